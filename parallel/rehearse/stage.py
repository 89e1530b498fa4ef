"""Where a rehearsal takes place: one rank of a process group without peers, tensors without values, a GPU that need not be there.

    with rehearsal(world) as pretended:      torch's fake process group of world.size ranks; world.device may be a GPU without a driver
        ...                                  the run's own code

Sources: torch.testing._internal.distributed.fake_pg, torch._subclasses.fake_tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg

from parallel.process import World
from parallel.rehearse.pretended import Pretended

_FSDP = "torch.distributed.fsdp._fully_shard"
_HANDLES = [f"{_FSDP}.{name}._get_device_handle" for name in ("_fsdp_collectives", "_fsdp_init", "_fsdp_param_group", "_fsdp_state")]


@contextmanager
def rehearsal(world: World) -> Iterator[Pretended]:
    """While it lasts, torch computes nothing and this process is the rank `world.rank` of a group of its own. There must be no other."""
    assert not dist.is_initialized(), "a rehearsal needs a process without a process group"
    dist.init_process_group("fake", rank=world.rank, world_size=world.size, store=fake_pg.FakeStore())
    pretended = Pretended(world.device)
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        pretended.ledger.resized(storage)
        return found

    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
            stack.enter_context(mock.patch.object(dist.Reducer, "_rebuild_buckets", _making(pretended, dist.Reducer._rebuild_buckets)))
            stack.enter_context(mock.patch.object(dist, "Reducer", _making(pretended, dist.Reducer)))
            if world.device.type == "cuda":
                for handle in _HANDLES:
                    stack.enter_context(mock.patch(handle, lambda _: _Handle(world.device.index)))
                stack.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", lambda **_: True))  # GPUs since 2020 do
                stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *_: None))
                stack.enter_context(_Moves())
            stack.enter_context(pretended)
            yield pretended
    finally:
        dist.destroy_process_group()


class _Handle:
    """Stands for torch.cuda in FSDP: streams are those of the CPU, which do nothing."""

    def __init__(self, index: int) -> None:
        self.index = index

    def current_device(self) -> int:
        return self.index

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _making(pretended: Pretended, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of DDP's reducer, where its buckets are made."""

    def made(*args: Any, **kwargs: Any) -> Any:
        pretended.of_reducer = True
        try:
            return function(*args, **kwargs)
        finally:
            pretended.of_reducer = False

    return made


class _Moves(TorchFunctionMode):
    """Moves between host and device: torch's C++ is told that all is on the host (parallel/rehearse/pretended.py), so it would not move."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor: Any = args[0] if args else None
        if func is Tensor.backward:
            with self:  # torch leaves a mode while it handles a call, and the backward passes of our own functions run in this one
                return torch.autograd.backward(tensor, kwargs.pop("gradient", None), **kwargs)
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
            if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
            if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
                return False
            if func is Tensor.cpu:
                return torch.ops.aten._to_copy(tensor, device=torch.device("cpu"))
            if func is Tensor.to:
                return _to(tensor, *args[1:], **kwargs)
        return func(*args, **kwargs)


def _to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    device, dtype, _, form = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if device.type == tensor.device.type:
        device = tensor.device
    if (device, dtype) == (tensor.device, tensor.dtype) and not copy:
        return tensor
    made: Tensor = torch.ops.aten._to_copy(tensor, device=device, dtype=dtype, memory_format=form)
    return made
