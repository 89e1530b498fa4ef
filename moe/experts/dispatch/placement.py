"""Which rank holds which expert: places 0, 1, ... of a layer in runs of equal length, one run a rank, and an expert at each.

    load_E   9 1 1 1 8 1 1 2       experts in order:  ranks compute  | 9 1 1 1 | 8 1 1 2 |
    load_E   9 8 1 1 1 1 1 2       experts in order:                 | 9 8 1 1 | 1 1 1 2 |      the first rank is the slow one
                                   balanced:                         | 9 1 1 1 | 8 2 1 1 |
Placement changes where an expert is, and nothing that it computes. Source: expert placement by load as in FlexMoE
(arXiv 2304.03946) and FasterMoE (PPoPP 2022); here by moving experts, without copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.errors import BadInput
from parallel.mesh import divisors

Placement = tuple[int, ...]


def balanced_placement(load_E: Sequence[float], ranks: int) -> Placement:
    """The expert at each place: heaviest first, each to the least loaded rank that has a place left.

    Ties go to the lower expert and the lower rank, so every rank computes the same answer. On a rank, experts stand in order
    of their numbers. Raises BadInput where experts do not divide by ranks.
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
    """The summed load of each rank's experts."""
    places = len(placement) // ranks
    return [sum(load_E[e] for e in placement[r * places : (r + 1) * places]) for r in range(ranks)]
