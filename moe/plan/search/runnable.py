"""Expresses plans that the trainer can run as strategies of a graph's operators, so that their times are predicted by the same cost model
as those of plans from a search.

    mesh of a stage   (edp, dp / edp, sp, tp)         edp: number of replicas of each expert; ep = dp / edp * sp * tp, or 1 without
                                                         expert parallelism

    1d        tensor parallelism: products are cut by heads, hidden units or vocabulary over tp; each tp rank repeats pointwise operators
    sliced    as 1d, but pointwise operators are cut by length over tp (Megatron-LM's sequence parallelism)
    sp        everything is cut by length over sp; keys and values are gathered
    experts   in MoE layers, tokens are cut over all ranks of the stage, and experts over the ranks of ep

A graph with equal layers is folded: it keeps one layer for each set of equal layers, and the number of layers in the set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import inf, prod
from typing import Literal

from moe.plan.job.cut import cut
from moe.plan.job.network import Plan, Recomputed
from moe.plan.operators.links import Machine, Mesh
from moe.plan.search.alpa import total
from moe.plan.search.strategies import AGAIN, LATER, WHOLE, Cost, Settings, Sharded, Strategy, change, read_together, strategy
from parallel.annotations.graph import Graph, Operator
from parallel.mesh.mesh import divisors

RECOMPUTED: tuple[Recomputed, ...] = ("none", "full")
_CUT_1D = ("vocab", "heads", "hidden")
_STAGES: tuple[Sharded, ...] = (0, 1, 1, 3)  # for each ZeRO stage of a plan, the stage in strategies.py, which has no stage 2


@dataclass(frozen=True)
class Folded:
    """A graph with only one of several equal layers. weight: layer -> number of layers that it represents. of: original layer -> the layer
    that represents it."""

    graph: Graph
    weight: Mapping[int, float]
    of: Mapping[int, int]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the indices of the graph's layers except the first (the embedding) and the last (the head)."""
        return self.graph.layers[1:-1]

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Return the name of the last operator of each layer except the last layer. The next layer reads this operator's output."""
        last = {op.layer: op.name for op in self.graph.operators}
        return tuple(last[layer] for layer in self.graph.layers[:-1])

    @cached_property
    def alike(self) -> tuple[tuple[str, str], ...]:
        """Return each two successive operators among those whose output another layer reads. All these outputs must have the same
        sharding."""
        read = {edge.writer for edge in self.graph.edges if self.graph.named[edge.writer].layer != self.graph.named[edge.reader].layer}
        return tuple(pairwise(op.name for op in self.graph.operators if op.name in read))


def fold(graph: Graph) -> Folded:
    """Fold a graph: of layers with equal operators, keep only the first. A layer may read only two kinds of other layers' outputs: the last
    output of the previous layer, and outputs of a layer that no other equals (an encoder-decoder's embedding and last encoder layer)."""
    ends = (graph.layers[0], graph.layers[-1])
    signs: dict[tuple[tuple[str, ...], ...], int] = {}
    of: dict[int, int] = {}
    for layer in graph.layers:
        sign = tuple((op.kind, op.rule, str(op.flops)) for op in graph.operators if op.layer == layer)
        of[layer] = layer if layer in ends else signs.setdefault(sign, layer)
    kept = sorted(set(of.values()))
    weight = {layer: float(sum(of[other] == layer for other in graph.layers)) for layer in kept}
    ops: list[Operator] = []
    stream, made = "", set[str]()
    for layer in kept:
        mine = [op for op in graph.operators if op.layer == layer]
        names = {op.name for op in mine}
        for op in mine:
            ops.append(replace(op, inputs=tuple(stream if x in graph.named and x not in names | made else x for x in op.inputs)))
        made |= names
        stream = mine[-1].name
    read = {x for op in ops for x in op.inputs}
    parameters = {name: letters for name, letters in graph.parameters.items() if name in read}
    return Folded(replace(graph, parameters=parameters, operators=tuple(ops), whole=graph.readers_of), weight, of)


def layer_costs(graph: Graph, mesh: Mesh, chosen: Mapping[str, Strategy]) -> dict[int, Cost]:
    """Return the cost of each layer of a folded graph, by the layer's index. Resharding a tensor is counted in the layer that reads it.
    chosen: operator -> strategy."""
    found = {}
    for layer in graph.layers:
        mine = [op for op in graph.operators if op.layer == layer]
        seconds = sum(chosen[op.name].seconds for op in mine)
        for op in mine:
            for x, reads in zip(op.inputs, chosen[op.name].reads, strict=True):
                if x in graph.named:
                    size = graph.size(graph.letters(x)) * graph.itemsize
                    seconds += change(size, mesh, chosen[x].gives, reads)
        strategies = [chosen[op.name] for op in mine]
        found[layer] = Cost(seconds, sum(s.state_bytes for s in strategies), sum(s.output_bytes for s in strategies))
    return found


