"""torch's fake tensors, which have shape, dtype and device but no data, extended by known values of small tensors.

    weight [4096, 16384] on cuda:0      a fake tensor: no memory, any device; every operator checks shapes, dtypes and devices
    tokens, counts, routing             fake tensors with known values on the CPU: if all inputs of an operator are known, it is computed,
                                        so that `.tolist()`, uneven splits and capacities are those of a real run
    a sum of losses                     a fake tensor with unknown values: reading it as a number gives 0

Collectives send nothing. All ranks are assumed to have the values of this rank. So an all-reduce multiplies by the number of ranks, an
all-gather repeats the tensor, and an all-to-all receives from each rank the rows that this rank would send to itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from parallel.rehearse.ledger import Ledger
from parallel.rehearse.order import Calls
from parallel.rehearse.work import READS, Counted, where

# Tensors that zeros() and empty() make have known values if they are integers, or have at most this number of floating-point elements: so
# counters and biases have known values, and weights do not
MADE_ELEMENTS = 512
KNOWN_ELEMENTS = 2**24  # larger results of operators have unknown values, even if the operator's inputs are known

# dtypes that NCCL cannot send
_NOT_OF_NCCL = {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128}
_SUM = int(dist.ReduceOp.SUM)  # type: ignore[call-overload]
_HASHED = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_DEVICE = torch.ops.prim.device.default
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_ENGINE = ("torch/autograd/graph.py", "torch/autograd/__init__.py")  # files that call autograd's C++ code, which makes tensors too
_BETWEEN = (  # files on the stack between an operator and its caller
    "rehearse/pretended.py",
    "rehearse/stage.py",
    "torch/_ops.py",
    "torch/utils/_stats.py",
    "torch/_compile.py",
    "_dynamo/eval_frame.py",
    "fake_tensor.py",
)


class RehearsalError(RuntimeError):
    """Raised if a rehearsal (a run on fake tensors) finds an error in the run. The message is one line with the source file and line number
    of the error."""


class Pretended(FakeTensorMode):
    """Mode in which all of torch's operators return fake tensors. `ledger` counts their bytes. `work` counts a GPU's kernels. `calls` lists
    collectives and messages. device: the rank's device, where all tensors given to collectives must be."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device, self.ledger, self.work, self.calls = device, Ledger(device), Counted(), Calls()
        self._within = 0  # depth of nested operators: only the outermost counts, as a device runs it as one fused kernel
        self.of_reducer = False  # True while DDP's reducer makes its buckets: its C++ code needs real integer tensors

    # --- known values of fake tensors ---------------------------------------------------------------------------------

    def suppose(self, tensor: Tensor, values: Callable[[], Tensor]) -> Tensor:
        """Give the fake tensor known values and return it. values: computes them on the CPU, in the tensor's shape."""
        with _disable_current_modes():
            real = values().to(tensor.dtype)
        assert tensor.shape == real.shape, (tensor.shape, real.shape)
        tensor._known = real  # type: ignore[attr-defined]
        return tensor

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a fake or real tensor, as a real tensor; None if they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return None if tensor.is_meta else tensor  # not fake, so it has its values
        values: Tensor | None = getattr(tensor, "_known", None)
        return None if values is None or self.ledger.is_unknown(tensor) else values

    def computed(self, function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call `function` with the known values of the tensors in `given`, on the CPU. Return None if a tensor's values are unknown."""
        values = [self.known(value) if isinstance(value, Tensor) else value for value in given]
        if any(value is None and one is not None for value, one in zip(values, given, strict=True)):
            return None
        with _disable_current_modes():
            return function(*values, **named)

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run one operator on fake tensors. torch calls this method for every operator, also in backward passes and its own C++ code."""
        kwargs = kwargs or {}
        if func is _DEVICE:
            return _device_in_cpp(args[0])
        if func.namespace == "prim" or func._opname in ("size", "stride", "storage_offset", "is_coalesced", "dense_dim", "sparse_dim"):
            return super().dispatch(func, types, args, kwargs)
        tensors = _tensors_in((*args, *kwargs.values()))
        if not all(type(tensor) in _PLAIN for tensor in tensors):
            return NotImplemented  # a DTensor, for which torch then calls the operator on local tensors
        if func.namespace == "c10d":
            return self._collective(func, args, tensors)
        if self.of_reducer and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if tensors or not kwargs.get("dtype", torch.float32).is_floating_point:
                with _disable_current_modes():
                    return func(*args, **kwargs)
            kwargs = kwargs | {"device": self.device}
        if _is_of_meta(tensors, kwargs):
            with _disable_current_modes():  # real meta tensors, not fake ones: a real run also builds its model on the meta device
                return func(*args, **kwargs)
        if self.device.type != "cpu" and kwargs.get("device") is not None and _asked_by().endswith(_ENGINE):
            # autograd's C++ code sees all tensors on the CPU (_device_in_cpp), and requests new tensors on the CPU
            kwargs = kwargs | {"device": self.device}
        values = [self.known(tensor) for tensor in tensors]
        everything = all(v is not None and v.numel() <= KNOWN_ELEMENTS for v in values)
        if READS & set(func.tags):
            self.work.read(func, args, kwargs, tensors)
        if func is torch.ops.aten.index.Tensor:  # the number of rows of x[mask] depends on the mask's values, which must be known
            args = (args[0], self._places(args[1]))
        elif READS & set(func.tags):
            return self._read(func, args, kwargs, tensors, everything)
        self._within += 1
        try:
            out = super().dispatch(func, types, args, kwargs)
        except RuntimeError as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise RehearsalError(f"{where()}: {func._opname}: {said}") from error
        finally:
            self._within -= 1
        made = [tensor for tensor in _tensors_in((out,)) if isinstance(tensor, FakeTensor)]
        for tensor in made:
            self.ledger.record(tensor, counts=not self._within)
        if not self._within:
            self.work.operator(func, args, kwargs, tensors, made)
        from_nothing = not tensors or func._opname.startswith(("new_", "empty_like", "zeros_like", "ones_like"))
        if everything and all(t.numel() <= (MADE_ELEMENTS if from_nothing and t.is_floating_point() else KNOWN_ELEMENTS) for t in made):
            self._compute(func, args, kwargs, made)
        else:
            self._forget_written(func, args, kwargs)
        return out

    __torch_dispatch__ = dispatch  # torch's own method does little more than call `dispatch`, through three wrappers

    def _prep_args_for_hash(self, result: list[object], args: Any, *rest: Any) -> None:
        """Append arguments to a key of torch's cache of results. Replaces torch's own method, which took a fifth of a rehearsal's time."""
        for value in (*args, *args.values()) if isinstance(args, dict) else args:
            if type(value) is FakeTensor and value.constant is None and value.fake_mode is self and value.layout is torch.strided:
                place = value.fake_device, value.storage_offset(), value.untyped_storage().nbytes()
                flags = value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference()
                result.append((value.dtype, value.shape, value.stride(), *place, *flags))
            elif type(value) in _HASHED:
                result.append((type(value), value))
            elif isinstance(value, (list, tuple, dict)):
                result.append((type(value), len(value)))
                self._prep_args_for_hash(result, value, *rest)
            else:
                super()._prep_args_for_hash(result, (value,), *rest)

    def _read(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], everything: bool) -> Any:
        """Run an operator whose result is a Python number, or a tensor whose shape depends on values.
        everything: True if all input values are known. If not, a floating-point number is 0, and any other result raises RehearsalError."""
        if everything:
            with _disable_current_modes():
                real = func(*self._real(args), **self._real(kwargs))
            return tree_map(lambda leaf: self._pretend(leaf, tensors[0].device) if isinstance(leaf, Tensor) else leaf, real)
        if func._opname == "_local_scalar_dense" and tensors[0].is_floating_point():
            return 0.0
        raise RehearsalError(f"{where()}: {func._opname} of values that a rehearsal cannot know")

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the arguments of `index()` with each boolean mask replaced by the indices at which it is True.
        Raises RehearsalError if a mask's values are unknown."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            mask = self.known(index)
            if mask is None:
                raise RehearsalError(f"{where()}: rows selected by a mask whose values a rehearsal cannot know")
            with _disable_current_modes():
                places = mask.nonzero(as_tuple=True)
            found += [self._pretend(at, index.device) for at in places]
        return found

    def _pretend(self, values: Tensor, device: torch.device) -> Tensor:
        with self:
            made = torch.empty(values.shape, dtype=values.dtype, device=device)
        return self.suppose(made, lambda: values)

    def _real(self, value: Any) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.known(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        return tree_map(one, value)

    def _compute(self, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
        """Compute the values of an operator's results `made` from known inputs, and keep them as known values. An in-place operator changes
        the known values of all views."""
        with _disable_current_modes():
            real = func(*self._real(args), **self._real(kwargs))
        for tensor, values in zip(made, (leaf for leaf in tree_leaves(real) if isinstance(leaf, Tensor)), strict=True):
            # empty() counts as zeros: no Triton kernel runs here, so nothing would fill the tensor later
            tensor._known = values.zero_() if "empty" in func._opname else values  # type: ignore[attr-defined]

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, name in _written(func):
            self.forget(_tensors_in((args[place] if place < len(args) else kwargs.get(name),)))

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Mark the values of these tensors as unknown, because unknown values were written into them."""
        for tensor in tensors:
            if hasattr(tensor, "_known"):
                self.ledger.mark_unknown(tensor)

    # --- collectives without communication ----------------------------------------------------------------------------

    def _collective(self, func: Any, args: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the results of a collective without communication. Only an all-reduce of one tensor, an all-gather or an all-to-all
        gives known values, if the sent values are known."""
        name = func._opname
        for tensor in tensors if name != "barrier" and not self.of_reducer else ():
            if (wrong := self._unsendable(tensor)) is not None:
                raise RehearsalError(f"{where()}: {name.strip('_')} of a tensor {wrong}")
        work = FakeWork().boxed()
        scripted = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        group = next(map(dist.ProcessGroup.unbox, scripted), None)
        if not self.of_reducer and name != "barrier":
            self.calls.add(func, args, group)
        with _disable_current_modes():
            came = self._coming(name, args, group)
        if name not in ("send", "barrier"):
            self._arrive(tree_leaves(args[0]), came)
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _unsendable(self, tensor: Tensor) -> str | None:
        """Return the reason for which the process group (gloo on the CPU, NCCL on a GPU) cannot send the tensor; None if it can."""
        if tensor.device.type != self.device.type:
            return f"on {tensor.device}; ranks send only from {self.device.type}"
        if self.device.type != "cuda":
            return None
        if tensor.dtype in _NOT_OF_NCCL:
            return f"of {tensor.dtype}, which NCCL does not know"
        return None if tensor.is_contiguous() else "that is not contiguous, which NCCL refuses"

    def _coming(self, name: str, args: Any, group: Any) -> Tensor | None:
        """Return the values that this rank receives in a collective, assuming that all ranks send the same; None if they are unknown."""
        if name == "allreduce_" and len(args[0]) == 1 and (values := self.known(args[0][0])) is not None:
            return values * group.size() if int(args[2].op()) == _SUM else values
        if name not in ("_allgather_base_", "alltoall_base_") or (values := self.known(args[1])) is None:
            return None
        if name == "alltoall_base_":
            values = (values.split(args[4]) if args[4] else values.chunk(group.size()))[group.rank()]
        return torch.cat([values] * group.size())

    def _arrive(self, into: Sequence[Tensor], came: Tensor | None) -> None:
        if came is None or self.ledger.is_unknown(into[0]) or came.numel() != into[0].numel():
            self.forget(into)
            return
        values = self.known(into[0])
        with _disable_current_modes():
            if values is not None:
                values.copy_(came.view(values.shape))
            else:
                into[0]._known = came.view(into[0].shape)  # type: ignore[attr-defined]


def _tensors_in(values: Iterable[Any]) -> list[Any]:
    """Return the tensors among an operator's arguments or results, in order, also those within lists, tuples and dictionaries."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
        elif isinstance(value, dict):
            found += _tensors_in(value.values())
    return found


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Return (position, name) of each argument into which an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _asked_by() -> str:
    """Return the path of the Python file that called the current operator, directly or through C++ code."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename


def _device_in_cpp(tensor: Any) -> torch.device:
    """Return the device that torch's C++ code sees: the CPU in place of an accelerator, which may not exist on this machine."""
    if tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type == "meta":
        return torch.device("meta")
    return torch.device("cpu")


def _is_of_meta(tensors: Sequence[Tensor], kwargs: Any) -> bool:
    """Return True if an operator's tensors are all on torch's meta device."""
    device = kwargs.get("device")
    if not tensors or device is not None:
        return device is not None and torch.device(device).type == "meta"
    return all(not isinstance(tensor, FakeTensor) and tensor.is_meta for tensor in tensors)
