"""Chooses a GPU clock for each action of a schedule, so that ranks that would wait run slower and use less energy (EnvPipe)."""
