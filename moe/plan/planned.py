"""The best plans of a recipe on a cluster: candidates, refused or ranked (parallel/plan/choose.py), and the recipe of the one chosen.

    round 1    every way to cut the ranks (pp, tp, sp, dp, ep), each with a few choices within          -> the fastest ways
    round 2    those ways, with every engine, schedule, tensor kind, micro-batch and form of experts    -> ranked

Round 2 costs as much as it has ways, whatever the cluster's size; `ways=None` takes all of them and needs no first round. What is ranked
has passed the recipe's own checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from moe.plan.job import network_of, plan_of
from moe.plan.recipe_of import as_stored, recipe_of
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.plan.candidates import Space, Way, candidates, way_of
from parallel.plan.choose import Found, Ranked, Refused, choose, described
from parallel.plan.cluster import Cluster
from parallel.plan.cost import Time, step_time
from parallel.plan.guide import FAMILIES, Said, walk
from parallel.plan.job import Engine, Network, Plan
from parallel.plan.memory import Memory, peak
from parallel.plan.pipeline_time import CLOSED, How

WAYS = 24
_GIB = 2**30
FIRST = Space(
    engines=("zero1", "fsdp"),
    tensors=("sliced", "1d", "2d", "3d"),
    sequences=("ring",),
    schedules=(("1f1b", 1),),
    lists=1,
    etp=(1,),
    largest_microbatch=4,
)


@dataclass(frozen=True)
class Planned:
    """`found`: ranked and refused; `runs`: the recipes of those ranked, in the same order."""

    network: Network
    cluster: Cluster
    found: Found
    runs: tuple[Run, ...]

    def time(self, plan: Plan) -> Time:
        return step_time(self.network, plan, self.cluster)

    def memory(self, plan: Plan) -> Memory:
        return peak(self.network, plan)


def planned(
    run: Run,
    cluster: Cluster,
    *,
    checked: Callable[[Run, int], Run],
    top: int = 10,
    space: Space | None = None,
    ways: int | None = WAYS,
) -> Planned:
    """The best plans for all devices of the cluster. `checked`: the recipe's own checks (moe/checks/together.py).

    Raises BadInput where no plan fits, with the change that would make one fit.
    """
    space = space or Space()
    run = run.resolve(cluster.world)
    network, base = network_of(run), plan_of(run)
    stored = _storages(run, base, space.engines)

    def made(space: Space, only: Collection[Way] | None) -> Iterator[Plan]:
        for plan in candidates(network, world=cluster.world, global_batch=run.train.global_batch, base=base, space=space, only=only):
            yield plan.but(storage=stored[plan.engine].storage, compute_bytes=stored[plan.engine].compute_bytes)

    def bound(how: How) -> Callable[[Plan], float]:
        return lambda plan: step_time(network, plan, cluster, pipeline=how).step

    def chosen(plans: Iterable[Plan], space: Space, *, top: int, enough: Callable[[Ranked], bool]) -> Found:
        simulates = any(name not in CLOSED for name, _ in space.schedules)
        return choose(
            network,
            plans,
            held_bytes=lambda plan: peak(network, plan).used,
            limit_bytes=cluster.memory_bytes(),
            seconds=bound("simulated"),
            least=(bound("alone"), bound("least")) if simulates else (bound("alone"),),
            devices_per_node=cluster.devices_per_node,
            top=top,
            enough=enough,
        )

    only: dict[Way, None] = {}
    first, found, accepted = None, None, _Accepted(run, cluster.world, top, checked)
    if ways is not None:

        def cut_so(ranked: Ranked) -> bool:
            only[way_of(ranked.plan)] = None
            return len(only) == ways

        small = replace(FIRST, largest_tp=space.largest_tp, largest_sp=space.largest_sp, largest_pp=space.largest_pp)
        first = chosen(made(small, None), small, top=100 * ways, enough=cut_so)
    if ways is None or only:
        found = chosen(made(space, None if ways is None else only), space, top=4 * top, enough=accepted)
    if found is None or not found.ranked:
        raise _nothing_fits((found or first), cluster)
    if first is not None:
        found = replace(found, tried=found.tried + first.tried, fitting=found.fitting + first.fitting, refused=_joined(found, first))
    return accepted.planned(network, cluster, found)


class _Accepted:
    """Of plans that are ranked, asked best first, `top` that the recipe's checks accept; the others are refused with the checks' words."""

    def __init__(self, run: Run, world: int, top: int, checked: Callable[[Run, int], Run]) -> None:
        self.run, self.world, self.top, self.checked = run, world, top, checked
        self.kept: list[Ranked] = []
        self.runs: list[Run] = []
        self.refused: list[Refused] = []

    def __call__(self, ranked: Ranked) -> bool:
        """Whether there are enough."""
        try:
            made = self.checked(recipe_of(ranked.plan, self.run), self.world)
        except BadInput as reason:
            self.refused.append(Refused(str(reason), 1, ranked.plan))
            return False
        self.kept.append(ranked)
        self.runs.append(made)
        return len(self.kept) == self.top

    def planned(self, network: Network, cluster: Cluster, found: Found) -> Planned:
        refused = (*found.refused, *self.refused)
        if not self.kept:
            fix = f"mend the recipe: {refused[-1].reason}"
            raise BadInput("plan", got="no plan that the recipe's checks accept", needed="one", fix=fix)
        return Planned(network, cluster, replace(found, ranked=tuple(self.kept), refused=refused), tuple(self.runs))


def _storages(run: Run, base: Plan, engines: Iterable[Engine]) -> dict[str, Plan]:
    """By engine a plan with the bytes that an element has under it."""
    return {engine: as_stored(replace(base, engine=engine), run) for engine in {*engines, *FIRST.engines, "ddp"}}  # type: ignore[arg-type]


def _joined(found: Found, first: Found) -> tuple[Refused, ...]:
    reasons = {one.reason: one for one in first.refused}
    for one in found.refused:
        before = reasons.get(one.reason)
        reasons[one.reason] = one if before is None else replace(before, count=before.count + one.count)
    return tuple(sorted(reasons.values(), key=lambda one: -one.count))


def _nothing_fits(found: Found | None, cluster: Cluster) -> BadInput:
    assert found is not None
    if found.nearest is None:
        reason = found.refused[0].reason if found.refused else "no way to cut so many ranks divides the batch"
        got = f"no plan that runs on {cluster.world} devices: {reason}"
        return BadInput("plan", got=got, needed="one", fix="change that size, or --cluster")
    plan, over = found.nearest
    limit = cluster.memory_bytes()
    times = math.ceil((over + limit) / limit)
    return BadInput(
        "plan",
        got=f"{over / _GIB:.1f} GiB a device too much for the smallest plan ({described(plan)})",
        needed=f"at most {cluster.device.memory_gib:.0f} GiB",
        fix=f"take about {times} times as many devices, a smaller model.max_length, or offload (sharding.offload)",
    )


def guided(run: Run, cluster: Cluster) -> Iterator[Said]:
    """The guide that chooses a strategy, with this recipe's numbers on this cluster. A batch that no division fits is left out."""
    network, batch = network_of(run.resolve(cluster.world)), run.train.global_batch
    base = plan_of(run.resolve(cluster.world))
    stored = _storages(run, base, GUIDED.engines)

    def kept(plan: Plan) -> Plan:
        return replace(plan, storage=stored[plan.engine].storage, compute_bytes=stored[plan.engine].compute_bytes)

    def judged(plan: Plan) -> Ranked:
        plan = kept(plan)
        return Ranked(plan, step_time(network, plan, cluster).step, peak(network, plan).used)

    def best(family: str, devices: int) -> Ranked | None:
        space = replace(GUIDED, largest_tp=cluster.devices_per_node)
        plans = candidates(network, world=devices, global_batch=batch, base=base, space=space)
        found = choose(
            network,
            (kept(plan) for plan in plans if FAMILIES[family](plan)),
            held_bytes=lambda plan: peak(network, plan).used,
            limit_bytes=cluster.memory_bytes(),
            seconds=lambda plan: step_time(network, plan, cluster).step,
            top=1,
        )
        return found.ranked[0] if found.ranked else None

    alone = replace(Plan(), microbatch=1, microbatches=batch, recompute="full")
    host = judged(replace(alone, engine="zero3", offload_optimizer="cpu", offload_parameters="cpu"))
    return walk(best, cluster, one_device=judged(alone), offloaded=host)


GUIDED = Space(
    engines=("ddp", "zero1", "zero3", "fsdp"),
    tensors=("sliced", "1d"),
    sequences=("ring",),
    schedules=(("1f1b", 1), ("interleaved", 2)),
    etp=(1,),
    largest_sp=1,
    largest_microbatch=8,
)
