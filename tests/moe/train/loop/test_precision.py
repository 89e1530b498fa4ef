"""Mixed precision: fp32 master weights and loss scaling keep small updates and gradients, and all ranks skip a step together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.nn.linear import Linear
from moe.recipe.load import build_run
from moe.train.loop import advance, trainer
from moe.train.parts.executor import Executor
from moe.train.start import place
from moe.verify.cases import Case
from moe.verify.plain.batches import batch
from parallel.data.ddp import DDP
from parallel.data.deepspeed import load_deepspeed
from parallel.data.engine import AdamW, Engine
from parallel.data.offload import Offload
from parallel.data.zero import Zero
from parallel.errors import BadInput
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.precision import DTYPES, LossScale
from parallel.process.process import World
from tests.support import trained
from tests.support.ranks import each_case, run_on_ranks
from tests.support.tiny import same, start

KINDS = [("ddp",), ("fsdp",), ("zero1",), ("zero2",), ("zero3",), ("zero2+cpu",), ("zero3+cpu-all",)]
WHOLE_WEIGHTS = [("ddp",), ("zero1",), ("zero2",)]
EXPERT, DENSE = "layers.1.moe.experts.w1", "layers.0.ffn.w1.weight"


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    load_deepspeed()  # imported before the forks, because it takes seconds


# --- a gradient that is not finite ----------------------------------------------------------------------------------------


def test_inf_on_one_rank_makes_all_ranks_skip_alike() -> None:
    """An infinite gradient on rank 1 leaves weights, moments and Adam's step counter unchanged on both ranks, and halves the loss scale.

    Tested with an expert that only rank 1 holds, and with a replicated weight. The step after the skipped ones is as if there were none.
    """

    def work(rank: int, kind: str) -> dict[str, Any]:
        tiny, other = (start(Case("switch", kind, 2, 2, 2, "fp16"), rank, scale=LossScale(2.0**10, growth_interval=100)) for _ in range(2))
        tiny.step(0), other.step(0)
        before = tiny.state()
        found: dict[str, Any] = {}
        for step, name in enumerate((EXPERT, DENSE), start=1):
            with tiny.spoiled(name, rank=1):
                norm = tiny.step(step)
            found[name] = [norm.finite, tiny.scale.value, *tiny.adam_steps(), same(tiny.state(), before)]
        other.scale.value = tiny.scale.value
        norms = [t.step(3).total for t in (tiny, other)]
        found |= {"next": tiny.adam_steps(), "as if": same(tiny.state(), other.state()) and norms[0] == norms[1]}
        return {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}

    skipped = {EXPERT: [False, 512.0, 1.0, True], DENSE: [False, 256.0, 1.0, True], "next": [2.0], "as if": True}
    assert each_case(work, 2, KINDS) == [[skipped] * 2] * len(KINDS)


def test_a_skipped_step_does_not_advance_the_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During warm-up, the step after a skipped step has the skipped step's learning rate."""
    home = trained.home(tmp_path, monkeypatch)
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 16, "max_length": 16, "moe_every": 2},
        "experts": {"num_experts": 2},
        "degrees": {"dp": 2, "ep": 2},
        "precision": {"compute": "fp16", "loss_scale": "dynamic"},
        "data": {"source": "text", "path": str(home / "text.txt"), "validation_share": 0.2},
        "optimizer": {"warmup_steps": 8},
        "train": {"steps": 5, "global_batch": 4, "eval_sequences": 4, "eval_every": 0, "save_every": 0},
    }
    real = advance.accumulate

    def spoil(grad: Tensor) -> Tensor:
        return torch.full_like(grad, math.inf)

    def accumulate(executor: Executor, *args: Any, step: int, **rest: Any) -> Any:
        handle = next(executor.model.parameters()).register_hook(spoil) if step == 2 and dist.get_rank() == 1 else None
        try:
            return real(executor, *args, step=step, **rest)
        finally:
            if handle is not None:
                handle.remove()

    monkeypatch.setattr(advance, "accumulate", accumulate)

    def work(rank: int) -> None:
        trainer.train(build_run(values), out=tmp_path / "out", world=World(rank, 2), display=False)

    run_on_ranks(work, 2, timeout_s=90)
    lines = [line for line in map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "train"]
    assert [line["skipped"] for line in lines] == [False, False, True, False, False]
    assert [line["lr"] for line in lines] == pytest.approx([1e-3 * n / 8 for n in (1, 2, 3, 3, 4)])
    assert [line["loss_scale"] for line in lines] == [2.0**16] * 3 + [2.0**15] * 2
    assert [line["skipped_total"] for line in lines] == [0, 0, 1, 1, 1]


