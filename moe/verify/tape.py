"""What a run of `moe verify` leaves behind of its first steps, so that the first place where two runs part can be named.

    forward      each part's output, by the place of its tokens in the step: whoever computed it, in whatever micro-batch
    again        the same of what recompute runs a second time
    reports      what each MoE layer says of itself: losses, kept choices, load
    gradients    of every parameter, summed and before clipping; then norms by family; then moments and weights after the step

Everything is whole and has the names that checkpoints use, so one process and any layout leave tapes that can be compared line by
line (moe/verify/where.py). The hooks see modules only; what a layout does with them is not their business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe.model.transformer import Block, Transformer
from moe.verify.cases import BATCH, LENGTH, Case
from parallel.tensor.sliced import SlicePlaces

TAPED = 3  # steps: the second one is the first with moments, the third the first after a skipped one
AGAIN = " again"


@dataclass
class Step:
    """One step, after the fact."""

    loss: float = 0.0
    reports: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Tape:
    """`forward`: by step and name, the tokens' places, their values and the channel that these begin with, in the order they came in."""

    forward: dict[tuple[int, str], list[tuple[Tensor, Tensor, int]]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    length: int = LENGTH  # of a sequence: what both halves of an encoder-decoder read
    batch: int = BATCH  # sequences of a step

    @staticmethod
    def of(case: Case) -> Tape:
        """For the sizes of a case."""
        return Tape(length=case.run().model.read_length, batch=case.batch)

    def note(self, step: int, name: str, places_T: Tensor, values: Tensor, *, first: int = 0) -> None:
        """`values` [..., width] of these tokens, channels from the `first` on. What comes a second time was computed again."""
        if step >= TAPED:
            return
        held = self.forward.setdefault((step, name), [])
        if any(torch.equal(places_T, before) for before, *_ in held):
            if not name.endswith(AGAIN):
                self.note(step, name + AGAIN, places_T, values, first=first)
            return
        held.append((places_T, values.detach().reshape(len(places_T), -1).float().clone(), first))

    def whole(self, step: int, name: str) -> Tensor | None:
        """[tokens of the batch, width]; NaN where nothing was noted; None where nothing was at all."""
        parts = self.forward.get((step, name))
        if not parts:
            return None
        out = torch.full((self.batch * self.length, max(first + values.shape[1] for _, values, first in parts)), torch.nan)
        for places_T, values, first in parts:
            out[places_T, first : first + values.shape[1]] = values
        return out


def plain(tape: Tape) -> dict[str, Any]:
    """As what torch.load(weights_only=True) reads."""
    forward = [[step, name, *part] for (step, name), parts in tape.forward.items() for part in parts]
    return {"forward": forward, "steps": [vars(step) for step in tape.steps], "length": tape.length, "batch": tape.batch}


def of_ranks(parts: list[dict[str, Any]]) -> Tape:
    """One tape from what each rank wrote: tokens from all of them, and pieces of tensors added up."""
    tape = Tape(steps=[Step(**step) for step in parts[0]["steps"]], length=parts[0]["length"], batch=parts[0]["batch"])
    for number, part in enumerate(parts):
        for step, name, places, values, first in part["forward"]:
            tape.forward.setdefault((step, name), []).append((places, values, first))
        for mine, theirs in zip(tape.steps, part["steps"], strict=True) if number else ():
            for kind in ("gradients", "moments", "weights"):
                held = getattr(mine, kind)
                for name, tensor in theirs[kind].items():
                    held[name] = held[name] + tensor if name in held else tensor
    return tape


def listen(model: nn.Module, tape: Tape) -> None:
    """Have every part of the model note what it gives while gradients are taken."""
    assert isinstance(model, Transformer)
    now = threading.local()  # replicas of DP run in threads
    held = next((block for block in model.layers if isinstance(block, Block)), None)
    places, first = (None, 0) if held is None else (held.places, held.first_channel)  # of what is between layers here
    axis = places.axis if isinstance(places, SlicePlaces) else None

    def between(context: Any) -> Any:
        """Which columns these are is worked out again: the model's own answer may be what is wrong."""
        if axis is None:
            return context
        each = len(context.position_T) // len(context.sequence_B) // axis.size
        return context.of_columns(slice(axis.index * each, (axis.index + 1) * each))

    def noted(name: str, pick: Callable[[Any], Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            context = _context(args, kwargs)
            if context is not None and pick is not _gates:
                context = between(context)
            second_pass = context is None and _seen(tape, name, now)
            if torch.is_grad_enabled() and not second_pass:
                context = context or now.context
                tape.note(context.step, name, context.position_T, pick(output), first=0 if pick is _gates else first)

        return hook

    def entered(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            now.context = between(_context(args, kwargs))
            if layer == 0 and torch.is_grad_enabled():
                tape.note(now.context.step, "embedding", now.context.position_T, args[0], first=first)

        return hook

    def after(module: nn.Module | None, name: str, pick: Callable[[Any], Tensor]) -> None:
        if module is not None:
            module.register_forward_hook(noted(name, pick), with_kwargs=True)

    for number, block in enumerate(model.layers):
        if block is None:  # of another stage
            continue
        assert isinstance(block, Block)
        block.register_forward_pre_hook(entered(number), with_kwargs=True)
        after(block.attention, f"layers.{number}.attention", lambda x: x)
        after(block.cross, f"layers.{number}.cross", lambda x: x)
        after(block.ffn, f"layers.{number}.ffn", lambda x: x)
        if block.moe is not None:
            after(block.moe.router, f"layers.{number}.router", _gates)
            after(block.moe, f"layers.{number}.moe", lambda out: out[0])
        after(block, f"layers.{number}", lambda out: out[0])
    if held is None:  # the head alone: no layer says which tokens these are
        model.register_forward_pre_hook(entered(-1), with_kwargs=True)
    after(model.norm, "norm", lambda x: x)


def _gates(routing: Any) -> Tensor:
    """[T, E]: the gates of the choices that have a slot."""
    return torch.zeros_like(routing.probs_TE).scatter(1, routing.expert_TK, routing.gate_TK.detach() * routing.kept_TK)


def _context(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((value for value in (*args, *kwargs.values()) if hasattr(value, "position_T")), None)


def _seen(tape: Tape, name: str, now: threading.local) -> bool:
    """Whether a part that is not told its tokens runs again: then it is not known which."""
    held = tape.forward.get((now.context.step, name), ())
    return any(torch.equal(now.context.position_T, places) for places, *_ in held)
