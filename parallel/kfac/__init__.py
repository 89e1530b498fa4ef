"""The optimizer K-FAC: its factors, its update, and its computation in a pipeline's bubbles (PipeFisher)."""
