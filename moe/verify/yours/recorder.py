"""`record`: records one step of any PyTorch program.

    from moe.verify import record

    for step in record("one", model, optimizer):       # forward, backward and optimizer.step; `on=False`: an ordinary step
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()

In one process the body runs four times from the same weights, optimizer states and random numbers: three times with sums in other orders
to measure rounding, then once unchanged. In several processes it runs once. Hooks are removed after the loop.

These values are recorded, in the order in which they occur: weights and buffers before the step; inputs and outputs of every call of every
module; gradients of outputs; each parameter's gradient after backward on this rank ("local gradient"), and at the beginning of
optimizer.step or torch.nn.utils.clip_grad_norm_ ("gradient"); the norm that clip_grad_norm_ computes; weights after the step.

Rounding is measured because a parallel layout computes the same sums as one process, but in another order. Under `Reordered`, each matrix
product adds its terms in a random order and as several partial sums. The results of other sums (softmax, norms, losses, attention, their
gradients) are changed at random by up to one unit roundoff of their dtype. Elementwise operations are not changed. (Monte Carlo arithmetic:
Parker 1997.)
"""

from __future__ import annotations

import copy
import random
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from moe.verify.yours.choices import FILE, Choices, Given, read
from moe.verify.yours.values import MASTER, MOST, Key, Piece, Recorded
from parallel.errors import BadInput

_SUMS = re.compile("sum|mean|var|norm|softmax|attention|convolution|loss|index_add|scatter_add|embedding_dense_backward|grouped_mm")
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # operator -> position of its first factor


