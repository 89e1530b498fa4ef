"""Placement: which rank holds which expert. A layer has places 0, 1, ..., each with one expert; each rank has an equal chunk of places.

    load_E   9 1 1 1 8 1 1 2       experts in order:  ranks compute  | 9 1 1 1 | 8 1 1 2 |
    load_E   9 8 1 1 1 1 1 2       experts in order:                 | 9 8 1 1 | 1 1 1 2 |      the first rank is slow
                                   balanced:                         | 9 1 1 1 | 8 2 1 1 |
Placement changes the rank of an expert, not its results. Source: expert placement by load as in FlexMoE (arXiv 2304.03946) and
FasterMoE (PPoPP 2022); here experts are moved, not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.errors import BadInput
from parallel.mesh.mesh import divisors

Placement = tuple[int, ...]


def balanced_placement(load_E: Sequence[float], ranks: int) -> Placement:
    """Return the expert at each place. Assign the heaviest expert first, always to the least loaded rank with a free place.

    Ties go to the lower expert and the lower rank, so all ranks compute the same placement. Each rank's experts are in ascending
    order. Raise BadInput if `ranks` does not divide the number of experts.
    """
    if ranks < 1 or len(load_E) % ranks:
        raise BadInput("ranks", got=ranks, needed=f"a divisor of {len(load_E)} experts", fix=f"use one of {divisors(len(load_E))}")
    places = len(load_E) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    load: list[float] = [0] * ranks
    for expert in sorted(range(len(load_E)), key=lambda e: (-load_E[e], e)):
        rank = min((r for r in range(ranks) if len(held[r]) < places), key=lambda r: (load[r], r))
        held[rank].append(expert)
        load[rank] += load_E[expert]
    return tuple(expert for rank in held for expert in sorted(rank))


def rank_loads(load_E: Sequence[float], placement: Sequence[int], ranks: int) -> list[float]:
    """Return the summed load of each rank's experts."""
    places = len(placement) // ranks
    return [sum(load_E[e] for e in placement[r * places : (r + 1) * places]) for r in range(ranks)]
