"""Conversion of checkpoints between models: dense to experts and back."""
