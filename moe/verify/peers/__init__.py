"""Other libraries whose parallelism `moe verify --peer NAME` checks, one file NAME.py each (its contents: moe/verify/pair.py)."""
