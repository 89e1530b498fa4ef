"""Checks and measures a new GPU: right results, speed, what to improve next. `python -m moe.bench.gpu --minutes 25 --json F`."""
