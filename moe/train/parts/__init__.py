"""Tools of the training loop."""
