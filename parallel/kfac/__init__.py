"""K-FAC: factors, its step, and its work in the waits of a pipeline (PipeFisher)."""
