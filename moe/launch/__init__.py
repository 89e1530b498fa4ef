"""Starts the ranks of a run: the parent process, the launchers, and the program of a rank."""
