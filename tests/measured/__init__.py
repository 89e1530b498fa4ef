"""Measurements of figures in the docs which users need not repeat themselves."""
