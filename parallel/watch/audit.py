"""Finds silent data corruption (values that a processor or memory changed without an error) by hashes, and restores an intact copy.

    fingerprints(held)                        a 64-bit hash of each tensor that a rank keeps
    by_majority(held, prints, mesh)           compares the hashes of several ranks' copies: finds ranks that differ, and an intact rank
    by_change(held, before, prints, mesh)     compares with earlier hashes of tensors that must not change meanwhile
    mend(finding)                             copies the intact rank's tensor, bit by bit, to all ranks that hold it

If there are two copies and they differ, neither is known to be intact. With three or more, the value of the majority counts as intact.
Sources: Silent Data Corruptions at Scale (arXiv 2102.11245); Understanding Silent Data Corruption in LLM Training (2502.12340).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.mesh.collectives import device_of, gathered, max_over, start_broadcast
from parallel.mesh.gradients import on_stages
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh

_WORDS = 2**16  # 8-byte words that are hashed at a time, few enough for the processor's cache


class Held(NamedTuple):
    """A tensor that a rank holds. kind: "weight", "gradient", or the name of an optimizer state. axes: mesh axes along which all ranks hold
    the same bits. holders: indices on the pp axis of the stages that hold the same bits, if there are several."""

    name: str
    kind: str
    tensor: Tensor
    axes: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}"


class Finding(NamedTuple):
    """A tensor with wrong bits. places: indices on `axis` of the ranks with wrong bits. source: index of an intact rank; None: no rank is
    known to be intact, and `places` has all ranks."""

    held: Held
    axis: Axis
    places: tuple[int, ...]
    source: int | None

    def __str__(self) -> str:
        ranks = [str(self.axis.ranks[place]) for place in self.places]
        return f"{self.held} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def copies_of(name: str, kind: str, tensor: Tensor, layout: Layout, *, but: Sequence[str] = ()) -> Held:
    """Return a Held with the axes of the layout's copies, except the axes `but`, over which an engine has cut the tensor further."""
    return Held(name, kind, tensor, tuple(axis for axis in layout.copies() if axis not in but), layout.holders)


@cache
def _weights(device: torch.device) -> Tensor:
    """Return _WORDS + 1 fixed odd 64-bit numbers: multiplication by an odd number loses no bit."""
    x = torch.arange(_WORDS + 1, device=device) * -7046029254386353131  # from the golden ratio: neighbors get distant numbers
    return x.bitwise_xor_(x >> 29).mul_(-4658895280553007687) | 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits, int64 []. Its 64-bit words and their upper halves are multiplied by fixed odd numbers and summed
    modulo 2^64. A single flipped bit always changes the hash. At most about one in 2^32 other changes is missed."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    found = _hashed(words.view(torch.int64))
    if whole < flat.numel():
        rest = flat.new_zeros(8)
        rest[: flat.numel() - whole] = flat[whole:]
        found = found * _FACTOR + _hashed(rest.view(torch.int64))
    return found


_FACTOR = 6364136223846793005  # odd, so that no bit of earlier words is lost


def _hashed(words: Tensor) -> Tensor:
    weights, found = _weights(words.device), words.new_zeros(())
    for run in words.split(_WORDS):
        upper = run >> 32  # overflow could hide two flipped upper bits, so the upper halves are hashed once more
        found = found * _FACTOR + _dot(run, weights[: len(run)]) + _dot(upper, weights[1 : len(run) + 1])
    return found


def _dot(words: Tensor, weights: Tensor) -> Tensor:
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


def fingerprints(held: Iterable[Held]) -> Tensor:
    """Return the hashes of all tensors, int64 [tensors], on the CPU."""
    found = [fingerprint(one.tensor) for one in held]
    return torch.stack([f.cpu() for f in found]) if found else torch.zeros(0, dtype=torch.int64)


def by_majority(held: Sequence[Held], prints: Tensor, mesh: Mesh) -> list[Finding]:
    """Find copies that differ between ranks. prints: `fingerprints(held)`. Collective: all ranks of an axis pass the same tensors."""
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
    """Find tensors that changed on a rank although nothing wrote to them. Copies on other ranks that did not change count as intact.
    before, prints: earlier and present `fingerprints(held)`. Collective."""
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
    """Yield (axis, indices in `held` of the tensors that all ranks of the axis hold): first axes within a pipeline stage, then over
    stages."""
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
    return gathered(mine.to(device_of(axis)).unsqueeze(0), axis).cpu()


@torch.no_grad()
def mend(finding: Finding) -> None:
    """Copy the intact rank's tensor to all other ranks of the axis. Collective: all ranks of the axis pass the same finding."""
    assert finding.source is not None
    tensor = finding.held.tensor
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    came = start_broadcast(bits.to(device_of(finding.axis)), finding.axis, root=finding.source).wait()
    if finding.axis.index != finding.source:
        tensor.copy_(came.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def lines_of_all(lines: Sequence[str], world: Axis) -> list[str]:
    """Return the lines of text of all ranks, in rank order, without repetitions. Collective."""
    own = "\n".join(lines).encode()
    device = device_of(world)
    longest = int(max_over(torch.tensor(len(own), device=device), world))
    if longest == 0:
        return []
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else mine[:0]
    found: dict[str, None] = {}
    for row in gathered(mine.to(device).unsqueeze(0), world).cpu():
        found.update(dict.fromkeys(bytes(row.tolist()).rstrip(b"\0").decode().split("\n")))
    return [line for line in found if line]
