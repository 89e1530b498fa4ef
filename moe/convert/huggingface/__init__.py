"""Converts a model of Hugging Face's transformers to a run's folder with a checkpoint, and a run's checkpoint to such a model."""

PREFIX = "hf:"  # in commands, hf:PATH is a folder in the format of transformers
