"""Tensor parallelism: layers split over ranks, with their layouts and their products."""
