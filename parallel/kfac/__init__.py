"""K-FAC: its factors, its optimizer, and its work in a pipeline's bubbles (PipeFisher)."""
