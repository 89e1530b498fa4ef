"""The memory that a process holds for a model in training, by purpose, as torch and the system report it.

parameters, gradients, optimizer      storages of tensors that the model, its engine and its optimizers refer to
buckets                               buffers of a fixed size in which DeepSpeed collects its messages
other                                 every other storage that is newer than the model, including forgotten ones
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe.plan.job.states import States
from moe.train.start.prediction import storages
from parallel.data.engine import Engine


def resident_bytes() -> int:
    """Return the anonymous memory of this process, after the C library has returned its free memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def living() -> list[Tensor]:
    """Return every tensor known to Python's garbage collector, after a wait in which gloo's threads drop the last message's tensors."""
    time.sleep(0.1)
    gc.collect()
    return [t for t in gc.get_objects() if issubclass(type(t), Tensor)]


def shards_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield DeepSpeed's shards of parameters (ZeRO stage 3)."""
    yield from (parameter.ds_tensor for parameter in model.parameters() if hasattr(parameter, "ds_tensor"))


def _of_optimizers() -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (tensor, its gradient or None) for every parameter and state of all optimizers of this process."""
    for optimizer in [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]:
        for stepped in (*(p for group in optimizer.param_groups for p in group["params"]), *optimizer.state):
            yield stepped, stepped.grad
        for state in optimizer.state.values():
            yield from ((value, None) for value in state.values() if isinstance(value, Tensor))


def _buckets(engine: Engine) -> Iterator[Tensor]:
    zero = getattr(getattr(engine, "engine", None), "optimizer", None)
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        yield from [bucket.buffer] if isinstance(bucket.buffer, Tensor) else bucket.buffer or ()


@dataclass(frozen=True)
class Held:
    """Bytes held, by purpose. shards: bytes of `states.parameters` that are DeepSpeed's parameter shards (ZeRO stage 3)."""

    states: States
    shards: int
    buckets: int
    other: int


def held(model: nn.Module, engine: Engine, *, before: set[int]) -> Held:
    """Return the bytes that torch now holds for the model, without the storages whose addresses are in `before`."""
    shards = storages(shards_of(model))
    parameters = shards | storages(model.parameters())
    stepped = list(_of_optimizers())
    waiting = [p.grad for p in model.parameters()] + [grad for _, grad in stepped] + [grad for _, grad in engine.owned_gradients()]
    parts, named = [], set(before)
    for tensors in (parameters, storages(t for t, _ in stepped), storages(_there(waiting)), storages(_buckets(engine)), storages(living())):
        parts.append(sum(size for where, size in tensors.items() if where not in named))
        named |= tensors.keys()
    return Held(States(parts[0], parts[2], parts[1]), sum(shards.values()), parts[3], parts[4])


def _there(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    return (t for t in tensors if t is not None)


@dataclass
class Arriving:
    """Watches a backward pass by hooks. gradients: peak bytes of all p.grad; resident: resident bytes of the process at that peak."""

    model: nn.Module
    gradients: int = 0
    resident: int = 0
    hooks: list[Any] = field(default_factory=list)

    def watch(self) -> Arriving:
        self.hooks = [p.register_post_accumulate_grad_hook(self._look) for p in self.model.parameters()]
        return self

    def _look(self, _: Tensor) -> None:
        now = sum(storages(_there(p.grad for p in self.model.parameters())).values())
        if now > self.gradients:
            self.gradients, self.resident = now, resident_bytes()
