"""The best plans of a recipe on a cluster: candidates, refused or ranked (moe/plan/choose/choose.py), and the recipe of each ranked plan.

    round 1    all degrees of parallelism (pp, tp, sp, dp, ep), each with a few other choices           -> the fastest degrees
    round 2    these degrees with every engine, schedule, tensor kind, micro-batch and etp              -> ranked

The cost of round 2 grows with the number of combinations of degrees (`ways`), not with the cluster. `ways=None` tries all combinations
without a first round, and so does a cluster with few of them. The recipe's own plan is ranked among the others. Ranked plans have passed
the recipe's own checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from moe.plan.choose.candidates import Degrees, Space, candidates, degree_choices, degrees_of
from moe.plan.choose.choose import Ranked, Ranking, Refused, choose, described
from moe.plan.choose.guide import FAMILIES, GuideRule, guide_rules
from moe.plan.choose.legal import refusal
from moe.plan.choose.predicted import Values, held_bytes, stack_on, with_values
from moe.plan.choose.recipe_of import as_stored, recipe_of
from moe.plan.job.flops import counted_training
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import FOLDER, Cluster, load_cluster
from moe.plan.memory.memory import Memory, peak
from moe.plan.time.cost import Time, step_time
from moe.plan.time.pipeline_time import How
from moe.recipe.sections import Run
from parallel.data.kinds.catalog import ENGINES, PLAIN, offloading
from parallel.errors import BadInput, counted
from parallel.fixes import Fix, Words, any_of, typed
from parallel.pipeline.schedules.catalog import closed_form

WAYS = 24  # number of combinations of degrees that the second round tries
TIGHT = 0.9  # fraction of the memory from which a plan counts as tight
SMALL = 32  # up to this number of devices, the first round also tries larger micro-batches
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


class Speed(NamedTuple):
    """Speed of a plan. tflops: TFLOP/s of one device. mfu: this divided by the device's peak in the compute dtype; None if unknown."""

    tokens_per_s: float
    tflops: float
    mfu: float | None


@dataclass(frozen=True)
class Planned:
    """Result of planning. found: ranked and refused plans. runs: the recipes of the ranked plans, in the same order. own: the plan of the
    given recipe; None if its checks refuse it on the cluster."""

    network: Network
    cluster: Cluster
    found: Ranking
    runs: tuple[Run, ...]
    own: Plan | None = None

    def time(self, plan: Plan) -> Time:
        return step_time(self.network, plan, self.cluster)

    def memory(self, plan: Plan) -> Memory:
        return peak(self.network, plan, stack_on(self.cluster))

    def speed(self, ranked: Ranked) -> Speed:
        """Return the speed of a ranked plan, by the model's FLOPs without recomputation."""
        run, cluster = self.runs[0], self.cluster
        tokens = run.train.global_batch * run.model.read_length
        tflops = counted_training(run) * tokens / cluster.world / ranked.seconds / 1e12
        top = cluster.device.peak_tflops.get(run.precision.compute)
        return Speed(tokens / ranked.seconds, tflops, tflops / top if top else None)

    def tight(self, ranked: Ranked) -> bool:
        """Return whether the plan uses the last tenth of the memory, in which the allocator may have to wait for freed blocks."""
        return ranked.held_bytes > TIGHT * self.cluster.memory_bytes()


def planned(
    run: Run,
    cluster: Cluster,
    *,
    checked: Callable[[Run, int], Run],
    top: int = 10,
    space: Space | None = None,
    ways: int | None = WAYS,
) -> Planned:
    """Return the best plans for all devices of the cluster.

    checked: the recipe's own checks (moe/checks/together.py). ways: number of combinations of degrees that the second round tries; None:
    all. Raises BadInput if no plan fits, with a change that makes one fit.
    """
    space = _offloading(space or Space(), run)
    own_run = None
    with suppress(BadInput):
        own_run = checked(run, cluster.world)
    own = None if own_run is None else plan_of(own_run)
    run = run.resolve(cluster.world)
    network = network_of(run)
    cuts = degree_choices(network, world=cluster.world, global_batch=run.train.global_batch, space=space)
    if ways is not None and next(islice(cuts, ways, None), None) is None:
        ways = None

    def bound(how: How) -> Callable[[Plan], float]:
        return lambda plan: step_time(network, plan, cluster, pipeline=how).step

    def chosen(plans: Iterable[Plan], space: Space, *, top: int, enough: Callable[[Ranked], bool], given: Plan | None = None) -> Ranking:
        simulates = any(closed_form(name) is None for name, _ in space.schedules)
        return choose(
            network,
            plans,
            held_bytes=lambda plan: held_bytes(network, plan, cluster),
            limit_bytes=cluster.memory_bytes(),
            seconds=bound("simulated"),
            least=(bound("alone"), bound("least")) if simulates else (bound("alone"),),
            devices_per_node=cluster.devices_per_node,
            top=top,
            enough=enough,
            given=given,
        )

    only: dict[Degrees, None] = {}
    first, accepted = None, _Accepted(run, cluster.world, top, checked, own, own_run)
    if ways is not None:

        def cut_so(ranked: Ranked) -> bool:
            only[degrees_of(ranked.plan)] = None
            return len(only) == ways

        small = replace(_offloading(FIRST, run), largest_tp=space.largest_tp, largest_sp=space.largest_sp, largest_pp=space.largest_pp)
        if cluster.world <= SMALL:
            small = replace(small, largest_microbatch=8 * cluster.devices_per_node)
        first = chosen(_plans(run, cluster, small), small, top=100 * ways, enough=cut_so)
    # if no plan of the first round fits, plans with all degrees are tried
    found = chosen(_plans(run, cluster, space, only or None), space, top=100 * top, enough=accepted, given=own)
    if not found.ranked:
        raise _nothing_fits(found, run, cluster, checked)
    if first is not None:
        found = replace(found, tried=found.tried + first.tried, fitting=found.fitting + first.fitting, refused=_joined(found, first))
    return accepted.planned(network, cluster, found)


