"""K-FAC: its factors, its step, and its work in a pipeline's bubbles (PipeFisher)."""
