"""Pipeline parallelism: schedules as values (one file each, named in catalog.py), simulated and drawn without processes."""
