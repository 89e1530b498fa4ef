"""The planner against measured and published runs."""
