"""Silent corruption: numbers that a processor or a memory got wrong, without an error. Found by hashes, and mended where an intact copy is.

    fingerprints(held)                        one 64-bit number for each tensor that a rank keeps
    by_majority(held, prints, mesh)           copies on several ranks must have equal ones: the odd ones out, and who is right
    by_change(held, before, prints, mesh)     what nobody may write meanwhile must have the same as before: who has changed, and who not
    mend(finding)                             the tensor of an intact rank, bit by bit, to all that hold it

Who holds copies, layouts say (`Held.axes`, `Held.holders`). Of two copies that differ neither is known to be right; of three or more, the
one that most agree on is taken. That such faults happen: Silent Data Corruptions at Scale (arXiv 2102.11245); what they do to training:
Understanding Silent Data Corruption in LLM Training (arXiv 2502.12340).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh.collectives import gathered, max_over, start_broadcast
from parallel.mesh.gradients import on_stages
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh

_WORDS = 2**16  # of 8 bytes, hashed at a time: what is multiplied stays in the processor's cache


class Held(NamedTuple):
    """A tensor that a rank keeps. `kind`: "weight", "gradient", or what an optimizer keeps beside it. `axes`: those of a mesh whose ranks
    hold the same bits, and `holders` the places on the pp axis that do, where they are several."""

    name: str
    kind: str
    tensor: Tensor
    axes: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}"


class Finding(NamedTuple):
    """A tensor of which some ranks hold other bits than they should: those at `places` of the axis. `source`: the place of an intact one;
    None: none is known."""

    held: Held
    axis: Axis
    places: tuple[int, ...]
    source: int | None

    def __str__(self) -> str:
        ranks = [str(self.axis.ranks[place]) for place in self.places]
        return f"{self.held} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def copies_of(name: str, kind: str, tensor: Tensor, layout: Layout, *, but: Sequence[str] = ()) -> Held:
    """A tensor that lies as its parameter does; `but`: axes over which an engine has cut it once more."""
    return Held(name, kind, tensor, tuple(axis for axis in layout.copies() if axis not in but), layout.holders)


# --- hashes ------------------------------------------------------------------------------------------------------------------


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd 64-bit numbers: a product with an odd number loses no bit."""
    x = torch.arange(_WORDS + 1, device=device) * -7046029254386353131  # the golden ratio's: neighbours get numbers far apart
    return x.bitwise_xor_(x >> 29).mul_(-4658895280553007687) | 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """int64 [] of a tensor's bits: their 64-bit words, and the upper halves of these, times fixed odd numbers, summed modulo 2^64.

    One flipped bit always changes it; of several changes about one in 2^32 goes unseen, or fewer.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    found = _hashed(words.view(torch.int64))
    if whole < flat.numel():
        rest = flat.new_zeros(8)
        rest[: flat.numel() - whole] = flat[whole:]
        found = found * _FACTOR + _hashed(rest.view(torch.int64))
    return found


_FACTOR = 6364136223846793005  # odd, so that no word of an earlier run is lost


def _hashed(words: Tensor) -> Tensor:
    weights, found = _weights(words.device), words.new_zeros(())
    for run in words.split(_WORDS):
        upper = run >> 32  # of a product with an upper bit little is left: two such flips might cancel
        found = found * _FACTOR + _dot(run, weights[: len(run)]) + _dot(upper, weights[1 : len(run) + 1])
    return found


def _dot(words: Tensor, weights: Tensor) -> Tensor:
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


def fingerprints(held: Iterable[Held]) -> Tensor:
    """int64 [tensors], on the host."""
    found = [fingerprint(one.tensor) for one in held]
    return torch.stack([f.cpu() for f in found]) if found else torch.zeros(0, dtype=torch.int64)


# --- comparison --------------------------------------------------------------------------------------------------------------


def by_majority(held: Sequence[Held], prints: Tensor, mesh: Mesh) -> list[Finding]:
    """Copies that differ. Collective: every rank of an axis gives its copies of the same tensors, in the same order."""
    found = []
    for axis, numbers in _together(held, mesh):
        rows = _of_all(prints[numbers], axis)  # [ranks, tensors]
        for column in (rows != rows[0]).any(0).nonzero().flatten().tolist():
            values = rows[:, column].tolist()
            most, count = Counter(values).most_common(1)[0]
            source = values.index(most) if 2 * count > len(values) else None
            places = tuple(i for i, value in enumerate(values) if source is None or value != most)
            found.append(Finding(held[numbers[column]], axis, places, source))
    return found


def by_change(held: Sequence[Held], before: Tensor, prints: Tensor, mesh: Mesh) -> list[Finding]:
    """Tensors that have changed on some rank of their copies though nobody writes them; what has not is intact. Collective."""
    changed, found, alone = before != prints, [], set(range(len(held)))
    for axis, numbers in _together(held, mesh):
        alone -= set(numbers)
        rows = _of_all(changed[numbers].long(), axis).bool()
        for column in rows.any(0).nonzero().flatten().tolist():
            places = tuple(rows[:, column].nonzero().flatten().tolist())
            source = next((place for place in range(axis.size) if place not in places), None)
            found.append(Finding(held[numbers[column]], axis, places, source))
    me = Axis("this rank", (mesh.rank,), 0)
    return found + [Finding(held[number], me, (0,), None) for number in sorted(alone) if changed[number]]


def _together(held: Sequence[Held], mesh: Mesh) -> Iterator[tuple[Axis, list[int]]]:
    """(axis, numbers of the tensors that its ranks hold copies of); holders of several stages after the copies of one."""
    numbers: dict[tuple[bool, tuple[object, ...]], list[int]] = {}
    for number, one in enumerate(held):
        if one.axes:
            numbers.setdefault((False, one.axes), []).append(number)
        if one.holders:
            numbers.setdefault((True, one.holders), []).append(number)
    for (staged, key), some in sorted(numbers.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        axis = on_stages(held[some[0]].holders, mesh) if staged else mesh.axis(*map(str, key))
        if axis.size > 1:
            yield replace(axis, label="the audit"), some


def _of_all(mine: Tensor, axis: Axis) -> Tensor:
    """[ranks, values], on the host."""
    there = mine.to("cuda") if _by_nccl(axis) else mine
    return gathered(there.unsqueeze(0), axis).cpu()


def _by_nccl(axis: Axis) -> bool:
    return axis.size > 1 and dist.get_backend(axis.group) == "nccl"


# --- what follows ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def mend(finding: Finding) -> None:
    """Copy the intact rank's tensor to all others of the axis. Collective over it: every one of its ranks has the same finding."""
    assert finding.source is not None
    tensor = finding.held.tensor
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    there = bits.to("cuda") if _by_nccl(finding.axis) else bits
    came = start_broadcast(there, finding.axis, root=finding.source).wait()
    if finding.axis.index != finding.source:
        tensor.copy_(came.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def said_by_all(lines: Sequence[str], world: Axis) -> list[str]:
    """The lines of all ranks, each once, in order; the same on every rank. Collective."""
    own = "\n".join(lines).encode()
    device = "cuda" if _by_nccl(world) else "cpu"
    longest = int(max_over(torch.tensor(len(own), device=device), world))
    if longest == 0:
        return []
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else mine[:0]
    found: dict[str, None] = {}
    for row in gathered(mine.to(device).unsqueeze(0), world).cpu():
        found.update(dict.fromkeys(bytes(row.tolist()).rstrip(b"\0").decode().split("\n")))
    return [line for line in found if line]
