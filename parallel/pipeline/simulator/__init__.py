"""Simulates a schedule without running ranks, and shows the result as text, picture or trace file."""
