"""Sequence parallelism: attention whose tokens lie on several ranks."""
