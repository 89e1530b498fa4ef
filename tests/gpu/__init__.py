"""The first hour on a new GPU: what is right, how fast it is, what to do next. `python -m tests.gpu --minutes 25 --json F`."""
