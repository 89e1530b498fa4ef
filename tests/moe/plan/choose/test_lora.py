"""Memory of LoRA: frozen weights have no gradients and optimizer states; only the adapters have."""

from __future__ import annotations

from typing import Any

import pytest

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.nn.lora import adapt, freeze
from moe.plan.choose.predicted import Place, predict
from moe.plan.choose.recipe_of import with_values
from moe.plan.job import counts
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import peak
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.records.prediction import refusal
from parallel.process.fork import run_on_ranks
from tests.planner import runs as planner_runs

GIB = 2**30
ALL = ("attention", "dense", "experts")


def thirty() -> Run:
    """Return a recipe with the sizes of Qwen3-30B-A3B and LoRA adapters of rank 16."""
    model = {"num_layers": 48, "d_model": 2048, "num_heads": 32, "num_kv_heads": 4, "head_size": 128, "d_ff": 6144, "ffn": "swiglu"}
    model |= {"max_length": 4096, "tied_embeddings": False, "qk_norm": "heads", "moe_every": 1, "vocab_size": 151936}
    experts: dict[str, Any] = {"experts": {"num_experts": 128, "d_ff": 768}, "router": {"preset": "mixtral", "num_choices": 8}}
    kept = {"precision": {"compute": "bf16", "master": "bf16"}, "recompute": {"kind": "full"}, "lora": {"rank": 16}}
    return build_run({"model": model, **experts, **kept, "train": {"global_batch": 1, "eval_sequences": 8}})


def test_a_frozen_model_of_30_billion_weights_fits_one_gpu_that_holds_them() -> None:
    run = check_run(thirty(), 1)
    parts = peak(network_of(run), plan_of(run)).parts
    assert parts["parameters"] / GIB == pytest.approx(57, abs=0.5)
    assert parts["gradients"] + parts["optimizer"] < 0.01 * parts["parameters"]
    assert predict(run, Place.of(load_cluster("h100-8"), 1)).fits


@pytest.mark.parametrize("targets", [("attention",), ("dense",), ("experts",), ALL], ids="+".join)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_elements_are_those_of_the_model(targets: tuple[str, ...], sparse: bool) -> None:
    if not sparse:
        targets = tuple(target for target in targets if target != "experts") or ("dense",)
    model: dict[str, Any] = {"num_layers": 4, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ff": 20}
    model |= {"max_length": 8, "vocab_size": 40, "ffn": "swiglu"}
    more = {"experts": {"num_experts": 6, "d_ff": 12}} if sparse else {}
    run = build_run({"model": model | {"moe_every": 2 * sparse}, **more, "lora": {"rank": 3, "targets": targets}})
    made = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    adapt(made, run.lora)
    freeze(made)
    run = run.resolve(1)
    found = counts.held(network_of(run), plan_of(run), (range(4),), (0,))
    assert found.total == sum(p.numel() for p in made.parameters())
    assert found.trained.total == sum(p.numel() for p in made.parameters() if p.requires_grad)


@pytest.mark.parametrize("case", ["lora", "lora ep 2"])
def test_predicted_memory_equals_measured_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 10 %. The error would be larger if recomputation did not free each layer's merged weight W + s B A."""
    small = {"num_layers": 2, "d_model": 96, "d_ff": 384, "vocab_size": 512, "max_length": 96}
    monkeypatch.setattr(planner_runs, "MODEL", planner_runs.MODEL | small)
    rows = run_on_ranks(planner_runs.measure, 2, 2, case, "fp32", timeout_s=90)
    assert all(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) < planner_runs.WITHIN for row in rows)


@pytest.mark.parametrize(("share", "helps"), [(1.5, True), (0.5, False)])
def test_the_proposed_fix_makes_lora_fit(share: float, helps: bool) -> None:
    """A device has `share` times the bytes of the frozen weights. Shorter sequences are proposed only if the run then fits."""
    run = thirty()
    run = with_values(run, {"train.global_batch": 8, "recompute.kind": "none"})
    place = Place("cuda", share * 57 * GIB)
    found = predict(check_run(run, 1), place)
    assert found.over_bytes > 0
    fix = str(refusal(found, run, 1, checked=check_run).fix)
    if not helps:
        assert "max_length" not in fix and "times as much memory together" in fix
        return
    words = fix.removeprefix("add ").partition(":")[0].split()
    values = {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    changed = with_values(run, {key: int(value) if value.isdigit() else value for key, value in values.items()})
    assert predict(check_run(changed, 1), place).fits
