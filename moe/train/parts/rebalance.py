"""Live rebalancing: every n steps, experts and their optimizer states move to other ranks, to even out the ranks' loads.

    for each layer: load of its experts in the n steps -> balanced placement -> if this lowers the largest load of any rank: move experts

All ranks know how often each expert was chosen in each step, summed over ranks, so they decide alike without further communication. Weights
and optimizer states are exchanged over the ep axis; layouts and dispatchers get the new placement. Rounding may differ afterwards
(docs/moe/dispatch.md). A checkpoint stores placement and load, so a run resumed with the same ep gives the same bits as without a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe.experts.dispatch.placement import Placement, balanced_placement, rank_loads
from moe.experts.layer import MoELayer
from moe.model.transformer import moe_layers
from moe.recipe.sections import Run
from moe.train.parts.numbers import Numbers
from parallel.data.engine import Engine
from parallel.data.load import given
from parallel.errors import BadInput
from parallel.mesh.collectives import all_to_all
from parallel.mesh.mesh import Axis, Mesh

# E experts of a layer, P ranks of the ep axis


def nothing_to_move(run: Run) -> str | None:
    """Return the reason why `experts.rebalance_every` has no effect on `run`; None if it is not set or has an effect. Degrees in `run` must
    be numbers, not "auto"."""
    if not run.experts.rebalance_every:
        return None
    if not run.model.layers_with_experts():
        return "the model is dense"
    if run.degrees.ep == 1:
        return "with degrees.ep 1 every rank holds all experts"
    if set(run.experts.counts) == {run.degrees.ep}:
        return "with one expert a rank, every placement is as even as any other"
    return None


class Rebalancer:
    """Counts each layer's load, and every `experts.rebalance_every` steps moves experts if this evens out the load. All ranks must call the
    same methods in the same order. experts: layer -> number of its experts, without those that compute nothing. load: layer -> how often
    each was chosen since the last step at which experts could move. placements: layer -> ids of its experts, ep rank 0's experts first."""

    def __init__(self, run: Run, engine: Engine, mesh: Mesh) -> None:
        self.engine, self.mesh = engine, mesh
        self.every = run.experts.rebalance_every if mesh.axis("ep").size > 1 else 0
        self.experts = {layer: run.experts.of_layer(nth) for nth, layer in enumerate(run.model.layers_with_experts())}
        self.load: dict[int, list[int]] = {}
        self.placements: dict[int, Placement] = {}

    def state(self) -> dict[str, Any] | None:
        """Return {"ranks": size of ep, "placements", "load"} for a checkpoint; None if rebalancing is off or ep is 1."""
        if not self.every:
            return None
        return {"ranks": self.mesh.axis("ep").size, "placements": _named(self.placements), "load": _named(self.load)}

    def resume(self, state: Any, *, where: str) -> None:
        """Restore the load and, if ep is the same, the placement from a checkpoint's `state`; None: change nothing. Call it before the
        engine's tensors are loaded. Raises BadInput for impossible values. where: names the checkpoint in the error."""
        if state is None or not self.every:
            return
        placements, load = _checked(state, self.experts, where=where)
        self.load = load
        if state["ranks"] != self.mesh.axis("ep").size:
            return
        held = {layer.layer: layer for layer in moe_layers(self.engine.module)}
        for number, placement in placements.items():
            self.placements[number] = placement
            if number in held:
                self._place(held[number], placement)

    def after_step(self, numbers: Numbers, *, step: int, updates: int, record: Callable[[dict[str, Any]], None]) -> None:
        """Count a step's load and, every n steps, move experts. updates: optimizer steps made so far. record: called with the fields of one
        metrics.jsonl line if experts of any layer have moved. Collective."""
        if not self.every:
            return
        for layer in numbers.layers:
            count = self.experts[layer.layer]
            before = self.load.get(layer.layer, [0] * count)
            self.load[layer.layer] = [a + b for a, b in zip(before, layer.choices[:count], strict=True)]
        if step % self.every:
            return
        # the MoE layers of this stage: every rank decides for all layers, but moves experts only in these
        held = {layer.layer: layer for layer in moe_layers(self.engine.module)}
        moved = [said for number in self.load if (said := self._rebalance(number, held.get(number), updates=updates))]
        self.load.clear()
        if moved:
            record({"kind": "event", "event": "rebalanced", "step": step, "largest_rank": ", ".join(moved)})

    def _rebalance(self, number: int, layer: MoELayer | None, *, updates: int) -> str | None:
        load_E, ranks = self.load[number], self.mesh.axis("ep").size
        now = self.placements.get(number, tuple(range(len(load_E))))
        better = balanced_placement(load_E, ranks)
        before, after = (max(rank_loads(load_E, placement, ranks)) for placement in (now, better))
        if after >= before:
            return None
        self.placements[number] = better
        if layer is not None:
            self.move(layer, now, better, updates=updates)
        total = sum(load_E)
        return f"layer {number}: {before / total:.3f} to {after / total:.3f} of the load"

    def move(self, layer: MoELayer, now: Placement, then: Placement, *, updates: int) -> None:
        """Move weights, optimizer states and quantized blocks of a layer's experts between ranks, from placement `now` to placement `then`.
        updates: optimizer steps made so far. Collective."""
        ep = self.mesh.axis("ep", label=f"layers.{layer.layer} rebalancing")
        states = {
            name: {kind: exchange_experts(t, now, then, ep) for kind, t in self.engine.state(name).items()} for name in self._names(layer)
        }
        self._place(layer, then)
        self.engine.load_state(list(states), given(states), steps=updates)
        for blocks, _ in layer.experts.blocks.values():
            for tensor in blocks.tensors.values():
                tensor.copy_(exchange_experts(tensor.view(torch.uint8), now, then, ep).view(tensor.dtype))

    def _names(self, layer: MoELayer) -> list[str]:
        own = {id(parameter) for parameter in layer.experts.parameters()}
        return [name for name, parameter in self.engine.module.named_parameters() if id(parameter) in own]

    def _place(self, layer: MoELayer, then: Placement) -> None:
        """Give the engine's layouts, the layer and its dispatcher the new placement `then` of the layer's experts."""
        ep = self.mesh.axis("ep")
        for name in self._names(layer):
            self.engine.layouts[name] = replace(self.engine.layouts[name], placement=then)
        for name, (blocks, layout) in layer.experts.blocks.items():
            layer.experts.blocks[name] = blocks, replace(layout, placement=then)
        places = len(then) // ep.size
        layer.experts.held = then[ep.index * places : (ep.index + 1) * places]
        layer.dispatcher = layer.dispatcher.layer(f"layers.{layer.layer}", then)


