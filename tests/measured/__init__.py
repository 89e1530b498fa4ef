"""Measurements behind the figures of the docs that users need not repeat."""
