"""Predicts the memory that each rank needs."""
