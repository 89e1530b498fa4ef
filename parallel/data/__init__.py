"""Data parallelism: one engine for each kind (DDP, FSDP, ZeRO, ...), all with the interface `engine.Engine`."""
