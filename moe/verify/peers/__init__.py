"""Adapters of `moe verify --peer NAME`, one file each, found by their names (moe/verify/pair.py)."""
