"""Lists the cases of `moe verify`, with one file for each kind of parallelism."""
