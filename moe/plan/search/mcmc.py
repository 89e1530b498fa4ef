"""FlexFlow's random walk over SOAP placements (arXiv 1807.05358, sections 4 and 6).

    cut every operator by Sample, Operator (attribute) and Parameter dims over any devices; start with data parallelism
    propose   a random operator gets a random cut; with probability 0.25 a neighbour takes it over too, then with 0.75 the next neighbour
    accept    faster placements; slower ones with probability exp(-alpha (new - old) / best)
    restart   from the best placement, after each hundredth of the budget, or 1000 proposals

Times come from the execution simulator (execution.py). Two differences to the paper: a factor that is summed over may be cut too (as in
Unity), so that Megatron's row-parallel layers are among the placements; and time differences are relative to the best time.
"""

from __future__ import annotations

import random
import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import exp, prod
from typing import Literal

from moe.plan.search.execution import Placed, Placement, Ran, Simulator, run
from parallel.annotations.graph import Graph, Operator

NEIGHBOURS, ONWARDS = 0.25, 0.75


@dataclass(frozen=True)
class Walk:
    """Result of a walk: best placement, its seconds, and numbers of proposals, of slower ones, and of slower ones that were accepted."""

    placement: Mapping[str, Placed]
    seconds: float
    proposals: int
    slower: int
    slower_accepted: int


def data_parallel(graph: Graph, devices: int) -> dict[str, Placed]:
    """Placement that cuts every operator by samples, over as many devices as possible. Operators without samples run on all devices."""
    found = {}
    for op in graph.operators:
        ways = max(n for n in range(1, devices + 1) if devices % n == 0 and graph.dims["b"].size % n == 0)
        found[op.name] = Placed((("b", ways),)) if "b" in op.factors else Placed((("", ways),))
    return found


def legal(op: Operator, graph: Graph, devices: int, *, axes: int = 2, spread: Literal["any", "all"] = "any") -> tuple[Placed, ...]:
    """All placements of an operator. Its number of parts divides `devices`; it is cut along at most `axes` factors, or copied; the parts
    are on neighbouring devices or evenly spread. spread: "all": only placements that use every device.
    """
    found: dict[tuple[tuple[str, int], ...], None] = {}
    free = ["", *(letter for letter in op.factors if letter not in op.whole)]
    for parts in (n for n in range(1, devices + 1) if devices % n == 0 and (spread == "any" or n == devices)):
        for sizes in (s for s in product(*[[n for n in range(1, parts + 1) if parts % n == 0]] * axes) if prod(s) == parts):
            for letters in product(free, repeat=axes):
                degrees: dict[str, int] = {}
                for letter, n in zip(letters, sizes, strict=True):
                    degrees[letter] = degrees.get(letter, 1) * n
                if all(a == "" or graph.dims[a].size % n == 0 for a, n in degrees.items()):
                    found[tuple((a, n) for a, n in zip(letters, sizes, strict=True) if n > 1)] = None
    placed = []
    for some in found:
        parts = prod(n for _, n in some)
        placed += [Placed(some, first) for first in range(0, devices, parts)]
        placed += [Placed(some, 0, devices // parts)] if 1 < parts < devices else []
    return tuple(dict.fromkeys(placed))


def mcmc(
    simulator: Simulator,
    *,
    options: Mapping[str, tuple[Placed, ...]] | None = None,
    start: Placement | None = None,
    budget: int = 2000,
    seconds: float = 50.0,
    alpha: float = 100.0,
    seed: int = 0,
    simulation: Literal["delta", "full"] = "delta",
    watch: Callable[[dict[str, Placed], Ran], None] | None = None,
) -> Walk:
    """Walk for `budget` proposals, or `seconds` of time. Returns the best placement.

    options: operator -> its possible placements; default: all legal ones. alpha: the larger, the fewer slower placements are accepted.
    watch: called with every proposal and its run.
    """
    graph, draw, began = simulator.graph, random.Random(seed), clock.monotonic()
    devices = simulator.machine.devices
    options = options or {op.name: legal(op, graph, devices) for op in graph.operators}
    sets = {name: frozenset(some) for name, some in options.items()}
    now = dict(start or data_parallel(graph, devices))
    ran = run(simulator.tasks(now))
    cost = simulator.seconds(now, ran)
    best, least, best_ran = dict(now), cost, ran
    proposals = slower = accepted = 0
    every = max(1, min(1000, budget // 100 or 1))
    names = list(options)
    while proposals < budget and clock.monotonic() - began < seconds:
        proposals += 1
        if proposals % every == 0 and cost > least:
            now, ran, cost = dict(best), best_ran, least
        there = _proposal(graph, now, draw, names, options, sets)
        new = run(simulator.tasks(there), ran if simulation == "delta" else None)
        time = simulator.seconds(there, new)
        if watch is not None:
            watch(there, new)
        take = time <= cost
        if not take:
            slower += 1
            take = draw.random() < exp(-alpha * (time - cost) / least)
            accepted += take
        if take:
            now, ran, cost = there, new, time
        if cost < least:
            best, least, best_ran = dict(now), cost, ran
    return Walk(best, least, proposals, slower, accepted)


def _proposal(
    graph: Graph,
    now: Mapping[str, Placed],
    draw: random.Random,
    names: list[str],
    options: Mapping[str, tuple[Placed, ...]],
    sets: Mapping[str, frozenset[Placed]],
) -> dict[str, Placed]:
    """Placement `now` with a new cut of one operator, and perhaps the same cut of neighbouring operators for which it is legal.

    names: of all operators. options, sets: operator -> its possible placements.
    """
    there, name = dict(now), draw.choice(names)
    there[name] = draw.choice(options[name])
    go = draw.random() < NEIGHBOURS
    seen = {name}
    while go:
        neighbours = [e.reader for e in graph.readers[name]] + [x for x in graph.named[name].inputs if x in graph.named]
        able = [other for other in neighbours if other not in seen and there[name] in sets.get(other, ())]
        if not able:
            break
        other = draw.choice(able)
        there[other] = there[name]
        seen.add(other)
        name, go = other, draw.random() < ONWARDS
    return there
