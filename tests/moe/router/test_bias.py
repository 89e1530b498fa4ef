"""The selection bias: DeepSeek's rule, applied once a finished step to the load of the global batch, on every layout and after a resume."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.model.transformer import extra_state
from moe.parallelize.build import build
from moe.router.losses import updated_bias
from moe.train.loop.step import move_biases, validation_loss
from moe.train.start import state
from moe.train.start.state import Counters
from moe.verify.cases import Case
from moe.verify.plain.batches import batch
from parallel.data.deepspeed import load_deepspeed
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.precision import LossScale
from parallel.store import checkpoint
from parallel.store.stored import Reader
from tests.support.ranks import each_case, run_on_ranks
from tests.support.tiny import Tiny, start

RATE = 0.05
BIAS = "layers.1.router.bias"
RECIPE = {"train": {"global_batch": 12, "seed": 7}, "model": {"max_length": 10}}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    load_deepspeed()  # before ranks are forked, because it takes seconds


def tiny_of(
    rank: int, *, kind: str = "ddp", world: int = 1, ep: int = 1, m: int = 1, recompute: str = "none", rate: float | None = RATE
) -> Tiny:
    case = Case("switch", kind, world, ep, m, "fp32")
    return start(case, rank, recompute={"kind": recompute}, router={"bias_rate": rate})


def bias_of(tiny: Tiny) -> Tensor:
    return extra_state(tiny.model)[BIAS].clone()


def test_updated_bias_moves_against_the_load() -> None:
    """The bias moves by rate * sign(mean load - load), is not centered, and stays for an expert at the mean."""
    before = torch.tensor([0.5, 0.0, -0.25, 0.0])
    after = updated_bias(before, torch.tensor([10, 3, 7, 8]), 0.125)
    assert after.tolist() == [0.375, 0.125, -0.25, -0.125]
    assert torch.equal(updated_bias(before, torch.tensor([9, 9, 9, 9]), 0.125), before)
    third = torch.tensor([10**9 // 3 + 1, 10**9 // 3 + 1, 10**9 // 3 + 1])  # their mean is no fp32 number
    assert torch.equal(updated_bias(torch.zeros(3), third, 0.1), torch.zeros(3))


def test_the_bias_evens_the_load_of_skewed_scores() -> None:
    """Scores favor two of six experts. After 300 steps, the bias has evened the load to within 15 %."""
    generator = torch.Generator().manual_seed(2)
    lean, bias = torch.tensor([0.4, 0.3, 0.0, 0.0, 0.0, -0.2]), torch.zeros(6)
    largest = []
    for _ in range(300):
        score_TE = (torch.randn(600, 6, generator=generator) / 3 + lean).sigmoid()
        load_E = torch.bincount((score_TE + bias).topk(2).indices.flatten(), minlength=6)
        largest.append(load_E.max().item() / 200)
        bias = updated_bias(bias, load_E, 0.003)
    assert largest[0] > 1.9 and sum(largest[-50:]) / 50 < 1.15


def test_the_bias_is_the_same_on_every_layout() -> None:
    """After five steps with drops and jitter, each layout's bias is bitwise that of one process."""

    def work(rank: int, options: dict[str, Any]) -> tuple[Tensor, list[list[int]]]:
        tiny = tiny_of(rank, **options)
        choices = []
        for step in range(5):
            tiny.step(step)
            assert tiny.numbers is not None and tiny.numbers.layers[0].dropped > 0
            choices.append(tiny.numbers.layers[0].choices)
        return bias_of(tiny), choices

    want, choices = work(0, {})
    expected = torch.zeros(4)
    for counts in choices:  # counted before dropping, so they sum to all choices
        assert sum(counts) == 12 * 10
        expected = updated_bias(expected, torch.tensor(counts), RATE)
    assert torch.equal(want, expected) and want.any()
    two = [{"ep": 2, "m": 3, "recompute": "selective"}, {"ep": 1}, {"ep": 2, "kind": "zero1"}]
    found = chain(*each_case(work, 2, [({"world": 2} | options,) for options in two]))
    for bias, counted in (work(0, {"m": 3}), work(0, {"recompute": "full"}), *found):
        assert torch.equal(bias, want) and counted == choices


def test_the_counting_pass_of_a_global_balance_loss_moves_nothing() -> None:
    tiny = start(Case("switch", "ddp", 1, 1, 3, "fp32"), 0, router={"bias_rate": RATE, "balance_scope": "global_batch"})
    tiny.step(0)
    assert tiny.numbers is not None
    bias, choices = bias_of(tiny), tiny.numbers.layers[0].choices
    assert sum(choices) == 12 * 10 and torch.equal(bias, updated_bias(torch.zeros(4), torch.tensor(choices), RATE))


