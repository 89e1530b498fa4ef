"""A run rehearsed by one of its ranks alone."""
