"""The command `moe`: its verbs, flags and entry."""
