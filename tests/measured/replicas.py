"""Measures the time of a training step of two replicas in threads (sharding.kind dp), divided by the time of two processes (ddp).

Both have two cores, and train the same batch: a Switch Transformer of 4 layers of width 256. In each round dp and ddp each start anew and
take `steps` steps; the round's time is their median. `python -m tests.measured replicas [--rounds N]`.
"""

from __future__ import annotations

import statistics
import time

import torch

from moe.records.results import write_json
from parallel.process.fork import run_on_ranks
from tests.campaigns.corruption import LARGER, Trained

RANKS = {"dp": 1, "ddp": 2}


def main(*, rounds: int = 7, steps: int = 5, json: str | None = None) -> int:
    """Print the median, smallest and largest ratio of the rounds."""
    rows = []
    for number in range(rounds):
        order = list(RANKS)[:: 1 if number % 2 == 0 else -1]
        seconds = {kind: max(run_on_ranks(_seconds, RANKS[kind], RANKS[kind], kind, steps, timeout_s=600)) for kind in order}
        rows.append(seconds | {"ratio": seconds["dp"] / seconds["ddp"]})
    ratios = [row["ratio"] for row in rows]
    print(f"dp over ddp: {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds")
    if json:
        write_json(json, verb="bench replicas", rows=rows)
    return 0


def _seconds(rank: int, ranks: int, kind: str, steps: int) -> float:
    """Return the median seconds of a step, without the first."""
    torch.set_num_threads(1)
    sharding = {"kind": kind} | ({"replicas": 2} if kind == "dp" else {})
    trained, times = Trained(rank, ranks, LARGER | {"sharding": sharding, "degrees": {"ep": 1}}, steps=1), []
    for step in range(steps):
        began = time.perf_counter()
        trained.step(step + 1)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
