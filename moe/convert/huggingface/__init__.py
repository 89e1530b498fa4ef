"""Converts models of Hugging Face's transformers to runs, and runs to such models."""

PREFIX = "hf:"  # prefix of the path of a transformers folder in commands
