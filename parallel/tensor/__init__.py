"""Tensor parallelism: how a layer lies on several ranks, and what it computes there."""
