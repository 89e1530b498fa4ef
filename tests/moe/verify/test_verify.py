"""`moe verify` lists every legal layout, passes correct code, and fails for faults that parallel training systems have had."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe.experts.layer
import moe.nn.attention
import moe.parallelize.engines
import moe.train.loop.step
from moe.checks.together import check_run
from moe.experts.dispatch.steps import Step
from moe.experts.experts import Experts
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.router.router import Router
from moe.verify import layouts, verify
from moe.verify.cases import LINES, MODELS, ROUTERS, SLICED, Case, attentions
from moe.verify.expected import NUMBERS, Expected, alone, compare, computed_in_background, own_order, reorderings, twin_of
from moe.verify.in_parts import in_parts
from moe.verify.kinds import cases
from moe.verify.layouts import compute
from moe.verify.rows.data import engine_cases, tiled_cases
from moe.verify.tape import Tape
from moe.verify.twin import Result, reference, updated
from moe.verify.where import Standard
from parallel.data import ddp
from parallel.data.ddp import DDP
from parallel.data.zero import Zero
from parallel.errors import BadInput
from parallel.kfac import grafted, kfac
from parallel.mesh.collectives import Started, sum_over
from parallel.mesh.grids import GRIDS
from parallel.mesh.layout import Layout
from parallel.numerics.clip import GradientNorm
from parallel.tensor import overlapped


def legal(case: Case) -> bool:
    try:
        check_run(case.run(), case.world)
    except BadInput:
        return False
    return True


@pytest.mark.parametrize("nproc", [1, 2, 4, 6])
def test_every_legal_layout_is_listed_once(nproc: int) -> None:
    found = [case for case in engine_cases() if case.world <= nproc]
    assert len(set(found)) == len(found)
    everything = {
        Case(model, kind, world, ep, microbatches, precision, recompute)
        for model in MODELS
        for kind in ("ddp", "zero1")
        for world in range(1, nproc + 1)
        for ep in range(1, world + 1)
        for microbatches in (1, 3)
        for precision in ("fp32", "bf16", "fp16")
        for recompute in ("none", "full", "selective")
        if recompute == "none" or (kind, precision, recompute) == ("ddp", "fp32", "full" if microbatches == 1 else "selective")
    }
    assert set(found) == {case for case in everything if legal(case)}


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_expert_layouts_are_legal_and_cover_every_pair(nproc: int) -> None:
    found = [case for case in cases(nproc, kinds=("expert",)) if case.model in MODELS | ROUTERS]
    assert len(set(found)) == len(found) and all(legal(case) for case in found)
    for world in {case.world for case in found}:
        here = [case for case in found if case.world == world]
        ways = {(case.ep, case.etp, case.rows) for case in here}
        assert {(case.model, case.ep, case.etp, case.rows) for case in here} == {
            (model, *way) for model in (MODELS | ROUTERS) for way in ways if model != "dense"
        }
        assert {case.ep * case.etp for case in here} == {n for n in range(1, world + 1) if world % n == 0}
        pairs = {(recompute, m) for recompute in ("none", "full", "selective") for m in (1, 3)}
        assert {(*way, *pair) for way in ways for pair in pairs} == {(c.ep, c.etp, c.rows, c.recompute, c.microbatches) for c in here}
    assert nproc < 4 or {case.rows for case in found} == {"all_to_all", "padded", "all_gather", "hierarchical", "overlapped"}


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_tiled_layouts_are_legal_and_meet_every_engine_and_split(nproc: int) -> None:
    found = [case for case in tiled_cases() if case.world <= nproc]
    assert len(set(found)) == len(found) and all(legal(case) for case in found)
    for world in {case.world for case in found}:
        here = [case for case in found if case.world == world]
        assert {(c.kind, c.precision) for c in here} >= {("ddp", "fp32"), ("ddp", "bf16"), ("zero1", "fp32"), ("fsdp", "fp32")}
        assert any(c.chunks > 1 for c in here) and {c.head_tiles for c in here} == {3}
    assert any(c.recompute == "selective" and c.microbatches == 3 for c in found)
    assert nproc < 2 or {(c.ep, c.etp) for c in found if c.world == 2 and c.tiles > 1} == {(1, 1), (2, 1), (1, 2)}


def test_reorderings_include_the_splits_of_every_16_bit_row_and_no_others() -> None:
    """The tolerance of a row comes from `reorderings`. They must contain the row's own splits of batch, head, loss and layers, and no
    tiles, chunks, parts or blocks that the row does not have, because these would widen its tolerance."""
    rows = [case for case in cases(8) if case.precision != "fp32"]
    assert {(c.head_tiles, c.chunks) for c in rows} == {(1, 1), (3, 7)} and {c.tiles for c in rows} == {1}
    for row in rows:
        twin = twin_of(row)
        measured = [alone(twin), *(case for case, _ in reorderings(twin))]
        parts = row.dp * row.microbatches * (row.replicas if row.kind == "dp" else 1) * {"2d": 2, "2.5d": 4, "3d": 4}.get(row.tensor, 1)
        ranks, blocks = (row.tp if row.tensor in LINES else 1), (2 if row.tensor in GRIDS else 1)
        own = replace(alone(twin), head_tiles=row.head_tiles * ranks, chunks=row.chunks, parts=ranks, blocks=blocks)
        assert replace(own, microbatches=parts) in measured, row
        cuts = {(c.head_tiles, c.chunks, c.parts, c.blocks) for c in measured}
        assert cuts == {(1, 1, 1, 1), (own.head_tiles, own.chunks, own.parts, own.blocks)}
    assert all(twin_of(c) == twin_of(replace(c, head_tiles=1, chunks=1)) for c in cases(2) if c.precision == "fp32")


@pytest.mark.usefixtures("three_steps")
def test_the_twin_of_kfac_finds_faults_of_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process equals the twin; with more damping, factors by the wrong side, or inverses that come too late it does not."""
    case = Case("kfac_at_once", "ddp", 1, 1, 1, "fp32", batch=3)
    want, damped, direct = reference(case), kfac.damped_inverse, grafted.direction
    assert max(compare(compute(case), want).values()) < 1e-5
    faults: list[tuple[Any, str, Any]] = [
        (kfac, "damped_inverse", lambda factor, *, damping: damped(factor, damping=1.1 * damping)),
        (grafted, "direction", lambda gradient, a, g: direct(gradient, a, torch.eye(g.shape[-1]).expand_as(g))),
        (kfac.Kfac, "has_inverses", property(lambda found: found.updates > 1)),
    ]
    for owner, name, fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            assert compare(compute(case), want)["update"] > 1e-5, name


