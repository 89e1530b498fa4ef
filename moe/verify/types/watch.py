"""Watches one rank of a layout for `moe verify --types`: the tensors that it sums with other ranks, its copies of tensors that other ranks
also hold, and the flows through its modules.

The flow of a tensor x with gradient g is the sum of x g over its elements. Only such sums and hashes are kept; moe/verify/types/laws.py
compares those of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.experts.layer import MoELayer
from moe.model.initialize import global_name
from moe.model.transformer import Block, extra_state
from moe.nn.attention import Attention
from moe.nn.latent import LatentAttention
from moe.nn.linear import Norm
from moe.router.methods.method import Method
from moe.router.router import Router
from moe.router.routing import Routing
from parallel.data.engine import Engine
from parallel.mesh.layout import stored as stored_of
from parallel.mesh.mesh import Mesh
from parallel.numerics.clip import GradientNorm
from parallel.rehearse.work import where
from parallel.store.checkpoint import pieces
from parallel.watch.audit import fingerprint

INPUT = "input"  # key of the flow into the first layer of the decoder or encoder
TOKENS = "token_norm"  # path in a module of multi-token prediction: the norm of the tokens' embeddings
_SUMS = ("allreduce", "all_reduce", "reduce_")  # beginnings of the names of torch's operators that can add tensors of ranks


@dataclass
class Seen:
    """Record of one rank. All values are numbers, texts, lists and dicts, so that processes can exchange them.

    sums: for each sum over ranks, in order: [ranks of the group, name and place of the call, hash of the input, whether the input is finite
        and has fractions]. Inputs without fractions are counts, which may rightly be equal on all ranks
    copies: [step, text such as "gradient of layers.0.norm", region as text, hash, whether all elements are equal or one is not finite]
    flows: step -> path of a module (for its output), name of a parameter, or INPUT -> for each tensor x with gradient g: [hash of (x, g),
        flow (sum of x g), sum of (x g)^2, sum of g^2]. For a parameter, a unique number replaces the hash
    said: each step's numbers (loss, norms) as texts; laws.py checks that all ranks have the same texts
    norms: step -> norm of the gradients, times the loss scale
    choices: for each pass of a router, [step, router, tokens, length of a whole sequence, slots of an expert, number of experts]; slots:
        None if there is no limit; tokens: for each token, [position, whether it is no padding, experts, whether each choice has a slot]
    gates: for each pass of a router, [step, router, for each token [position, whether each gate has a gradient other than 0]]
    balance: for each pass of a router, [step, router, hash of choices and positions, then for each expert the sum, minimum and maximum over
        tokens of the gradient of its probability, from the balance loss alone]
    scales: step -> loss scale
    columns: [step, first column, for each column of this rank's part of the head: sum of the gradient, sum of its absolute values]
    moments: [parameter, sums of m g, m^2 and g^2] after the first step; m: first moment, g: gradient
    remarks: faults of single tensors, as texts
    trained, frozen: names, as in checkpoints, of the parameters of which the rank holds a shard or copy, with and without gradients
    """

    sums: list[list[Any]] = field(default_factory=list)
    copies: list[list[Any]] = field(default_factory=list)
    flows: list[dict[str, list[list[float]]]] = field(default_factory=lambda: [{}])
    said: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    choices: list[list[Any]] = field(default_factory=list)
    gates: list[list[Any]] = field(default_factory=list)
    balance: list[list[Any]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    columns: list[list[Any]] = field(default_factory=list)
    moments: list[list[Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Torch dispatch mode that records every sum over ranks (all-reduce, reduce-scatter) of this rank. moe/verify/layouts.py calls `built`
    first, and in each step `summed` after the gradients are summed and `updated` after the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.noting, self._lock = Seen(), True, threading.Lock()
        self.biases: dict[tuple[int, str], float] = {}  # (step, router) -> hash of its selection bias in the first pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then runs the DTensor's operators on local tensors, and this mode sees those calls
        if self.noting and "c10d" in func.namespace and func._opname.lstrip("_").startswith(_SUMS) and _adds(args):
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any) -> None:
        tensors, group = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)], _group_of(args)
        given = tensors[-1] if "scatter" in func._opname else tensors[0]  # the first tensor of a reduce_scatter may be its output
        if group.size() > 1 and given.is_floating_point():
            proper = bool((given != given.round()).any()) and bool(given.isfinite().all())
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            self.seen.sums.append([ranks, f"{func._opname.strip('_')} at {where(__file__)}", fingerprint(given).item(), proper])

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """Return a context in which sums over ranks are not recorded."""
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
            elif path.endswith(TOKENS):
                module.register_forward_pre_hook(lambda _, args, key=f"{INPUT} of {key}": self._listen(key, args[0]))  # type: ignore[misc]
            if isinstance(module, (Norm, Attention, LatentAttention)) or path.endswith(".ffn"):
                module.register_forward_hook(self._hook(key, lambda out: out))
            elif isinstance(module, MoELayer):
                module.register_forward_hook(self._hook(path, lambda out: out[0]))
            elif isinstance(module, Router):
                module.register_forward_hook(self._hook(key, lambda out: out.gate_TK))
                module.register_forward_hook(partial(self._routed, key), with_kwargs=True)
        for name, layout in engine.layouts.items():
            held = self.seen.trained if engine.module.get_parameter(name).requires_grad else self.seen.frozen
            held += [stored.name for stored in stored_of(global_name(name), layout, mesh)]
        with self._silent():
            self.held = self._held()
            for name, tensor in self.held["weight"].items():
                self._copy("first value", name, tensor)
                rows = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[:0]
                if len(rows) > 1 and len(rows.unique(dim=0)) < len(rows) and rows.any():
                    self.seen.remarks.append(f"repeated, though first values are random: rows of {name}")

    def _held(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the trained weights and of Adam's first moments: kind -> name -> tensor. Collective."""
        return {kind: {name: held.detach().clone() for name, held in self._of_each(kind, 1.0)} for kind in ("weight", "exp_avg")}

    def _routed(self, key: str, router: Router, args: Any, kwargs: Any, out: Routing) -> Routing:
        """Note the choices of a pass. Return the routing with a view of the probabilities. Only the balance loss reads this view, so a hook
        on it gets only this loss's gradient. This is a forward hook of the router `key`."""
        context, step = kwargs["context"], len(self.seen.flows) - 1
        valid_T = torch.ones(len(out.expert_TK), dtype=torch.bool) if out.valid_T is None else out.valid_T
        of_tokens = [context.position_T, valid_T, out.expert_TK, out.kept_TK]
        with self._lock:
            tokens = [*zip(*(x.tolist() for x in of_tokens), strict=True)]
            self.seen.choices.append([step, key, tokens, context.length, out.capacity, router.num_experts])
            self.seen.remarks += [f"{line} in {key} (step {step})" for line in self._of_gates(key, router, out)]
        if not (torch.is_grad_enabled() and out.gate_TK.requires_grad and out.probs_TE.requires_grad):
            return out
        name = fingerprint(out.expert_TK).item() * 31 + fingerprint(context.position_T).item()
        probs_TE = out.probs_TE.view_as(out.probs_TE)

        def of_probs(g_TE: Tensor) -> None:
            g_TE = g_TE.detach().double()
            ends = (g_TE[valid_T].amin(0).tolist(), g_TE[valid_T].amax(0).tolist()) if valid_T.any() else ()
            with self._lock:
                self.seen.balance.append([step, key, name, g_TE.sum(0).tolist(), *ends])

        def of_gates(g_TK: Tensor) -> None:
            with self._lock:
                self.seen.gates.append([step, key, [*zip(context.position_T.tolist(), (g_TK != 0).tolist(), strict=True)]])

        probs_TE.register_hook(of_probs)
        out.gate_TK.register_hook(of_gates)
        return replace(out, probs_TE=probs_TE)

    def _of_gates(self, key: str, router: Router, out: Routing) -> Iterator[str]:
        """Yield a line if gates break the recipe's rule (equal to the probabilities, or a token's gates sum to gate_scale), or if two
        passes of a step choose experts with different selection biases."""
        spec, step = router.spec, len(self.seen.flows) - 1
        if router.bias_E is not None and self.biases.setdefault((step, key), fingerprint(router.bias_E).item()) != fingerprint(
            router.bias_E
        ):
            yield "varies between passes of a step: the selection bias"
        if router.expert_scale is not None or type(router.method).gates is not Method.gates:
            return
        gate_TK = out.gate_TK.detach() / spec.gate_scale
        if spec.gates == "as_is" and spec.softmax_over == "all":
            probs_TK = out.probs_TE.detach().gather(1, out.expert_TK)
            if spec.score == "softmax" and not torch.allclose(gate_TK[out.kept_TK], probs_TK[out.kept_TK], rtol=1e-5):
                yield "not in proportion: gates and probabilities"
        else:
            some = spec.gates == "after_drop" or not router.method.tokens_choose  # a token may have no gate
            whole_T = out.kept_TK.any(1) if some else torch.ones(len(gate_TK))
            if not torch.allclose(gate_TK.sum(1), whole_T.to(gate_TK.dtype), rtol=1e-5):
                yield "not a mean: a token's gates do not sum to gate_scale"

    def _hook(self, key: str, pick: Callable[[Any], Tensor]) -> Callable[..., None]:
        return lambda module, args, out: self._listen(key, pick(out))

    def _listen(self, key: str, tensor: Tensor) -> None:
        """Record the flow of a tensor (sum of tensor * gradient) when its gradient arrives. key: key of `Seen.flows[-1]`."""
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
        """Note the gradients that the engine has summed over ranks, and the step's numbers. kind "exp_avg": the engine has already made the
        update, so gradients are computed from Adam's state as exp_avg / scale. Collective."""
        self.seen.said.append(repr(numbers))
        self.gradients: dict[str, Tensor] = {}
        with self._silent():
            for name, gradient in self._of_each(kind, scale):
                self.gradients[name] = gradient.detach().clone()
                self._copy("gradient", name, gradient)
                if self.engine.layouts[name].is_owner(self.mesh):
                    self._owned(name, gradient)

    def _owned(self, name: str, gradient: Tensor) -> None:
        """Record the flow (sum of weight * gradient) of this rank's shard of a parameter and, for the head, the sums of the gradient's
        columns."""
        layout = self.engine.layouts[name]
        both = (pieces(global_name(name), layout, self.mesh, tensor) for tensor in (self.held["weight"][name], gradient))
        for weight, part in zip(*both, strict=True):
            flows = self.seen.flows[-1].setdefault(weight.name, [])
            # laws.py counts entries with equal hashes once, as copies. Here each piece is recorded by its owner alone, so a unique number
            # in place of the hash makes equal pieces count too
            flows.append([self.mesh.rank * 2**20 + len(flows), *_flow(weight.tensor, part.tensor)])
            if weight.name == "head.weight":
                g_VD = part.tensor.double()
                sums = [*zip(g_VD.sum(0).tolist(), g_VD.abs().sum(0).tolist(), strict=True)]
                self.seen.columns.append([len(self.seen.flows) - 1, part.start[1], sums])

    def updated(self, norm: GradientNorm, *, loss_scale: float = 1.0) -> None:
        """Note weights and optimizer states after the step. norm: the gradients' norm, without the loss scale. Collective."""
        self.seen.said.append(repr(norm))
        self.seen.norms.append(norm.total * loss_scale)
        self.seen.scales.append(loss_scale)
        with self._silent():
            for name, layout in self.engine.layouts.items():
                for kind, tensor in self.engine.state(name).items():
                    if tensor.shape == layout.local_shape(self.mesh):
                        self._copy(kind, name, tensor)
            for name, bias in extra_state(self.engine.module).items():
                self.seen.copies.append([len(self.seen.flows) - 1, f"value of {name}", "", fingerprint(bias).item(), True])
            before, self.held = self.held, self._held()
            self._changed(before, finite=norm.finite)
        self.seen.flows.append({})

    def _changed(self, before: dict[str, dict[str, Tensor]], *, finite: bool) -> None:
        """Record faults of an update: weights that stayed the same, weights that were rounded to 16 bits, and weights or first moments
        (Adam) that a skipped step changed. After step 0, also record sums of first moments (`Seen.moments`). before: result of `_held`
        before the step. finite: whether the gradients are finite; if not, the step is skipped."""
        step = len(self.seen.flows) - 1
        for name, weight in self.held["weight"].items():
            same = torch.equal(weight, before["weight"][name])
            whole = weight.dtype == torch.float32  # only fp32 is checked: in 16 bits a small update is rounded away
            if finite and same and whole and self.gradients[name].any():
                self.seen.remarks.append(f"not updated: {name} (step {step})")
            if finite and not same and whole and weight.numel() > 8 and torch.equal(weight, weight.bfloat16().to(weight.dtype)):
                self.seen.remarks.append(f"rounded to 16 bits: {name} (step {step})")
            if not finite and not (
                same and all(torch.equal(self.held[kind][name], old[name]) for kind, old in before.items() if name in old)
            ):
                self.seen.remarks.append(f"changed by a skipped step: {name} (step {step})")
        for name, moment in self.held["exp_avg"].items() if step == 0 else ():
            if self.engine.layouts[name].is_owner(self.mesh) and moment.dtype == torch.float32:
                m, g = moment.double().flatten(), self.gradients[name].double().flatten()
                self.seen.moments.append([name, *((a * b).sum().item() for a, b in ((m, g), (m, m), (g, g)))])

    def _of_each(self, kind: str, scale: float) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each trained parameter. Collective. kind: gradient, or a state of the engine, such as weight or exp_avg.
        Each tensor is divided by `scale`."""
        for name in self.engine.layouts:
            if not self.engine.module.get_parameter(name).requires_grad:
                continue
            held = {kind: self.engine.gradient(name)} if kind == "gradient" else self.engine.state(name)
            if kind in held:
                yield name, held[kind] / scale if scale != 1 else held[kind]

    def _copy(self, kind: str, name: str, tensor: Tensor) -> None:
        """Record the hash of this rank's copy of a gradient, weight or state (`kind`)."""
        layout = self.engine.layouts[name]
        region = str([(part.start, part.stop) for part in layout.region(self.mesh)])
        constant = tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()) or not bool(tensor.isfinite().all())
        self.seen.copies.append([len(self.seen.flows) - 1, f"{kind} of {name}", region, fingerprint(tensor).item(), constant])


def _flow(value: Tensor, gradient: Tensor) -> list[float]:
    """Return [sum of x g (the flow), sum of (x g)^2, sum of g^2] for a tensor x with gradient g."""
    product = value.double() * gradient.double()
    return [product.sum().item(), product.square().sum().item(), gradient.double().square().sum().item()]


def _local(tensor: Any) -> Tensor:
    """Return this rank's local shard of a DTensor; other tensors unchanged."""
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
