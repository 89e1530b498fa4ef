"""Finds the best plans of a recipe on a cluster, and the recipe of each.

    round 1    all sets of degrees (pp, tp, sp, dp, ep), each with a few values of the other settings   -> sets that can be the fastest
    round 2    these sets with every engine, schedule, tensor kind, micro-batch and etp                 -> the ranking

Round 1 is in candidates.py. Round 2's time grows with its number of sets of degrees, not with the size of the cluster. Without round 1
(`num_degrees=None`, or if few sets are possible), round 2 tries all sets. The recipe's own plan is ranked among the others. All ranked
plans pass the recipe's checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple, get_args

from moe.plan.choose.candidates import FIRST, SMALL, Degrees, Space, candidates, degree_choices, fastest_degrees
from moe.plan.choose.choose import TIGHT, Held, Ranked, Ranking, Refusals, Refused, choose, described
from moe.plan.choose.guide import FAMILIES, GuideRule, guide_rules
from moe.plan.choose.legal import refusal
from moe.plan.choose.predicted import held_bytes, stack_on
from moe.plan.choose.recipe_of import Values, as_stored, recipe_of, with_values
from moe.plan.job.flops import counted_training
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster, larger_clusters
from moe.plan.memory.memory import Memory, peak
from moe.plan.time.cost import Time, ideal_seconds, step_time
from moe.plan.time.pipeline_time import How
from moe.recipe.sections import Run
from parallel.data.kinds import ENGINES, offloading
from parallel.errors import BadInput, counted
from parallel.fixes import Fix, Words, any_of, typed
from parallel.pipeline.schedules import closed_form

NUM_DEGREES = 16  # least number of sets of degrees (pp, tp, sp, dp, ep) that round 2 tries
_GIB = 2**30
Check = Callable[[Run, int], Run]  # (recipe, number of ranks) -> the recipe after its checks (moe/checks/), which raise BadInput


class TooLarge(BadInput):
    """No plan fits into memory. over_bytes: bytes by which the smallest plan exceeds a device's memory."""

    def __init__(self, over_bytes: float, *, got: str, needed: str, fix: Fix) -> None:
        super().__init__("plan", got=got, needed=needed, fix=fix)
        self.over_bytes = over_bytes


class Speed(NamedTuple):
    """Speed of a plan. tflops: TFLOP/s of one device. mfu: model FLOPs utilization, tflops / the device's peak; None if the peak is
    unknown."""

    tokens_per_s: float
    tflops: float
    mfu: float | None


@dataclass(frozen=True)
class Planned:
    """Result of planning. found: ranked and refused plans. runs: recipes of the ranked plans, in the same order. own: the given recipe's
    own plan; None if the checks refuse that recipe on the cluster."""

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
        """Return the speed of a ranked plan. FLOPs of activation recomputation do not count."""
        run, cluster = self.runs[0], self.cluster
        tokens = run.train.global_batch * run.model.read_length
        tflops = counted_training(run) * tokens / cluster.world / ranked.seconds / 1e12
        top = cluster.device.peak_tflops.get(run.precision.compute)
        return Speed(tokens / ranked.seconds, tflops, tflops / top if top else None)

    def tight(self, ranked: Ranked) -> bool:
        """Return whether the plan uses more than the fraction TIGHT of the memory. The allocator may then have to wait for freed blocks."""
        return ranked.held_bytes > TIGHT * self.cluster.memory_bytes()


def planned(
    run: Run, cluster: Cluster, *, checked: Check, top: int = 10, space: Space | None = None, num_degrees: int | None = NUM_DEGREES
) -> Planned:
    """Return the `top` best plans for all devices of the cluster. checked: returns a recipe after its checks. space: values that are tried
    for each setting; None: Space(). num_degrees: least number of sets of degrees that round 2 (top of this file) tries; None: all sets,
    without round 1.

    Raises BadInput if there is no plan that can run, fits into memory and passes the recipe's checks. The message proposes a change of the
    recipe or of the cluster with which a plan exists.
    """
    space = _offloading(space or Space(), run)
    own_run = None
    with suppress(BadInput):
        own_run = checked(run, cluster.world)
    own = None if own_run is None else plan_of(own_run)
    run = run.resolve(cluster.world)
    network = network_of(run)
    choices = degree_choices(network, world=cluster.world, global_batch=run.train.global_batch, space=space)
    if num_degrees is not None and next(islice(choices, num_degrees, None), None) is None:
        num_degrees = None

    def bound(how: How) -> Callable[[Plan], float]:
        return lambda plan: step_time(network, plan, cluster, pipeline=how).step

    simulates = any(closed_form(name) is None for name, _ in space.schedules)
    bounds = (bound("alone"), bound("least")) if simulates else (bound("alone"),)
    limit = cluster.memory_bytes()

    def held(plan: Plan) -> float:
        return held_bytes(network, plan, cluster)

    only: tuple[Degrees, ...] = ()
    counts = Ranking(0, 0, (), ())
    if num_degrees is not None:
        only, counts = fastest_degrees(
            network,
            _plans(run, cluster, _first(space, run, cluster)),
            held=Held(held, limit),
            ideal=lambda plan: ideal_seconds(network, plan, cluster),
            seconds={how: bound(how) for how in get_args(How)},
            schedules=space.schedules,
            devices_per_node=cluster.devices_per_node,
            count=num_degrees,
        )
    accepted = _Accepted(run, cluster.world, top, checked, own, own_run)
    found = choose(
        network,
        _plans(run, cluster, space, only or None),  # `only` is empty if no plan of round 1 fits: then all degrees are tried
        held_bytes=held,
        limit_bytes=limit,
        seconds=bound("simulated"),
        least=bounds,
        devices_per_node=cluster.devices_per_node,
        top=100 * top,
        enough=accepted,
        given=own,
    )
    if not found.ranked:
        raise _nothing_fits(found, run, cluster, checked)
    both = counts.tried + found.tried, counts.fitting + found.fitting
    found = replace(found, tried=both[0], fitting=both[1], refused=_joined(counts, found))
    return accepted.planned(network, cluster, found)