def _plans(run: Run, cluster: Cluster, space: Space, only: Collection[Degrees] | None = None) -> Iterator[Plan]:
    """Yield plans of a resolved run, legal or not. only: if given, only plans with these degrees."""
    base, stored = plan_of(run), _storages(run, plan_of(run), space.engines)
    for plan in candidates(network_of(run), world=cluster.world, global_batch=run.train.global_batch, base=base, space=space, only=only):
        yield plan.but(storage=stored[plan.engine].storage, compute_bytes=stored[plan.engine].compute_bytes)


def _offloading(space: Space, run: Run) -> Space:
    """Return the space, restricted to the engines that can offload if the recipe offloads model states."""
    offload = run.sharding.offload
    on_host = (offload.optimizer, offload.parameters) != ("none", "none")
    return replace(space, engines=tuple(name for name, kind in ENGINES.items() if kind.offloads)) if on_host else space


class _Accepted:
    """Collects the `top` best ranked plans that the recipe's checks accept. Other plans are refused with the checks' error."""

    def __init__(self, run: Run, world: int, top: int, checked: Callable[[Run, int], Run], own: Plan | None, own_run: Run | None) -> None:
        """own: the recipe's own plan, if it passed the checks. own_run: the recipe after these checks."""
        self.run, self.world, self.top, self.checked, self.own, self.own_run = run, world, top, checked, own, own_run
        self.kept: list[Ranked] = []
        self.runs: list[Run] = []
        self.refused: dict[str, Refused] = {}
        self.first: BadInput | None = None

    def __call__(self, ranked: Ranked) -> bool:
        """Check the next best plan. Returns True once `top` plans are accepted."""
        try:
            own = self.own_run if ranked.plan == self.own else None
            made = own or self.checked(recipe_of(ranked.plan, self.run), self.world)
        except BadInput as reason:
            self.first = self.first or reason
            before = self.refused.get(str(reason), Refused(str(reason), 0, ranked.plan))
            self.refused[str(reason)] = replace(before, count=before.count + 1)
            return False
        self.kept.append(ranked)
        self.runs.append(made)
        return len(self.kept) == self.top

    def planned(self, network: Network, cluster: Cluster, found: Ranking) -> Planned:
        refused = (*found.refused, *self.refused.values())
        if not self.kept:
            assert self.first is not None
            raise BadInput(
                "plan",
                got=f"no plan that the recipe's checks accept: {self.first.what}={self.first.got}",
                needed=self.first.needed,
                fix=self.first.fix,
            )
        return Planned(network, cluster, replace(found, ranked=tuple(self.kept), refused=refused), tuple(self.runs), self.own)


def _storages(run: Run, base: Plan, engines: Iterable[str]) -> dict[str, Plan]:
    """Return engine -> a plan with this engine, its bytes of model states (`storage`) and of an activation's element (`compute_bytes`)."""
    return {engine: as_stored(replace(base, engine=engine), run) for engine in {*engines, *FIRST.engines, PLAIN}}


def _joined(found: Ranking, first: Ranking) -> tuple[Refused, ...]:
    reasons = {one.reason: one for one in first.refused}
    for one in found.refused:
        before = reasons.get(one.reason)
        reasons[one.reason] = one if before is None else replace(before, count=before.count + one.count)
    return tuple(sorted(reasons.values(), key=lambda one: -one.count))


