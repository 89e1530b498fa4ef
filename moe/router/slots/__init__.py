"""Capacity: which choices are kept, and in which groups."""
