"""FlexFlow's random walk over SOAP placements (arXiv 1807.05358, sections 4 and 6).

    start     with data parallelism. Each operator (O) may be cut along sample, attribute and parameter dims (S, A, P), over any devices
    propose   a random operator gets a random cut; with probability 0.25 one of its neighbors gets the same cut, then with probability
              0.75 a neighbor of that one, and so on
    accept    faster placements; slower ones with probability exp(-alpha (new - old) / best)
    restart   from the best placement, after each hundredth of the budget, and at least every 1000 proposals

Times come from the execution simulator (execution.py). The walk differs from the paper in two ways. The dim that a matrix product sums over
may be cut too, as in Unity, so that Megatron's row-parallel layers are among the placements. And `accept` divides time differences by the
best time.
"""

from __future__ import annotations

import random
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import exp, prod
from typing import Literal

from moe.plan.search.execution import Placed, Simulator, run
from parallel.annotations.graph import Graph, Operator
from parallel.mesh.mesh import divisors

NEIGHBORS, ONWARDS = 0.25, 0.75  # probabilities that a first, and a further, neighbor gets the same cut


@dataclass(frozen=True)
class Walk:
    """Result of a walk: the best placement, its seconds, and the numbers of proposals, slower proposals, and accepted slower proposals."""

    placement: Mapping[str, Placed]
    seconds: float
    proposals: int
    slower: int
    slower_accepted: int


def data_parallel(graph: Graph, devices: int) -> dict[str, Placed]:
    """Return a placement that cuts every operator along the batch. Operators without a batch dim are copied to the same devices."""
    ways = max(n for n in divisors(devices) if graph.dims["b"].size % n == 0)
    return {op.name: Placed((("b" if "b" in op.factors else "", ways),)) for op in graph.operators}


def legal(op: Operator, graph: Graph, devices: int, *, spread: Literal["any", "all"] = "any") -> tuple[Placed, ...]:
    """Return the placements of an operator that may be proposed, on neighboring or evenly spaced devices. The number of parts divides
    `devices`. The parts come from at most two cuts; each cut divides a dim or makes copies. spread="all": only placements on all
    devices."""
    found: dict[tuple[tuple[str, int], ...], None] = {}
    free = ["", *(letter for letter in op.factors if letter not in op.whole)]
    for parts in divisors(devices) if spread == "any" else [devices]:
        for first in divisors(parts):
            for letters in product(free, repeat=2):
                cuts = tuple(zip(letters, (first, parts // first), strict=True))
                degrees: dict[str, int] = {}
                for letter, n in cuts:
                    degrees[letter] = degrees.get(letter, 1) * n
                if all(a == "" or graph.dims[a].size % n == 0 for a, n in degrees.items()):
                    found[tuple((a, n) for a, n in cuts if n > 1)] = None
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
    budget: int = 2000,
    seconds: float = 50.0,
    alpha: float = 100.0,
    seed: int = 0,
) -> Walk:
    """Walk for `budget` proposals, or at most `seconds`. options: operator -> placements that may be proposed; None: all legal ones. alpha:
    the larger it is, the fewer slower placements are accepted."""
    graph, draw, began = simulator.graph, random.Random(seed), clock.monotonic()
    devices = simulator.machine.devices
    options = options or {op.name: legal(op, graph, devices) for op in graph.operators}
    sets = {name: frozenset(some) for name, some in options.items()}
    now = data_parallel(graph, devices)
    ran = run(simulator.tasks(now))
    cost = simulator.seconds(now, ran)
    best, least, best_ran = dict(now), cost, ran
    proposals = slower = accepted = 0
    every = max(1, min(1000, budget // 100 or 1))
    while proposals < budget and clock.monotonic() - began < seconds:
        proposals += 1
        if proposals % every == 0 and cost > least:
            now, ran, cost = dict(best), best_ran, least
        there = _proposal(graph, now, draw, options, sets)
        new = run(simulator.tasks(there), ran)
        time = simulator.seconds(there, new)
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
    options: Mapping[str, tuple[Placed, ...]],
    sets: Mapping[str, frozenset[Placed]],
) -> dict[str, Placed]:
    """Return `now` with a new placement of an operator, and perhaps of its neighbors. options, sets: operator -> its possible placements,
    as a tuple and as a set."""
    there, name = dict(now), draw.choice(list(options))
    there[name] = draw.choice(options[name])
    go = draw.random() < NEIGHBORS
    seen = {name}
    while go:
        neighbors = [e.reader for e in graph.readers[name]] + [x for x in graph.named[name].inputs if x in graph.named]
        able = [other for other in neighbors if other not in seen and there[name] in sets.get(other, ())]
        if not able:
            break
        other = draw.choice(able)
        there[other] = there[name]
        seen.add(other)
        name, go = other, draw.random() < ONWARDS
    return there
