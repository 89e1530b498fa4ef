"""Trained models in use: generation and evaluation."""