def _nothing_fits(found: Ranking, run: Run, cluster: Cluster, checked: Callable[[Run, int], Run]) -> BadInput:
    """Return the error for a recipe that no plan can train on the cluster. The fixes that it proposes have been tested."""
    if found.nearest is None:
        reason = (
            found.refused[0].reason if found.refused else f"its ways to cut ranks do not divide train.global_batch={run.train.global_batch}"
        )
        batch = -(-run.train.global_batch // cluster.world) * cluster.world
        larger = {"train.global_batch": batch}
        works = batch > run.train.global_batch and _that_fits(with_values(run, larger), cluster, checked) is not None
        fix = typed(larger) if works else "change that size, or --cluster"
        return BadInput("plan", got=f"no plan that runs on {counted(cluster.world, 'device')}: {reason}", needed="one", fix=fix)
    plan, over = found.nearest
    mends = list(_mends(run, cluster, checked, least=over / cluster.memory_bytes() + 1))
    return BadInput(
        "plan",
        got=f"{gib(over)} GiB a device too much for the smallest plan ({described(plan)})",
        needed=f"at most {cluster.memory_bytes() / _GIB:.4g} GiB",
        fix=any_of(mends or ["a smaller model, or devices with more memory"]),
    )


def _mends(run: Run, cluster: Cluster, checked: Callable[[Run, int], Run], *, least: float) -> Iterator[Fix]:
    """Yield up to two fixes that work: a change of the recipe, more nodes. least: memory of the smallest plan / memory of a device."""
    chunks: Values = {"recompute.loss_chunks": 8}
    optimizer: Values = {"sharding.kind": "zero", "sharding.offload.optimizer": "cpu"}
    changes = [chunks]
    if not cluster.cores:  # on a CPU, offloading to the host would change nothing
        changes += [optimizer, optimizer | {"sharding.stage": 3, "sharding.offload.parameters": "cpu"}]
        changes.append(changes[-1] | chunks)
    for values in changes:
        changed = with_values(run, values)
        if (plan := _that_fits(changed, cluster, checked)) is not None:
            host = sum(peak(network_of(changed), plan, stack_on(cluster)).host.values())
            fix = typed(values)
            yield Words(f"{fix} (and about {gib(host)} GiB of its host's memory for each device)", fix) if host else fix
            break
    if cluster.cores:
        return
    nodes = (cluster.nodes * 2**n for n in range(1, 15) if 2**n > least / 2 and cluster.world * 2**n <= 64 * run.train.global_batch)
    for more in islice((n for n in nodes if _that_fits(run, cluster.of(n), checked)), 1):
        shipped = (FOLDER / f"{cluster.name}.yaml").is_file() and load_cluster(cluster.name).of(cluster.nodes) == cluster
        yield Words(f"take --cluster {cluster.name}x{more}" if shipped else f"write nodes: {more} in {cluster.name}.yaml")


def _that_fits(run: Run, cluster: Cluster, checked: Callable[[Run, int], Run]) -> Plan | None:
    """Return a plan of the first round with full recomputation that fits and that the recipe's checks accept; None if none is found."""
    run = run.resolve(cluster.world)
    network, limit = network_of(run), cluster.memory_bytes()
    again = (plan.but(recompute="full") for plan in _plans(run, cluster, _offloading(FIRST, run)))
    fitting = (plan for plan in again if refusal(network, plan) is None and held_bytes(network, plan, cluster) <= limit)
    for plan in islice(fitting, 100):  # if the checks refuse 100 plans, they probably refuse all
        with suppress(BadInput):
            checked(recipe_of(plan, run), cluster.world)
            return plan
    return None


def gib(size_bytes: float) -> str:
    """Format bytes as GiB: one digit after the point, or two significant digits below 0.1."""
    size = size_bytes / _GIB
    return f"{size:.1f}" if size >= 0.1 else f"{size:.2g}"


def guided(run: Run, cluster: Cluster) -> Iterator[GuideRule]:
    """Yield the rules of the guide (guide.py) with this recipe's numbers on this cluster."""
    network, batch = network_of(run.resolve(cluster.world)), run.train.global_batch
    base = plan_of(run.resolve(cluster.world))
    stored = _storages(run, base, GUIDED.engines)

    def kept(plan: Plan) -> Plan:
        return replace(plan, storage=stored[plan.engine].storage, compute_bytes=stored[plan.engine].compute_bytes)

    def judged(plan: Plan) -> Ranked:
        plan = kept(plan)
        return Ranked(plan, step_time(network, plan, cluster).step, held_bytes(network, plan, cluster))

    def best(family: str, devices: int) -> Ranked | None:
        space = replace(GUIDED, largest_tp=cluster.devices_per_node)
        plans = candidates(network, world=devices, global_batch=batch, base=base, space=space)
        found = choose(
            network,
            (kept(plan) for plan in plans if FAMILIES[family](plan)),
            held_bytes=lambda plan: held_bytes(network, plan, cluster),
            limit_bytes=cluster.memory_bytes(),
            seconds=lambda plan: step_time(network, plan, cluster).step,
            top=1,
        )
        return found.ranked[0] if found.ranked else None

    alone = replace(Plan(), microbatch=1, microbatches=batch, recompute="full")
    host = judged(replace(alone, engine=offloading("parameters", "cpu").name, offload_optimizer="cpu", offload_parameters="cpu"))
    return guide_rules(best, cluster, one_device=judged(alone), offloaded=host, compute=run.precision.compute)


GUIDED = Space(
    engines=("ddp", "zero1", "zero3", "fsdp"),
    tensors=("sliced", "1d"),
    sequences=("ring",),
    schedules=(("1f1b", 1), ("interleaved", 2)),
    etp=(1,),
    largest_sp=1,
)
