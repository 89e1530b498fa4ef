"""Recipes: the values that a user can set, and the origin of each value. Nothing here needs torch."""
