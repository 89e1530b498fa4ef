"""Lists all plans for training a network on a given number of ranks. A plan has degrees of parallelism, a data-parallel engine, a pipeline
schedule, a kind of tensor parallelism and of sequence parallelism, and a micro-batch size.

    ranks = pp x tp x sp x dp;  ep x etp divides dp x sp x tp;  global batch = dp x micro-batch x micro-batches

A Space lists the values that are tried for each setting. legal.py then refuses the plans that cannot run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from moe.plan.job.cut import layer_lists
from moe.plan.job.network import Network, Plan
from parallel.data.kinds.catalog import ENGINES, PLAIN
from parallel.mesh.grids import grid
from parallel.mesh.mesh import divisors
from parallel.sequence.kinds import DEFAULT, SEQUENCES


@dataclass(frozen=True)
class Space:
    """Values that are tried for each setting of a plan. tensors, sequences: kinds of tensor and sequence parallelism.

    schedules: (name, stages on each rank). lists: largest number of different partitions of the layers into stages that are tried for each
    schedule (moe/plan/job/cut.py). largest_microbatch: upper limit of the sequences of a micro-batch; None: all divisors of a replica's
    batch are tried.
    """

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
    """Yield all (pp, tp, sp, dp) whose product is `world`, within the limits of `space`."""
    for pp in (n for n in divisors(world) if n <= min(space.largest_pp, network.depth)):
        for tp in (n for n in divisors(world // pp) if n <= space.largest_tp):
            for sp in (n for n in divisors(world // pp // tp) if n <= space.largest_sp):
                yield pp, tp, sp, world // pp // tp // sp


class Degrees(NamedTuple):
    """Degrees of parallelism of a plan, without etp."""

    pp: int
    tp: int
    sp: int
    dp: int
    ep: int


def degrees_of(plan: Plan) -> Degrees:
    return Degrees(plan.pp, plan.tp, plan.sp, plan.dp, plan.ep)


def degree_choices(network: Network, *, world: int, global_batch: int, space: Space) -> Iterator[Degrees]:
    """Yield all degrees of parallelism of `world` ranks such that dp divides the global batch and ep divides the number of experts."""
    for pp, tp, sp, dp in degrees(network, world=world, space=space):
        if global_batch % dp == 0:
            yield from dict.fromkeys(Degrees(pp, tp, sp, dp, ep) for ep, _ in _experts(network, dp * sp * tp, space))


def candidates(
    network: Network, *, world: int, global_batch: int, base: Plan, space: Space, only: Collection[Degrees] | None = None
) -> Iterator[Plan]:
    """Yield plans for `world` ranks, including plans that cannot run. `base`: plan with the settings that `space` does not vary (precision,
    tiles). only: if given, only plans with these degrees of parallelism."""
    for pp, tp, sp, dp in degrees(network, world=world, space=space):
        if global_batch % dp:
            continue
        limit = space.largest_microbatch
        sizes = [n for n in divisors(global_batch // dp) if limit is None or n <= limit]
        experts = [one for one in _experts(network, dp * sp * tp, space) if only is None or Degrees(pp, tp, sp, dp, one[0]) in only]
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
                reshard = base.reshard or "reshard" not in ENGINES[engine].keys  # only FSDP can keep gathered weights
                yield made.but(engine=engine, reshard=reshard, stage_layers=layers)


def _tensors(tp: int, space: Space) -> list[tuple[str, int]]:
    """Return (kind, depth) for all kinds of tensor parallelism that are possible with `tp` ranks. depth: number of 2D grids that form a
    2.5D grid; 1 for other kinds."""
    if tp == 1:
        return [("1d", 1)]
    found = ((kind, depth) for kind in space.tensors for depth in (divisors(tp)[1:] if kind == "2.5d" else [1]))
    return [(kind, depth) for kind, depth in found if grid(kind, tp, depth)]


def _experts(network: Network, stage: int, space: Space) -> Iterator[tuple[int, int]]:
    """Yield all (ep, etp) such that ep divides the number of experts, and ep x etp divides `stage`. stage: number of ranks of a pipeline
    stage."""
    if network.experts is None:
        yield 1, 1
        return
    for etp in (n for n in space.etp if stage % n == 0):
        for ep in divisors(stage // etp):
            if network.experts.count % ep == 0:
                yield ep, etp
