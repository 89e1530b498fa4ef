"""The records of a run while it runs: metrics, live progress, summary."""
