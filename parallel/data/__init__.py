"""Data parallelism: one engine a kind, all with the surface of `engine.Engine`."""
