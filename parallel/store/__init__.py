"""Files: checkpoints, saving, locks."""
