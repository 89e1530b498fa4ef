"""The oracle: every layout against one process."""
