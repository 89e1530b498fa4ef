"""Tensor parallelism: linear layers, embedding and head split over ranks, with the layouts of their parameters."""
