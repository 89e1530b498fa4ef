"""Reads, writes and locks files: checkpoints, which can be saved in the background, and files that a user names."""
