"""What a run says while it runs: metrics, progress, summary."""
