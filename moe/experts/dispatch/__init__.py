"""Dispatchers send tokens to the ranks that hold their experts, and results back. dispatcher.py has the interface, catalog.py the list."""
