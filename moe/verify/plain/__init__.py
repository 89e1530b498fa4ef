"""The plain twin, which shares no code with the layouts that it checks."""
