"""Measurements of tensor, sequence and pipeline parallelism."""
