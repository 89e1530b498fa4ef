"""Measures the memory that a process holds for a model in training, by purpose, as torch and the system report it.

parameters, gradients, optimizer      storages of tensors that the model, its engine and its optimizers refer to
buckets                               buffers of a fixed size in which DeepSpeed collects gradients before it sends them
other                                 every other tensor storage allocated since before the model, also those kept by mistake
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from moe.plan.job.states import States
from moe.train.start.prediction import storages
from parallel.data.engine import Engine


def resident_bytes() -> int:
    """Return the bytes of this process's anonymous memory, after the C library has returned its free memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def living() -> list[Tensor]:
    """Return every tensor known to Python's garbage collector."""
    time.sleep(0.1)  # gloo's threads drop the tensors of the last message a little later
    gc.collect()
    return [t for t in gc.get_objects() if issubclass(type(t), Tensor)]


def shards_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield this rank's shards of the parameters in DeepSpeed's ZeRO stage 3; nothing in other engines."""
    yield from (parameter.ds_tensor for parameter in model.parameters() if hasattr(parameter, "ds_tensor"))


def _of_optimizers() -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (tensor, its gradient or None) for every parameter and every state of all optimizers in this process."""
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
    """Bytes in tensors, by purpose (see above). shards: the part of states.parameters that is DeepSpeed's parameter shards (ZeRO-3)."""

    states: States
    shards: int
    buckets: int
    other: int


def held(model: nn.Module, engine: Engine, *, before: set[int]) -> Held:
    """Return the bytes that torch now holds for the model. before: addresses of storages that are older than the model."""
    shards = storages(shards_of(model))
    parameters = shards | storages(model.parameters())
    stepped = list(_of_optimizers())
    waiting = [p.grad for p in model.parameters()] + [grad for _, grad in stepped] + [grad for _, grad in engine.owned_gradients()]
    gradients = (grad for grad in waiting if grad is not None)
    sizes, counted = [], set(before)
    for tensors in (parameters, storages(t for t, _ in stepped), storages(gradients), storages(_buckets(engine)), storages(living())):
        sizes.append(sum(size for where, size in tensors.items() if where not in counted))
        counted |= tensors.keys()
    return Held(States(sizes[0], sizes[2], sizes[1]), sum(shards.values()), sizes[3], sizes[4])


class GradientPeak:
    """Watches all later backward passes. gradients: peak bytes of all p.grad; resident: bytes of the process's memory at that peak."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gradients, self.resident = model, 0, 0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: Tensor) -> None:
        now = sum(storages(p.grad for p in self.model.parameters() if p.grad is not None).values())
        if now > self.gradients:
            self.gradients, self.resident = now, resident_bytes()