@pytest.mark.usefixtures("three_steps")
def test_parts_and_slices_both_change_the_gradients_if_they_are_combined() -> None:
    """A reference run with Case.parts and Case.slices differs from runs with only one of them."""
    one = Case("dense", "ddp", 1, 1, 1, "bf16", batch=3, length=SLICED)
    both, parts, slices = (compute(replace(one, **cut)).gradients for cut in ({"parts": 2, "slices": 2}, {"parts": 2}, {"slices": 2}))
    assert all(any(not torch.equal(both[name], other[name]) for name in both) for other in (parts, slices))


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("attention", attentions())
def test_attention_merged_from_slices_equals_the_twin(attention: str) -> None:
    """With Case.slices, one process computes the numbers of the twin in fp32, for every method of sequence parallelism."""
    one = Case("packed" if attention == "striped" else "dense", "ddp", 1, 1, 1, "fp32", batch=3, length=SLICED)
    assert max(compare(compute(replace(one, slices=4, attention=attention)), reference(one)).values()) < 1e-5


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("attention", ["colossal", "striped"])
def test_a_row_in_16_bits_has_the_loss_of_its_own_order_on_one_process(attention: str) -> None:
    row = Case("gshard", "ddp", 2, 1, 1, "bf16", batch=4, length=SLICED, sp=2, attention=attention)
    ((_, ran),) = layouts.run_world([row], 2)
    assert not isinstance(ran, str)
    found = compare(ran[0], compute(own_order(row), delayed_as=twin_of(row)))
    assert found["loss"] < 1e-6 and found["gradient"] < 0.02  # if a token gets another expert, gradients differ by 0.05 or more


def test_in_parts_also_splits_the_sums_of_cross_attention() -> None:
    """In bf16, the output of cross-attention after `in_parts` is close to the whole sum but not equal."""
    case = Case("t5", "ddp", 1, 1, 1, "bf16")
    run = case.run()
    model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=torch.bfloat16)
    x_BLD, source_BSD = (torch.randn(3, length, 24, generator=torch.Generator().manual_seed(1)).bfloat16() for length in (5, 7))

    def crossed() -> Tensor:
        return model.layers[2].cross(x_BLD, Context.of(torch.zeros(3, 5, dtype=torch.int64)), source_BSD=source_BSD)

    whole = crossed()
    in_parts(model, replace(case, world=2, tp=2, tensor="1d").run(), first=0)
    assert not torch.equal(crossed(), whole) and torch.allclose(
        crossed().float(), whole.float(), rtol=0, atol=0.02 * whole.abs().max().item()
    )


