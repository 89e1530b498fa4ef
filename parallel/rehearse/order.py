"""Compares the order of collectives and messages of all ranks of a world. The ranks were rehearsed (run on fake tensors) one after another.

    rank 0   all_reduce of (0, 1)   send F of micro-batch 0 to 2   ...      a group: equal collectives in the same order on all ranks
    rank 2   recv F of micro-batch 0 from 0   all_reduce of (2, 3)   ...    a pair: each send has its receive, in the same order

NCCL has no tags: a rank's call is matched with the other ranks' next call on the same group, and the run hangs or gets wrong numbers if
the calls differ. The numbers of rows in an all-to-all are not compared, because ranks exchange these numbers first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parallel.rehearse.work import where


class Call(NamedTuple):
    """A call of a collective, or of a message to or from the rank `peer`.

    `group`: the group's name and its ranks. `name`: operator. `said`: text that is compared between all ranks of the group, or between
    sender and receiver: operator (of a message: its label), numbers of elements and dtypes. `place`: file, line and function. `batch`:
    number of the batch of messages that start together; 0: none."""

    group: tuple[str, tuple[int, ...]]
    name: str
    said: str
    place: str
    peer: int | None = None
    batch: int = 0


@cache
def _call(*fields: Any) -> Call:
    """Return `Call(*fields)`, the same object for equal calls, to save memory: a world has many ranks, which mostly make equal calls."""
    return Call(*fields)


class Calls:
    """Records this rank's calls of collectives and messages in the list `made`."""

    def __init__(self) -> None:
        self.made: list[Call] = []
        self._batches = self._batch = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within this context, record messages as one batch (`Call.batch`), because one batch_isend_irecv starts them together."""
        self._batches += 1
        self._batch = self._batches
        try:
            yield
        finally:
            self._batch = 0

    def add(self, func: Any, args: Sequence[Any], group: Any) -> None:
        """Add a call of torch's operator `func`, a collective or message, with the arguments `args` on the process group `group`."""
        name, tensors = func._opname.strip("_"), [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        key = group.group_name, tuple(dist.get_process_group_ranks(group))
        label = "".join(t.__dict__.pop("label", "") for t in tensors)
        uneven = name == "alltoall_base" and len(args[3]) > 0
        sizes = [f"{(t.shape[1:] if uneven else t.shape).numel()} {str(t.dtype).removeprefix('torch.')}" for t in tensors]
        if name in ("send", "recv"):
            self.made.append(_call(key, name, " ".join((*sizes, label)).strip(), where(), key[1][args[2]], self._batch))
            return
        scripted: list[Any] = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ReduceOp" in str(arg._type())]
        numbers = [str(arg) for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]  # such as the root's rank
        numbers += [str(operation.op()) for operation in scripted]
        self.made.append(_call(key, name, " ".join((name, ", ".join(sizes), *numbers)), where()))


def difference(made: Sequence[Sequence[Call]], named: Callable[[int], str]) -> str | None:
    """Return a line about the first difference between the calls made[rank] of all ranks, or None. named: rank -> its name."""
    for group in dict.fromkeys(call.group for calls in made for call in calls):
        of_rank = {rank: [call for call in made[rank] if call.group == group] for rank in group[1]}
        wrong = _of_collectives(of_rank, named) or _of_messages(of_rank, named)
        if wrong is not None:
            return wrong
    return None


def _of_collectives(of_rank: Mapping[int, Sequence[Call]], named: Callable[[int], str]) -> str | None:
    mine = [[call for call in calls if call.peer is None] for calls in of_rank.values()]
    for number, each in enumerate(zip_longest(*mine), 1):
        if len({call and call.said for call in each}) > 1:
            return f"collective {number} of ranks {list(of_rank)} differs: {_odd(dict(zip(of_rank, each, strict=True)), named)}"
    return None


def _of_messages(of_rank: Mapping[int, Sequence[Call]], named: Callable[[int], str]) -> str | None:
    peers = {(rank, call.peer) for rank, calls in of_rank.items() for call in calls if call.peer is not None}
    for first, second in sorted({(min(pair), max(pair)) for pair in peers}):
        sides = [list(_messages(of_rank[rank], rank, peer)) for rank, peer in ((first, second), (second, first))]
        for number, both in enumerate(zip_longest(*sides, fillvalue=[]), 1):
            one, other = ([what for what, _ in side] for side in both)
            if one != other:
                pair = {rank: side[0][1] if side else None for rank, side in zip((first, second), both, strict=True)}
                return f"message {number} between ranks {first} and {second} differs: {_odd(pair, named)}"
    return None


def _messages(calls: Sequence[Call], rank: int, peer: int) -> Iterator[list[tuple[tuple[int, str], Call]]]:
    """For each batch of messages between the two ranks, yield a sorted list of ((sending rank, call.said), call). Messages of a batch
    start together. A message outside of a batch has a list of its own."""
    mine = [call for call in calls if call.peer == peer]
    numbered = [(call.batch or -n, ((rank if call.name == "send" else peer, call.said), call)) for n, call in enumerate(mine, 1)]
    for _, batch in groupby(numbered, key=lambda both: both[0]):
        yield sorted((found for _, found in batch), key=lambda found: found[0])


def _odd(each: Mapping[int, Call | None], named: Callable[[int], str]) -> str:
    """Return a text about two ranks with different calls, the rarer call first. each: rank -> its call; None: it makes none."""
    said = {rank: call and call.said for rank, call in each.items()}
    often = Counter(said.values())
    one = min(each, key=lambda rank: (often[said[rank]], rank))
    other = next(rank for rank in each if rank != one and (said[rank] != said[one] or len(each) == 2))
    return ", but ".join(f"{named(rank)} {_told(each[rank])}" for rank in (one, other))


def _told(call: Call | None) -> str:
    if call is None:
        return "makes none"
    peer = {"send": f"sends to rank {call.peer}: ", "recv": f"receives from rank {call.peer}: "}.get(call.name, "calls ")
    return f"{peer}{call.said} at {call.place}"
