"""Converts models of Hugging Face's transformers to runs, and runs to such models."""

PREFIX = "hf:"  # in commands, hf:PATH is a folder in the format of transformers
