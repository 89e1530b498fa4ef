"""One row of expert load: a cell per expert, with height and colour by the load relative to uniform.

    relative  0   ⅛       ½       1       1½      2 and more
    cell      ·   ▁       ▂       ▄       ▆       █            blue: too little, grey: a fair share, orange: too much

The height stops growing at twice the fair share, the colour at four times. Blue and orange can be told apart with any colour vision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "·▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#@"  # the same nine heights for terminals and files without Unicode
UNKNOWN = "?"
FAIR = (150, 150, 150)
LITTLE, MUCH = (60, 140, 230), (230, 120, 20)


def relative(load: Sequence[float | None]) -> list[float]:
    """Return each expert's load over the mean load: 1 is a fair share. None becomes NaN; if no tokens were routed, all are 0."""
    known = [share for share in load if share is not None]
    mean = sum(known) / len(known) if known else 0.0
    return [math.nan if share is None else share / mean if mean else 0.0 for share in load]


def imbalance(load: Sequence[float | None]) -> float:
    """Return the largest load over the mean load: 1 if balanced, the number of experts if one gets all tokens. NaN without known loads."""
    return max((value for value in relative(load) if not math.isnan(value)), default=math.nan)


def binned(values: Sequence[float], cells: int) -> list[float]:
    """Return at most `cells` means, each over a bin of neighbouring values. Bins are of equal size; the last may be smaller."""
    per_bin = max(1, math.ceil(len(values) / max(1, cells)))
    return [sum(part) / len(part) for part in (values[i : i + per_bin] for i in range(0, len(values), per_bin))]


def cell(value: float, ramp: str = BLOCKS) -> str:
    """Return the character of `ramp`, nine of growing height, for a load relative to uniform. The lowest means no tokens at all."""
    if math.isnan(value):
        return UNKNOWN
    if value <= 0:
        return ramp[0]
    return ramp[max(1, min(8, round(4 * value)))]


def colour(value: float) -> str:
    """Return the colour `#rrggbb` for a load relative to uniform, by its logarithm: blue at ¼ and less, orange at 4 and more."""
    if math.isnan(value):
        return "#808080"
    strength = max(-1.0, min(1.0, math.log2(value) / 2)) if value > 0 else -1.0
    end = MUCH if strength > 0 else LITTLE
    return "#" + "".join(f"{round(a + (b - a) * abs(strength) ** 0.75):02x}" for a, b in zip(FAIR, end, strict=True))


def row(load: Sequence[float | None], *, cells: int = 64, ramp: str = BLOCKS) -> str:
    """Return a character for each expert; with more experts than `cells`, a character for the mean of several neighbouring experts."""
    return "".join(cell(value, ramp) for value in binned(relative(load), cells))