@pytest.mark.usefixtures("three_steps")
def test_a_failing_16_bit_row_passes_only_if_it_equals_one_process_with_its_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row fails against the first reference. It passes with the numbers of `own_order`, and fails with numbers 0.1 % larger."""
    monkeypatch.setattr("moe.verify.expected.CUTS", (2,))
    row = Case("gshard", "ddp", 2, 1, 1, "bf16", batch=4, length=SLICED, sp=2, attention="colossal")
    expected = Expected.of(twin_of(row))
    own = compute(own_order(row), delayed_as=twin_of(row))
    other = replace(expected, result=replace(own, norm=own.norm * 1.5), tolerance=dict.fromkeys(NUMBERS, 1e-5))
    assert verify.judged(row, (own, None), other)["passed"]
    for wrong in (replace(own, norm=own.norm * 1.001), replace(own, losses=[loss * 1.001 for loss in own.losses])):
        assert not verify.judged(row, (wrong, None), other)["passed"]


@pytest.mark.parametrize("sp", [1, 2])
def test_a_failing_fp32_row_passes_only_with_the_twins_update_of_gradients_in_its_own_order(
    sp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam magnifies the rounding of small gradients, here by a twin whose weights are 2e-5 off. The row is compared again with the twin's
    update of one process's gradients. Weights or gradients that are 2e-5 off fail, also if that process has the same fault."""
    row = Case("dense", "ddp", 2, 1, 3, "fp32", batch=6, steps=1, sp=sp, attention="ulysses")
    expected, own = Expected.of(twin_of(row)), compute(own_order(row), delayed_as=twin_of(row))
    off = {name: weight * (1 + 2e-5) for name, weight in expected.result.weights.items()}
    magnified = replace(expected, result=replace(expected.result, weights=off))
    again = verify.judged(row, (own, None), magnified)
    assert again["passed"] and again["update"] < 1e-6
    for what in ("weights", "gradients"):
        wrong = replace(own, **{what: {name: tensor * (1 + 2e-5) for name, tensor in getattr(own, what).items()}})
        assert not verify.judged(row, (wrong, None), expected)["passed"]
        with monkeypatch.context() as shared:
            shared.setattr("moe.verify.expected.compute", lambda *args, wrong=wrong, **named: wrong)
            assert not verify.judged(row, (wrong, None), expected)["passed"]


@pytest.mark.parametrize(("size", "passes"), [(2e-7, True), (5e-6, False)])
def test_a_failing_fp32_row_with_sp_passes_only_with_rounding_in_its_gradients(size: float, passes: bool) -> None:
    """The gradient nearest 0 of each parameter is off by `size` of the largest, and the weights are the twin's with these. 5e-6 is
    within 1e-5, but more than twice the rounding of one process."""
    row = Case("dense", "ddp", 2, 1, 1, "fp32", batch=6, steps=1, sp=2, attention="ulysses")
    expected, own = Expected.of(twin_of(row)), compute(own_order(row), delayed_as=twin_of(row))
    gradients = {name: gradient.clone() for name, gradient in own.gradients.items()}
    for gradient in gradients.values():
        gradient.view(-1)[gradient.abs().argmin()] += size * gradient.abs().max()
    moved = replace(own, gradients=gradients, weights=own.weights | updated(row, gradients))
    assert not all(compare(moved, expected.result)[number] <= 1e-5 for number in NUMBERS)
    assert verify.judged(row, (moved, None), expected)["passed"] == passes


@pytest.mark.usefixtures("three_steps")
def test_checks_accept_every_tensor_parallel_row_on_one_process_in_its_own_order() -> None:
    """A row that fails is computed again in this form, so that a refusal would end `moe verify` (adafactor refuses tiles of the head)."""
    for one in dict.fromkeys(map(own_order, cases(8, kinds=("tensor",)))):
        check_run(one.run(), 1)


def test_a_background_process_computes_the_same_expected_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.verify.expected.CUTS", (3,))
    twins = [Case("dense", "ddp", 1, 1, 1, precision, batch=3) for precision in ("fp32", "fp16")]
    for twin, got in zip(twins, computed_in_background(twins), strict=True):
        want = Expected.of(twin)
        assert got.twin == twin and got.tolerance == want.tolerance and max(compare(got.result, want.result).values()) == 0
        assert (got.bound is None) == (want.bound is None)
        if got.bound is not None and want.bound is not None:
            assert got.bound.share(want.result) == want.bound.share(want.result)


def test_kinds_there_are_not_are_refused() -> None:
    with pytest.raises(BadInput, match="--kinds: got pipelines, needed comma-separated kinds: data, expert, tensor"):
        cases(2, kinds=("data", "pipelines"))


def judged(tmp_path: Path, only: str, *, nproc: int = 2, kinds: str = "data") -> tuple[int, list[dict[str, Any]], list[str]]:
    """Run `moe verify`. Return (exit code, table rows, printed lines)."""
    said: list[str] = []
    code = verify.main(nproc=nproc, kinds=kinds, only=only, json=str(tmp_path / "verify.json"), say=said.append)
    return code, json.loads((tmp_path / "verify.json").read_text())["rows"], said


