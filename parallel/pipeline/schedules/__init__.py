"""The pipeline schedules, one file each; catalog.py lists them."""
