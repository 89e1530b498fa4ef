"""The first hour on a new GPU: what is right, how fast it is, what to do next. `python -m moe.bench.gpu --minutes 25 --json F`."""
