"""Moving experts between ranks does not change a run: equal losses to the bit, and equal state by global name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.experts.dispatch.placement import balanced_placement, rank_loads
from moe.kernels.grouped import blocks, grouped_ffn
from moe.train.parts.rebalance import Rebalancer, exchange_experts, nothing_to_move
from moe.verify.cases import Case
from parallel.data.deepspeed import load_deepspeed
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh, divisors
from parallel.process import process
from parallel.process.process import World
from tests.moe.experts.dispatch.test_dispatch_training import held
from tests.support import trained
from tests.support.networks import network_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Tiny, hand_over, start


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], int]:
    load_E = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=24))
    return load_E, draw(st.sampled_from(divisors(len(load_E))))


@given(loads())
def test_balanced_placement_has_every_expert_once(case: tuple[list[int], int]) -> None:
    load_E, ranks = case
    placement = balanced_placement(load_E, ranks)
    assert sorted(placement) == list(range(len(load_E)))
    found = rank_loads(load_E, placement, ranks)
    assert len(found) == ranks and sum(found) == sum(load_E)
    assert placement == balanced_placement(load_E, ranks)
    heaviest = max(load_E)
    assert max(found) <= sum(load_E) / ranks + heaviest * len(load_E) / ranks


def test_the_heaviest_are_parted_and_ties_go_to_the_lower() -> None:
    load_E = [9, 8, 1, 1, 1, 1, 1, 2]
    assert balanced_placement(load_E, 2) == (0, 2, 3, 5, 1, 4, 6, 7) and rank_loads(load_E, range(8), 2) == [19, 5]
    assert rank_loads(load_E, balanced_placement(load_E, 2), 2) == [12, 12]
    assert balanced_placement([1, 1, 1, 1], 2) == (0, 2, 1, 3)
    with pytest.raises(BadInput, match="ranks: got 3, needed a divisor of 4, the number of experts; fix: use one of "):
        balanced_placement([1, 1, 1, 1], 3)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"experts": {"rebalance_every": 0}}, None),
        ({}, None),
        ({"degrees": {"dp": 4, "ep": 1}}, "every rank holds all experts"),
        ({"experts": {"rebalance_every": 3, "num_experts": 4}}, "one expert a rank"),
        ({"model": {"moe_every": 0}}, "the model is dense"),
    ],
)
def test_nothing_to_move_returns_the_reason(changed: dict[str, Any], why: str | None) -> None:
    run = Case("switch", "ddp", 4, 4, 1, "fp32", experts=8).run()
    values = {"experts": {"rebalance_every": 3}} | changed
    run = run.model_copy(update={name: getattr(run, name).model_copy(update=fields) for name, fields in values.items()})
    said = nothing_to_move(run)
    assert said is None if why is None else said is not None and why in said


NOW, THEN = (0, 1, 2, 3, 4, 5, 6, 7), (6, 1, 3, 0, 7, 5, 4, 2)


def _exchange_on_rank(rank: int) -> list[bool]:
    ep = process.connect(Degrees(dp=4, ep=4), World(rank, 4)).axis("ep")
    found = []
    for now, then in ((NOW, THEN), (THEN, NOW), (THEN, THEN[::-1]), (NOW, NOW)):
        stack = torch.tensor(now[2 * rank : 2 * rank + 2]).view(2, 1, 1) * torch.ones(2, 3, 5)
        moved = exchange_experts(stack, now, then, ep)
        found.append(moved[:, 0, 0].tolist() == list(then[2 * rank : 2 * rank + 2]) and bool((moved == moved[:, :1, :1]).all()))
    return found


def test_experts_arrive_at_their_places() -> None:
    assert run_on_ranks(_exchange_on_rank, 4, timeout_s=60) == [[True] * 4] * 4


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"degrees": {"ep": 2}}),
    "ep2 edp2": (4, {"degrees": {"ep": 2}}),
    "ep2 etp2": (4, {"degrees": {"ep": 2, "etp": 2}}),
    "ep4 hierarchical": (4, {"experts": {"num_experts": 8}, "dispatch": {"kind": "hierarchical", "node_size": 2}}),
    "ep2 adapters": (2, {"degrees": {"ep": 2}, "lora": {"rank": 2, "targets": ["experts"]}}),  # the experts' own weights are frozen
    "ep2 chunked": (2, {"degrees": {"ep": 2}, "dispatch": {"overlap_chunks": 2}}),
    "ep2 free": (2, {"degrees": {"ep": 2}, "experts": {"skip": 1, "zero": 1}}),
}


def train(tiny: Tiny, *, every: int, first: int = 0, steps: int = 5) -> tuple[list[float], list[dict[str, Any]]]:
    run = tiny.run.model_copy(update={"experts": tiny.run.experts.model_copy(update={"rebalance_every": every})})
    rebalancer, losses, events = Rebalancer(run, tiny.engine, tiny.mesh), [], []
    for step in range(first, first + steps):
        numbers = tiny.accumulate(step)
        losses.append(numbers.loss)
        tiny.finish()
        crowded = []
        for layer in numbers.layers:  # replace the load: the two experts at the first places have most of it, so that one of them moves
            now = rebalancer.placements.get(layer.layer, range(len(layer.choices)))
            crowded.append(replace(layer, choices=[10 if e in now[:2] else 1 for e in sorted(now)]))
        numbers.layers = crowded
        rebalancer.after_step(numbers, step=step + 1, updates=step + 1, record=events.append)
    return losses, events


def settings(name: str, *, clip: float | None = None) -> dict[str, Any]:
    """Return the layout's settings with d_model 32 and d_ff 64: the CPU's matrix library rounds by a row's offset in its cache line of 64
    bytes.
    """
    return {"optimizer": {"clip_norm": clip}, "model": {"d_model": 32, "d_ff": 64}} | LAYOUTS[name][1]


# engine, model, layouts. Moves of weights depend on the layout alone, so one engine is tested on all layouts. Optimizer states are
# sharded by each engine in its own way, over the ranks that hold the same experts (edp 2) or shards of them (etp 2).
MOVED: list[tuple[str, str, list[str]]] = [
    ("ddp", "gshard", ["ep2 etp2", "ep4 hierarchical", "ep2 adapters", "ep2 chunked", "ep2 free"]),
    ("zero1", "switch", ["ep2 edp2", "ep2 etp2", "ep2 adapters"]),
    ("zero3", "gshard", ["ep2 edp2"]),
    ("fsdp", "switch", ["ep2 edp2", "ep2 etp2"]),
]


@pytest.mark.parametrize("kind, model, layouts", MOVED, ids=[f"{kind}-{model}" for kind, model, _ in MOVED])
def test_training_that_moves_experts_has_the_same_losses_to_the_bit(kind: str, model: str, layouts: list[str]) -> None:
    """A run that moves experts has the losses, weights and moments of a run that does not, with drops, noise and dropout in the experts."""
    if kind.startswith("zero"):
        load_deepspeed()

    def work(rank: int, world: int) -> list[Any]:
        found = []
        for name in (n for n in layouts if LAYOUTS[n][0] == world):
            still, moving = (start(Case(model, kind, world, world, 1, "fp32"), rank, **settings(name)) for _ in range(2))
            losses, events = train(still, every=0, steps=3)
            again, moves = train(moving, every=1, steps=3)
            names = [n for n, layout in moving.engine.layouts.items() if layout.placement]
            found.append([losses == again, events == [], len(moves), len(names), held(still), held(moving)])
        return found

    for world in sorted({LAYOUTS[n][0] for n in layouts}):
        ranks = run_on_ranks(work, world, world, timeout_s=90)
        for number in range(len(ranks[0])):
            still, moving = ({}, {})
            for rank in ranks:
                same, silent, moves, names, a, b = rank[number]
                assert (same, silent, moves, names >= 2) == (True, True, 3, True), number
                still |= a
                moving |= b
            assert still.keys() == moving.keys()
            different = {n: float((still[n] - moving[n]).abs().max()) for n in still if not torch.equal(still[n], moving[n])}
            assert different == {}, number


@pytest.mark.parametrize("sum_of", ["the norm", "a token"])
def test_sums_over_the_experts_of_a_rank_are_the_same_to_rounding(sum_of: str) -> None:
    """The gradient norm, and a token's output with all_gather, are sums in the order of a rank's experts, so moves change rounding."""

    def work(rank: int) -> list[Any]:
        changed = settings("ep2", clip=0.5) if sum_of == "the norm" else settings("ep2") | {"dispatch": {"kind": "all_gather"}}
        tinies = [start(Case("gshard", "ddp", 2, 2, 1, "fp32"), rank, **changed) for _ in range(2)]
        return [train(tinies[0], every=0)[0], train(tinies[1], every=2)[0]]

    for still, moving in run_on_ranks(work, 2, timeout_s=60):
        assert moving == pytest.approx(still, rel=1e-6)


def test_experts_move_within_their_stages() -> None:
    """In a pipeline, experts move among the ranks of their stage, in the same way in each replica. All ranks report all moves."""

    def work(rank: int) -> list[Any]:
        case = Case("gshard", "ddp", 4, 2, 2, "fp32", pp=2, schedule="chimera", layers=5)
        tinies = [start(case, rank, **settings("ep2")) for _ in range(2)]
        still, (moving, events) = train(tinies[0], every=0)[0], train(tinies[1], every=2)
        return [still, moving, [event["largest_rank"] for event in events]]

    ranks = run_on_ranks(work, 4, timeout_s=60)
    for still, moving, events in ranks:
        assert moving == pytest.approx(still, rel=1e-6) and events == ranks[0][2]
    assert any("layer 1" in event for event in ranks[0][2]) and any("layer 3" in event for event in ranks[0][2])


def of_experts(order: tuple[int, ...], counts: list[int], dtype: torch.dtype) -> dict[int, list[Tensor]]:
    """Return expert -> [output, gradient of its rows, gradients of w1 and w2], computed with the experts in this order."""
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randn(count, 64, generator=draw).to(dtype) for count in counts]
    w1, w2 = torch.randn(len(counts), 64, 96, generator=draw) / 8, torch.randn(len(counts), 96, 64, generator=draw) / 10
    grads = [torch.randn(count, 64, generator=draw).to(dtype) for count in counts]
    x_RD, a, b = torch.cat([rows[e] for e in order]).requires_grad_(), *(w[list(order)].requires_grad_() for w in (w1, w2))
    there = [counts[e] for e in order]
    y_RD = grouped_ffn(x_RD, network_of("gelu", a, b), counts=there)
    y_RD.backward(torch.cat([grads[e] for e in order]))
    found = (y_RD.detach().split(there), x_RD.grad.split(there), a.grad, b.grad)  # type: ignore[union-attr]
    return {e: [part[place] for part in found] for place, e in enumerate(order)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_experts_results_are_bitwise_equal_in_the_same_block_and_close_in_another(dtype: torch.dtype) -> None:
    counts, order = [300, 340, 310, 1000], (0, 1, 2, 3)

    def members(order: tuple[int, ...]) -> set[tuple[int, ...]]:
        cut = blocks([counts[e] for e in order], row_bytes=(96 + 4 * 64) * dtype.itemsize, dtype=dtype, device=torch.device("cpu"))
        return {order[block.first : block.last] for block in cut}

    assert members(order) == {(0, 1, 2), (3,)} == members((3, 0, 1, 2)) and members((1, 3, 0, 2)) != members(order)
    want = of_experts(order, counts, dtype)
    for e, parts in of_experts((3, 0, 1, 2), counts, dtype).items():
        assert all(torch.equal(got, still) for got, still in zip(parts, want[e], strict=True))
    for e, parts in of_experts((1, 3, 0, 2), counts, dtype).items():
        for got, still in zip(parts, want[e], strict=True):
            difference = (got.float() - still.float()).norm() / still.float().norm()
            assert difference <= (2e-6 if dtype == torch.float32 else 2**-7)


def test_a_checkpoint_after_moves_can_be_resumed_without_moves(tmp_path: Path) -> None:
    """A run that saved after moves resumes with experts in the initial order. Its losses equal an uninterrupted run without moves."""

    def work(rank: int) -> list[Any]:
        case = Case("switch", "ddp", 2, 2, 1, "fp32")
        one, other = start(case, rank, **settings("ep2")), start(case, rank, train={"seed": 8}, **settings("ep2"))
        _, events = train(one, every=2, steps=4)
        hand_over(tmp_path, one, other, step=4)
        unbroken = start(case, rank, **settings("ep2"))
        whole, _ = train(unbroken, every=0, steps=7)
        rest, _ = train(other, every=1, first=4, steps=3)
        return [len(events), whole[4:], rest]

    for events, unbroken, resumed in run_on_ranks(work, 2, timeout_s=90):
        assert events == 2 and unbroken == resumed


@pytest.mark.parametrize("kind", ["zero", "fsdp"])
def test_a_resumed_run_that_moves_experts_and_clips_is_bitwise_equal(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped between two moves resumes to the same losses, norms, moves and checkpoint as an uninterrupted run."""
    if kind == "zero":
        trained.warm_zero()
    home, moves = trained.home(tmp_path, monkeypatch), {"num_experts": 8, "rebalance_every": 4}
    sections = {"degrees": {"ep": 2}, "experts": moves, "optimizer": {"clip_norm": 0.1}, "sharding": {"kind": kind}}
    run, whole, out = trained.recipe(home, **sections, train={"steps": 9, "save_every": 3}), tmp_path / "whole", tmp_path / "out"
    trained.train(run, whole, ranks=2)
    assert trained.train(run, out, ranks=2, before=trained.stop_at(5)) == [trained.STOPPED] * 2
    assert trained.checkpoints(out)[-1] == 6
    trained.train(run, out, ranks=2)
    moved, again = ([line for line in trained.lines(o, "event") if line["event"] == "rebalanced"] for o in (whole, out))
    assert moved[0]["step"] == 4 and moved[-1]["step"] > 6
    told = [[(line["step"], line["largest_rank"]) for line in found] for found in (moved, again)]
    assert told[0] == told[1] and trained.losses(out) == trained.losses(whole)
    norms = [[line["grad_norm"] for line in trained.lines(o)] for o in (out, whole)]
    assert norms[0] == norms[1]
    assert trained.tensors(out / "checkpoints/step-9") == trained.tensors(whole / "checkpoints/step-9")


