"""Clocks for the actions of a schedule, so that waiting costs less energy (EnvPipe)."""
