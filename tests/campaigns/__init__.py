"""Faults put into runs that train, and their outcomes."""
