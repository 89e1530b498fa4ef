"""Compares the collectives and messages of all ranks of a world. Each rank is rehearsed in turn, and keeps a list of its calls.

    rank 0    all_reduce over (0, 1)    send to 2        ...        every group: the same collectives in the same order, of equal sizes
    rank 1    all_reduce over (0, 1)    send to 3        ...        every pair: each send has its receive, in the same order
    rank 2    recv from 0               all_reduce over (2, 3)

NCCL has no tags: a message or collective meets the next call of the same group on the other rank. If the two differ, the run hangs or
goes on with wrong numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

Group = tuple[str, tuple[int, ...]]  # the group's name, and its ranks in the world
_MESSAGES = {"send": "send", "recv_": "recv"}


@dataclass(frozen=True)
class Call:
    """A call of a collective, or a message. `said`: its name, dtypes, elements, root and operation, which are equal on all ranks.
    `send`, `receive`: rows to and from each rank of the group, in an all-to-all. `peer`: the other rank of a message; None for a
    collective. `batch`: number of the batch of messages that are started together. `place`: file, line and function.
    """

    group: Group
    said: str
    place: str
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    peer: int | None = None
    batch: int = 0

    def __str__(self) -> str:
        rows = f", sends {list(self.send)} and receives {list(self.receive)} rows" if self.send else ""
        return f"{self.said}{rows} at {self.place}"


def call_of(func: Any, args: Sequence[Any], group: Any, *, place: str, batch: int) -> Call:
    """Return the Call of torch's operator `func` of a process group. batch: 0 outside of a batch."""
    name, tensors = func._opname, [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    ranks = tuple(dist.get_process_group_ranks(group))
    key, size = (group.group_name, ranks), len(ranks)
    label = next((found for t in tensors if (found := getattr(t, "label", ""))), "")
    if name in _MESSAGES:
        said = " ".join(filter(None, (label, _sizes(tensors))))
        return Call(key, said, place, peer=ranks[args[2]], batch=batch)
    numbers = [str(arg) for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    numbers += [str(dist.ReduceOp.unbox(arg)) for arg in args if isinstance(arg, torch.ScriptObject) and "ReduceOp" in str(arg._type())]
    if name != "alltoall_base_":
        return Call(key, " ".join((name.strip("_"), _sizes(tensors), *numbers)), place)
    rows = (tuple(splits) or (len(tensor) // size,) * size for tensor, splits in zip(args[:2], args[3:5], strict=True))
    receive, send = rows
    return Call(key, f"{name.strip('_')} {tensors[0].dtype} x {tensors[0][:1].numel()}", place, send=send, receive=receive)


def _sizes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{t.numel()} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def difference(ledgers: Sequence[Sequence[Call]], named: Callable[[int], str]) -> str | None:
    """Return a line on the first difference between the calls of rank 0, 1, ...; None if all agree. named: rank -> its name."""
    collectives, messages = defaultdict[Group, dict[int, list[Call]]](dict), defaultdict[Any, list[Any]](list)
    for rank, calls in enumerate(ledgers):
        for call in calls:
            if call.peer is None:
                collectives[call.group].setdefault(rank, []).append(call)
    del messages
    for (name, ranks), found in collectives.items():
        for number, each in enumerate(zip_longest(*(found.get(rank, []) for rank in ranks)), 1):
            if (wrong := _disagree(each, ranks, named)) is not None:
                return f"collective {number} of group {name} of ranks {list(ranks)} differs: {wrong}"
    return None


def _disagree(each: Sequence[Call | None], ranks: tuple[int, ...], named: Callable[[int], str]) -> str | None:
    """Return how the calls of one collective differ; first the rank that differs from most others."""
    said = [None if call is None else call.said for call in each]
    if len(set(said)) > 1:
        usual = Counter(said).most_common(1)[0][0]
        odd = next(i for i in reversed(range(len(said))) if said[i] != usual)
        other = said.index(usual)
        return f"{named(ranks[odd])}: {each[odd] or 'nothing'}; {named(ranks[other])}: {each[other] or 'nothing'}"
    for i, mine in enumerate(each):
        for j, theirs in enumerate(each):
            if mine is not None and theirs is not None and mine.send and mine.send[j] != theirs.receive[i]:
                return f"{named(ranks[i])}: {mine}; {named(ranks[j])}: {theirs}"
    return None
