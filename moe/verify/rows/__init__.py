"""Lists the cases of `moe verify` (each a tiny model in one layout), with one file for each kind of parallelism."""
