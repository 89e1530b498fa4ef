"""Methods of selecting experts: one object a file (method.py), listed in catalog.py."""
