"""Pipeline parallelism. A schedule is only data, so it can be simulated and drawn without processes; schedules/__init__.py lists all."""
