"""Detects hangs and silent data corruption. If one rank raises an error, all ranks raise it."""
