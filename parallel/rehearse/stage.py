"""Context of a rehearsal, which runs training on fake tensors (no data, no computation) to count memory and work. This process is one rank
of torch's fake process group, on a GPU that may not exist.

with rehearsal(world) as pretended:      world.device may be a GPU without a driver
    ...                                  the run's own code
pretended.ledger.at_peak()               purpose -> bytes at the peak
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg

from parallel.process.process import World
from parallel.rehearse.pretended import Pretended, RehearsalError
from parallel.rehearse.work import Counted, launches, where

_FSDP_MODULES = [f"torch.distributed.fsdp._fully_shard._fsdp_{name}" for name in ("collectives", "init", "param_group", "state")]


@contextmanager
def rehearsal(world: World) -> Iterator[Pretended]:
    """Return a context in which torch computes nothing, and this process is rank `world.rank` of a fake process group.
    The process must not have a process group yet."""
    assert not dist.is_initialized(), "a rehearsal needs a process without a process group"
    dist.init_process_group("fake", rank=world.rank, world_size=world.size, store=fake_pg.FakeStore())
    pretended = Pretended(world.device)
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        pretended.ledger.resized(storage)
        return found

    def making() -> AbstractContextManager[Any]:  # a context in which DDP's reducer makes its buckets
        return mock.patch.object(pretended, "of_reducer", True)

    @contextmanager
    def backward() -> Iterator[None]:  # torch switches modes such as _Gpu off in a backward pass; this switches _Gpu on again
        with _Gpu(), mock.patch.object(pretended.work, "passing", "backward"):
            yield

    patches: list[tuple[Any, str, Any]] = [
        (torch.UntypedStorage, "resize_", resized),
        (dist, "batch_isend_irecv", _within(pretended.calls.together, dist.batch_isend_irecv)),
        (dist.Reducer, "_rebuild_buckets", _within(making, dist.Reducer._rebuild_buckets)),
        (dist, "Reducer", _within(making, dist.Reducer)),
    ]
    gpu = _Gpu() if world.device.type == "cuda" else None
    if gpu is not None:
        patches += [
            *((module, "_get_device_handle", lambda _: _Handle(world.device.index)) for module in map(import_module, _FSDP_MODULES)),
            (torch.cuda, "is_bf16_supported", lambda **_: True),  # GPUs since 2020 support bf16
            (torch.cuda, "synchronize", lambda *_: pretended.work.wait()),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "get_device_properties", lambda *_: _Hopper),
            (torch.cuda, "device", lambda *_: nullcontext()),
            (torch.cuda, "Event", partial(_Event, pretended.work)),
            (FakeTensor, "tolist", partialmethod(_tolist, pretended)),
            (torch.autograd, "_engine_run_backward", _within(backward, torch.autograd._engine_run_backward)),
            *((kernels, "run", launches(kernels.run)) for kernels in _triton_kernels()),
        ]
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for target, name, value in patches:
                stack.enter_context(mock.patch.object(target, name, value))
            if gpu is not None:
                stack.enter_context(gpu)
            stack.enter_context(pretended)
            yield pretended
    finally:
        dist.destroy_process_group()


class _Hopper:
    """Device properties of an H100, for a GPU that this machine does not have."""

    major, minor, shared_memory_per_block_optin, L2_cache_size, multi_processor_count = 9, 0, 227 * 1024, 50 * 2**20, 132


class _Event:
    """Replaces torch.cuda.Event. The GPU is assumed to reach the event at the next host synchronization."""

    def __init__(self, work: Counted, **_: Any) -> None:
        self.work, self.synchronize = work, work.wait

    def record(self) -> None:
        self.before = self.work.waited

    def query(self) -> bool:
        return self.work.waited > self.before


def _tolist(tensor: Any, pretended: Pretended) -> Any:
    """Replaces Tensor.tolist of fake tensors. As with a real tensor, the host waits for one copy, not for one copy of each element."""
    if tensor.fake_device.type == "cuda":
        pretended.work.wait()
    values = pretended.known(tensor)
    if values is None and not tensor.is_floating_point():
        raise RehearsalError(f"{where()}: tolist of values that a rehearsal cannot know")
    return (np.zeros(tensor.shape) if values is None else values).tolist()


def _triton_kernels() -> list[Any]:
    """Return the classes of Triton's compiled and interpreted kernels; none without Triton."""
    if find_spec("triton") is None:
        return []
    return [import_module("triton.runtime.jit").JITFunction, import_module("triton.runtime.interpreter").InterpretedFunction]


