"""Dtypes, loss scale, gradient clipping, activation recomputation, random numbers and initial values of parameters."""
