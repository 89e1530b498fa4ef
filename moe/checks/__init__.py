"""Checks of a recipe's values against each other: each mistake is one line, found before torch is imported."""