def test_fp16_is_refused_on_all_ranks_if_one_processor_would_emulate_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def work(rank: int) -> str:
        monkeypatch.setattr(place, "multiplies", lambda *_: rank == 0)
        try:
            trainer.train(
                build_run({"precision": {"compute": "fp16", "loss_scale": "dynamic"}}), out=tmp_path / "out", world=World(rank, 2)
            )
        except BadInput as refused:
            return str(refused)
        return "trained"

    lines = run_on_ranks(work, 2, timeout_s=60)
    assert lines[0] == lines[1] and lines[0].startswith("precision.compute: got fp16 on a processor")
    assert "; fix: set precision.compute to auto" in lines[0] and "\n" not in lines[0] and not (tmp_path / "out").exists()


# --- rounding and underflow in fp16 and bf16 --------------------------------------------------------------------------------


def engine_for(kind: str, model: nn.Module, **adam: Any) -> Engine:
    """Return a data-parallel engine with AdamW on one rank. kind: ddp, zero1 or zero2."""
    settings = AdamW(adam.get("betas", (0.9, 0.95)), adam.get("eps", 1e-8), 0.0, lambda name, p: False)
    layouts = {name: Layout(tuple(p.shape)) for name, p in model.named_parameters()}
    kinds: dict[str, Callable[..., Engine]] = {"ddp": DDP} | {
        f"zero{stage}": partial(Zero, stage=stage, offload=Offload(), working=None) for stage in (1, 2)
    }
    return kinds[kind](model, layouts=layouts, mesh=Mesh.of(Degrees()), optimizer=settings)


def linear(value: float, *, master: torch.dtype = torch.float32) -> Linear:
    """Return a 1 x 1 linear layer whose weight is `value`, in the dtype `master`."""
    layer = Linear(1, 1)
    nn.init.constant_(layer.weight, value)
    return layer.to(master)


def test_scaling_saves_a_gradient_that_fp16_would_lose() -> None:
    """A gradient of 2e-8 underflows to 0 in fp16, whose smallest number is 6e-8, and the weight never changes. With a scale it does."""

    def work(rank: int, kind: str, scale: float) -> list[float]:
        layer = linear(1.0)
        engine = engine_for(kind, layer, eps=1e-12)
        out = engine.forward(torch.ones(1, 1, dtype=torch.float16), last=True)
        engine.backward(out.float().sum() * 2e-8 * scale, last=True)
        gradient = float(engine.gradient("weight")) / scale
        engine.step(lr=0.125, factor=1 / scale)
        return [gradient, float(engine.state("weight")["weight"])]

    cases = [(*kind, scale) for kind in WHOLE_WEIGHTS for scale in (1.0, 2.0**16)]
    for case, ((gradient, weight),) in zip(cases, each_case(work, 1, cases), strict=True):
        assert gradient == pytest.approx(0.0 if case[1] == 1 else 2e-8, rel=1e-3), case
        assert weight == pytest.approx(1.0 if case[1] == 1 else 0.875, rel=1e-3), case