def two_processes() -> list[Case]:
    """A part of the cases of `moe verify --nproc 2`: every engine in fp32 with ep, and in one of the 16-bit dtypes with micro-batches
    (tests/moe/train/loop/test_precision.py has both dtypes), and every other option of layouts at least once.
    """
    rows = cases(2, kinds=("data",))
    exact = [c for c in rows if c.layout == "deepseek dp2 ep2 m1" and c.precision == "fp32"]
    in_fp16 = ("fsdp", "zero1", "zero3", "zero2+cpu")
    rounded = [c for c in rows if c.layout == "dense dp2 ep1 m3" and c.precision == ("fp16" if c.kind in in_fp16 else "bf16")]
    words = [c for c in rows if c.layout.startswith("deepseek dp2 ep2 m1 full") and c.kind in ("fsdp", "zero3")]
    words += [c for c in rows if c.layout == "dense dp2 ep1 m3 selective tiles5/3"]
    words += [c for c in rows if c.layout == "deepseek dp2 ep2 m1 tiles5/3 chunks7" and c.kind == "fsdp"]
    words += [c for c in rows if c.layout in ("deepseek dp2 ep2 m3 padded", "deepseek dp2 ep2 m1 overflow")]
    copied = [c for c in rows if c.layout == "dense dp1 tp2-copied ep1 m3" and c.precision == "fp32"]
    words += [c for c in copied if c.kind in ("fsdp", "zero2")]  # two ranks have equal shards, of which the gradient norm counts one
    shared = [c for c in cases(2, kinds=("tensor",)) if c.precision == "fp32"]
    cut = [c for c in shared if (c.layout, c.kind) in (("dense dp1 tp2-1d ep1 m3", "zero3"), ("gshard dp1 tp2-1d ep2 m1", "fsdp"))]
    ways = (("gshard", "full", 1), ("dense", "none", 5))
    cut += [c for c in shared if c.kind == "ddp" and (c.model, c.recompute, c.tiles) in ways]
    return exact + rounded + words + cut


@pytest.mark.long
@pytest.mark.usefixtures("three_steps")
def test_two_processes_give_the_numbers_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = two_processes()
    monkeypatch.setattr(verify, "cases", lambda nproc, kinds: chosen)
    monkeypatch.setattr("moe.verify.expected.CUTS", ())  # only the rows' own micro-batches: fewer orders of sums make a narrower tolerance
    code, rows, said = judged(tmp_path, "")
    assert code == 0 and len(rows) == len(chosen) and all(row["passed"] for row in rows)
    kinds = {"ddp", "fsdp", "zero1", "zero2", "zero3", "zero1+cpu", "zero2+cpu", "zero3+cpu-all"}
    assert {r["kind"] for r in rows if r["precision"] == "fp32"} >= kinds
    assert {r["kind"] for r in rows if r["precision"] != "fp32"} >= kinds and {r["precision"] for r in rows} == {"fp32", "bf16", "fp16"}
    assert {c.kind for c in chosen if c.padded} == {c.kind for c in chosen if c.overflow} == {"ddp", "fsdp", "zero1"}
    assert all(0 <= row[number] <= 1e-5 for row in rows for number in NUMBERS if row["precision"] == "fp32")
    assert sum(line.rstrip().endswith("pass") for line in said) == len(rows)


@pytest.mark.usefixtures("three_steps")
def test_every_router_on_two_processes_gives_the_numbers_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the routers with experts on both ranks, half with hidden units on both (tests/moe/router has each on two more layouts)."""
    ways = ("dp2 ep2 m3 overlapped full", "dp2 ep1 etp2 m1 selective")
    chosen = [case for case in cases(2, kinds=("expert",)) if case.layout.endswith(ways)]
    monkeypatch.setattr(verify, "cases", lambda nproc, kinds: chosen)
    code, rows, _ = judged(tmp_path, "")
    assert code == 0 and len(rows) == len(MODELS) - 1 + len(ROUTERS) and all(row["passed"] for row in rows)


@pytest.mark.parametrize(
    "only, kinds",
    [
        ("gshard dp2 ep1 m1 zero1 fp16", "data"),
        ("pipedream pp2 deepseek dp1 ep1 m1 ddp bf16", "pipeline"),  # its gradients are computed at older weights
    ],
)
@pytest.mark.usefixtures("three_steps")
def test_lower_precision_stays_within_what_rounding_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: str, kinds: str) -> None:
    monkeypatch.setattr("moe.verify.expected.CUTS", (2,))  # fewer orders of sums make a narrower tolerance
    code, rows, said = judged(tmp_path, only, kinds=kinds)
    assert code == 0 and [row["passed"] for row in rows] == [True]
    assert any("twice the effect of rounding" in line for line in said)
    tolerances = json.loads((tmp_path / "verify.json").read_text())["tolerances"]
    assert all(1e-5 <= value < 0.2 for numbers in tolerances.values() for value in numbers.values())


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize(
    ("model", "cut"),
    [("gshard", {"parts": 2}), ("gshard", {"parts": 2, "first_part": 1}), ("gshard", {"blocks": 2}), ("t5", {"parts": 2})],
    ids=str,
)
def test_one_process_that_sums_in_the_order_of_ranks_equals_the_twin_in_fp32(model: str, cut: dict[str, int]) -> None:
    twin = twin_of(Case(model, "ddp", 1, 1, 1, "fp32"))
    assert max(compare(layouts.compute(replace(alone(twin), **cut)), reference(twin)).values()) <= 1e-5


@pytest.mark.usefixtures("five_steps")
def test_one_process_with_delayed_as_equals_the_twin_of_pipedream() -> None:
    """compute(delayed_as=twin) gives the losses of the twin, with gradients at older weights. Without delayed_as they differ."""
    twin = twin_of(next(c for c in cases(4) if c.layout == "pipedream pp4 deepseek dp1 ep1 m1" and c.precision == "fp32"))
    delayed = compare(layouts.compute(alone(twin), delayed_as=twin), reference(twin))
    assert max(delayed.values()) <= 1e-5
    assert compare(layouts.compute(alone(twin)), reference(twin))["ten_step"] > 1e-4


@pytest.mark.usefixtures("three_steps")
def test_first_deviation_names_the_cross_attention_of_an_encoder_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-attention of the first decoder layer is multiplied by 1.01. Without that, nothing deviates."""
    case = Case("t5", "ddp", 1, 1, 1, "fp32", batch=2)
    standard, real = Standard(Expected.of(case)), moe.nn.attention.softmax_core

    def across(*given: Any, bias: Any, **rest: Any) -> Tensor:
        return real(*given, bias=bias, **rest) * (1.01 if bias is None else 1)

    for core, where in ((real, "None"), (across, "layers.2.cross (forward of step 0, micro-batch 0 of data rank 0, 8 of 28 tokens")):
        monkeypatch.setattr(moe.nn.attention, "softmax_core", core)
        tape = Tape.of(case)
        assert str(standard.first_deviation(tape, compute(case, tape=tape), case)).startswith(where)


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("schedule", ["chimera", "dualpipe_v"])
def test_recompute_in_a_two_way_pipeline_names_nothing_if_nothing_is_wrong(schedule: str) -> None:
    """A rank recomputes a layer after other micro-batches have passed its other layers: its outputs are recorded as this micro-batch's."""
    case = next(c for c in cases(2, kinds=("pipeline",)) if (c.schedule, c.model, c.recompute) == (schedule, "dense", "full"))
    ((_, ran),) = layouts.run_world([case], 2, taped=True)
    assert not isinstance(ran, str) and ran[1] is not None
    assert Standard(Expected.of(twin_of(case))).first_deviation(ran[1], ran[0], case) is None


