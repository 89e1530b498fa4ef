"""Pipeline parallelism: schedules as values (one file each, listed in schedules/catalog.py), simulated and drawn without processes."""
