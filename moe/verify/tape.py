"""Records tensors of the first steps of a run of `moe verify` in a Tape. moe/verify/where.py compares the tapes of two runs, to find the
first tensor that differs.

    forward      outputs of the model's modules, with the index of each output's token in the step's batch
    again        the outputs that activation recomputation computes a second time
    reports      figures of each MoE layer: losses, number of choices with a slot, number of choices of each expert
    gradients    of every parameter, summed over ranks, before clipping; their norms; first moments (exp_avg) and weights after the update
    first        weights before step 0

All tensors are unsharded and have their names in checkpoints, so that tapes of different layouts can be compared. The hooks that record
them depend only on modules, not on the layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe.model.initialize import global_name
from moe.model.transformer import Block, Transformer
from moe.verify.cases import BATCH, LENGTH, Case
from parallel.data.engine import Engine
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh
from parallel.optim.sgd import MOMENTUM
from parallel.store.checkpoint import pieces

TAPED = 3  # number of recorded steps, 0 to 2. Step 1 reads Adam's moments, and overflows in some cases; step 2 shows the state after that
AGAIN = " again"  # appended to a module's name for outputs from recompute


@dataclass
class Step:
    """Record of one step. reports: router -> [5 + E]: balance, importance, load and z loss, number of choices with a slot, choices of each
    expert. norms: family of parameters (dense, router or expert), or "total" for all -> norm of the gradients. moments: Adam's exp_avg."""

    loss: float = 0.0
    reports: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Tape:
    """Record of a run's first steps. forward: (step, name of a module) -> list of (token indices, outputs, index of the outputs'
    first channel), see `note`. first: weights before step 0."""

    forward: dict[tuple[int, str], list[tuple[Tensor, Tensor, int]]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    first: dict[str, Tensor] = field(default_factory=dict)
    length: int = LENGTH  # tokens of a sequence; in an encoder-decoder, of source plus target
    batch: int = BATCH  # sequences of a step
    last: str = "start"  # the module that ran last, with its step

    @staticmethod
    def of(case: Case) -> Tape:
        """Return an empty tape for runs of this case."""
        return Tape(length=case.run().model.read_length, batch=case.batch)

    def note(self, step: int, name: str, places_T: Tensor, values: Tensor, *, first: int = 0) -> None:
        """Record outputs `values` [..., width] of the module `name` for the tokens with the indices `places_T` in the step's batch. A
        second record of the same tokens is stored as recomputed outputs. first: index of the outputs' first channel in the module's whole
        output."""
        self.last = f"{name} of step {step}"
        if step >= TAPED:
            return
        held = self.forward.setdefault((step, name), [])
        if any(torch.equal(places_T, before) for before, *_ in held):
            if not name.endswith(AGAIN):
                self.note(step, name + AGAIN, places_T, values, first=first)
            return
        held.append((places_T, values.detach().reshape(len(places_T), -1).float().clone(), first))

    def whole(self, step: int, name: str) -> Tensor | None:
        """Return the module's outputs [tokens of the batch, width], with NaN for tokens that were not recorded; None if none were."""
        parts = self.forward.get((step, name))
        if not parts:
            return None
        out = torch.full((self.batch * self.length, max(first + values.shape[1] for _, values, first in parts)), torch.nan)
        for places_T, values, first in parts:
            out[places_T, first : first + values.shape[1]] = values
        return out


def plain(tape: Tape) -> dict[str, Any]:
    """Return the tape as lists and dicts, which processes can exchange (torch.load with weights_only)."""
    forward = [[step, name, *part] for (step, name), parts in tape.forward.items() for part in parts]
    steps = [vars(step) for step in tape.steps]
    return {"forward": forward, "steps": steps, "first": tape.first, "length": tape.length, "batch": tape.batch}


def of_ranks(parts: list[dict[str, Any]]) -> Tape:
    """Merge the tapes of all ranks (each as returned by `plain`) into one. Outputs are joined by token. Tensors of parameters, which are
    zero outside the part that a rank owns, are summed."""
    tape = Tape(steps=[Step(**step) for step in parts[0]["steps"]], length=parts[0]["length"], batch=parts[0]["batch"])
    for number, part in enumerate(parts):
        for step, name, places, values, first in part["forward"]:
            tape.forward.setdefault((step, name), []).append((places, values, first))
        for mine, theirs in zip(tape.steps, part["steps"], strict=True) if number else ():
            for kind in ("gradients", "moments", "weights"):
                _add(getattr(mine, kind), theirs[kind])
        _add(tape.first, part["first"])
    return tape


def _add(held: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
    for name, tensor in parts.items():
        held[name] = held[name] + tensor if name in held else tensor


def listen(model: nn.Module, tape: Tape) -> None:
    """Add hooks to the model that record its modules' outputs on the tape, except in passes without gradient."""
    assert isinstance(model, Transformer)
    # now.contexts: layer -> Context (step, token indices) of its latest input. One for each thread, as a replica of engine dp is a thread
    now = threading.local()
    held = next((block for block in model.layers if isinstance(block, Block)), None)
    columns, first = (None, 0) if held is None else (held.columns, held.first_channel)  # this rank's slice of layer inputs, with tp
    axis = columns.keywords["axis"] if isinstance(columns, partial) else None

    def between(context: Any) -> Any:
        """Return the Context (step, token indices) of the tokens that this rank has between layers. The model's own slicing is not used,
        because it may be faulty."""
        if axis is None:
            return context
        each = len(context.position_T) // len(context.sequence_B) // axis.size
        return context.of_columns(slice(axis.index * each, (axis.index + 1) * each))

    def noted(name: str, pick: Callable[[Any], Tensor], layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            context = _context(args, kwargs)
            if context is not None and pick is not _gates:
                context = between(context)
            known: Any = getattr(now, "contexts", {}).get(layer)  # None: `dp` recomputes on another thread than the forward pass
            second_pass = context is None and (known is None or _seen(tape, name, known))
            if torch.is_grad_enabled() and not second_pass:
                context = context or known
                tape.note(context.step, name, context.position_T, pick(output), first=0 if pick is _gates else first)

        return hook

    def entered(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            context = between(_context(args, kwargs))
            now.contexts = getattr(now, "contexts", {}) | {layer: context}
            if layer == 0 and torch.is_grad_enabled():
                tape.note(context.step, "embedding", context.position_T, args[0], first=first)

        return hook

    def after(module: nn.Module | None, name: str, pick: Callable[[Any], Tensor], layer: int) -> None:
        if module is not None:
            module.register_forward_hook(noted(name, pick, layer), with_kwargs=True)

    for number, block in enumerate(model.layers):
        if block is None:  # on another stage
            continue
        assert isinstance(block, Block)
        block.register_forward_pre_hook(entered(number), with_kwargs=True)
        for name in ("attention_norm", "attention", "cross_norm", "cross", "ffn_norm", "ffn"):
            after(getattr(block, name), f"layers.{number}.{name}", lambda x: x, number)
        if block.moe is not None:
            after(block.moe.router, f"layers.{number}.router", _gates, number)
            after(block.moe, f"layers.{number}.moe", lambda out: out[0], number)
        after(block, f"layers.{number}", lambda out: out[0], number)
    layers = [number for number, block in enumerate(model.layers) if block is not None]
    if not layers:  # a stage with only the head has no layer whose hook sets now.contexts
        model.register_forward_pre_hook(entered(-1), with_kwargs=True)
    after(model.norm, "norm", lambda x: x, max(layers, default=-1))


def _gates(routing: Any) -> Tensor:
    """Gates [T, E] of a Routing: 0 for experts that a token did not choose, or that have no slot for it."""
    return torch.zeros_like(routing.probs_TE).scatter(1, routing.expert_TK, routing.gate_TK.detach() * routing.kept_TK)


def _context(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((value for value in (*args, *kwargs.values()) if hasattr(value, "position_T")), None)


def _seen(tape: Tape, name: str, context: Any) -> bool:
    """Return whether the outputs of the module `name` for these tokens are already recorded, which means that the module runs again for
    recompute."""
    held = tape.forward.get((context.step, name), ())
    return any(torch.equal(context.position_T, places) for places, *_ in held)


def owned(engine: Engine, mesh: Mesh, what: str, scale: float) -> dict[str, Tensor]:
    """Return a dict: name -> tensor of the unsharded shape. It has this rank's part of the gradient, weight or exp_avg (`what`), divided by
    `scale`, and zeros elsewhere. If several ranks hold copies, only one of them returns the part, so the sum over ranks is the whole
    tensor.
    """

    def held() -> Iterator[tuple[str, Tensor | None]]:
        for name in engine.layouts:
            if what != "weight" and not engine.module.get_parameter(name).requires_grad:
                continue  # frozen parameters have neither gradients nor optimizer states
            state = _gradient(engine, name) if what == "gradient" else engine.state(name)
            yield name, state.get(what, state.get(MOMENTUM))  # Muon's momentum instead of exp_avg; Adafactor has neither

    return parts_of(held(), engine.layouts, mesh, scale)


def _gradient(engine: Engine, name: str) -> dict[str, Tensor]:
    try:
        return {"gradient": engine.gradient(name)}
    except KeyError:  # no rank computed a gradient of this parameter: it deviates, and its name is in the table
        return {}


@torch.no_grad()
def parts_of(
    tensors: Iterable[tuple[str, Tensor | None]], layouts: Mapping[str, Layout], mesh: Mesh, scale: float = 1.0
) -> dict[str, Tensor]:
    """Return a dict: name in checkpoints -> tensor of the unsharded shape, fp32. It has this rank's part, divided by `scale`, and zeros
    elsewhere (see `owned`). tensors: (name of a parameter, this rank's shard of it or of a tensor of its shape)."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if tensor is not None and layouts[name].is_owner(mesh):
            for p in pieces(global_name(name), layouts[name], mesh, tensor):
                whole = found.setdefault(p.name, torch.zeros(p.shape))
                place = tuple(slice(start, start + n) for start, n in zip(p.start, p.tensor.shape, strict=True))
                whole[place] = p.tensor.float().cpu() / scale
    return found
