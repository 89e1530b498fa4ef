"""Applies parallelism to the model. Only this folder depends on both the model (moe) and the mesh (parallel)."""
