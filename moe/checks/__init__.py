"""Checks of a recipe's values against each other. Each mistake is reported in one line, before torch is imported."""
