"""Models of Hugging Face's transformers as runs, and runs as such models."""

PREFIX = "hf:"  # of a folder's path in commands