def test_only_without_a_matching_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--only: got no such layout, needed a part of a row's text"):
        judged(tmp_path, "no such layout")


# --- rows are printed one by one ------------------------------------------------------------------------------------------

THREE = [Case("dense", kind, 2, 1, m, "fp32") for kind, m in (("ddp", 1), ("ddp", 3), ("fsdp", 1))]


def on_the_second_layout(patch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Make every rank call `happens` before it computes the second case of THREE."""
    real = layouts.compute
    patch.setattr(layouts, "compute", lambda case, **rest: (happens() if case == THREE[1] else None, real(case, **rest))[1])
    patch.setattr(verify, "cases", lambda nproc, kinds: THREE)


@pytest.mark.usefixtures("three_steps")
def test_a_row_is_flushed_before_the_next_layout_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second layout, ranks wait for the flush of the first row. Without it they would reach the time limit."""
    first = tmp_path / "first"

    class Pipe(io.StringIO):
        def flush(self) -> None:
            if "pass" in self.getvalue():
                first.touch()

    def wait() -> None:
        while not first.exists():
            time.sleep(0.01)

    on_the_second_layout(monkeypatch, wait)
    monkeypatch.setattr(layouts, "LIMIT_S", 30.0)
    monkeypatch.setattr("sys.stdout", said := Pipe())
    assert verify.main(nproc=2) == 0
    assert [line.split()[-1] for line in said.getvalue().splitlines()[1:4]] == ["pass"] * 3


@pytest.mark.parametrize("end", [signal.SIGKILL, None])
@pytest.mark.usefixtures("three_steps")
def test_ranks_that_die_or_hang_fail_only_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals | None) -> None:
    def one_rank_ends() -> None:
        if dist.get_rank() == 1:
            time.sleep(60) if end is None else os.kill(os.getpid(), end)

    on_the_second_layout(monkeypatch, one_rank_ends)
    monkeypatch.setattr(layouts, "LIMIT_S", 10.0)
    code, rows, said = judged(tmp_path, "")
    assert code == 1 and [(r["layout"], r["kind"], r["passed"]) for r in rows] == [(c.layout, c.kind, c is not THREE[1]) for c in THREE]
    assert ("rank 1 was still running" if end is None else "rank 1 gave no result") in rows[1]["error"]
    assert rows[1]["error"] in said and "first deviation in dense dp2 ep1 m3 ddp fp32: its ranks failed" in said


# --- compare --------------------------------------------------------------------------------------------------------------


def result() -> Result:
    gradients = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[4.0], [8.0]])}
    return Result([2.0, 1.5, 1.0], 0.5, 10.0, gradients, {name: g * 3 for name, g in gradients.items()})


def test_equal_results_differ_by_nothing() -> None:
    assert compare(result(), result()) == dict.fromkeys(NUMBERS, 0.0)