class _Handle:
    """Replaces the module torch.cuda in FSDP by torch.cpu, whose streams do nothing. index: index of the current device."""

    def __init__(self, index: int) -> None:
        self.index = index

    def current_device(self) -> int:
        return self.index

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _within(context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` wrapped so that each call runs in a new context from `context()`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return run


class _Gpu(TorchFunctionMode):
    """Mode in which torch functions behave as on a GPU. Without it, torch's C++ code, which sees all tensors on the CPU (`_device_in_cpp`),
    would not copy between CPU and GPU, and would choose CPU kernels, which save more tensors for backward than GPU kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_GPU:
            tensor: Any = args[0]
            if func is Tensor.pin_memory:
                tensor._pinned = True
                return tensor
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                return _OF_GPU[func](*args, **kwargs)
        return func(*args, **kwargs)


def _to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    device, dtype, ahead, form = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if device.type == tensor.device.type:
        device = tensor.device
    if (device, dtype) == (tensor.device, tensor.dtype) and not copy:
        return tensor
    made: Tensor = torch.ops.aten._to_copy(tensor, device=device, dtype=dtype, non_blocking=ahead, memory_format=form)
    return made


def _one_kernel(*read: Any) -> AbstractContextManager[None]:
    counted: Counted = read[0].fake_mode.work
    return counted.one_kernel(*read)


class _FusedRmsNorm(torch.autograd.Function):
    """RMSNorm that allocates like the GPU's fused kernel: it saves x and one number per token. The CPU's operators also save x / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        with _one_kernel(x):
            ctx.save_for_backward(x, gain, x[..., :1].clone())
            return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, _ = ctx.saved_tensors
        with _one_kernel(x, grad):
            return grad * gain, grad.flatten(0, -2).sum(0)


class _FusedSilu(torch.autograd.Function):
    """SiLU that allocates like the GPU's fused kernels. On the CPU, torch would run six operators in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        made: Tensor = grad * ctx.saved_tensors[0]
        return made


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention that allocates like a GPU's kernel.
    If the mask needs a gradient (T5's bias) and a head's channels take a multiple of 16 bytes, a GPU uses its memory-efficient kernel, for
    which the mask's rows are padded. In all other cases, the CPU's kernel allocates the same memory as the GPU's."""
    aligned = all(x.shape[-1] * x.element_size() % 16 == 0 for x in (query, value)) and query.shape[-1] == key.shape[-1]
    if attn_mask is None or not attn_mask.requires_grad or attn_mask.stride(-1) != 1 or not aligned:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    more = -attn_mask.shape[-1] % 16
    mask = F.pad(attn_mask, (0, more))[..., : attn_mask.shape[-1]] if more else attn_mask
    shape = *query.shape[:3], key.shape[2]
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask.expand(shape), True, scale=scale)[0]
    return out


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float | None = None) -> Tensor:
    if weight.dtype != x.dtype:  # torch does not fuse the norm
        return F.rms_norm(x, shape, weight, eps)
    made: Tensor = _FusedRmsNorm.apply(x, weight)
    return made


_OF_GPU: dict[Any, Callable[..., Any]] = {  # torch function -> its replacement for a tensor on the GPU
    Tensor.pin_memory: Tensor.pin_memory,  # listed with itself: it is not replaced
    Tensor.is_cuda.__get__: lambda _: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda _: False,  # type: ignore[attr-defined]
    Tensor.cpu: lambda x: torch.ops.aten._to_copy(x, device=torch.device("cpu")),
    Tensor.to: _to,
    F.rms_norm: _rms_norm,
    F.silu: lambda x, **_: _FusedSilu.apply(x),
    F.scaled_dot_product_attention: _attention,
}
