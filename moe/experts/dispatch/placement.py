"""Placement of experts on ranks. A layer has places 0, 1, ..., each for one expert; each rank has an equal chunk of consecutive places.

    load_E   9 8 1 1 1 1 1 2       experts in order:  ranks compute  | 9 8 1 1 | 1 1 1 2 |      the first rank is slow
                                   balanced:                         | 9 1 1 1 | 8 1 1 2 |

Rows (a token for one of its experts) are sorted by the experts' places. Source: expert placement by load as in FlexMoE (arXiv 2304.03946)
and FasterMoE (PPoPP 2022); here experts are moved, not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from parallel.errors import BadInput
from parallel.mesh.mesh import divisors

Placement = tuple[int, ...]  # placement[i]: index of the expert at place i


def balanced_placement(load_E: Sequence[float], ranks: int) -> Placement:
    """Return the placement: the experts in the order in which ranks hold them, rank 0's first, the same number for each rank. Experts are
    assigned in order of descending load, each to the least loaded rank with room. Of equal loads, the expert and the rank with the lower
    number come first, so all ranks compute the same placement. Raises BadInput if `ranks` does not divide the number of experts.
    """
    experts = len(load_E)
    if ranks < 1 or experts % ranks:
        raise BadInput("ranks", got=ranks, needed=f"a divisor of {experts}, the number of experts", fix=f"use one of {divisors(experts)}")
    places = experts // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    load: list[float] = [0] * ranks
    for expert in sorted(range(experts), key=lambda e: (-load_E[e], e)):
        rank = min((r for r in range(ranks) if len(held[r]) < places), key=lambda r: (load[r], r))
        held[rank].append(expert)
        load[rank] += load_E[expert]
    return tuple(expert for rank in held for expert in sorted(rank))


def rank_loads(load_E: Sequence[float], placement: Sequence[int], ranks: int) -> list[float]:
    """Return the sum of the loads of each rank's experts. placement: the experts in the order in which ranks hold them."""
    places = len(placement) // ranks
    return [sum(load_E[e] for e in placement[r * places : (r + 1) * places]) for r in range(ranks)]


@lru_cache
def place_of_expert(num_experts: int, placement: Placement | None, order: tuple[int, ...] | None) -> list[int]:
    """Return the place of each expert: its position in `placement` (None: the expert's index). `order`: a new numbering of the places, in
    which place order[i] gets number i; None: the numbers stay."""
    expert_at, ordered = placement or range(num_experts), order or range(num_experts)
    place_E = [0] * num_experts
    for number, place in enumerate(ordered):
        place_E[expert_at[place]] = number
    return place_E