@pytest.mark.parametrize(
    "number, change",
    [
        ("loss", lambda r: replace(r, balance=0.6)),
        ("gradient", lambda r: replace(r, gradients=r.gradients | {"a": torch.tensor([1.0, -1.6])})),
        ("norm", lambda r: replace(r, norm=8.0)),
        ("update", lambda r: replace(r, weights=r.weights | {"b": torch.tensor([[12.0], [19.2]])})),
        ("ten_step", lambda r: replace(r, losses=[2.0, 1.5, 0.8])),
    ],
)
def test_each_number_sees_its_own_and_is_relative(number: str, change: Callable[[Result], Result]) -> None:
    found = compare(change(result()), result())
    assert found == pytest.approx(dict.fromkeys(NUMBERS, 0.0) | {number: 0.2})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_deviation_of_nan_or_inf_is_infinite(bad: float) -> None:
    """In every position, because Python's max() ignores NaN in some positions."""
    for losses in ([bad, 1.5, 1.0], [2.0, bad, 1.0], [2.0, 1.5, bad]):
        assert compare(replace(result(), losses=losses), result())["ten_step"] == math.inf
    assert compare(replace(result(), balance=bad), result())["loss"] == math.inf
    assert compare(replace(result(), norm=bad), result())["norm"] == math.inf
    for name in ("a", "b"):
        spoiled = result().gradients | {name: torch.full_like(result().gradients[name], bad)}
        assert compare(replace(result(), gradients=spoiled), result())["gradient"] == math.inf
        assert compare(replace(result(), weights=spoiled), result())["update"] == math.inf


def test_a_gradient_that_is_missing_or_of_another_shape_is_infinitely_wrong() -> None:
    missing = replace(result(), gradients={"a": result().gradients["a"]})
    assert compare(missing, result()) == dict.fromkeys(NUMBERS, math.inf)
    other = replace(result(), gradients=result().gradients | {"b": torch.tensor([4.0, 8.0])})
    assert compare(other, result())["gradient"] == math.inf


# --- faults ---------------------------------------------------------------------------------------------------------------


def on_ranks() -> bool:
    return dist.is_initialized()


def expert_gradient_times_ep(patch: pytest.MonkeyPatch) -> None:
    """Fault of averaging experts' gradients over edp ranks instead of dividing their sum by dp (DeepSpeed issue 5259)."""
    real = ddp.DDP.reduce

    def wrong(engine: ddp.DDP) -> None:
        real(engine)
        for name, grad in engine.gradients():
            if "ep" in engine.layouts[name].cut_by():
                grad.mul_(engine.mesh.axis("ep").size)

    patch.setattr(ddp.DDP, "reduce", wrong)


def copies_that_saw_the_same_tokens_summed(patch: pytest.MonkeyPatch) -> None:
    """Fault of summing gradients over all ranks that have a copy of a weight, although some have computed the same gradient."""
    patch.setattr(Layout, "summed_over", lambda layout: layout.copies())


def gradients_of_inputs_not_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """Fault of leaving out the backward all-reduce of Megatron's f (arXiv 1909.08053, section 3)."""
    patch.setattr(overlapped, "start_sum", lambda x, axis: Started(x, None))


def every_shard_counted(patch: pytest.MonkeyPatch) -> None:
    """Fault of a gradient norm that counts equal shards on several ranks more than once."""
    patch.setattr(Layout, "shard_counts", lambda layout, mesh: layout.counts_on(mesh.axis("pp").index))


def routers_not_summed_over_cut_tokens(patch: pytest.MonkeyPatch) -> None:
    """Fault of not summing routers' gradients over tp, although each tp rank routes only a part of the tokens."""
    patch.setattr(Layout, "summed_over", lambda layout: tuple(axis for axis in layout.copies() if axis != "tp"))


def copies_of_experts_never_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ddp.Buckets, "_start", lambda self, bucket: None)


def dense_gradient_averaged(patch: pytest.MonkeyPatch) -> None:
    real = ddp._sum_bucket

    def wrong(axis: Any, bucket: Any) -> Any:
        bucket.buffer().div_(axis.size)
        return real(axis, bucket)

    patch.setattr(ddp, "_sum_bucket", wrong)


def norms_of_ranks_averaged(patch: pytest.MonkeyPatch) -> None:
    """Fault of averaging the gradient norms of ranks (DeepSpeed issue 8475)."""

    def wrong(owned: Any, *, families: tuple[str, ...], world: Any, device: torch.device) -> GradientNorm:
        mine = torch.stack([grad.norm() for _, grad in owned]).norm().double()
        return GradientNorm(float(sum_over(mine, world)) / world.size, {})

    patch.setattr(moe.train.loop.step, "gradient_norm", wrong)


def balance_loss_lost_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    real = moe.experts.layer.join

    def wrong(x: Tensor, loss: Tensor, *, scale: float) -> Tensor:
        return x if on_ranks() and dist.get_rank() == 1 else real(x, loss, scale=scale)

    patch.setattr(moe.experts.layer, "join", wrong)


def jitter_drawn_by_each_rank_for_itself(patch: pytest.MonkeyPatch) -> None:
    real = Context.of

    def wrong(tokens_BL: Tensor, **rest: Any) -> Context:
        return real(tokens_BL, **rest | {"first_sequence": 0})

    patch.setattr(Context, "of", staticmethod(wrong))


