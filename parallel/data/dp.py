"""DP: one process, n replicas, each with its part of every micro-batch, as torch's DataParallel has it. Kept to read and to compare.

    batch --scatter--> parts       weights --broadcast--> replica 1 .. n-1        (replica 0 is the model itself)
    parts --n threads: forward--> outputs --gather--> one output on the first device
    backward: the broadcast's own backward pass adds the replicas' gradients up on the first device

Every micro-batch sends all weights out and all gradients back, (n - 1) P each way through one device, which also holds the
only optimizer; the threads share one interpreter. So it costs 2 (n - 1) P a micro-batch where DDP's ranks send 2 (n - 1) / n P
a step each. Losses are shares of the global mean: gradients are sums, never averages. Source: torch.nn.DataParallel.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Together = Callable[[Any, Tensor], Tensor]  # (name, a replica's part) -> its sum over all replicas of this pass
Scatter = Callable[[tuple[Any, ...], Sequence[torch.device], Sequence[Together]], list[tuple[Any, ...]]]
Gather = Callable[[tuple[Any, ...], Sequence[Any], torch.device], Any]


class Replicas(nn.Module):
    """Stands for `model` in the forward pass of training. `scatter(args, devices, together)` gives each replica's arguments,
    `gather(args, outputs, device)` makes one output of theirs. `sent`: bytes of "broadcast" and "reduce" so far."""

    def __init__(self, model: nn.Module, *, devices: Sequence[torch.device], scatter: Scatter, gather: Gather) -> None:
        super().__init__()
        self.model, self.devices = model, list(devices)
        self.scatter, self.gather = scatter, gather
        self.sent: Counter[str] = Counter()

    def forward(self, *args: Any) -> Any:
        meeting = _Meeting(len(self.devices))
        parts = self.scatter(args, self.devices, [meeting.of(i) for i in range(len(self.devices))])
        replicas = [self.model, *(_replica(self.model, device, self.sent) for device in self.devices[1:])]
        return self.gather(args, _applied(replicas, parts, meeting), self.devices[0])


def _replica(module: nn.Module, device: torch.device, sent: Counter[str]) -> nn.Module:
    """The module with copies of its weights, through which gradients flow back to it; everything else is the module's own."""
    made: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is None:
            made._parameters[name] = None
            continue
        copy = parameter.to(device, copy=True)
        sent["broadcast"] += copy.nbytes
        if copy.requires_grad:
            copy.register_hook(lambda grad: sent.update(reduce=grad.nbytes))
        setattr(made, name, copy)  # no parameter: it is a result
    for name, buffer in module._buffers.items():
        made._buffers[name] = None if buffer is None else buffer.to(device)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _replica(child, device, sent)
    return made


def _applied(replicas: Sequence[nn.Module], parts: Sequence[tuple[Any, ...]], meeting: _Meeting) -> list[Any]:
    """Each replica on its part, all at once; the first error in order of replicas is raised once all have ended."""
    outputs: list[Any] = [None] * len(replicas)
    errors: list[BaseException | None] = [None] * len(replicas)
    grad = torch.is_grad_enabled()  # a thread begins with its own

    def one(i: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                outputs[i] = replicas[i](*parts[i])
        except BaseException as error:
            errors[i] = error
            meeting.leave()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [error for error in errors if error is not None]
    for error in sorted(failed, key=lambda e: isinstance(e, threading.BrokenBarrierError)):  # who waited in vain is not the cause
        raise error
    return outputs


class _Meeting:
    """Where the replicas of one pass add up what they must know of each other. A part that is computed again has its answer already."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.parts: dict[Any, list[Tensor | None]] = {}
        self.lock = threading.Lock()

    def of(self, index: int) -> Together:
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

    def leave(self) -> None:
        self.barrier.abort()