PLACED = {"ranks": 2, "placements": {"1": [2, 0, 1, 3]}, "load": {"1": [5, 0, 3, 1]}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"placements": {"1": [2, 2, 1, 3]}},
        {"placements": {"1": [0, 1]}},
        {"placements": {"9": [0, 1, 2, 3]}},
        {"placements": {"x": [0, 1, 2, 3]}},
        {"load": {"1": [1, 2, 3, -4]}},
        {"load": {"1": 5}},
        {"load": []},
        {"ranks": None},
    ],
)
def test_places_that_no_run_has_are_refused_in_a_line(wrong: dict[str, Any]) -> None:
    run = Case("switch", "ddp", 2, 2, 1, "fp32").run()
    run = run.model_copy(update={"experts": run.experts.model_copy(update={"rebalance_every": 2})})
    model = torch.nn.Module()
    mesh = Mesh.of(Degrees(dp=2, ep=2))
    mover = Rebalancer(run, SimpleNamespace(module=model, layouts={}), mesh)  # type: ignore[arg-type]
    mover.resume(PLACED, where="step-4")
    assert mover.state() == PLACED and (mover.resume(None, where="step-4"), mover.state())[1] == PLACED
    with pytest.raises(BadInput, match="^step-4: got an impossible placement of experts, needed "):
        mover.resume(PLACED | wrong, where="step-4")
    other = Rebalancer(run, SimpleNamespace(module=model, layouts={}), Mesh.of(Degrees(dp=4, ep=4)))  # type: ignore[arg-type]
    other.resume(PLACED, where="step-4")  # with other ranks, the load is kept and the placements are not
    assert other.state() == {"ranks": 4, "placements": {}, "load": PLACED["load"]}
