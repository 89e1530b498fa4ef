"""Numbers of layers for the stages of a pipeline that the planner tries: cut by work, and by parameters if that needs less memory.

    by work        operations of a token: the slowest stage is as fast as possible
    by elements    parameters on a rank of tp, ep and etp: the largest stage is as small as possible; tried if it is a twentieth smaller

Head and embedding count as separate units, so a stage may consist of one of them: (12, 12, 0) are three stages, of which the last has
only the head. With a large vocabulary this cut is faster (by work), or the only one that fits (by elements).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from moe.plan.job import counts
from moe.plan.job.cut import cut
from moe.plan.job.network import Network, Plan
from parallel.mesh.grids import LINES

EMPTIER = 0.95  # the largest stage must have at most this fraction of the parameters of the cut by work


def layer_lists(network: Network, plan: Plan, stages: int, most: int = 2) -> tuple[tuple[int, ...], ...]:
    """Lists with the number of layers of each stage, the cut by work first. most: most lists. Empty for more stages than layers."""
    if stages > network.layers or most < 1:
        return ()
    if most == 1:
        return (_by_work(network, stages),)
    tensor = "1d" if plan.tensor in LINES or plan.tensor == "sliced" else plan.tensor  # these cut matrices equally
    return _lists(network, stages, plan.tp, tensor, plan.depth, plan.ep, plan.etp)


@lru_cache(maxsize=5_000)
def _lists(network: Network, stages: int, tp: int, tensor: str, depth: int, ep: int, etp: int) -> tuple[tuple[int, ...], ...]:
    by_work, plan = _by_work(network, stages), Plan(tp=tp, tensor=tensor, depth=depth, ep=ep, etp=etp)  # type: ignore[arg-type]
    first, last = (counts.ends(network, plan, first=begins, last=not begins).total for begins in (True, False))
    of_kind = {index in network.sparse_layers: index for index in range(network.layers)}  # all layers of a kind are equal
    total = {kind: counts.layer(network, plan, index).total for kind, index in of_kind.items()}
    held = [total[index in network.sparse_layers] for index in range(network.layers)]
    sizes = cut([first, *held, last], stages)
    by_elements = (sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1)
    if _fullest(held, first, last, by_elements) > EMPTIER * _fullest(held, first, last, by_work):
        return (by_work,)
    return by_work, by_elements


@lru_cache(maxsize=1_000)
def _by_work(network: Network, stages: int) -> tuple[int, ...]:
    head = network.width * network.vocab
    end = head + network.ahead * (operations(replace(network, experts=None), 0) + 2 * network.width**2 + head)
    sizes = cut([*(operations(network, index) for index in range(network.layers)), end], stages)
    return (*sizes[:-1], sizes[-1] - 1)


def operations(network: Network, index: int) -> float:
    """Multiplications of one token in a layer's forward pass: the matrices that it uses, and half of all pairs of attention."""
    n, e = network, network.experts
    met = n if e is None else replace(n, experts=replace(e, count=e.choices))
    return counts.layer(met, Plan(), index).total + n.heads * n.channels * n.length


def _fullest(held: list[float], first: float, last: float, sizes: tuple[int, ...]) -> float:
    """Parameters of the largest stage. held: of each layer. first, last: of the ends. sizes: number of layers of each stage."""
    of_stage = [sum(held[a:b]) for a, b in pairwise((0, *accumulate(sizes)))]
    of_stage[0] += first
    of_stage[-1] += last
    return max(of_stage)
