"""Chooses a GPU clock for each action of a schedule, so that ranks compute slower instead of waiting, and use less energy (EnvPipe)."""
