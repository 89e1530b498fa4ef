"""The measurements of `moe bench`, each in a file with `main(**flags) -> int`, which prints a table and writes it to `--json FILE`."""
