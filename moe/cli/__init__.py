"""The command `moe`: its verbs (train, plan, ...), their flags, and the entry point."""
