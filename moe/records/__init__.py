"""Records of a run: metrics, live display, summary."""
