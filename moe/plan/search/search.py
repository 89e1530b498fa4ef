"""Searches over a whole graph. Each returns a Plan that the trainer can run.

    alpa        strategies for each submesh and logical shape, then stages, both by alpa.py
    flexflow    placements of every operator by mcmc.py, without stages
    both        then the fastest plan that the trainer can run, by the cost model of the same search

`seconds` of a result: step time of its plan by the cost model of strategies.py. `free_seconds`: step time of the optimum, which the trainer
may be unable to run. alpa's optimum is the best of all strategies; flexflow's, the best of all placements by its simulator. Equal layers
are searched once (Folded): they get equal cuts, and the tensors between them have equal shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from moe.plan.job.network import Plan
from moe.plan.operators.links import Machine
from moe.plan.search.alpa import Stage, inter_op, intra_op
from moe.plan.search.execution import Placed, Simulator, run
from moe.plan.search.mcmc import legal, mcmc
from moe.plan.search.runnable import RECOMPUTED, Runnable
from moe.plan.search.strategies import Cost, Settings, Strategy
from parallel.annotations.graph import Graph
from parallel.errors import BadInput


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. seconds: time of a step with `plan` by the search's cost model. free_seconds: time of a step with the optimum,
    even if the trainer cannot run it. assignment: operator -> letters of its cut dims with the numbers of parts, from the most distant to
    the nearest ranks, such as `b8 f4`; for the searches in layouts.py (mesh-tf, gspmd), the rules of the layout or annotations. stages:
    Alpa's stages; () for other searches. nearest: True if the trainer cannot run the optimum, so that `plan` is another plan. said: a line
    for the user about optimum and plan."""

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
    """Strategies of all layers on one submesh. sums: cumulative sums over the first 0, 1, ... layers, in three rows: seconds, bytes of
    model states, bytes of outputs. assignment: operator -> letters of its cut dims with the numbers of parts."""

    sums: tuple[tuple[float, ...], ...]
    assignment: Mapping[str, str]


_Layers = tuple[Mapping[int, Cost], Mapping[str, Strategy], tuple[int, ...]]  # (layer -> its cost, operator -> its strategy, mesh shape)
Allowed = Callable[[Plan], bool]
GAP = 1e-3  # times count as equal if they differ by less than this fraction


def alpa(graph: Graph, machine: Machine, settings: Settings | None = None, *, allowed: Allowed = lambda plan: True) -> SearchResult:
    """Find stages and strategies with the least time (Alpa). Raises BadInput if no stages fit into memory. allowed: returns whether the
    recipe can be trained with a plan."""
    settings = settings or Settings()
    runnable = Runnable(graph, machine, settings, allowed)
    whole = tuple(2**i * machine.node_size for i in range(machine.nodes.bit_length()))
    submeshes = tuple(n for n in machine.submeshes() if n <= machine.node_size or n in (*whole, machine.devices))
    solutions = {n: some for n in submeshes if (some := _solutions(runnable, n))}
    tables: dict[tuple[int, int], tuple[Any, Any]] = {}  # (number of devices, micro-batches in flight) -> result of _fastest

    def table(devices: int, later: int) -> tuple[Any, Any]:
        key = (devices, min(later + 1, settings.microbatches))
        if key not in tables:
            tables[key] = _fastest(solutions[devices], key[1], machine.memory_bytes)
        return tables[key]

    def time(first: int, end: int, devices: int, later: int) -> float:
        return float(table(devices, later)[0][first, end])

    blocks = len(runnable.blocks)
    found = inter_op(time, layers=blocks, devices=machine.devices, submeshes=tuple(solutions), microbatches=settings.microbatches, gap=GAP)
    stages, first = found.stages, found.stages[0]
    assignment = solutions[first.devices][table(first.devices, len(stages) - 1)[1][first.first, first.end]].assignment
    equal = len({stage.devices for stage in stages}) == 1
    plan = _nearest(runnable, tuple(stage.end - stage.first for stage in stages) if equal else None)
    seconds = runnable.seconds(plan)
    own = seconds <= found.seconds * (1 + 1e-6)
    return SearchResult("alpa", plan, seconds, min(found.seconds, seconds), assignment, stages, not own, _said(own, seconds, found.seconds))


