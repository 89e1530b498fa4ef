"""Measures this machine for the planner: `moe plan --calibrate`."""
