"""Every plan that a network could be trained by on so many ranks: the degrees that multiply to them, and the choices within.

    ranks = pp x tp x sp x dp;  ep x etp divides dp sp tp;  global batch = dp x micro-batch x micro-batches

A Space says which choices are tried. What cannot run is left to legal.py, which says why. Where one choice is never slower and never
larger than another it stands for both: slices between layers for plain 1D (the same bytes, less kept), where they can be had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from moe.plan.choose.stage_layers import layer_lists
from moe.plan.job.network import Network, Plan
from parallel.data.kinds.catalog import ENGINES, PLAIN
from parallel.mesh.mesh import divisors
from parallel.sequence.kinds.catalog import DEFAULT, SEQUENCES


@dataclass(frozen=True)
class Space:
    """What is tried. `schedules`: (name, chunks); `lists`: of layers for the stages of each, at most; largest degrees; micro-batches of
    every size that divides a replica's batch, or up to the largest (with experts at least a sequence for each rank of tp)."""

    engines: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp")
    tensors: tuple[str, ...] = ("sliced", "1d", "2d", "2.5d", "3d")
    sequences: tuple[str, ...] = ("ring", "ulysses")
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zb_v", 2))
    lists: int = 2
    largest_tp: int = 64
    largest_sp: int = 64
    largest_pp: int = 128
    largest_microbatch: int | None = None
    etp: tuple[int, ...] = (1, 2)


def degrees(network: Network, *, world: int, space: Space) -> Iterator[tuple[int, int, int, int]]:
    """(pp, tp, sp, dp) whose product is the world."""
    for pp in (n for n in divisors(world) if n <= min(space.largest_pp, network.layers)):
        for tp in (n for n in divisors(world // pp) if n <= space.largest_tp):
            for sp in (n for n in divisors(world // pp // tp) if n <= space.largest_sp):
                yield pp, tp, sp, world // pp // tp // sp


class Way(NamedTuple):
    """How ranks are cut."""

    pp: int
    tp: int
    sp: int
    dp: int
    ep: int


def way_of(plan: Plan) -> Way:
    return Way(plan.pp, plan.tp, plan.sp, plan.dp, plan.ep)


def ways(network: Network, *, world: int, global_batch: int, space: Space) -> Iterator[Way]:
    """Every way to cut the ranks that shares the batch out equally."""
    for pp, tp, sp, dp in degrees(network, world=world, space=space):
        if global_batch % dp == 0:
            yield from dict.fromkeys(Way(pp, tp, sp, dp, ep) for ep, _ in _experts(network, dp * sp * tp, space))


def candidates(
    network: Network,
    *,
    world: int,
    global_batch: int,
    base: Plan,
    space: Space | None = None,
    only: Collection[Way] | None = None,
) -> Iterator[Plan]:
    """Plans for `world` ranks, legal or not; what the space does not vary (precision, storage, tiles) is the base's.

    `only`: of these ways to cut the ranks.
    """
    space = space or Space()
    for pp, tp, sp, dp in degrees(network, world=world, space=space):
        if global_batch % dp:
            continue
        sizes, unit = divisors(global_batch // dp), tp if network.experts else 1
        if space.largest_microbatch is not None:
            sizes = [n for n in sizes if n % unit == 0 and n <= max(space.largest_microbatch, unit)]
        experts = [one for one in _experts(network, dp * sp * tp, space) if only is None or Way(pp, tp, sp, dp, one[0]) in only]
        if not experts:
            continue
        schedules = space.schedules if pp > 1 else (("1f1b", 1),)
        for size, (ep, etp), (tensor, depth), sequence, (schedule, chunks) in product(
            sizes, experts, _tensors(tp, space), space.sequences if sp > 1 else (DEFAULT,), schedules
        ):
            made = base.but(
                dp=dp, tp=tp, sp=sp, pp=pp, ep=ep, etp=etp, tensor=tensor, depth=depth, sequence=sequence,
                order=SEQUENCES[sequence].orders[0],
                schedule=schedule, chunks=chunks, stage_layers=None,
                microbatch=size, microbatches=global_batch // dp // size,
            )  # fmt: skip
            lists = layer_lists(network, made, pp * chunks, space.lists) if pp > 1 else ()
            for layers, engine in product(lists or (None,), space.engines if dp * sp > 1 else (PLAIN,)):
                reshard = base.reshard or "reshard" not in ENGINES[engine].keys  # the others have no such choice
                yield made.but(engine=engine, reshard=reshard, stage_layers=layers)


def _tensors(tp: int, space: Space) -> list[tuple[str, int]]:
    """(kind, depth)."""
    if tp == 1:
        return [("1d", 1)]
    deep = [d for d in divisors(tp) if d > 1 and tp // d in _SQUARES]
    kinds = [kind for kind in space.tensors if not ((kind == "2d" and tp not in _SQUARES) or (kind == "3d" and tp not in _CUBES))]
    return [(kind, depth) for kind in kinds for depth in (deep if kind == "2.5d" else [1])]


def _experts(network: Network, stage: int, space: Space) -> Iterator[tuple[int, int]]:
    """(ep, etp)."""
    if network.experts is None:
        yield 1, 1
        return
    for etp in (n for n in space.etp if stage % n == 0):
        for ep in divisors(stage // etp):
            if network.experts.count % ep == 0:
                yield ep, etp


_SQUARES = {n * n for n in range(2, 64)}
_CUBES = {n**3 for n in range(2, 16)}
