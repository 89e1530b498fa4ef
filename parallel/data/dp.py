"""DP: one process with n replicas, each with a shard of every micro-batch, like torch's DataParallel. For study and comparison.

    batch --scatter--> shards      weights --broadcast--> replica 1 .. n-1        (replica 0 reads the model's own weights)
    shards --n threads: forward--> outputs --gather--> one output on the first device
    backward: autograd of the broadcast sums the replicas' gradients on the first device, in the replicas' order

With P parameters, the first device exchanges 2 (n - 1) P elements in each micro-batch; a DDP rank sends 2 (n - 1) / n P in each step. The
threads share one Python interpreter, so their Python code runs one after another.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

SumReplicas = Callable[[Any, Tensor], Tensor]  # (name of a sum, this replica's tensor) -> sum over all replicas in this forward pass
Scatter = Callable[[tuple[Any, ...], Sequence[torch.device], Sequence[SumReplicas]], list[tuple[Any, ...]]]
Gather = Callable[[tuple[Any, ...], Sequence[Any], torch.device], Any]


@runtime_checkable
class Follows(Protocol):
    """A module with frozen tensors that are neither parameters nor buffers."""

    def follow(self, device: torch.device) -> None:
        """Replace these tensors by copies on the device, if they are on another."""


class Replicas(nn.Module):
    """Replicas of `model`, which run its forward pass in training.
    `scatter(args, devices, sums)` returns each replica's arguments; sums[i] is the function with which replica i sums its tensors over all
    replicas (SumReplicas). `gather(args, outputs, device)` joins the replicas' outputs on a device. `sent`: "broadcast" or "reduce" ->
    number of bytes sent so far."""

    def __init__(self, model: nn.Module, *, devices: Sequence[torch.device], scatter: Scatter, gather: Gather) -> None:
        super().__init__()
        self.model, self.devices = model, list(devices)
        self.scatter, self.gather = scatter, gather
        self.sent: Counter[str] = Counter()

    def forward(self, *args: Any) -> Any:
        meeting = _Meeting(len(self.devices))
        parts = self.scatter(args, self.devices, [meeting.of(i) for i in range(len(self.devices))])
        replicas = _replicas(self.model, self.devices, self.sent)
        return self.gather(args, _applied(replicas, parts, meeting), self.devices[0])


def _replicas(module: nn.Module, devices: Sequence[torch.device], sent: Counter[str]) -> list[nn.Module]:
    """Return the module with copies of its weights on each device; the first replica reads the weights themselves. Gradients flow to the
    original weights. sent: counts bytes of weights and gradients."""
    made: list[nn.Module] = [module._replicate_for_data_parallel() for _ in devices]  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        copies = [None] * len(devices) if parameter is None else _Copies.apply(parameter, devices, sent)
        for replica, copy in zip(made, copies, strict=True):
            setattr(replica, name, copy)  # as a plain tensor, not a parameter: gradients flow through it
    for name, buffer in module._buffers.items():
        for replica, device in zip(made, devices, strict=True):
            replica._buffers[name] = None if buffer is None else buffer.to(device)
    for replica, device in zip(made, devices, strict=True):
        if isinstance(replica, Follows):
            replica.follow(device)
    for name, child in module._modules.items():
        parts = [None] * len(devices) if child is None else _replicas(child, devices, sent)
        for replica, part in zip(made, parts, strict=True):
            replica._modules[name] = part
    return made


class _Copies(torch.autograd.Function):
    """The weight itself, then its copies on all devices but the first. Backward: the sum of their gradients, in this order."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, devices: Sequence[torch.device], sent: Counter[str]) -> tuple[Tensor, ...]:
        ctx.sent = sent
        sent["broadcast"] += (len(devices) - 1) * weight.nbytes
        return weight.view_as(weight), *(weight.to(device, copy=True) for device in devices[1:])

    @staticmethod
    def backward(ctx: Any, first: Tensor, *others: Tensor) -> tuple[Tensor, None, None]:
        for grad in others:
            ctx.sent["reduce"] += grad.nbytes
            first = first + grad.to(first.device)
        return first, None, None


def _applied(replicas: Sequence[nn.Module], parts: Sequence[tuple[Any, ...]], meeting: _Meeting) -> list[Any]:
    """Run replica i on parts[i], each in a thread, and return the outputs. If replicas fail, raise the error that is the cause, after all
    threads have ended."""
    outputs: list[Any] = [None] * len(replicas)
    errors: list[BaseException | None] = [None] * len(replicas)
    grad = torch.is_grad_enabled()  # new threads do not inherit this setting

    def one(i: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                outputs[i] = replicas[i](*parts[i])
        except BaseException as error:
            errors[i] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [error for error in errors if error is not None]
    # BrokenBarrierError comes last: another replica's error caused it
    for error in sorted(failed, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return outputs


class _Meeting:
    """Sums tensors over the replicas of one forward pass. A name identifies each sum. If activation recomputation repeats the forward pass,
    the second pass gets the stored sums."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.parts: dict[Any, list[Tensor | None]] = {}
        self.lock = threading.Lock()

    def of(self, index: int) -> SumReplicas:
        known: dict[Any, Tensor] = {}

        def together(name: Any, mine: Tensor) -> Tensor:
            if name not in known:
                with self.lock:
                    parts = self.parts.setdefault(name, [None] * self.barrier.parties)
                    parts[index] = mine
                self.barrier.wait()
                total = torch.zeros_like(mine)
                for part in parts:
                    assert part is not None
                    total += part.to(mine.device)
                known[name] = total
            return known[name]

        return together
