"""Debug mode: ranks that disagree about a collective get one line that names it, in seconds, instead of waiting or wrong numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.verify.cases import Case
from parallel.mesh.collectives import all_reduce, all_to_all, sum_over
from parallel.mesh.debug_collectives import DEBUG, Call, Disagreement
from parallel.mesh.exchange import exchange_counts
from parallel.mesh.mesh import Axis, Degrees
from parallel.numerics.clip import gradient_norm
from parallel.process import process
from parallel.process.process import World
from tests.moe.experts.dispatch.test_dispatch import SETTINGS, experts_of, opened, run_once
from tests.support.ranks import run_on_ranks
from tests.support.tiny import start

LAYER = "layers.3"


def wrong_split(axis: Axis, rank: int) -> None:
    """Run an all_to_all in which rank 0 sends 3 rows and rank 1 expects 2. Without debug mode, gloo would return wrong numbers."""
    all_to_all(torch.ones(4, 5), axis, send=[[1, 3], [2, 2]][rank], receive=[[1, 2], [2, 2]][rank])


def wrong_split_backward(axis: Axis, rank: int) -> None:
    rows = torch.ones(4, 5, requires_grad=True)
    there = all_to_all(rows, axis, send=[2, 2], receive=[2, 2])
    if rank == 0:
        there.sum().backward()
    else:
        sum_over(torch.ones(4, 5), axis)


def wrong_dtype(axis: Axis, rank: int) -> None:
    all_reduce(torch.ones(4, dtype=[torch.float32, torch.bfloat16][rank]), axis)


def wrong_shape(axis: Axis, rank: int) -> None:
    exchange_counts(torch.ones(2, [3, 4][rank], dtype=torch.int64), axis)


def wrong_width(axis: Axis, rank: int) -> None:
    all_to_all(torch.ones(4, [5, 6][rank]), axis, send=[2, 2], receive=[2, 2])


def another_collective(axis: Axis, rank: int) -> None:
    sum_over(torch.ones(3), axis)
    if rank == 0:
        sum_over(torch.ones(3), axis)
    exchange_counts(torch.ones(2, 3, dtype=torch.int64), axis)


def another_layer(axis: Axis, rank: int) -> None:
    sum_over(torch.ones(3), replace(axis, label=f"layers.{3 + rank}"))


def missing(axis: Axis, rank: int) -> None:
    sum_over(torch.ones(7), axis)
    if rank == 0:
        sum_over(torch.ones(8), axis)
    time.sleep(4 if rank else 0)


WRONG: list[tuple[Callable[[Axis, int], None], list[str]]] = [
    (wrong_split, ["collective 1", "all_to_all over ep in layers.3", "rank 0 sends 3 rows to rank 1, which expects 2"]),
    (wrong_split_backward, ["collective 2", "rank 0 is at all_to_all over ep in layers.3 backward", "but rank 1 at all_reduce over ep"]),
    (wrong_dtype, ["collective 1", "rank 0 is at all_reduce", "float32", "but rank 1", "bfloat16", "layers.3"]),
    (wrong_shape, ["collective 1", "counts over ep in layers.3", "[2, 3]", "[2, 4]"]),
    (wrong_width, ["all_to_all over ep in layers.3", "[4, 5]", "[4, 6]"]),
    (another_collective, ["collective 2", "rank 0 is at all_reduce", "but rank 1 at counts"]),
    (another_layer, ["in layers.3", "in layers.4"]),
    (missing, ["rank 1 did not come within 2 s to collective 2", "rank 0 is at all_reduce over ep in layers.3 of [8]", "of [7]"]),
]


def _wrong_on_rank(rank: int, number: int) -> list[Any]:
    axis = process.connect(Degrees(dp=2, ep=2), World(rank, 2)).axis("ep", label=LAYER)
    began = time.perf_counter()
    try:
        WRONG[number][0](axis, rank)
    except Disagreement as error:
        return [str(error), time.perf_counter() - began]
    return ["", 0.0]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[wrong.__name__ for wrong, _ in WRONG])
def test_a_disagreement_is_one_line_on_every_rank_in_seconds(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "2")
    for rank, (said, seconds) in enumerate(run_on_ranks(_wrong_on_rank, 2, number, timeout_s=30)):
        if rank == 1 and WRONG[number][0] is missing:
            assert said == ""
            continue
        assert len(said.splitlines()) == 1 and all(part in said for part in WRONG[number][1]), said
        assert seconds < 5


def _of_a_step(rank: int, what: str) -> str:
    """Run a training step in which rank 1 differs in a sum of dense or experts' gradients or of norms (`what`). Return the error."""
    tiny = start(Case("switch", "ddp", 2, 1, 1, "fp32", tp=2 if what == "expert" else 1), rank)
    if what == "dense" and rank == 1:
        tiny.engine.backward = lambda loss, last: sum_over(torch.ones(3), tiny.mesh.axis("dp"))  # type: ignore[assignment,method-assign]
    if what == "expert" and rank == 1:
        tiny.engine.apart.pop()  # type: ignore[attr-defined]
    try:
        tiny.accumulate(0)
        families = ("dense", "router", "expert")[: 2 + (what != "norm" or rank)]
        gradient_norm([], families=families, world=tiny.mesh.axis("world"), device=torch.device("cpu"))
    except Disagreement as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dense", "rank 0 is at all_reduce over dp in the gradients from "),
        ("expert", "all_reduce over edp in the gradients from layers.1.moe.experts.w"),
        ("norm", "rank 0 is at all_reduce over world in the gradient norm of [2] float64, but rank 1 "),
    ],
)
def test_the_sums_of_a_step_have_names(what: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "5")
    for line in run_on_ranks(_of_a_step, 2, what, timeout_s=60):
        assert said in line and len(line.splitlines()) == 1, line


