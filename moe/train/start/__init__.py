"""Everything between reading a recipe and a run's first step."""
