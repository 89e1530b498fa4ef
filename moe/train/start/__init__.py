"""From a recipe to a run that can take its first step."""
