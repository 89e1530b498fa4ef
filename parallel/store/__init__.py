"""Reads and writes checkpoints (saved in the background, if wanted) and files that a user names. Locks a run's folder."""
