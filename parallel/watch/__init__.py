"""Detects hangs and silent data corruption, and raises an error of one rank on every rank."""
