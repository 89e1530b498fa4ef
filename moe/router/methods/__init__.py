"""Methods of selecting experts, each in a file of its own: method.py has the interface, catalog.py the list."""
