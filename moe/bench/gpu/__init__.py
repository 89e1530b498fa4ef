"""Checks results on a new GPU, measures its speed, and advises on the next improvement. `python -m moe.bench.gpu --minutes 25 --json F`."""
