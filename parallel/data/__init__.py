"""Data parallelism: one engine for each kind, all with the interface `engine.Engine`."""
