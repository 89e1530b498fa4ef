"""Other libraries whose parallelism `moe verify --peer NAME` checks, one file NAME.py each (what each defines: moe/verify/peer.py)."""