def _plans(run: Run, cluster: Cluster, space: Space, only: Collection[Degrees] | None = None) -> Iterator[Plan]:
    """Return plans for a run with resolved degrees, including plans that cannot run. only: if given, only plans with these degrees."""
    if not run.is_flat:  # leave out ZeRO, which FSDP replaces if the optimizer needs whole matrices or master weights are not fp32
        space = replace(space, engines=tuple(name for name in space.engines if ENGINES[name].unless_flat is None))
    network, batch = network_of(run), run.train.global_batch
    return map(_storing(run), candidates(network, world=cluster.world, global_batch=batch, base=plan_of(run), space=space, only=only))


def _first(space: Space, run: Run, cluster: Cluster) -> Space:
    """Return the space of round 1: FIRST, with the limits of `space` on tp, sp and pp, and with larger micro-batches on small clusters.
    run: has resolved degrees."""
    largest = 8 * cluster.devices_per_node if cluster.world <= SMALL else FIRST.largest_microbatch
    return replace(
        _offloading(FIRST, run),
        largest_tp=space.largest_tp,
        largest_sp=space.largest_sp,
        largest_pp=space.largest_pp,
        largest_microbatch=largest,
    )


def _offloading(space: Space, run: Run) -> Space:
    """Return `space`. If the recipe offloads model states, the engines are replaced by all engines that can offload."""
    offload = run.sharding.offload
    on_host = (offload.optimizer, offload.parameters) != ("none", "none")
    return replace(space, engines=tuple(name for name, kind in ENGINES.items() if kind.offloads)) if on_host else space


class _Accepted:
    """Collects the `top` best plans that the recipe's checks accept, and the refused plans with the checks' error messages as reasons."""

    def __init__(self, run: Run, world: int, top: int, checked: Check, own: Plan | None, own_run: Run | None) -> None:
        """own: the recipe's own plan; None if the checks refused it. own_run: the recipe after the checks."""
        self.run, self.world, self.top, self.checked, self.own, self.own_run = run, world, top, checked, own, own_run
        self.kept: list[Ranked] = []
        self.runs: list[Run] = []
        self.refused = Refusals()
        self.first: BadInput | None = None

    def __call__(self, ranked: Ranked) -> bool:
        """Check the next best plan. Return True once `top` plans are accepted."""
        try:
            own = self.own_run if ranked.plan == self.own else None
            made = own or self.checked(recipe_of(ranked.plan, self.run), self.world)
        except BadInput as reason:
            self.first = self.first or reason
            self.refused.add(Refused(str(reason), 1, ranked.plan))
            return False
        self.kept.append(ranked)
        self.runs.append(made)
        return len(self.kept) == self.top

    def planned(self, network: Network, cluster: Cluster, found: Ranking) -> Planned:
        refused = (*found.refused, *self.refused.values())
        if not self.kept:
            assert self.first is not None
            got = f"no plan that the recipe's checks accept: {self.first.what}={self.first.got}"
            raise BadInput("plan", got=got, needed=self.first.needed, fix=self.first.fix)
        return Planned(network, cluster, replace(found, ranked=tuple(self.kept), refused=refused), tuple(self.runs), self.own)


def _storing(run: Run) -> Callable[[Plan], Plan]:
    """Return a function: plan -> the plan with the bytes that its engine stores for each parameter and activation in the recipe's
    precision."""
    stored = {engine: as_stored(replace(plan_of(run), engine=engine, pp=1), run) for engine in ENGINES}

    def kept(plan: Plan) -> Plan:
        like = stored[plan.carrier.name]
        return plan.but(storage=like.storage, compute_bytes=like.compute_bytes)

    return kept


def _joined(*rounds: Ranking) -> tuple[Refused, ...]:
    joined = Refusals()
    for refused in chain.from_iterable(ranking.refused for ranking in rounds):
        joined.add(refused)
    return joined.sorted()


