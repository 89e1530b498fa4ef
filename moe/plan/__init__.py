"""Costs of a recipe, computed without building the model: FLOPs, activations, pipeline stages."""