def capacity_over_what_a_rank_holds(patch: pytest.MonkeyPatch) -> None:
    real = Router._num_groups
    patch.setattr(Router, "_num_groups", lambda self, t, s: 1 if on_ranks() else real(self, t, s))


def experts_born_on_the_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    real = Experts.hold

    def wrong(self: Experts, held: range, *, hidden: slice | None = None) -> None:
        first = (held.start + len(held)) % self.num_experts
        real(self, range(first, first + len(held)), hidden=hidden)

    patch.setattr(Experts, "hold", wrong)


def rows_brought_back_in_the_order_they_lie(patch: pytest.MonkeyPatch) -> None:
    real = Step.back

    def wrong(self: Step, rows: Tensor, kernels: Any) -> Any:
        return real(replace(self, order_R=torch.arange(len(self.order_R))), rows, kernels)

    patch.setattr(Step, "back", wrong)


def weight_decay_on_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moe.parallelize.engines, "decays", lambda name, parameter: True)


def experts_left_out_of_clipping(patch: pytest.MonkeyPatch) -> None:
    real = DDP.step

    def wrong(self: DDP, lr: float, *, factor: float = 1.0) -> None:
        torch._foreach_mul_([p.grad for n, p in self.parameters.items() if n not in self.apart and p.grad is not None], factor)
        real(self, lr)

    patch.setattr(DDP, "step", wrong)


def gradients_of_the_step_before_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DDP, "drop_gradients", lambda self: None)


def engine_divides_by_dp(patch: pytest.MonkeyPatch) -> None:
    real = Zero.backward

    def wrong(self: Zero, loss: torch.Tensor, *, last: bool) -> None:
        real(self, loss, last=last)
        if last:
            for _, part in self._partitions():
                part.div_(self.mesh.axis("dp").size)

    patch.setattr(Zero, "backward", wrong)


def loss_turns_nan_half_way(patch: pytest.MonkeyPatch) -> None:
    real = layouts.accumulate

    def wrong(*args: Any, step: int, **rest: Any) -> Any:
        numbers = real(*args, step=step, **rest)
        return replace(numbers, loss=math.nan) if on_ranks() and step >= 1 else numbers

    patch.setattr(layouts, "accumulate", wrong)


def one_rank_fails(patch: pytest.MonkeyPatch) -> None:
    real = layouts.accumulate

    def wrong(*args: Any, step: int, **rest: Any) -> Any:
        if on_ranks() and dist.get_rank() == 1 and step == 2:
            raise ArithmeticError("the second rank gives up")
        return real(*args, step=step, **rest)

    patch.setattr(layouts, "accumulate", wrong)


@cache
def as_it_should_be(twin: Case) -> Standard:
    """The Standard of a reference case. It is computed once, before a fault is patched in."""
    return Standard(Expected.of(twin))


EVERY = set(NUMBERS)
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, set[str]]] = [
    # (function that patches in a fault, layout in which it shows, numbers that must exceed their tolerance)
    (expert_gradient_times_ep, "switch dp2 ep2 m1 ddp fp32", {"gradient", "norm", "update"}),
    (copies_of_experts_never_summed, "deepseek dp1 tp2-copied ep1 m3 ddp fp32", {"gradient", "norm", "update", "ten_step"}),
    (copies_that_saw_the_same_tokens_summed, "dense dp1 tp2-copied ep1 m3 ddp fp32", {"gradient", "norm"}),
    (copies_that_saw_the_same_tokens_summed, "dense dp1 tp2-copied ep1 m3 fsdp fp32", {"gradient", "norm"}),
    (copies_that_saw_the_same_tokens_summed, "dense dp1 tp2-copied ep1 m3 zero3 fp32", {"gradient", "norm"}),
    (every_shard_counted, "dense dp1 tp2-copied ep1 m3 zero3 fp32", {"norm"}),
    (gradients_of_inputs_not_summed_over_tp, "dense dp1 tp2-1d ep1 m3 ddp fp32", {"gradient", "norm"}),
    (routers_not_summed_over_cut_tokens, "deepseek dp1 tp2-copied ep1 m3 ddp fp32", {"norm", "update"}),
    (dense_gradient_averaged, "dense dp2 ep1 m3 ddp fp32", {"gradient", "norm"}),
    (norms_of_ranks_averaged, "switch dp2 ep2 m1 ddp fp32", {"norm"}),
    (balance_loss_lost_on_one_rank, "switch dp2 ep2 m1 ddp fp32", {"gradient", "ten_step"}),
    (jitter_drawn_by_each_rank_for_itself, "switch dp2 ep1 m1 ddp fp32", {"loss", "gradient", "ten_step"}),
    (capacity_over_what_a_rank_holds, "gshard dp2 ep2 m1 ddp fp32", EVERY),
    (experts_born_on_the_wrong_rank, "switch dp2 ep2 m1 ddp fp32", EVERY),
    (rows_brought_back_in_the_order_they_lie, "gshard dp2 ep2 m1 ddp fp32", EVERY),
    (weight_decay_on_everything, "dense dp2 ep1 m1 ddp fp32", {"update"}),
    (experts_left_out_of_clipping, "switch dp2 ep2 m3 ddp fp32", {"update"}),
    (gradients_of_the_step_before_kept, "switch dp1 ep1 m1 ddp fp32", {"ten_step"}),
    (engine_divides_by_dp, "dense dp2 ep1 m1 zero1 fp32", {"gradient", "norm"}),
    (loss_turns_nan_half_way, "dense dp2 ep1 m1 ddp fp32", {"ten_step"}),
    (one_rank_fails, "dense dp2 ep1 m1 ddp fp32", EVERY),
]


