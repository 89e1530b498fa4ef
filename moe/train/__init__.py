"""Training: the data, the trainer, its records and how it is launched."""