def _fastest(solutions: list[_Solution], in_flight: int, memory_bytes: float) -> tuple[Any, Any]:
    """Return two arrays [first, end]: the seconds of the layers first to end - 1 in the fastest solution that fits, and its index.
    in_flight: number of micro-batches with outputs in memory."""
    sums = np.array([one.sums for one in solutions]).transpose(1, 0, 2)
    seconds, states, kept = sums[:, :, None, :] - sums[:, :, :, None]
    times = np.where(states + kept * in_flight <= memory_bytes, seconds, inf)
    return times.min(axis=0), times.argmin(axis=0)


def _solutions(runnable: Runnable, devices: int) -> list[_Solution]:
    """Return the solutions for a submesh with `devices` devices, each without and with recomputation, from up to three searches:

    1. without a memory limit
    2. if result 1 does not fit: with a device's memory as the limit
    3. if search 2 finds nothing, and result 1 does not fit even with recomputation: the same limit, all layers recomputed

    The plans that the trainer can run are added, written as strategies, so the best solution is at least as fast as each of them."""
    machine, folded = runnable.machine, runnable.folded
    share, flight = devices / machine.devices, min(runnable.settings.microbatches, max(1, machine.devices // devices))
    weight = {layer: n * share for layer, n in folded.weight.items()}
    alike, again = folded.alike, dict(zip(folded.blocks, folded.streams[1:], strict=True))
    found: list[_Layers] = []

    def solved(shape: tuple[int, int], limit: float, same: tuple[tuple[str, str], ...], again: Mapping[int, str]) -> list[bool]:
        """Search on one mesh shape and add the results to `found`. Return [whether the strategies fit into a device's memory without
        recomputation, whether they fit with it]; [] if no strategies fit into `limit`. same: pairs of operators that must get equal
        shardings. again: recomputed layer -> operator whose output is kept."""
        mesh = machine.mesh(*shape)
        how: dict[str, Any] = {"memory_bytes": limit, "in_flight": flight, "same": same, "weight": weight, "again": again}
        how |= {"large": 0} if again else {}  # search 3: always round the relaxation; an integer program with little memory is slow
        try:
            got = intra_op(folded.graph, mesh, runnable.settings, gap=GAP, **how)
        except BadInput:
            return []
        each = [runnable.costs_of(got.graph, mesh, got.chosen, recompute=recompute) for recompute in RECOMPUTED]
        found.extend((costs, got.chosen, shape) for costs in each)
        held = [sum(weight[i] * (c.state_bytes + c.output_bytes * flight) for i, c in costs.items()) for costs in each]
        return [size <= machine.memory_bytes for size in held]

    for shape in _shapes(devices, machine.node_size):
        same = alike if max(folded.weight.values()) > 1 else ()
        fits = solved(shape, inf, same, {})
        if fits and not fits[0] and not solved(shape, machine.memory_bytes, same, {}) and not fits[1]:
            solved(shape, machine.memory_bytes, alike, again)
    for plan in runnable.plans(machine.devices // devices) if machine.devices % devices == 0 else ():
        of, chosen, sizes = runnable.costs(plan), runnable.chosen(plan), runnable.sizes(plan)
        if of is not None and chosen is not None and sizes is not None:
            found.append((of, chosen, sizes))
    return [_Solution(_sums(runnable, costs), _texts(chosen, sizes)) for costs, chosen, sizes in _unbeaten(found)]


def _unbeaten(found: list[_Layers]) -> list[_Layers]:
    """Return the solutions that no other dominates. A solution dominates another if none of its layers needs more seconds or bytes."""
    kept: dict[tuple[float, ...], _Layers] = {}
    numbers = ((tuple(x for c in one[0].values() for x in astuple(c)), one) for one in found)
    for mine, one in sorted(numbers, key=lambda some: some[0]):
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in kept):
            kept[mine] = one
    return list(kept.values())


def _texts(chosen: Mapping[str, Strategy], sizes: tuple[int, ...]) -> dict[str, str]:
    return {name: " ".join(f"{a}{n}" for a, n in zip(s.cut, sizes, strict=True) if a and n > 1) or "-" for name, s in chosen.items()}


def _shapes(devices: int, node_size: int) -> list[tuple[int, int]]:
    """Return the logical grids (far, near) of a submesh. Ranks along `near` are in the same node. If no such grid exists, returns one with
    a single axis."""
    near = [n for n in range(1, devices + 1) if devices % n == 0 and n <= node_size and n & (n - 1) == 0]
    return [(devices // n, n) for n in near if n > 1 or devices == 1] or [(1, devices)]


def _sums(runnable: Runnable, costs: Mapping[int, Cost]) -> tuple[tuple[float, ...], ...]:
    """Return cumulative sums over the layers (`_Solution.sums`). The embedding is counted in the first layer, the head in the last. costs:
    layer of the folded graph (equal layers are in it once) -> its cost."""
    blocks, (first, *_, last) = runnable.blocks, runnable.whole.layers
    rows = []
    for part in ("seconds", "state_bytes", "output_bytes"):
        each = [getattr(costs[runnable.folded.of[layer]], part) for layer in blocks]
        each[0] += getattr(costs[first], part)
        each[-1] += getattr(costs[last], part)
        rows.append((0.0, *accumulate(each)))
    return tuple(rows)


def _nearest(runnable: Runnable, layers: tuple[int, ...] | None) -> Plan:
    """Return the fastest plan that the trainer can run and that is allowed. layers: a further division to try, as the
    number of layers of each stage; None: only the divisions of `Runnable.stages`."""
    numbers = [n for n in range(1, len(runnable.blocks) + 1) if runnable.machine.devices % n == 0]
    given = list(runnable.plans(len(layers), layers)) if layers is not None and len(layers) in numbers else []
    plans = [(runnable.seconds(plan), plan) for plan in (*given, *(plan for n in numbers for plan in runnable.plans(n)))]
    for seconds, plan in sorted(plans, key=itemgetter(0)):
        costs = runnable.costs(plan)
        if seconds < inf and costs is not None:
            made = replace(plan, stage_layers=runnable.stages(plan, costs) if plan.pp > 1 else None)
            if runnable.allowed(made):
                return made
    fix = "--search enumerate, which tries more kinds of plans; or another pipeline.microbatches, or more devices"
    raise BadInput("--search", got="no plan that can run and fits", needed="at least one", fix=fix)


def _said(own: bool, seconds: float, free_seconds: float) -> str:
    if own:
        return "the trainer can run the optimum itself"
    return f"the trainer cannot run the optimum; its fastest plan takes {seconds / free_seconds - 1:.1%} longer by the same cost model"


def flexflow(
    graph: Graph,
    machine: Machine,
    settings: Settings | None = None,
    *,
    allowed: Allowed = lambda plan: True,
    budget: int = 2000,
    seconds: float = 20.0,
    seed: int = 0,
) -> SearchResult:
    """Find the best placement by a random walk (FlexFlow), and the fastest plan that the trainer can run. The walk places every operator on
    all devices, without pipeline stages: micro-batches run one after another. budget: number of proposals. seconds: time limit of the walk.
    allowed: returns whether the recipe can be trained with a plan."""
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

    plans = [plan for plan in runnable.plans(1) if runnable.seconds(plan) < inf and runnable.allowed(plan)]
    if plans:
        plan = min(plans, key=lambda plan: (simulated(plan), runnable.seconds(plan)))
        near = simulated(plan)
    else:  # only plans with stages fit: take the fastest, which the simulator cannot time
        plan = _nearest(runnable, None)
        near = inf
    free = walk.seconds * settings.microbatches
    texts = {name: " ".join(f"{a or 'copies'}{n}" for a, n in placed.degrees) or "-" for name, placed in walk.placement.items()}
    own = near <= walk.seconds * (1 + 1e-9)
    said = _said(own, near, walk.seconds) if near < inf else f"no plan without stages fits; the fastest has {plan.pp} stages"
    return SearchResult("flexflow", plan, runnable.seconds(plan), free, texts, (), not own, said)
