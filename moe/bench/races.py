"""Two ways of computing the same result, timed in turn on several ranks: the ratio of their times within a round, and its quartiles.

Ranks share this machine's cores, so the slowest rank's time counts for a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Race:
    """`ours` compared with `theirs`. `most`: the largest allowed ratio, None if it is only reported."""

    name: str
    ours: str
    theirs: str
    most: float | None


def slowest(seconds: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The slowest rank's time for each piece of work and round."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in seconds), strict=True)] for name in seconds[0]}


def race_row(race: Race, seconds: dict[str, list[float]], *, ranks: int) -> dict[str, Any]:
    """Print and return a row. It passes if the lower quartile of the ratio is at most `most`."""
    ratios = [a / b for a, b in zip(seconds[race.ours], seconds[race.theirs], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    row: dict[str, Any] = {"race": race.name, "ranks": ranks, "seconds": statistics.median(seconds[race.ours])}
    row |= {"ratio": middle, "quartiles": [low, high]}
    if race.most is not None:
        row["passed"] = low <= race.most
    print(
        f"{race.name:<46} {ranks} rank{'s' * (ranks > 1)} {row['seconds']:8.3f} s   ratio {middle:5.2f} ({low:.2f} to {high:.2f})",
        flush=True,
    )
    return row
