"""Optimizers beside AdamW, one a file: as data (a Rule of parallel/data/engine.py) and as one of torch's optimizers."""
