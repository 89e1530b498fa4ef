"""Shows expert load as a row of characters: one for each expert, with height and color by its load relative to the mean load.

    relative  0   ⅛       ½       1       1½      2 and more
    cell      ·   ▁       ▂       ▄       ▆       █            blue: below the mean, grey: the mean, orange: above

Height grows up to twice the mean, color up to four times and down to a quarter. Blue and orange can be told apart with any color vision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "·▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#@"  # the same nine heights for terminals and files without Unicode
UNKNOWN = "?"
FAIR = (150, 150, 150)
LITTLE, MUCH = (60, 140, 230), (230, 120, 20)  # RGB far below the mean load, and far above it; FAIR: at the mean


def relative(load: Sequence[float | None]) -> list[float]:
    """Return each expert's load divided by the mean load. None becomes NaN; if no tokens were routed, all are 0."""
    known = [share for share in load if share is not None]
    mean = sum(known) / len(known) if known else 0.0
    return [math.nan if share is None else share / mean if mean else 0.0 for share in load]


def imbalance(load: Sequence[float | None]) -> float:
    """Return the largest load divided by the mean load: 1 if loads are equal, the number of experts if one expert has all tokens; NaN if no
    load is known."""
    return max((value for value in relative(load) if not math.isnan(value)), default=math.nan)


def binned(values: Sequence[float], cells: int) -> list[float]:
    """Return at most `cells` means of neighboring values. All means are over equally many values, except perhaps the last."""
    per_bin = max(1, math.ceil(len(values) / max(1, cells)))
    return [sum(part) / len(part) for part in (values[i : i + per_bin] for i in range(0, len(values), per_bin))]


def cell(value: float, ramp: str = BLOCKS) -> str:
    """Return the character for a load relative to the mean. ramp: nine characters of growing height; the lowest means no tokens at all."""
    if math.isnan(value):
        return UNKNOWN
    if value <= 0:
        return ramp[0]
    return ramp[max(1, min(8, round(4 * value)))]


def color(value: float) -> str:
    """Return the color `#rrggbb` for a load relative to the mean, by its logarithm: blue up to ¼, grey at 1, orange from 4."""
    if math.isnan(value):
        return "#808080"
    strength = max(-1.0, min(1.0, math.log2(value) / 2)) if value > 0 else -1.0
    end = MUCH if strength > 0 else LITTLE
    return "#" + "".join(f"{round(a + (b - a) * abs(strength) ** 0.75):02x}" for a, b in zip(FAIR, end, strict=True))


def row(load: Sequence[float | None], *, cells: int = 64, ramp: str = BLOCKS) -> str:
    """Return one character of `ramp` (see `cell`) for each expert, or for the mean of several neighbors if there are over `cells`."""
    return "".join(cell(value, ramp) for value in binned(relative(load), cells))
