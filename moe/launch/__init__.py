"""Starting the ranks of a run: the parent process, the launchers, and the code that each rank runs."""
