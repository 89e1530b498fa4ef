"""What is measured against which peer: one file a bench, each with `main(**flags) -> int`, a table and `--json FILE`."""
