"""Checks results on a new GPU, measures its speed, and names the next code to improve. `python -m moe.bench.gpu --minutes 25 --json F`."""
