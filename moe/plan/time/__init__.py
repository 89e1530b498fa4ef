"""Predicts the seconds of a training step."""
