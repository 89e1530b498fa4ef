"""Watches one rank of a layout for `moe verify --types`: what it passes to sums, which copies it holds, and the flows through its modules.

The flow of a tensor x with gradient g is the sum of x g over its elements. Only such sums and hashes are kept; moe/verify/types/laws.py
compares those of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.experts.layer import MoELayer
from moe.model.names import global_name
from moe.model.transformer import Block, extra_state
from moe.nn.attention import Attention
from moe.nn.latent import LatentAttention
from moe.nn.linear import Norm
from moe.router.router import Router
from parallel.data.engine import Engine
from parallel.mesh.layout import stored as stored_of
from parallel.mesh.mesh import Mesh
from parallel.numerics.clip import GradientNorm
from parallel.rehearse.work import where
from parallel.store.checkpoint import pieces
from parallel.watch.audit import fingerprint

INPUT = "input"  # key of the flow into the first layer of the decoder or encoder
_SUMS = ("allreduce", "all_reduce", "reduce_")  # beginnings of the names of torch's operators that can add tensors of ranks


@dataclass
class Seen:
    """What one rank has seen. All values are numbers, texts, lists and dicts, so that processes can exchange them.

    sums: [ranks of the group, name and place, hash of the input, whether it has a number that is no integer] in order
    copies: [step, text such as "gradient of layers.0.norm", region as text, hash, whether all elements are equal]
    flows: step -> key -> [hash of the pair (tensor, gradient), flow, sum of (x g)^2, sum of g^2] of each tensor
    said: texts of the step's numbers (loss, norms), which must be equal on all ranks
    norms: step -> norm of the gradients, with the loss scale
    trained, frozen: names in checkpoints of the parameters of which the rank owns a part, with and without gradients
    """

    sums: list[list[Any]] = field(default_factory=list)
    copies: list[list[Any]] = field(default_factory=list)
    flows: list[dict[str, list[list[float]]]] = field(default_factory=lambda: [{}])
    said: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """A mode in which this rank's sums are noted. `built`, `summed` and `updated` are called by the run (moe/verify/layouts.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.noting, self._lock = Seen(), True, threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor, for which torch then calls operators on local tensors, which this mode sees
        if self.noting and "c10d" in func.namespace and func._opname.lstrip("_").startswith(_SUMS) and _adds(args):
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any) -> None:
        tensors, group = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)], _group_of(args)
        given = tensors[-1] if "scatter" in func._opname else tensors[0]  # a reduce_scatter may have its output first
        if group.size() > 1 and given.is_floating_point():
            proper = bool((given != given.round()).any()) and bool(given.isfinite().all())
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            self.seen.sums.append([ranks, f"{func._opname.strip('_')} at {where(__file__)}", fingerprint(given).item(), proper])

    @contextmanager
    def _silent(self) -> Iterator[None]:
        self.noting = False
        yield
        self.noting = True

    def built(self, engine: Engine, mesh: Mesh) -> None:
        """Start to watch a model. Collective."""
        self.engine, self.mesh = engine, mesh
        for path, module in engine.module.named_modules():
            key = global_name(f"{path}.").removesuffix(".")
            if isinstance(module, Block) and module.layer in (0, engine.module.config.decoder_begins):  # type: ignore[union-attr]
                module.register_forward_pre_hook(lambda _, args: self._listen(INPUT, args[0]))
            if isinstance(module, (Norm, Attention, LatentAttention)) or path.endswith(".ffn"):
                module.register_forward_hook(self._hook(key, lambda out: out))
            elif isinstance(module, MoELayer):
                module.register_forward_hook(self._hook(path, lambda out: out[0]))
            elif isinstance(module, Router):
                module.register_forward_hook(self._hook(key, lambda out: out.gate_TK))
        for name, layout in engine.layouts.items():
            held = self.seen.trained if engine.module.get_parameter(name).requires_grad else self.seen.frozen
            held += [stored.name for stored in stored_of(global_name(name), layout, mesh)]
        with self._silent():
            self.weights = {name: tensor.detach().clone() for name, tensor in self._of_each("weight", 1.0)}

    def _hook(self, key: str, pick: Callable[[Any], Tensor]) -> Callable[..., None]:
        return lambda module, args, out: self._listen(key, pick(out))

    def _listen(self, key: str, tensor: Tensor) -> None:
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return
        with self._lock:
            self.seen.flows[-1].setdefault(key, [])
        value = _local(tensor).detach().clone()

        def arrived(gradient: Tensor) -> None:
            g = _local(gradient).detach()
            name = fingerprint(value).item() * 31 + fingerprint(g).item()
            with self._lock:
                self.seen.flows[-1].setdefault(key, []).append([name, *_flow(value, g)])

        tensor.register_hook(arrived)

    def summed(self, numbers: object, *, kind: str = "gradient", scale: float = 1.0) -> None:
        """Note the gradients that the engine has summed over ranks, and the step's numbers. kind "exp_avg": gradients are exp_avg / scale,
        for engines that have already made the update. Collective."""
        self.seen.said.append(repr(numbers))
        with self._silent():
            for name, gradient in self._of_each(kind, scale):
                self._copy("gradient", name, gradient)
                if self.engine.layouts[name].is_owner(self.mesh):
                    self._owned(name, gradient)

    def _owned(self, name: str, gradient: Tensor) -> None:
        layout = self.engine.layouts[name]
        both = (pieces(global_name(name), layout, self.mesh, tensor) for tensor in (self.weights[name], gradient))
        for weight, part in zip(*both, strict=True):
            flows = self.seen.flows[-1].setdefault(weight.name, [])
            flows.append([self.mesh.rank * 2**20 + len(flows), *_flow(weight.tensor, part.tensor)])  # an owner's pieces all count

    def updated(self, norm: GradientNorm, *, loss_scale: float = 1.0) -> None:
        """Note weights and optimizer states after the step. norm: the gradients' norm, without the loss scale. Collective."""
        self.seen.said.append(repr(norm))
        self.seen.norms.append(norm.total * loss_scale)
        with self._silent():
            for name, layout in self.engine.layouts.items():
                for kind, tensor in self.engine.state(name).items():
                    if tensor.shape == layout.local_shape(self.mesh):
                        self._copy(kind, name, tensor)
            for name, bias in extra_state(self.engine.module).items():
                self.seen.copies.append([len(self.seen.flows) - 1, f"value of {name}", "", fingerprint(bias).item(), True])
            self.weights = {name: tensor.detach().clone() for name, tensor in self._of_each("weight", 1.0)}
        self.seen.flows.append({})

    def _of_each(self, kind: str, scale: float) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each trained parameter. Collective."""
        for name in self.engine.layouts:
            if not self.engine.module.get_parameter(name).requires_grad:
                continue
            held = {kind: self.engine.gradient(name)} if kind == "gradient" else self.engine.state(name)
            if kind in held:
                yield name, held[kind] / scale if scale != 1 else held[kind]

    def _copy(self, kind: str, name: str, tensor: Tensor) -> None:
        layout = self.engine.layouts[name]
        region = str([(part.start, part.stop) for part in layout.region(self.mesh)])
        constant = tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()) or not bool(tensor.isfinite().all())
        self.seen.copies.append([len(self.seen.flows) - 1, f"{kind} of {name}", region, fingerprint(tensor).item(), constant])


def _flow(value: Tensor, gradient: Tensor) -> list[float]:
    product = value.double() * gradient.double()
    return [product.sum().item(), product.square().sum().item(), gradient.double().square().sum().item()]


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; other tensors unchanged."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _adds(args: Any) -> bool:
    """Return whether a collective with these arguments adds tensors: its operation is a sum, not a maximum or a mean."""
    operations: list[Any] = [cast(Any, arg).op() for arg in args if isinstance(arg, torch.ScriptObject) and "ReduceOp" in str(arg._type())]
    operations += [arg for arg in args if isinstance(arg, str) and arg in ("sum", "avg", "max", "min", "product")]
    return all(operation in ("sum", int(dist.ReduceOp.SUM)) for operation in operations)  # type: ignore[call-overload]


def _group_of(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(args[-1])
