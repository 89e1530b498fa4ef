"""Costs of a recipe without a model: FLOPs, activations, stages."""
