"""Generates with trained models, evaluates them, and opens them in Python."""
