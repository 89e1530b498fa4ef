"""Silent corruption: the audit finds corrupted copies of a tensor, and the rank with an intact one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.mesh.mesh import Degrees, Mesh
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from parallel.watch.audit import Held, by_change, by_majority, fingerprint, fingerprints, lines_of_all, mend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (0, 4)])
def test_every_bit_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Each flipped bit of a tensor changes its fingerprint, each to another value. The fingerprint does not depend on the address."""
    tensor = (torch.rand(shape) * 3).to(dtype)
    raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    before, seen = int(fingerprint(tensor)), set()
    for byte in range(len(raw)):
        for bit in range(8 if dtype != torch.bool else 1):
            raw[byte] ^= 1 << bit
            seen.add(int(fingerprint(tensor)))
            raw[byte] ^= 1 << bit
    assert before not in seen and len(seen) == len(raw) * (8 if dtype != torch.bool else 1)
    assert int(fingerprint(tensor)) == before
    moved = torch.empty(tensor.numel() + 1, dtype=dtype)[1:].view(shape).copy_(tensor)
    assert int(fingerprint(moved)) == before


def test_the_order_of_elements_counts() -> None:
    """Swapping two elements changes a fingerprint, also across chunks of _WORDS. A view and its contiguous copy have the same one."""
    long = torch.arange(2**18 + 3, dtype=torch.float32)
    found = {int(fingerprint(long))}
    for a, b in ((0, 1), (5, 2**17 + 5), (2**18 + 1, 2**18 + 2)):
        swapped = long.clone()
        swapped[[a, b]] = long[[b, a]]
        found.add(int(fingerprint(swapped)))
    assert len(found) == 4
    table = torch.randn(6, 5)
    assert int(fingerprint(table.T)) == int(fingerprint(table.T.contiguous())) != int(fingerprint(table))


def _mesh(rank: int, ranks: int) -> Mesh:
    return process.connect(Degrees(dp=ranks), World(rank, ranks, rank, ranks))


def _held(odd: bool) -> list[Held]:
    made = [Held(name, "weight", torch.arange(5.0) + n, ("dp",)) for n, name in enumerate("abc")]
    if odd:
        made[1].tensor[2] = -0.0
    return made


def test_the_odd_one_of_three_is_mended_and_of_two_neither_is_known() -> None:
    def work(rank: int, ranks: int) -> list[Any]:
        mesh = _mesh(rank, ranks)
        held = _held(odd=rank == 1)
        found = by_majority(held, fingerprints(held), mesh)
        said = [str(one) for one in found]
        for one in found:
            if one.source is not None:
                mend(one)
        return [said, [one.source for one in found], [one.tensor.tolist() for one in held]]

    right = [one.tensor.tolist() for one in _held(odd=False)]
    assert run_on_ranks(work, 3, 3) == [[["weight of b on rank 1"], [0], right]] * 3
    two = run_on_ranks(work, 2, 2)
    assert [rank[:2] for rank in two] == [[["weight of b on ranks 0, 1"], [None]]] * 2


def test_by_change_takes_the_unchanged_copy() -> None:
    """If one of two copies has changed, the other is the source of the repair. A changed tensor without a copy has no source.
    `lines_of_all` gives all ranks all lines."""

    def work(rank: int) -> list[Any]:
        mesh = _mesh(rank, 2)
        held = [*_held(odd=False), Held("part", "exp_avg", torch.ones(3))]
        before = fingerprints(held)
        if rank == 0:
            held[2].tensor[0] = 9.0
            held[3].tensor[0] = 9.0
        found = by_change(held, before, fingerprints(held), mesh)
        for one in found:
            if one.source is not None:
                mend(one)
        lines = lines_of_all([str(one) for one in found], mesh.axis("world"))
        return [[(str(one), one.source) for one in found], lines, held[2].tensor.tolist()]

    shared, alone = ("weight of c on rank 0", 1), ("exp_avg of part on rank 0", None)
    c: Tensor = _held(odd=False)[2].tensor
    lines = [shared[0], alone[0]]
    assert run_on_ranks(work, 2) == [[[shared, alone], lines, c.tolist()], [[shared], lines, c.tolist()]]


def test_no_copies_no_collective() -> None:
    held = [Held("a", "weight", torch.ones(2), ("dp",)), Held("b", "weight", torch.ones(2))]
    prints = fingerprints(held)
    assert by_majority(held, prints, Mesh.of(Degrees())) == [] == by_change(held, prints, prints, Mesh.of(Degrees()))
