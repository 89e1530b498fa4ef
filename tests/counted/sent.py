"""Counts the bytes that this rank sends in collectives, by intercepting all calls of torch.distributed in torch's dispatcher.

    with Sent() as sent: step()         sent.bytes["gradients and parameters"]

Bytes are those of ring algorithms: (N - 1)/N of the whole tensor for a gather or reduce-scatter, twice that for an all-reduce. A reduce or
broadcast, in which only some ranks send, counts with its mean over ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

STATES, ROWS, NUMBERS = "gradients and parameters", "rows of experts", "numbers"

# names of collectives in torch's dispatcher: first c10d's, then the functional collectives'
_ALL_REDUCE = ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_")
_GATHER = (
    *("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
)
_SCATTER = (
    *("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
)
_ONE_TO_ALL = ("reduce_", "broadcast_", "broadcast")
_EXCHANGE = ("alltoall_base_", "alltoall_", "all_to_all_single")
_SEND = ("send",)
_NOTHING = ("barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd")
_SECOND_IS_INPUT = (
    "_allgather",
    "allgather",
    "_reduce_scatter",
    "reduce_scatter_",
    "alltoall",
)  # c10d operators whose first argument is the output


class Sent(TorchDispatchMode):
    """Mode that counts the bytes sent by this rank. bytes: purpose (STATES, ROWS or NUMBERS) -> bytes. calls, bytes_of: only for STATES:
    (collective, dtype, number of ranks) -> number of calls, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.bytes_of: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        space, name = func.name().split(".")[0].split("::")
        if space in ("c10d", "_c10d_functional") and name not in _NOTHING:
            self._count(space, name, [*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _count(self, space: str, name: str, args: list[Any]) -> None:
        ranks, mine = _group(args)
        given = list(_tensors(args[1 if space == "c10d" and name.startswith(_SECOND_IS_INPUT) else 0]))
        size = sum(t.numel() * t.element_size() for t in given)
        if ranks == 1 or not given:
            return
        did, sent = _sent(name, size, ranks)
        dtype = given[0].dtype
        if did == "all_to_all":
            parts = args[4] if name == "alltoall_base_" else ()  # number of rows to each rank; empty if all are equal
            self.bytes[ROWS] += size - size * parts[mine] // max(1, sum(parts)) if parts else sent
        elif dtype in (torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8) or sum(t.numel() for t in given) <= ranks:
            self.bytes[NUMBERS] += sent  # gradient norms, counts, numbers on which ranks agree
        else:
            key = did, str(dtype).removeprefix("torch."), ranks
            self.bytes[STATES] += sent
            self.calls[key] += 1
            self.bytes_of[key] += sent


def _sent(name: str, size: int, ranks: int) -> tuple[str, int]:
    """Return (common name of the collective, bytes that this rank sends for an input of `size` bytes)."""
    if name in _ALL_REDUCE:
        return "all_reduce", 2 * size * (ranks - 1) // ranks
    if name in _GATHER:
        return "all_gather", size * (ranks - 1)
    if name in _SCATTER:
        return "reduce_scatter", size * (ranks - 1) // ranks
    if name in _ONE_TO_ALL:
        return name.rstrip("_"), size * (ranks - 1) // ranks
    if name in _EXCHANGE:
        return "all_to_all", size * (ranks - 1) // ranks
    if name in _SEND:
        return "send", size
    raise AssertionError(f"a collective that is not counted: {name}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _group(args: list[Any]) -> tuple[int, int]:
    """Return (number of ranks of the process group, this rank's index in it), from a collective's arguments."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):  # type: ignore[attr-defined]
            group = dist.ProcessGroup.unbox(value)  # type: ignore[attr-defined]
            return int(group.size()), int(group.rank())
    name: Any = [value for value in args if isinstance(value, str)][-1]
    group = dist.distributed_c10d._resolve_process_group(name)
    return int(group.size()), int(group.rank())