CLEAN = (
    "dense dp2 ep1 m1 fsdp", "coefficients dp2 ep2 m3 zero3", "spectral dp2 ep2 m3 ddp", "dense dp1 tp2-1d ep1 m3 ddp",
    "gshard dp1 tp2-sliced ep2 m1 ddp", "stretched dp1 tp2-dtensor ep2 m1 ddp", "pipedream pp2 gshard dp1 ep1 m1 ddp",
    "coefficients dp1 ep2 sp2 zigzag m1 ddp", "t5 dp2 ep2 m1 full zero1",
)  # fmt: skip


@pytest.mark.usefixtures("three_steps")
def test_no_line_of_a_clean_run_deviates() -> None:
    """Each line of the recordings is within its bound: first weights, outputs of all modules, gradients, moments and weights."""
    chosen = [c for c in cases(2) if c.precision == "fp32" and c.world == 2 and f"{c.layout} {c.kind}" in CLEAN]
    assert {f"{c.layout} {c.kind}" for c in chosen} == {*CLEAN}
    for case, ran in layouts.run_world(chosen, 2, taped=True):
        assert not isinstance(ran, str) and ran[1] is not None, ran
        assert Standard(Expected.of(twin_of(case))).first_deviation(ran[1], ran[0], case) is None, case.layout


def test_first_weights_and_lost_positions_are_named() -> None:
    """The weights before the first step come before the outputs, and a token that no rank has before both."""
    case = Case("dense", "ddp", 1, 1, 1, "fp32", steps=1)
    standard, tape = Standard(Expected.of(case)), Tape.of(case)
    ran = compute(case, tape=tape)
    tape.first["layers.1.ffn.w1.weight"] = tape.first["layers.1.ffn.w1.weight"] * 1.5
    assert str(standard.first_deviation(tape, ran, case)).startswith("layers.1.ffn.w1.weight (weight before the first step: ")
    places_T, values, first = tape.forward[0, "embedding"][0]
    tape.forward[0, "embedding"][0] = places_T[1:], values[1:], first
    assert str(standard.first_deviation(tape, ran, case)).startswith("positions (forward of step 0, no rank has token 0 of the batch")


def test_repeated_positions_are_the_first_deviation() -> None:
    """A tape holds one output for each position, so it cannot compare tokens with equal positions."""
    case, tape = Case("dense", "ddp", 1, 1, 1, "fp32"), Tape()
    tape.note(0, "embedding", torch.tensor([3, 4, 3]), torch.zeros(3, 5))
    found = Standard(Expected(case, result(), {})).first_deviation(tape, result(), case)
    assert found is not None and found.name == "positions" and found.place == "several tokens of embedding have the same"


# faults for which the first deviation is also searched, which needs a second run; `python -m tests.mutations` does so for many more
PLACED = {expert_gradient_times_ep, every_shard_counted, loss_turns_nan_half_way}


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("fault, only, numbers", FAULTS, ids=[f"{f.__name__} {only.split(' fp32')[0]}" for f, only, _ in FAULTS])
def test_a_fault_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], only: str, numbers: set[str]
) -> None:
    (case,) = (c for c in cases(2, kinds=("data", "tensor")) if only in f"{c.layout} {c.kind} {c.precision}")
    standard = as_it_should_be(twin_of(case))
    if placed := fault in PLACED or case.kind == "fsdp":
        assert standard.tape.steps and standard.allowed
    elif fault is not one_rank_fails:
        monkeypatch.setattr(verify, "_say_where", lambda *_: None)
    monkeypatch.setattr(verify, "Expected", SimpleNamespace(of=lambda twin: as_it_should_be(twin).expected))
    monkeypatch.setattr(verify, "Standard", lambda expected: as_it_should_be(expected.twin))
    fault(monkeypatch)
    code, (row,), said = judged(tmp_path, only, kinds="data,tensor")
    wrong = {number for number in NUMBERS if row[number] is None or row[number] > 1e-5}  # None: an infinite deviation
    assert code == 1 and not row["passed"] and numbers <= wrong, row
    assert any(line.rstrip().endswith("FAIL") for line in said)
    assert not placed or not row["where"].startswith("nothing"), row["where"]
    if fault is one_rank_fails:
        assert "rank 1 failed:" in row["error"] and "the second rank gives up" in row["error"]
        assert row["where"] == "its ranks failed after norm of step 1"
