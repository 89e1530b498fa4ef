"""The decoder-only Transformer, dense or with experts; it runs alone, without a process group."""
