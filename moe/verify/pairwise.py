"""Chooses a few rows (combinations of one value of every factor), so that every pair of values of two factors occurs in some row.

    factors   a: 1 2    b: x y    c: p q r            there are 12 combinations; these 6 rows contain every pair:
              (1, x, p) (2, y, p) (1, y, q) (2, x, q) (1, x, r) (2, y, r)

Most faults that appear only in combinations need just two particular values (Kuhn, Wallace, Gallo 2004). Rows are chosen greedily as in
AETG (Cohen, Dalal, Fredman, Patton 1997): a row begins with a pair that no earlier row has. Then values are added one by one: among the
allowed values of all remaining factors, always the one that adds the most new pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from parallel.errors import BadInput

Factors = Mapping[str, Sequence[str]]  # factor -> its values
Choice = dict[str, str]  # a row, or a part of one: factor -> value
Pair = tuple[tuple[str, str], tuple[str, str]]  # ((factor, value), (later factor, value))


@dataclass(frozen=True)
class Covering:
    """The chosen rows. met: pair -> number of rows that contain it; refused: pair that no row may contain -> reason."""

    rows: tuple[Choice, ...]
    met: dict[Pair, int]
    refused: dict[Pair, BadInput]


def every_pair(factors: Factors) -> Iterator[Pair]:
    """Yield every pair of values of two factors, in the order of the factors."""
    for one, other in combinations(factors, 2):
        yield from (((one, a), (other, b)) for a in factors[one] for b in factors[other])


def pairs_of(row: Choice, factors: Factors) -> list[Pair]:
    """Return all pairs that the row contains."""
    return list(combinations([(factor, row[factor]) for factor in factors if factor in row], 2))


def together(pairs: Sequence[Pair]) -> list[str]:
    """Return the pairs as lines of text. A line such as `schedule zb_h1, zb_h2 x data fsdp, zero2` means four pairs."""
    lines = []
    for factors in dict.fromkeys((one[0], other[0]) for one, other in pairs):
        partners: dict[str, list[str]] = {}
        for one, other in pairs:
            if (one[0], other[0]) == factors:
                partners.setdefault(one[1], []).append(other[1])
        for others in dict.fromkeys(map(tuple, partners.values())):
            ones = [value for value, found in partners.items() if tuple(found) == others]
            lines.append(f"{factors[0]} {', '.join(ones)} x {factors[1]} {', '.join(others)}")
    return lines


def cover(
    factors: Factors, *, complete: Callable[[Choice], Choice], refuse: Callable[[Choice], BadInput | None], first_of: Sequence[str] = ()
) -> Covering:
    """Choose rows that contain every pair that is not refused. complete(values): returns the simplest row with these values. refuse(row):
    returns the error with which the row is refused, or None. A pair is refused if the simplest row with it is refused. If several values
    add equally many new pairs, a row gets the value that the fewest rows have; for a factor in `first_of`, the factor's first such value.
    """
    reason_of: dict[tuple[str, ...], BadInput | None] = {}

    def why_not(chosen: Choice) -> BadInput | None:
        row = complete(chosen)
        key = tuple(row[factor] for factor in factors)
        if key not in reason_of:
            reason_of[key] = refuse(row)
        return reason_of[key]

    reasons = {pair: why_not(dict(pair)) for pair in every_pair(factors)}
    left = dict.fromkeys(pair for pair, reason in reasons.items() if reason is None)
    met: Counter[Pair] = Counter()
    used: Counter[tuple[str, str]] = Counter()

    def brought(row: Choice, option: tuple[str, str]) -> list[Pair]:
        return [pair for pair in pairs_of(row | dict([option]), factors) if option in pair]

    def extended(row: Choice) -> Choice:
        """Return the row with one more value: among all allowed values, the one that adds the most new pairs."""
        options = [(factor, value) for factor in factors if factor not in row for value in factors[factor]]
        gains = {option: sum(pair in left for pair in brought(row, option)) for option in options}
        options.sort(key=lambda option: (-gains[option], 0 if option[0] in first_of else used[option]))
        for option in options:
            if all(reasons[pair] is None for pair in brought(row, option)) and why_not(row | dict([option])) is None:
                return row | dict([option])
        raise AssertionError(f"{row} is allowed, but no further value is allowed with it")

    rows: list[Choice] = []
    while left:
        row = dict(next(iter(left)))
        while len(row) < len(factors):
            row = extended(row)
        rows.append({factor: row[factor] for factor in factors})
        used.update(row.items())
        for pair in pairs_of(row, factors):
            met[pair] += 1
            left.pop(pair, None)
    return Covering(tuple(rows), dict(met), {pair: reason for pair, reason in reasons.items() if reason is not None})
