"""Lists the cases of each kind of `moe verify`."""
