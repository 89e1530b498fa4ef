"""Automatic searches: Alpa, FlexFlow."""
