"""What does not go together in a recipe: each mistake is one line, before torch loads."""
