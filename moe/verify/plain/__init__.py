"""The plain twin of `moe verify`: a second, simple implementation of model and optimizer. It shares no code with the trainer, which it
checks."""
