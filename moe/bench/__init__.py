"""The measurements of `moe bench`: one file each, with `main(**flags) -> int`, a table and `--json FILE`."""