def test_fp32_masters_keep_what_bf16_weights_lose() -> None:
    """In bf16, 1 + 2^-9 rounds to 1, so eight such updates have no effect. With fp32 masters they add up to 1 + 2^-6."""

    def work(rank: int, kind: str, master: str) -> list[float]:
        layer = linear(1.0, master={"fp32": torch.float32, "bf16": torch.bfloat16}[master])
        engine = engine_for(kind, layer)
        outputs = []
        for _ in range(8):
            out = engine.forward(torch.ones(1, 1, dtype=torch.bfloat16), last=True)
            outputs.append(float(out.detach()))
            engine.backward(-out.float().sum(), last=True)
            engine.step(lr=2.0**-9)  # with a constant gradient, Adam's update is the learning rate
        return [*outputs, float(engine.forward(torch.ones(1, 1, dtype=torch.bfloat16), last=True)), float(engine.state("weight")["weight"])]

    found = each_case(work, 1, [(*kind, master) for kind in WHOLE_WEIGHTS for master in ("fp32", "bf16")])
    for (kind,), (kept,), (without,) in zip(WHOLE_WEIGHTS, found[::2], found[1::2], strict=True):
        assert kept[-1] == pytest.approx(1 + 2.0**-6, rel=1e-6) and kept[0] == 1.0, kind
        assert kept[-2] == float(torch.tensor(kept[-1]).bfloat16()) == 1 + 2.0**-6  # the forward pass uses the master weight, cast to bf16
        if kind == "ddp":
            assert without == [1.0] * 10
        else:  # DeepSpeed has its own fp32 masters of bf16 parameters
            assert without[-1] == kept[-1] and without[-2] == kept[-2], kind


def test_tiny_gradients_of_many_micro_batches_add_up() -> None:
    """Gradients accumulate in fp32: 1 + 64 * 2^-9 is 1.125, but a sum in bf16 would remain 1."""

    def work(rank: int, kind: str) -> list[float]:
        engine = engine_for(kind, linear(1.0))
        for i in range(65):
            out = engine.forward(torch.ones(1, 1, dtype=torch.bfloat16), last=i == 64)
            engine.backward(out.float().sum() * (1.0 if i == 0 else 2.0**-9), last=i == 64)
        return [float(engine.gradient("weight"))]

    total = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(64):
        total += torch.tensor(2.0**-9, dtype=torch.bfloat16)
    assert total == 1.0
    assert each_case(work, 1, WHOLE_WEIGHTS) == [[[1.125]]] * 3


def test_the_model_computes_with_the_stepped_masters() -> None:
    """After a step the model's parameters equal the engine's fp32 masters, cast, and give the logits of a model loaded with the masters."""

    def work(rank: int, kind: str, precision: str) -> list[Any]:
        tiny = start(Case("switch", kind, 2, 1, 1, precision), rank)
        before = tiny.state()
        tiny.step(0)
        after = tiny.state()
        masters = {name: s["weight"] for name, s in after.items()}
        read_in = DTYPES[precision] if kind.startswith("zero") else torch.float32  # DeepSpeed's model reads a 16-bit copy of the masters
        found: list[Any] = [all(torch.equal(p, masters[n].to(p.dtype)) for n, p in tiny.model.named_parameters())]
        found.append(dict(tiny.model.named_parameters())[DENSE].dtype == read_in)
        found.append(all(s.dtype == torch.float32 for parts in after.values() for s in parts.values()))
        found.append(all(not torch.equal(masters[n], before[n]["weight"]) for n in (EXPERT, DENSE)))
        fresh = start(Case("switch", "ddp", 2, 1, 1, precision), rank, train={"seed": 99})
        fresh.model.load_state_dict(masters)
        tokens = batch(3)[:, :-1]
        for model in (tiny.model, fresh.model):
            model.eval()
        return [*found, torch.equal(tiny.model(tokens).logits_BLV, fresh.model(tokens).logits_BLV)]

    assert each_case(work, 2, product(("ddp", "zero1", "zero2"), ("bf16", "fp16"))) == [[[True] * 5] * 2] * 6


