"""Converts checkpoints between models: dense to experts and back, and from and to Hugging Face's transformers."""
