"""Models of Hugging Face's transformers as runs, and runs as such models."""
