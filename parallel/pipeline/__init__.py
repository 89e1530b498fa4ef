"""Pipeline parallelism. Each schedule is data (a file each, listed in schedules/catalog.py), to simulate and draw without processes."""
