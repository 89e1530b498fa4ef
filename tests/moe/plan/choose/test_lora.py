"""Memory of LoRA: frozen weights have no gradients and optimizer states; only the adapters have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.nn.lora import adapt, freeze, is_adapter
from moe.parallelize.build import laid_out
from moe.plan.choose.predicted import Place, predict, refusal
from moe.plan.choose.recipe_of import with_values
from moe.plan.job import counts
from moe.plan.job.flops import core_forward, size
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import memory, peak
from moe.plan.memory.stack import OURS_ON_CPU
from moe.plan.pipeline import layers_of, schedule_of
from moe.plan.time.collective_times import all_reduce, gather, group_of
from moe.plan.time.cost import step_time
from moe.plan.time.stage_time import own_program
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.rehearse import walk
from parallel.mesh.mesh import Mesh
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
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


LATENT = {"latent": {"key_rank": 8, "query_rank": 12, "rotary_size": 4, "value_size": 8}, "num_kv_heads": None}


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "model"),
    [("1d", 2, 2, {}), ("1d", 4, 1, {"num_kv_heads": 2}), ("1d", 2, 1, LATENT), ("2.5d", 8, 1, {}), ("3d", 8, 1, {"num_kv_heads": 1})],
)
def test_adapters_of_a_rank_are_those_that_it_holds(kind: str, tp: int, pp: int, model: dict[str, Any]) -> None:
    sizes = {"num_layers": 4, "d_model": 32, "num_heads": 4, "num_kv_heads": 4, "d_ff": 32, "max_length": 8, "vocab_size": 264}
    values: dict[str, Any] = {"model": sizes | {"ffn": "swiglu", "moe_every": 2} | model, "experts": {"num_experts": 4, "d_ff": 12}}
    values |= {"degrees": {"tp": tp, "pp": pp, "ep": 2}, "tensor": {"kind": kind}, "pipeline": {"microbatches": 2}}
    run = check_run(build_run(values | {"lora": {"rank": 3, "targets": ALL}, "train": {"global_batch": 16, "eval_sequences": 16}}), tp * pp)
    stages = layers_of(run, schedule_of(run)) if pp > 1 else (range(4),)
    for rank in {0, tp * pp - 1}:
        mesh = Mesh.of(run.mesh_degrees(), rank)
        made, _, _ = laid_out(run, mesh)
        said = counts.held(network_of(run), plan_of(run), stages, (mesh.axis("pp").index,)).trained.total
        assert said == sum(p.numel() for name, p in made.named_parameters() if is_adapter(name)) > 0


@pytest.mark.parametrize(("tp", "pp", "more"), [(2, 1, {}), (1, 2, {"schedule": "zb_h1", "microbatches": 2})], ids=["tp", "pp"])
def test_memory_and_flops_are_those_of_a_rehearsed_step(tp: int, pp: int, more: dict[str, Any]) -> None:
    """Within 5 %: bytes of the fullest rank at its peak, and FLOPs of all ranks. Attention's core, which torch does not count, is left
    out."""
    sizes = {"num_layers": 2, "d_model": 96, "num_heads": 4, "d_ff": 160, "max_length": 64, "vocab_size": 264, "ffn": "swiglu"}
    values: dict[str, Any] = {"model": sizes | {"moe_every": 0, "tied_embeddings": False}, "degrees": {"tp": tp, "pp": pp}}
    values |= {"lora": {"rank": 2, "targets": ["attention", "dense"]}, "pipeline": more, "precision": {"compute": "fp32"}}
    run = check_run(build_run(values | {"train": {"global_batch": 8, "eval_sequences": 8}}), tp * pp)
    fullest, found = walk(run, World(0, tp * pp)).peak_bytes, 0.0  # without the counter, which keeps tensors
    for rank in range(pp):
        with FlopCounterMode(display=False) as counted:
            walk(run, World(rank, tp * pp))
        found += counted.get_total_flops() / 2 * tp  # two steps; ranks of tp compute equally much
    said = memory(network_of(run), plan_of(run), OURS_ON_CPU)
    assert max(of.allocated for of in said) == pytest.approx(fullest, rel=0.05)
    core = sum(core_forward(run.model, layer=layer) for layer in range(2))
    assert 8 * 64 * (size(run).training - 3 * core) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(("kind", "update", "zeroed"), [("ddp", 1, 1), ("zero", 8, 1), ("fsdp", 8, 8)])
def test_only_adapters_are_updated_and_only_their_gradients_are_sent(kind: str, update: int, zeroed: int) -> None:
    """Frozen weights cost time only if ranks hold shards of them and gather them. update, zeroed: number of shards of optimizer states and
    of gradients."""
    cluster = load_cluster("h100-8")
    values: dict[str, Any] = {"lora.targets": ("attention",), "sharding.kind": kind, "degrees.ep": 8, "train.global_batch": 8}
    values |= {"precision.master": "fp32"} if kind == "zero" else {}  # FSDP carries out ZeRO with 16-bit masters
    run = check_run(with_values(thirty(), values), 8)
    network, plan = network_of(run), plan_of(run)
    waited = {"gradients": "after", "gathers": "waited", "parameters": "after", "step_ms": 0.0, "gather_us": 0.0}
    program = replace(own_program(cluster), **waited)  # type: ignore[arg-type]
    found = step_time(network, plan, cluster, program)
    held, copies = counts.held(network, plan, (range(48),), (0,)), group_of(8, 1, 8, 8)
    assert 0 < held.trained.expert + held.trained.dense < 0.01 * held.total
    wide = plan.compute_bytes if program.sent_gradients == "computed" else plan.storage.gradients
    moved = (26 + 2 * plan.storage.gradients) / update + plan.storage.gradients / zeroed
    assert found.optimizer == pytest.approx(moved * held.trained.total / cluster.device.bandwidth)
    summed = all_reduce(cluster, copies, held.trained.dense * wide) if kind == "ddp" else gather(cluster, copies, held.trained.dense * wide)
    weights = gather(cluster, copies, {"ddp": 0, "zero": held.trained.dense, "fsdp": held.dense}[kind] * plan.compute_bytes)
    again = weights if kind == "fsdp" and plan.reshard else 0.0
    assert found.gradients == pytest.approx(summed + again)
    assert found.parameters == pytest.approx(weights * (1 + 1 / 48 if kind == "fsdp" else 1))


@pytest.mark.parametrize("case", ["lora ep 2"])
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
