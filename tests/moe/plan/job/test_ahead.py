"""Multi-token prediction in the planner: parameters equal the model's, kept bytes equal autograd's, seconds grow with the FLOPs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.build import save_memory
from moe.parallelize.stages import parts_of
from moe.plan.choose.legal import refusal
from moe.plan.job.counts import held, parameters
from moe.plan.job.flops import size
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.kept import cast_ahead, casts_kept, ends_kept
from moe.plan.memory.memory import peak
from moe.plan.memory.stack import OURS_ON_CPU
from moe.plan.pipeline import layers_of, schedule_of, stages_of
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput

B, L = 3, 40
MODEL = {"num_layers": 1, "d_model": 48, "num_heads": 6, "num_kv_heads": 2, "d_ff": 112, "max_length": L, "vocab_size": 96}


def run_of(ahead: int, *, model: dict[str, Any] | None = None, **sections: Any) -> Run:
    given = MODEL | {"ahead": ahead, "tied_embeddings": False} | (model or {})
    return build_run({"model": given, "train": {"global_batch": B}, "degrees": {"dp": 1}, **sections}).resolve(1)


def kept(run: Run) -> int:
    """Return the bytes of storages that autograd keeps for one micro-batch, without parameters."""
    compute = torch.bfloat16 if run.precision.compute == "bf16" else torch.float32
    model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=compute).train()
    save_memory(model, recompute=run.recompute)
    weights, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            found[t.untyped_storage().data_ptr()] = t
        return t

    tokens_BL = torch.randint(96, (B, L))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens_BL, Context.fresh(tokens_BL).remembering(), tokens_BL)
    return sum(t.untyped_storage().nbytes() for t in found.values())


@pytest.mark.parametrize("model", [{}, {"ffn": "swiglu", "qk_norm": "heads"}, {"moe_every": 1}])
def test_elements_are_the_models(model: dict[str, Any]) -> None:
    run = run_of(2, model=model)
    real = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    assert parameters(network_of(run)) == sum(math.prod(p.shape) for p in real.parameters())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kept_bytes_are_those_of_autograd(recompute: str, compute: str) -> None:
    sections = {"recompute": {"kind": recompute}, "precision": {"compute": compute}}
    without, run = run_of(0, **sections), run_of(2, **sections)
    network, plan = network_of(run), plan_of(run)
    said = ends_kept(network, plan, OURS_ON_CPU, first=True, last=True) - ends_kept(
        network_of(without), plan, OURS_ON_CPU, first=True, last=True
    )
    said += 2 * cast_ahead(network, plan) if casts_kept(plan, OURS_ON_CPU) else 0.0
    assert said == pytest.approx(kept(run) - kept(without), rel=0.05)


def test_seconds_grow_with_the_flops() -> None:
    """For large products, predicting two further tokens multiplies seconds by the same factor as FLOPs (moe/plan/job/flops.py)."""
    model = {"num_layers": 6, "d_model": 4096, "num_heads": 32, "d_ff": 16384, "max_length": 2048, "vocab_size": 50304}
    cluster = load_cluster("h100-8").holding(1)
    runs = [run_of(ahead, model=model, precision={"compute": "bf16"}) for ahead in (0, 2)]
    counted = [size(run).training for run in runs]
    times = [step_time(network_of(run), plan_of(run).but(microbatch=4), cluster) for run in runs]
    passes = [time.forward + time.backward for time in times]
    assert passes[1] / passes[0] == pytest.approx(counted[1] / counted[0], rel=0.05)
    assert times[1].optimizer > times[0].optimizer
    full = [step_time(network_of(run), replace(plan_of(run), recompute="full"), cluster).recompute for run in runs]
    assert full[1] / full[0] == pytest.approx(8 / 6, rel=1e-6)
    assert peak(network_of(runs[1]), plan_of(runs[1])).allocated > peak(network_of(runs[0]), plan_of(runs[0])).allocated


@pytest.mark.parametrize(("layers", "ahead"), [(5, 1), (5, 2), (6, 1)])
def test_the_planner_recomputes_the_same_layers_as_the_trainer(layers: int, ahead: int) -> None:
    """With recompute.every=2. The layers of multi-token prediction continue the numbers of the other layers."""
    cluster = load_cluster("h100-8").holding(1)
    model = {"num_layers": layers, "d_model": 4096, "num_heads": 32, "d_ff": 16384, "max_length": 2048}

    def seconds(every: int) -> float:
        run = run_of(ahead, model=model, precision={"compute": "bf16"}, recompute={"kind": "full", "every": every})
        return step_time(network_of(run), plan_of(run), cluster).recompute

    run = run_of(ahead, model=model, recompute={"kind": "full", "every": 2})
    again = sum(run.recompute.of_layer(layer) == "full" for layer in range(layers + ahead))
    assert seconds(2) / seconds(1) == pytest.approx(again / (layers + ahead))


def test_each_stage_has_the_models_number_of_parameters() -> None:
    """With multi-token prediction, the last stage also holds an embedding."""
    run = run_of(2, model={"num_layers": 3}, train={"global_batch": B}, pipeline={"schedule": "1f1b", "microbatches": B})
    run = build_run(run.model_dump(mode="json") | {"degrees": {"dp": 1, "pp": 2}}).resolve(2)
    schedule, counted = schedule_of(run), []
    for rank in range(2):
        with torch.device("meta"):
            model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
        model.hold({stage: parts_of(run, schedule)[stage] for stage in schedule.stages_of(rank)})
        counted.append(sum(p.numel() for p in model.parameters()))
    stages = layers_of(run, schedule)
    assert [held(network_of(run), plan_of(run), stages, [rank]).total for rank in range(2)] == counted
    assert [stage.parameters for stage in stages_of(run, stages, sequences=1)] == counted


def test_what_the_checks_refuse_is_refused() -> None:
    given = {"model": MODEL | {"ahead": 1, "d_model": 48}, "tensor": {"kind": "2d"}, "degrees": {"tp": 4}}
    run = build_run({**given, "train": {"global_batch": 2}})
    with pytest.raises(BadInput, match="model.ahead=1"):
        check_run(run, 4)
    found = refusal(network_of(run.resolve(4)), plan_of(run.resolve(4)))
    assert found is not None and "model.ahead=1" in found
