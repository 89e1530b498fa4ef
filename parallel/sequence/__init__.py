"""Sequence parallelism: attention over sequences that are sharded over ranks."""