class Reordered(TorchDispatchMode):
    """Computes matrix products as sums of `parts` partial sums, in random order, and changes the results of other sums at random."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.draws = torch.Generator().manual_seed(parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name
        if name in _PRODUCTS and func._overloadname == "default":
            return self._product(func, args, kwargs or {}, _PRODUCTS[name])
        out = func(*args, **(kwargs or {}))
        writes = any(r.alias_info is not None for r in func._schema.returns)
        return out if writes or not _SUMS.search(name) else tree_map(self._rounded, out)

    def _product(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], first: int) -> Tensor:
        """Compute a matrix product as a sum of partial sums. first: position of the product's first factor in `args`."""
        a, b = args[first : first + 2]
        order = torch.randperm(a.shape[-1], generator=self.draws).to(a.device)
        parts = [(a.index_select(-1, at), b.index_select(-2, at)) for at in order.chunk(self.parts)]
        out = func(*args[:first], *parts[0], **kwargs) if parts else func(*args, **kwargs)
        for a_part, b_part in parts[1:]:
            out = out + (a_part @ b_part) * kwargs.get("alpha", 1)
        return out

    def _rounded(self, value: Any) -> Any:
        """Return a floating-point tensor with each element changed at random by up to one unit roundoff; other values unchanged."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
            return value
        unit = torch.finfo(value.dtype).eps / 2
        noise = torch.rand(value.shape, generator=self.draws, dtype=torch.float64) * 2 - 1
        return (value.double() * (1 + unit * noise.to(value.device))).to(value.dtype)


_WRAPPED = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_ORDERS = (2, 3, 4)  # numbers of partial sums into which sums are split, in the runs that measure rounding


def record(
    folder: str | Path, model: nn.Module, *others: Any, on: bool = True, most: int = MOST, pin: str | Path | None = None
) -> Iterator[Step]:
    """Record the step in the body of `for step in record(...)` into this rank's files in `folder`. They replace files of earlier steps.

    model: the object that the body calls, wrapped (DDP, FSDP, ...) or not. others: the optimizers, and all other objects with a state_dict
    that the body changes (GradScaler, scheduler). on: False runs the body once and does nothing else. most: tensors with more elements than
    this are recorded as samples. pin: folder for routing choices (choices.py). A single process runs the body once more, to write its
    routers' choices there; all other runs replay them.

    A single process also repeats the step with sums in other orders, to measure rounding. Raises BadInput if a gradient or norm is
    not finite in such a repeat.
    """
    optimizers = tuple(o for o in others if hasattr(o, "register_step_pre_hook"))
    torch_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if torch_ranks else (0, 1)
    home = Path(folder)
    if not on:
        yield Step(model, optimizers, Recorded(rank, world), most)
        return
    if world == 1:
        (home / FILE).unlink(missing_ok=True)
    for old in [*home.glob("rank-*.*"), *home.glob("rounded-*.*")]:
        if old.stem == f"rank-{rank}" or (rank == 0 and (old.stem.startswith("rounded") or int(old.stem.removeprefix("rank-")) >= world)):
            old.unlink()
    shared = [uuid.uuid4().hex]
    if world > 1:
        torch.distributed.broadcast_object_list(shared, src=0)
    before = _State(model, others) if world == 1 else None
    given = read(pin) if pin is not None and before is None else None
    if pin is not None and before is not None:
        step = Step(model, optimizers, Recorded(rank, world), most)
        step.choices = Choices(None, step._chosen)
        with step.hooks():
            yield step
        before.restore()
        given = step.choices.write(pin)
    for parts in _ORDERS if before else ():
        step = Step(model, optimizers, Recorded(rank, world, step=shared[0]), most, given)
        with step.hooks(), Reordered(parts):
            yield step
        if before:
            before.restore()
        _refuse_infinite(step.record)
        step.record.write(home, f"rounded-{parts}")
    step = Step(model, optimizers, Recorded(rank, world, step=shared[0]), most, given)
    with step.hooks():
        yield step
    step.record.write(home, f"rank-{rank}")


def _refuse_infinite(record: Recorded) -> None:
    for key, pieces in record.pieces.items():
        if key.kind in ("gradient", "norm") and not all(bool(p.values.isfinite().all()) for p in pieces):
            got = f"a {key.kind} of {key.name} that is not finite when the loop's body runs again with other orders of sums"
            fix = "pass to record() each object that the loop's body changes, such as a GradScaler, or record a step with finite gradients"
            raise BadInput("record", got=got, needed=f"a finite {key.kind}", fix=fix)


class Step:
    """Records one run of the loop's body. most: tensors with more elements than this are recorded as samples. given: routing choices to
    replay; None: the routers choose."""

    def __init__(
        self, model: nn.Module, optimizers: tuple[Optimizer, ...], record: Recorded, most: int, given: Given | None = None
    ) -> None:
        self.model, self.optimizers, self.record, self.most = model, optimizers, record, most
        self.choices = None if given is None else Choices(given, self._chosen)
        self._has_gradients = False  # whether the record already has the gradients
        self._open = ExitStack()
        self._hooked: set[int] = set()
        self._by_call: dict[Key, dict[int, Piece]] = {}  # output gradients of each call; sorted at the end, as backward has its own order

    def note(self, name: str, value: Tensor | float) -> None:
        """Record a further value, such as the loss, under this name."""
        self._keep(Key("note", name), torch.as_tensor(value).detach())

    def gradients(self) -> None:
        """Record the gradients now. Call it before your own code clips them. Without this call they are recorded at the start of torch's
        clip_grad_norm_ or of the optimizer's step."""
        if not self._has_gradients:
            self._has_gradients = True
            for name, parameter in self._parameters():
                if (gradient := _of_engine(parameter, "safe_get_full_grad", parameter.grad)) is not None:
                    self._keep(Key("gradient", name), gradient)

    def hooks(self) -> ExitStack:
        """Record the weights and add hooks that record the step. Return a context manager that, at its end, records the new weights and
        removes the hooks."""
        for name, tensor in [*self._parameters(), *((_name(n), b) for n, b in self.model.named_buffers())]:
            self._keep(Key("weight", name), _whole(tensor))
        self._masters("weight")
        for name, parameter in self._parameters():
            self._hook(name, parameter)
        for name, module in self.model.named_modules():
            # a wrapper (DDP, FSDP, ...) is skipped, because the module in it is recorded under the same name
            if not any(_WRAPPED.fullmatch(child) for child, _ in module.named_children()):
                self.record.modules[_name(name)] = type(module).__name__
                self._until_the_end(module.register_forward_pre_hook(partial(self._entered, _name(name)), with_kwargs=True))
                self._until_the_end(module.register_forward_hook(partial(self._left, _name(name))))
        for optimizer in self.optimizers:
            self._until_the_end(optimizer.register_step_pre_hook(lambda *_: self.gradients()))
        norm = clip_grad._get_total_norm
        self._open.enter_context(mock.patch.object(clip_grad, "_get_total_norm", partial(self._clipped, norm)))
        if self.choices is not None:
            self._open.enter_context(self.choices)
        self._open.push(self._ended)
        return self._open

    def _chosen(self, module: str, number: int, scores: Tensor) -> None:
        self._keep(Key("output", module, f"choice {number}"), scores)

    def _ended(self, kind: Any, *_: Any) -> None:
        if kind is None:
            if self.choices is not None:
                self.choices.check_replayed()
            self.gradients()
            for key, pieces in self._by_call.items():
                self.record.pieces[key] = [pieces[call] for call in sorted(pieces)]
            for name, parameter in [*self._parameters(), *((_name(n), b) for n, b in self.model.named_buffers())]:
                self._keep(Key("weight after", name), _whole(parameter))
            self._masters("weight after")

    def _masters(self, kind: str) -> None:
        """Record the master weights of DeepSpeed's ZeRO 1 and 2. kind: weight (before the step) or weight after."""
        for name, parameter in self._parameters():
            if hasattr(parameter, "_hp_mapping") and (master := _of_engine(parameter, "safe_get_full_fp32_param", None)) is not None:
                self._keep(Key(kind, name, MASTER), master)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(_name(name), parameter) for name, parameter in self.model.named_parameters()]

    def _until_the_end(self, handle: Any) -> None:
        self._open.callback(handle.remove)

    def _hook(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._hooked:
            self._hooked.add(id(parameter))
            self._until_the_end(parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name)))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # called after each micro-batch: a later value, which includes the earlier ones, replaces them
            self.record.pieces[Key("local gradient", name)] = []
            self._keep(Key("local gradient", name), parameter.grad)

    def _clipped(self, norm: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Record the gradients and their total norm. Replaces the function `norm` by which torch's clipping computes it; returns the
        result."""
        self.gradients()
        value = norm(*args, **kwargs)
        self._keep(Key("norm", "total"), value.full_tensor() if hasattr(value, "full_tensor") else value)
        return value

    def _entered(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for own, parameter in module.named_parameters(name, recurse=False):
            self._hook(_name(own), parameter)  # FSDP2 accumulates gradients in gathered parameters, which exist from this call on
        if _in_backward():
            if self.choices is not None:
                self.choices.check_recomputed(name)
        else:
            given = list(_tensors((args, kwargs)))
            if self.choices is not None:
                self.choices.enter(name, [tensor for _, tensor in given])
            for slot, tensor in given:
                self._keep(Key("input", name, slot), tensor)

    def _left(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not _in_backward():  # in the backward pass, activation checkpointing runs modules again
            if self.choices is not None:
                self.choices.leave()
            for slot, tensor in _tensors(output):
                self._keep(Key("output", name, slot), tensor)
                if tensor.requires_grad and tensor.grad_fn is not None:
                    number = len(self.record.pieces[Key("output", name, slot)])
                    self._until_the_end(tensor.register_hook(partial(self._gradient, Key("output gradient", name, slot), number)))

    def _gradient(self, key: Key, call: int, gradient: Tensor) -> None:
        self.record.pieces.setdefault(key, [])  # reserves its position in the order of events
        self._by_call.setdefault(key, {})[call] = self._piece(key, gradient)

    def _keep(self, key: Key, tensor: Tensor) -> None:
        self.record.pieces.setdefault(key, []).append(self._piece(key, tensor))

    def _piece(self, key: Key, tensor: Tensor) -> Piece:
        """Return a copy or a sample of the tensor. For the step's first input, also a hash of the data at each index of dim 0."""
        began = time.perf_counter()
        first = next((k for k in self.record.pieces if k.kind == "input"), key)
        piece = Piece.of(tensor, key.name, self.most, hashed=key == first and key.kind == "input")
        self.record.seconds += time.perf_counter() - began
        return piece


class _State:
    """A copy of everything that a step changes: parameters, buffers, gradients, states of optimizers and other objects, random number
    generators."""

    def __init__(self, model: nn.Module, others: tuple[Any, ...]) -> None:
        self.tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self.gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self.others = [(o, copy.deepcopy(o.state_dict())) for o in others]
        self.random = torch.get_rng_state(), torch.cuda.get_rng_state_all(), random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        """Restore all copied values."""
        with torch.no_grad():
            for tensor, value in self.tensors:
                tensor.copy_(value)
        for parameter, gradient in self.gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        for other, state in self.others:
            other.load_state_dict(copy.deepcopy(state))
            groups = other.param_groups if isinstance(other, Optimizer) else []
            for number, parameter in enumerate(p for group in groups for p in group["params"]):
                if number in state["state"]:  # restored once more, because load_state_dict casts optimizer states to the parameter's dtype
                    other.state[parameter].update(copy.deepcopy(state["state"][number]))
        torch.set_rng_state(self.random[0])
        torch.cuda.set_rng_state_all(self.random[1])
        random.setstate(self.random[2])
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _of_engine(parameter: Tensor, function: str, own: Tensor | None) -> Tensor | None:
    """Return the gradient or value of a parameter in DeepSpeed's ZeRO, gathered by DeepSpeed's `function`. For other parameters, return
    `own`."""
    if not (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
        return own
    import deepspeed.utils

    found: Tensor | None = getattr(deepspeed.utils, function)(parameter)
    return found


def _whole(parameter: Tensor) -> Tensor:
    found = _of_engine(parameter, "safe_get_full_fp32_param", None) if hasattr(parameter, "ds_id") else None
    return parameter if found is None else found


def _name(name: str) -> str:
    return _WRAPPED.sub("", name).removeprefix(".")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(value: Any, slot: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path such as "0.mask", tensor) of the tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield slot, value
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, tuple | list):
        inside = enumerate(value)
    elif hasattr(value, "__dataclass_fields__"):
        inside = vars(value).items()
    for place, item in inside:
        yield from _tensors(item, f"{slot}.{place}" if slot else str(place))
