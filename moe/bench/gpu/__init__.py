"""Checks the kernels' results on a new GPU, measures their speed, and names the next code to improve.

`python -m moe.bench.gpu --minutes 25 --json FILE`
"""
