"""Searches over a whole graph, each ending in a Plan that the trainer runs.

    alpa        for each submesh and logical shape strategies by intra_op.py; stages over them by inter_op.py
    flexflow    placements of every operator by mcmc.py, without stages
                \\__ then the nearest plan that runs: of those with as many (equal) stages the one of least time by the same search's cost

`seconds` of a Found are of its plan, by the strategies' cost for all searches alike, so that they can be compared; `free_seconds` are of
what was found before it had to be a plan, by the search's own cost. Layers that are alike are searched once (Folded): they are
cut alike, and what goes from layer to layer lies alike everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

from parallel.errors import BadInput
from parallel.plan.graph import Graph
from parallel.plan.inter_op import Stage, inter_op
from parallel.plan.intra_op import intra_op
from parallel.plan.job import Plan
from parallel.plan.links import Machine
from parallel.plan.runnable import LayerCost, Runnable, layer_costs, with_recompute
from parallel.plan.strategies import Settings


@dataclass(frozen=True)
class Found:
    """`assignment`: of each operator of the different layers the factors that are cut, from the farthest ranks to the nearest, as `b8 f4`.

    `nearest`: whether the plan is the optimum itself, or stands in for it; `said`: the same in words, with what it costs.
    """

    search: Literal["alpa", "flexflow", "mesh-tf", "gspmd"]
    plan: Plan
    seconds: float
    free_seconds: float
    assignment: Mapping[str, str]
    stages: tuple[Stage, ...]
    nearest: bool
    said: str


@dataclass(frozen=True)
class _Solution:
    """Of one submesh: its layers' costs as sums from the first block on, and what was assigned."""

    sums: tuple[tuple[float, ...], ...]  # seconds, state_bytes, kept_bytes; each [blocks + 1]
    assignment: Mapping[str, str]


Allowed = Callable[[Plan], bool]


def _all(plan: Plan) -> bool:
    return True


def alpa(graph: Graph, machine: Machine, settings: Settings | None = None, *, allowed: Allowed = _all) -> Found:
    """Stages and strategies of least time; `allowed`: which plans the recipe can be trained by.

    Raises BadInput where nothing fits into the devices' memory.
    """
    settings = settings or Settings()
    runnable = Runnable(graph, machine, settings, allowed)
    whole = tuple(2**i * machine.node_size for i in range(machine.nodes.bit_length()))
    submeshes = tuple(n for n in machine.submeshes() if n <= machine.node_size or n in (*whole, machine.devices))
    solutions = {n: _solutions(runnable, n) for n in submeshes}
    used: dict[tuple[int, int, int, int], _Solution] = {}

    def time(first: int, end: int, devices: int, later: int) -> float:
        best, in_flight = inf, min(later + 1, settings.microbatches)
        for one in solutions[devices]:
            seconds, states, kept = (part[end] - part[first] for part in one.sums)
            if seconds < best and states + kept * in_flight <= machine.memory_bytes:
                best, used[first, end, devices, later] = seconds, one
        return best

    blocks = len(runnable.blocks)
    found = inter_op(time, layers=blocks, devices=machine.devices, submeshes=submeshes, microbatches=settings.microbatches, gap=1e-3)
    stages = found.stages
    assignment = used[stages[0].first, stages[0].end, stages[0].devices, len(stages) - 1].assignment
    equal = len({stage.devices for stage in stages}) == 1
    layers = tuple(stage.end - stage.first for stage in stages) if equal else None
    plan = _nearest(runnable, len(stages) if equal else None, layers)
    seconds = runnable.seconds(plan)
    own = equal and plan.pp == len(stages) and seconds <= found.seconds * (1 + 1e-6)
    return Found("alpa", plan, seconds, found.seconds, assignment, stages, not own, _said(own, seconds, found.seconds))