def _named(by_layer: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    return {str(number): list(values) for number, values in by_layer.items()}


def _checked(state: Any, experts: Mapping[int, int], *, where: str) -> tuple[dict[int, Placement], dict[int, list[int]]]:
    """Return (layer -> placement, layer -> load) from a checkpoint's `state`. experts: layer -> number of experts. Raises BadInput, with
    `where` as the name of the state, for values that no run can have."""
    try:
        placements, load = ({int(name): [int(n) for n in values] for name, values in state[key].items()} for key in ("placements", "load"))
        right = all(sorted(found) == list(range(experts[number])) for number, found in placements.items())
        right = right and all(len(found) == experts[number] and min(found) >= 0 for number, found in load.items())
        right = right and isinstance(state["ranks"], int)
    except (KeyError, TypeError, ValueError, AttributeError):
        right = False
    if not right:
        needed = "for each layer, every expert exactly once, and for each expert how often it was chosen (at least 0)"
        raise BadInput(where, got="an impossible placement of experts", needed=needed, fix="take another checkpoint")
    return {number: tuple(found) for number, found in placements.items()}, load


@torch.no_grad()
def exchange_experts(stack: Tensor, now: Placement, then: Placement, ep: Axis) -> Tensor:
    """Exchange tensors of experts between ranks. stack: [E / P, ...], one tensor for each expert that this rank holds in placement `now`,
    in the placement's order. Return the stack of the experts that this rank holds in placement `then`. Collective."""
    places = len(now) // ep.size
    mine = range(ep.index * places, (ep.index + 1) * places)
    goal = {expert: place for place, expert in enumerate(then)}
    source = {expert: place for place, expert in enumerate(now)}
    out = sorted(mine, key=lambda place: goal[now[place]])  # sorted by new rank, then by position on that rank
    come = sorted(mine, key=lambda place: (source[then[place]] // places, place))
    send = [sum(goal[now[place]] // places == rank for place in mine) for rank in range(ep.size)]
    receive = [sum(source[then[place]] // places == rank for place in mine) for rank in range(ep.size)]
    flat = stack[[place - mine.start for place in out]].reshape(places, -1)
    there = all_to_all(flat, ep, send=send, receive=receive)
    result = torch.empty_like(there)
    result[[place - mine.start for place in come]] = there
    return result.view(stack.shape)