def _elsewhere_on_rank(rank: int) -> list[Any]:
    """Ranks 0 and 1 disagree on ep; ranks 2 and 3 wait for them on the world axis. Return [error, seconds until it came]."""
    mesh = process.connect(Degrees(dp=4, ep=2), World(rank, 4))
    began = time.perf_counter()
    try:
        if rank < 2:
            sum_over(torch.ones(2 + rank), mesh.axis("ep", label=LAYER))
        sum_over(torch.ones(1), mesh.axis("world"))
    except Disagreement as error:
        return [str(error), time.perf_counter() - began]
    return ["", 0.0]


def test_ranks_that_wait_elsewhere_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "30")
    found = run_on_ranks(_elsewhere_on_rank, 4, timeout_s=60)
    assert len({said for said, _ in found}) == 1 and "[2] float32" in found[3][0] and "[3] float32" in found[3][0]
    assert max(seconds for _, seconds in found) < 5


def _agreed_on_rank(rank: int) -> list[Any]:
    mesh = process.connect(Degrees(dp=2, ep=2, ep_inner=2), World(rank, 2))
    found: list[Any] = [(mesh.communicator.agreement is not None) == (DEBUG in os.environ)]
    for settings in SETTINGS.values():
        way = opened(mesh, label=LAYER, **settings)
        found += run_once(way, experts_of(mesh, None), rank, "drops", 2, torch.float32, False)
    tiny = start(Case("switch", "ddp", 2, 2, 1, "fp32"), rank)
    return [*found, tiny.step(0).total, tiny.step(1).total]


def test_debug_mode_changes_no_number_if_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of all dispatchers and of two training steps with DDP are equal with and without debug mode."""
    plain = run_on_ranks(_agreed_on_rank, 2, timeout_s=60)
    monkeypatch.setenv(DEBUG, "20")
    for off, on in zip(plain, run_on_ranks(_agreed_on_rank, 2, timeout_s=60), strict=True):
        assert off[0] and on[0] and off[-2:] == on[-2:]
        assert all(torch.equal(a, b) for a, b in zip(off[1:-2], on[1:-2], strict=True))


class Store(dict[str, bytes]):
    """A store for one process: each value that rank 0 writes also appears under rank 1's key."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()
        if key.endswith("/0"):
            self[key[:-1] + "1"] = value.encode()

    def wait(self, keys: list[str], timeout: Any) -> None:
        assert keys[0] in self

    def add(self, key: str, number: int) -> int:
        self[key] = str(int(self.get(key, b"0")) + number).encode()
        return int(self[key])

    def delete_key(self, key: str) -> None:
        self.pop(key)
        self.pop(key[:-1] + "1")

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self


def test_a_long_run_leaves_nothing_in_the_store() -> None:
    from parallel.mesh.debug_collectives import Agreement

    store = Store()
    agreement = Agreement(store, rank=0, timeout_s=1)
    for _ in range(50):
        agreement.check((0, 1), Call("all_reduce", "ep", "", [3], "float32"))
    assert len(store) <= 7


def test_a_rank_of_a_launcher_ends_with_that_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    from moe.launch import launch

    def disagree(*_: Any) -> int:
        assert os.environ[DEBUG] == "60"
        raise Disagreement("collective 3 differs")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(DEBUG, "")
    monkeypatch.delenv(DEBUG)
    monkeypatch.setattr(launch, "_train", disagree)
    monkeypatch.setattr(launch, "die_with_parent", lambda: None)
    assert launch.main(["switch_tiny", "--out", str(tmp_path), "--debug-collectives"]) == 1
    assert capfd.readouterr().err == "error on rank 1: collective 3 differs\n"


def test_nothing_is_compared_unless_asked() -> None:
    mesh = process.connect(Degrees(), World())
    assert mesh.communicator.agreement is None
    assert sum_over(torch.ones(2), mesh.axis("ep")).tolist() == [1, 1]
