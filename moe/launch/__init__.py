"""Starting ranks: the parent process, launchers, and what each rank runs."""