def _nothing_fits(found: Ranking, run: Run, cluster: Cluster, checked: Check) -> BadInput:
    """Return the error for a recipe that no plan can train on the cluster. It proposes only fixes with which a plan was found."""
    if (nearest := found.nearest) is None:
        no_dp = f"no possible dp divides train.global_batch={run.train.global_batch}"
        reason = found.refused[0].reason if found.refused else no_dp
        batch = -(-run.train.global_batch // cluster.world) * cluster.world
        larger = {"train.global_batch": batch}
        works = batch > run.train.global_batch and _that_fits(with_values(run, larger), cluster, checked) is not None
        fix = typed(larger) if works else "change the size that this message names, or choose another --cluster"
        return BadInput("plan", got=f"no plan that runs on {counted(cluster.world, 'device')}: {reason}", needed="at least one", fix=fix)
    mends = list(_mends(run, cluster, checked, least=nearest.over_bytes / cluster.memory_bytes() + 1))
    return TooLarge(
        nearest.over_bytes,
        got=f"{gib(nearest.over_bytes)} GiB a device too much for the smallest plan ({described(nearest.example)})",
        needed=f"at most {cluster.memory_bytes() / _GIB:.4g} GiB",
        fix=any_of(mends or ["a smaller model, or devices with more memory"]),
    )


def _mends(run: Run, cluster: Cluster, checked: Check, *, least: float) -> Iterator[Fix]:
    """Yield up to two fixes with which a plan fits: a change of the recipe, and a larger cluster. least: memory of the smallest
    plan divided by the memory of a device."""
    chunks: Values = {"recompute.loss_chunks": 8}
    optimizer: Values = {"sharding.kind": "zero", "sharding.offload.optimizer": "cpu"}
    changes = [chunks]
    if not cluster.cores:  # on a CPU, states are in the host's memory anyway, so offload saves nothing
        changes += [optimizer, optimizer | {"sharding.stage": 3, "sharding.offload.parameters": "cpu"}]
        changes.append(changes[-1] | chunks)
    for values in changes:
        changed = with_values(run, values)
        if (plan := _that_fits(changed, cluster, checked)) is not None:
            host = sum(peak(network_of(changed), plan, stack_on(cluster)).host.values())
            fix = typed(values)
            yield Words(f"{fix} (which needs about {gib(host)} GiB of host memory per device)", fix) if host else fix
            break
    if cluster.cores:
        return
    for words, more in larger_clusters(cluster):
        enough = more.world > cluster.world * least / 2 and more.world <= 64 * run.train.global_batch
        if enough and _that_fits(run, more, checked) is not None:
            yield Words(words)
            return


def _that_fits(run: Run, cluster: Cluster, checked: Check) -> Plan | None:
    """Return a plan of the space FIRST that fits with full recomputation and that the recipe's checks accept; None if there is none."""
    run = run.resolve(cluster.world)
    network, limit = network_of(run), cluster.memory_bytes()
    again = (plan.but(recompute="full") for plan in _plans(run, cluster, _offloading(FIRST, run)))
    fitting = (plan for plan in again if refusal(network, plan) is None and held_bytes(network, plan, cluster) <= limit)
    for plan in islice(fitting, 100):  # give up after 100 refusals: then the checks probably refuse every plan
        with suppress(BadInput):
            checked(recipe_of(plan, run), cluster.world)
            return plan
    return None


def gib(size_bytes: float) -> str:
    """Format bytes as GiB, with one digit after the point, or with two significant digits below 0.1 GiB."""
    size = size_bytes / _GIB
    return f"{size:.1f}" if size >= 0.1 else f"{size:.2g}"


def guided(run: Run, cluster: Cluster) -> Iterator[GuideRule]:
    """Yield the rules of thumb of guide.py with predictions for this recipe on this cluster."""
    run = run.resolve(cluster.world)
    network, kept = network_of(run), _storing(run)

    def judged(plan: Plan) -> Ranked:
        plan = kept(plan)
        return Ranked(plan, step_time(network, plan, cluster).step, held_bytes(network, plan, cluster))

    def best(family: str, devices: int) -> Ranked | None:
        space = replace(GUIDED, largest_tp=cluster.devices_per_node)
        plans = candidates(network, world=devices, global_batch=run.train.global_batch, base=plan_of(run), space=space)
        found = choose(
            network,
            (kept(plan) for plan in plans if FAMILIES[family](plan)),
            held_bytes=lambda plan: held_bytes(network, plan, cluster),
            limit_bytes=cluster.memory_bytes(),
            seconds=lambda plan: step_time(network, plan, cluster).step,
            top=1,
        )
        return found.ranked[0] if found.ranked else None

    alone = replace(Plan(), microbatch=1, microbatches=run.train.global_batch, recompute="full")
    host = judged(replace(alone, engine=offloading("parameters", "cpu").name, offload_optimizer="cpu", offload_parameters="cpu"))
    return guide_rules(best, cluster, one_device=judged(alone), offloaded=host, compute=run.precision.compute)


GUIDED = Space(  # plans that `guided` tries: the best of each family is an example for a rule in guide.py
    engines=("ddp", "zero1", "zero3", "fsdp"),
    tensors=("sliced", "1d"),
    sequences=("ring",),
    schedules=(("1f1b", 1), ("interleaved", 2)),
    etp=(1,),
    largest_sp=1,
)
