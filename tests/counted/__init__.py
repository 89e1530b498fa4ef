"""Bytes and messages counted against formulas."""
