"""The measurements of `moe bench`, each in a file with `main(**flags) -> int`. It prints a table, and with `--json FILE` also writes it."""