def test_a_scale_changes_no_number_of_a_step() -> None:
    """With a loss scale that is a power of two, losses, gradient norm, clipped update and moments are bitwise those without a scale."""

    def work(rank: int, kind: str) -> list[bool]:
        case = Case("switch", kind, 2, 2, 3, "fp32")
        plain, scaled = start(case, rank), start(case, rank, scale=LossScale(2.0**12))
        found = []
        for step in range(2):
            found.append(repr(plain.accumulate(step)) == repr(scaled.accumulate(step)))
            found.append(plain.finish() == scaled.finish())
        return [*found, same(plain.state(), scaled.state())]

    assert each_case(work, 2, WHOLE_WEIGHTS) == [[[True] * 5] * 2] * 3


# --- the loss scale -----------------------------------------------------------------------------------------------------------


def test_the_scale_doubles_after_so_many_good_steps_in_a_row() -> None:
    scale = LossScale(8.0, growth_interval=3)
    values = []
    for finite in [True, True, True, True, False, True, True, True, True]:
        scale.update(finite)
        values.append(scale.value)
    assert values == [8, 8, 16, 16, 8, 8, 8, 16, 16]


def test_the_scale_stops_at_its_floor_and_says_so() -> None:
    scale = LossScale(4.0, growth_interval=3, floor=1.0)
    told = []
    for _ in range(4):
        scale.update(False)
        told.append((scale.value, scale.at_floor))
    assert told == [(2, False), (1, False), (1, True), (1, True)]
    scale.update(True)
    assert not scale.at_floor and scale.value == 1


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.sampled_from([1.0, 2.0, 64.0]))
def test_the_scale_is_a_power_of_two_times_its_start_and_only_runs_raise_it(steps: list[bool], interval: int, floor: float) -> None:
    scale = LossScale(64.0, growth_interval=interval, floor=floor)
    run = 0
    for finite in steps:
        before = scale.value
        scale.update(finite)
        run = run + 1 if finite else 0
        if finite:
            assert scale.value == before * (2 if run and run % interval == 0 else 1)
        else:
            assert scale.value == max(floor, before / 2) and scale.at_floor == (before == floor)
        assert math.log2(scale.value).is_integer() and scale.value >= floor


@given(st.lists(st.booleans(), max_size=10), st.sampled_from(["none", 1.0, 1024.0, 3.5]))
def test_a_fixed_scale_never_moves(steps: list[bool], kind: str | float) -> None:
    scale = LossScale.of(kind)
    for finite in steps:
        scale.update(finite)
    assert scale.value == (1.0 if kind == "none" else kind) and not scale.at_floor


@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_a_saved_scale_goes_on_as_if_nothing_had_been(before: list[bool], after: list[bool]) -> None:
    scale, resumed = LossScale(2.0**16, growth_interval=4), LossScale(2.0**16, growth_interval=4)
    for finite in before:
        scale.update(finite)
    resumed.load(json.loads(json.dumps(scale.state())))
    for finite in after:
        scale.update(finite)
        resumed.update(finite)
        assert (scale.value, scale.good_steps) == (resumed.value, resumed.good_steps)


def test_dynamic_starts_at_two_to_the_sixteenth() -> None:
    scale = LossScale.of("dynamic")
    assert (scale.value, scale.growth_interval, scale.floor) == (65536.0, 1000, 1.0)


def test_a_warning_says_that_bf16_is_emulated(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning appears only for bf16 on a processor without bf16 instructions."""
    monkeypatch.setattr(trainer, "check_precision", place.check_precision)
    for has, compute, said in ((False, "bf16", 1), (False, "fp32", 0), (True, "bf16", 0)):
        monkeypatch.setattr(place, "multiplies", lambda dtype, device, has=has: has)
        run = trained.recipe(home, precision={"compute": compute}, train={"steps": 1, "save_every": 0})
        trainer.train(run, out=tmp_path / f"{has}{compute}", world=World())
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if "no instructions for it" in line and "--precision.compute auto" in line]) == said
