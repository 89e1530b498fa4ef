"""Starts and ends process groups, forks ranks on this machine, and changes settings of a process (memory, determinism)."""
