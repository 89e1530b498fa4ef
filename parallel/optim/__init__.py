"""Optimizers other than AdamW, one in each file. Each has a Rule (parallel/data/engine.py) that builds a torch.optim.Optimizer."""
