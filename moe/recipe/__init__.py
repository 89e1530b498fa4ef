"""Recipes: the values that a user can set, and the origin of each value. This package does not need torch."""
