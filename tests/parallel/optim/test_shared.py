"""Work on whole matrices that lie in shards: results, bytes, and what is under way while a rank works."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.data.whole import Cut, Whole
from parallel.mesh.mesh import Degrees
from parallel.optim import shared as file
from parallel.optim.shared import Stack, shared
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import run_on_ranks

N, R, C, RANKS = 12, 6, 10, 4  # matrices in three rounds; dp cuts rows, tp columns


def whole(number: int) -> Tensor:
    return torch.randn(1, R, C, generator=torch.Generator().manual_seed(number))


def worked(number: int, matrices: Tensor) -> Tensor:
    return (number + 1) * matrices @ matrices.mT @ matrices


def on_rank(rank: int) -> tuple[dict[int, Tensor], list[int], dict[str, int]]:
    """Return (results, number of exchanges under way at each call of `work`, bytes sent by axis)."""
    mesh = process.connect(Degrees(dp=2, tp=2), World(rank, RANKS))
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    lie = Whole((Cut(-2, R // 2, R, dp), Cut(-1, C // 2, C, tp)))
    under_way, seen = 0, list[int]()
    start, finish = file.start_all_to_all, file.finish_rows

    def started(*args: Any, **options: Any) -> Any:
        nonlocal under_way
        under_way += 1
        return start(*args, **options)

    def finished(one: Any) -> Tensor:
        nonlocal under_way
        under_way -= 1
        return finish(one)

    def work(number: int, matrices: Tensor) -> Tensor:
        seen.append(under_way)
        return worked(number, matrices)

    def part(number: int) -> Tensor:
        return whole(number).narrow(-2, *lie.cuts[0].run(dp.index)).narrow(-1, *lie.cuts[1].run(tp.index))

    file.start_all_to_all, file.finish_rows = started, finished  # type: ignore[assignment]
    stacks = [Stack(n, 1, (R // 2, C // 2), torch.float32, lie) for n in range(N)]
    found = {n: lie.gathered(x) for n, x in list(shared(stacks, part, work, cost=math.prod))}
    sent = {axis: count.sent for (axis, name), count in mesh.communicator.counts().items() if name == "all_to_all"}
    assert not under_way
    return found, seen, sent


def test_a_round_travels_while_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of three rounds is computed, later ones are sent over both axes, and earlier ones are sent back over both. A matrix is
    sent once to its owner and once back, without the parts that are there."""
    monkeypatch.setattr(file, "_ROUND_ELEMENTS", 1)  # as many matrices a round as ranks
    ranks = run_on_ranks(on_rank, RANKS)
    for found, seen, _ in ranks:
        assert all(torch.equal(found[n], worked(n, whole(n))) for n in range(N))
        assert seen == [min(2, r) + min(2, 2 - r) for r in range(3)]
    for axis in ("dp", "tp"):
        assert sum(sent[axis] for _, _, sent in ranks) == 2 * N * R * C * 4 // 2
