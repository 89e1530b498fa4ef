"""The measurements of `moe bench`: one file each, with `main(**flags) -> int`, which prints a table and writes it to `--json FILE`."""