class Runnable:
    """Predicts the seconds and bytes of a plan on a machine: gives each operator of the graph a strategy, and adds the strategies' costs.
    graph: operators for one micro-batch, with the sequences of all replicas. allowed(plan): whether the recipe can be trained with it."""

    def __init__(self, graph: Graph, machine: Machine, settings: Settings, allowed: Callable[[Plan], bool] = lambda plan: True) -> None:
        self.allowed = allowed
        self.machine, self.settings, self.folded, self.whole = machine, settings, fold(graph), graph
        self.joined = read_together(self.folded.graph)  # has operators NAME.read: the readers of tensor NAME share one resharding
        self.blocks = [layer for layer in graph.layers if layer not in (graph.layers[0], graph.layers[-1])]
        self.experts = next((dim.size for dim in graph.dims.values() if dim.name == "experts"), 1)
        self._costs: dict[tuple[object, ...], dict[int, Cost] | None] = {}

    def sizes(self, plan: Plan) -> tuple[int, ...] | None:
        """Return the axis sizes (edp, dp / edp, sp, tp) of a stage's mesh. None if experts are cut otherwise than over the last three axes:
        etp is above 1, or ep is neither 1 nor sp * tp * a divisor of dp."""
        inner = plan.sp * plan.tp
        if plan.ep == 1 and plan.etp == 1:
            return (plan.dp, 1, plan.sp, plan.tp)
        if plan.etp > 1 or plan.ep % inner or plan.dp % (plan.ep // inner):
            return None
        return (plan.dp * inner // plan.ep, plan.ep // inner, plan.sp, plan.tp)

    def cuts(self, plan: Plan) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return a dict: operator of `joined` -> (cut, scatter). cut: for each mesh axis, the letter of the dim that it cuts. scatter: for
        each mesh axis, the letter of the dim over which partial sums are reduce-scattered. "": none."""
        return {op.name: self._cut(op, plan) for op in self.joined.operators if op.whole != "read"}

    def _cut(self, op: Operator, plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (cut, scatter) of an operator, as in `cuts`."""
        dims, letters = self.joined.dims, {self.joined.dims[a].name: a for a in op.factors}
        sliced = plan.tensor == "sliced"
        batch, length = letters.get("batch", ""), letters.get("length", "")
        if ".moe." in op.name and not op.name.endswith(".moe.add"):
            experts = letters["experts"] if "slots" in letters and op.kind in ("product", "pointwise") and plan.ep > 1 else batch
            return (batch, experts, experts, experts), ("",) * 4
        units = next((letters[role] for role in _CUT_1D if role in letters and dims[letters[role]].size % plan.tp == 0), "")
        over_tp = units or (length if sliced else "")
        scatter = length if sliced and units and units in op.summed and op.kind != "loss" else ""
        return (batch, batch, length or batch, over_tp), ("", "", "", scatter)

    def chosen(self, plan: Plan) -> dict[str, Strategy] | None:
        """Return a dict: operator -> strategy for a plan; None if a size is not divisible."""
        sizes = self.sizes(plan)
        if sizes is None or prod(sizes) > self.machine.devices:
            return None
        mesh, found, cuts = self.machine.mesh(*sizes), {}, self.cuts(plan)
        for op in self.joined.operators:
            if op.whole == "read":
                continue
            taken, to = (tuple(a if n > 1 else "" for a, n in zip(letters, sizes, strict=True)) for letters in cuts[op.name])
            made = strategy(op, self.joined, mesh, self.settings, cut=taken, scatter=to, sharded=_STAGES[plan.stage])
            if made is None:
                return None
            found[op.name] = made
        for op in self.joined.operators:
            if op.whole == "read":
                state = next(found[e.reader].reads[e.place] for e in self.joined.readers[op.name])
                if any(found[e.reader].reads[e.place] != state for e in self.joined.readers[op.name]):
                    state = tuple(WHOLE if place == LATER else place for place in state)
                cut_ = tuple(op.output[place] if place >= 0 else "" for place in state)
                found[op.name] = Strategy(cut_, ("",) * 4, 0, 0.0, 0.0, 0.0, (state,), state)
        return found

    def costs(self, plan: Plan) -> dict[int, Cost] | None:
        """Return a dict: index of a layer in the folded graph -> its cost; None if the plan cannot be expressed by strategies of this
        graph."""
        key = (plan.dp, plan.sp, plan.tp, plan.ep, plan.etp, plan.tensor, plan.engine, plan.recompute)
        if key not in self._costs:
            chosen, sizes = self.chosen(plan), self.sizes(plan)
            found = None
            if chosen is not None and sizes is not None:
                found = self.costs_of(self.joined, self.machine.mesh(*sizes), chosen, recompute=plan.recompute)
            self._costs[key] = found
        return self._costs[key]

    def costs_of(self, graph: Graph, mesh: Mesh, chosen: Mapping[str, Strategy], *, recompute: Recomputed) -> dict[int, Cost]:
        """Return a dict: index of a layer in the folded graph (top of this file) -> its cost. graph: `joined`, or the graph that a search
        returns, which has the same operators. chosen: operator -> strategy."""
        found = layer_costs(graph, mesh, chosen)
        stream = max(chosen[name].output_bytes for name in self.folded.streams)
        for i in set(found) & set(self.blocks) if recompute == "full" else ():  # a recomputed layer keeps only its input
            found[i] = Cost(found[i].seconds * AGAIN, found[i].state_bytes, min(stream, found[i].output_bytes))
        return found

    def stages(self, plan: Plan, costs: Mapping[int, Cost]) -> tuple[int, ...]:
        """Return the number of layers of each stage: plan.stage_layers if given, otherwise a cut that balances seconds."""
        if plan.stage_layers is not None:
            return plan.stage_layers
        each = [costs[self.folded.of[layer]].seconds for layer in self.blocks]
        each[0] += costs[self.whole.layers[0]].seconds
        each[-1] += costs[self.whole.layers[-1]].seconds
        return cut(each, plan.pp)

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a step of the plan; inf if it does not fit or cannot be run."""
        costs = self.costs(plan)
        if costs is None or plan.pp > len(self.blocks):
            return inf
        times = []
        places = list(pairwise([0, *accumulate(self.stages(plan, costs))]))
        for i, (first, end) in enumerate(places):
            held = [costs[self.folded.of[layer]] for layer in self.blocks[first:end]]
            held += [costs[self.whole.layers[0]]] if i == 0 else []
            held += [costs[self.whole.layers[-1]]] if i == len(places) - 1 else []
            in_flight = min(len(places) - i, plan.microbatches)
            if sum(c.state_bytes + c.output_bytes * in_flight for c in held) > self.machine.memory_bytes:
                return inf
            times.append(sum(c.seconds for c in held))
        return total(times, plan.microbatches)

    def plans(self, pp: int, stage_layers: tuple[int, ...] | None = None) -> Iterator[Plan]:
        """Yield all plans with `pp` stages that use all devices and the graph's number of sequences, even if they are not `allowed`."""
        ranks, sequences = self.machine.devices // pp, self.whole.dims["b"].size
        for tp, sp, ep in self._degrees(ranks) if ranks * pp == self.machine.devices else ():
            dp = ranks // (tp * sp)
            tensors: tuple[Literal["1d", "sliced"], ...] = ("1d", "sliced") if tp > 1 and sp == 1 else ("1d",)
            engines = ("ddp", "zero1", "fsdp") if pp == 1 else ("ddp", "zero1")
            for engine, tensor, recompute in product(engines, tensors, RECOMPUTED):
                plan = Plan(dp=dp, tp=tp, sp=sp, pp=pp, ep=ep, engine=engine, tensor=tensor, recompute=recompute, stage_layers=stage_layers)
                plan = replace(plan, microbatch=sequences // dp, microbatches=self.settings.microbatches)
                yield replace(plan, compute_bytes=self.whole.itemsize, storage=self.settings.storage)

    def _degrees(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Yield (tp, sp, ep) for a stage of `ranks` ranks. dp = ranks / (tp sp) divides the sequences; ep divides ranks and experts."""
        for tp, sp in product(divisors(ranks), repeat=2):
            if ranks % (tp * sp) == 0 and self.whole.dims["b"].size % (ranks // (tp * sp)) == 0 and (sp == 1 or self.experts == 1):
                yield from ((tp, sp, ep) for ep in divisors(math.gcd(ranks, self.experts)))