def test_a_skipped_step_and_an_evaluation_leave_the_bias() -> None:
    def work(rank: int) -> list[Tensor]:
        tiny = tiny_of(rank, world=2, ep=2)
        tiny.step(0)
        found = [bias_of(tiny)]
        with tiny.spoiled("layers.0.ffn.w1.weight", rank=1):
            assert not tiny.step(1).finite
        found.append(bias_of(tiny))
        validation_loss(tiny.executor, tiny.shard.of_batch(batch(2)), shard=tiny.shard, at_once=3)
        tiny.accumulate(3)
        return [*found, bias_of(tiny)]

    for first, *others in run_on_ranks(work, 2, timeout_s=60):
        assert first.any() and all(torch.equal(other, first) for other in others)


def test_a_router_without_a_bias_has_nothing_to_update() -> None:
    tiny = tiny_of(0, rate=None)
    move_biases(tiny.model, {layer.layer: torch.tensor(layer.choices) for layer in tiny.accumulate(0).layers})
    assert extra_state(tiny.model) == {}


def test_a_bias_is_fp32_whatever_the_weights_are() -> None:
    run = Case("switch", "ddp", 1, 1, 1, "bf16").run()
    router, precision = run.router.model_copy(update={"bias_rate": RATE}), run.precision.model_copy(update={"master": "bf16"})
    model, _ = build(
        check_run(run.model_copy(update={"router": router, "precision": precision}), 1), Mesh.of(Degrees()), device=torch.device("cpu")
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert [(t.dtype, t.device.type, t.tolist()) for t in extra_state(model).values()] == [(torch.float32, "cpu", [0.0] * 4)]


def commit(tiny: Tiny, folder: Path, steps: int) -> Path:
    counters = Counters(step=steps, updates=steps)
    return state.save(folder, tiny.engine, tiny.mesh, counters=counters, scale=LossScale(), recipe=RECIPE, tokenizer={}, data="", keep=2)


def reopen(tiny: Tiny, folder: Path) -> list[str]:
    told: list[str] = []
    assert state.resume(
        state.find(folder, tiny.mesh, log=print),
        tiny.engine,
        tiny.mesh,
        counters=Counters(),
        scale=LossScale(),
        data="",
        recipe=RECIPE,
        log=told.append,
    )
    return told


def test_a_checkpoint_with_a_bias_of_nan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint with NaN in the bias is refused, although its hashes are right. Without an older checkpoint, the run is refused."""
    monkeypatch.setattr(checkpoint, "finite", lambda tensor: True)
    tiny = tiny_of(0)
    extra_state(tiny.model)[BIAS].fill_(float("nan"))
    commit(tiny, tmp_path, 1)
    with pytest.raises(BadInput, match="got checkpoints, none of which verifies"):
        reopen(tiny_of(0), tmp_path)
    assert f"values of {BIAS}/buffer that are not finite" in capsys.readouterr().out


def test_a_bias_goes_through_a_checkpoint_to_any_layout(tmp_path: Path) -> None:
    """The bias is saved once, by its global name, and restored on every layout. On the layout that saved it, the next steps are bitwise
    equal.
    """

    def before(rank: int) -> tuple[Tensor, list[float]]:
        tiny = tiny_of(rank, world=2, ep=2)
        for step in range(3):
            tiny.step(step)
        path, bias = commit(tiny, tmp_path, 3), bias_of(tiny)
        reader = Reader(path)
        assert reader.names("buffer") == {BIAS: (4,)} and BIAS not in reader.names()
        return bias, [tiny.accumulate(3).loss, tiny.finish().total, tiny.accumulate(4).loss]

    def after(rank: int, options: dict[str, Any]) -> tuple[Tensor, list[float]]:
        tiny = tiny_of(rank, **options)
        assert reopen(tiny, tmp_path) == []
        return bias_of(tiny), [tiny.accumulate(3).loss, tiny.finish().total, tiny.accumulate(4).loss]

    (bias, numbers), _ = run_on_ranks(before, 2, timeout_s=60)
    assert bias.any()
    same, others = each_case(after, 2, [({"world": 2, "ep": 2},), ({"world": 2, "ep": 1, "kind": "zero1"},)])
    for found, going_on in (*same, *others, after(0, {}), after(0, {"m": 3, "recompute": "full"})):
        assert torch.equal(found, bias) and going_on == pytest.approx(numbers, rel=1e-5)
    assert all(going_on == numbers for _, going_on in same)


def test_a_bias_gained_or_lost_is_said(tmp_path: Path) -> None:
    told = []
    for i, (had, has) in enumerate([(None, RATE), (RATE, None)]):
        commit(tiny_of(0, rate=had), tmp_path / str(i), 1)
        told.append(reopen(tiny_of(0, rate=has), tmp_path / str(i)))
    assert told == [[f"the checkpoint has no {BIAS}: it starts at zero"], [f"this recipe has no {BIAS}: the checkpoint's is left out"]]