def _solutions(runnable: Runnable, devices: int) -> list[_Solution]:
    """The best strategies without a limit, and those that fit where stages are equal; each also with recomputation."""
    machine, folded, settings = runnable.machine, runnable.folded, runnable.settings
    streams = folded.streams
    same = tuple(pairwise(streams)) if max(folded.weight.values()) > 1 else ()
    found = []
    for shape in _shapes(devices, machine.node_size):
        mesh, share = machine.mesh(*shape), devices / machine.devices
        for limit in (inf, machine.memory_bytes):
            weight = {layer: n * (share if limit < inf else 1.0) for layer, n in folded.weight.items()}
            flight = min(settings.microbatches, max(1, machine.devices // devices))
            try:
                got = intra_op(folded.graph, mesh, settings, memory_bytes=limit, in_flight=flight, same=same, weight=weight)
            except BadInput:
                continue
            costs = layer_costs(got.graph, mesh, settings, got.chosen)
            stream = max(got.chosen[name].output_bytes for name in streams)
            again = {i: with_recompute(c, stream) if i in runnable.blocks else c for i, c in costs.items()}
            texts = {
                name: " ".join(f"{a}{n}" for a, n in zip(s.cut, shape, strict=True) if a and n > 1) or "-" for name, s in got.chosen.items()
            }
            found += [_Solution(_sums(runnable, some), texts) for some in (costs, again)]
            if (
                limit == inf
                and sum(c.state_bytes * folded.weight[i] + c.kept_bytes * folded.weight[i] for i, c in costs.items())
                <= machine.memory_bytes
            ):
                break
    return found


def _shapes(devices: int, node_size: int) -> list[tuple[int, int]]:
    """Logical grids (far, near) of a submesh: near ranks within a node, or all ranks along one axis."""
    near = [n for n in range(1, devices + 1) if devices % n == 0 and n <= node_size and n & (n - 1) == 0]
    return [(devices // n, n) for n in near if n > 1 or devices == 1] or [(1, devices)]


def _sums(runnable: Runnable, costs: Mapping[int, LayerCost]) -> tuple[tuple[float, ...], ...]:
    """The ends belong to the first and the last block."""
    blocks, (first, *_, last) = runnable.blocks, runnable.whole.layers
    rows = []
    for part in ("seconds", "state_bytes", "kept_bytes"):
        each = [getattr(costs[runnable.folded.of[layer]], part) for layer in blocks]
        each[0] += getattr(costs[first], part)
        each[-1] += getattr(costs[last], part)
        rows.append((0.0, *accumulate(each)))
    return tuple(rows)


def _nearest(runnable: Runnable, pp: int | None, layers: tuple[int, ...] | None) -> Plan:
    """The fastest plan of so many stages; where none fits, or the number is None, the fastest of all."""
    able = [n for n in range(1, len(runnable.blocks) + 1) if runnable.machine.devices % n == 0]
    for stages in ([pp] if pp in able else [], able):
        plans = [plan for n in stages for given in {layers if n == pp else None, None} for plan in runnable.plans(n, given)]
        best = min(plans, key=runnable.seconds, default=None)
        if best is not None and runnable.seconds(best) < inf:
            costs = runnable.costs(best)
            assert costs is not None
            return replace(best, stage_layers=runnable.stages(best, costs) if best.pp > 1 else None)
    fix = "--search enumerate, which has more kinds; or another pipeline.microbatches, recompute.kind=full, or more devices"
    raise BadInput("--search", got="no plan of its kinds that runs and fits", needed="one", fix=fix)


def _said(own: bool, seconds: float, free_seconds: float) -> str:
    if own:
        return "the optimum itself is a plan that runs"
    if seconds < free_seconds:
        return (
            f"a plan that runs, {seconds / free_seconds - 1:+.1%} by the same cost: what was found chose its cuts before it was recomputed"
        )
    return f"the nearest plan that runs: {seconds / free_seconds - 1:+.1%} by the same cost"


def flexflow(
    graph: Graph,
    machine: Machine,
    settings: Settings | None = None,
    *,
    allowed: Allowed = _all,
    budget: int = 2000,
    seconds: float = 20.0,
    seed: int = 0,
) -> Found:
    """The best placement of a random walk over cuts that use all devices, without stages; its micro-batches one after another."""
    from parallel.plan.execution import Placed, Simulator, run
    from parallel.plan.mcmc import legal, mcmc

    settings = settings or Settings()
    runnable = Runnable(graph, machine, settings, allowed)
    folded = runnable.folded
    simulator = Simulator(folded.graph, machine, settings, folded.weight)
    options = {op.name: legal(op, folded.graph, machine.devices, spread="all") for op in folded.graph.operators}
    walk = mcmc(simulator, options=options, budget=budget, seconds=seconds, seed=seed)
    times: dict[tuple[tuple[str, Placed], ...], float] = {}

    def simulated(plan: Plan) -> float:
        sizes = runnable.sizes(plan)
        if sizes is None or runnable.chosen(plan) is None:
            return inf
        cuts = runnable.cuts(plan)
        placed = {name: Placed(tuple((a, n) for a, n in zip(cut, sizes, strict=True) if n > 1)) for name, (cut, _) in cuts.items()}
        key = tuple(placed.items())
        if key not in times:
            times[key] = simulator.seconds(placed, run(simulator.tasks(placed)))
        return times[key]

    plans = [plan for plan in runnable.plans(1) if runnable.seconds(plan) < inf]
    if plans:
        plan = min(plans, key=lambda plan: (simulated(plan), runnable.seconds(plan)))
        near = simulated(plan)
    else:  # nothing fits without stages, which the walk does not know
        plan = _nearest(runnable, None, None)
        near = inf
    free = walk.seconds * settings.microbatches
    texts = {name: " ".join(f"{a or 'copies'}{n}" for a, n in placed.degrees) or "-" for name, placed in walk.placement.items()}
    own = near <= walk.seconds * (1 + 1e-9)
    said = _said(own, near, walk.seconds) if near < inf else f"no plan without stages fits: one of {plan.pp} stages"
    return Found("flexflow", plan, runnable.seconds(plan), free, texts, (), not own, said)
