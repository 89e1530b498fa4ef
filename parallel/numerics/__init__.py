"""Dtypes, loss scale, clipping, recomputation, random numbers and first values."""
