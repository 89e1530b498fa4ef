"""The lists of layers that a planner tries for the stages of a pipeline: cut by work, and by what stages hold where that is more even.

    by work        operations of a token: the slowest stage is as fast as possible
    by elements    parameters on a rank of tp, ep and etp: the fullest stage is as empty as possible; tried if it is a twentieth emptier

The head and the embedding are units beside the layers, so a stage may have one of them alone: (12, 12, 0) is three stages of which the
last has the head. With a large vocabulary that is the faster cut (by work), or the one that fits (by elements).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from moe.plan.job import counts
from moe.plan.job.cut import cut
from moe.plan.job.network import Network, Plan
from parallel.mesh.grids import LINES

EMPTIER = 0.95  # of the fullest stage of the cut by work


def layer_lists(network: Network, plan: Plan, stages: int, most: int = 2) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage, by work first, `most` lists of them; nothing where stages are more than layers."""
    if stages > network.layers or most < 1:
        return ()
    if most == 1:
        return (_by_work(network, stages),)
    tensor = "1d" if plan.tensor in LINES or plan.tensor == "sliced" else plan.tensor  # which cut matrices alike
    return _lists(network, stages, plan.tp, tensor, plan.depth, plan.ep, plan.etp)


@lru_cache(maxsize=5_000)
def _lists(network: Network, stages: int, tp: int, tensor: str, depth: int, ep: int, etp: int) -> tuple[tuple[int, ...], ...]:
    by_work, plan = _by_work(network, stages), Plan(tp=tp, tensor=tensor, depth=depth, ep=ep, etp=etp)  # type: ignore[arg-type]
    first, last = (counts.ends(network, plan, first=begins, last=not begins).total for begins in (True, False))
    of_kind = {index in network.sparse_layers: index for index in range(network.layers)}  # layers of a kind are alike
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
    """Multiplications of one token in a layer, forward: of matrices that it meets, and half of all pairs of attention."""
    n, e = network, network.experts
    met = n if e is None else replace(n, experts=replace(e, count=e.choices))
    return counts.layer(met, Plan(), index).total + n.heads * n.channels * n.length


def _fullest(held: list[float], first: float, last: float, sizes: tuple[int, ...]) -> float:
    """Elements of the stage that has most; `first`, `last`: those of the ends beside layers."""
    of_stage = [sum(held[a:b]) for a, b in pairwise((0, *accumulate(sizes)))]
    of_stage[0] += first
    of_stage[-1] += last
    return max(of_stage)
