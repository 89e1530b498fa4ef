"""Simulates a schedule without running ranks: its times, a drawing of them, a trace file."""
