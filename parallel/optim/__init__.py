"""Optimizers other than AdamW, one a file: a Rule (parallel/data/engine.py) with its facts, and a torch.optim.Optimizer."""
