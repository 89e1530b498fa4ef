"""Bytes that each rank needs."""
