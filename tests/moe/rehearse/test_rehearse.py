"""`moe rehearse` finds the collectives and memory of a rank as real ranks have them, and names errors that a real run would have.

The reference is the same run on two to four real gloo ranks.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.cli.main import main
from moe.experts.dispatch import examples
from moe.nn import attention
from moe.nn.rotary import Turns
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.memory.memory import memory
from moe.plan.memory.stack import OURS
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.rehearse import Walked, carried, open_job, take_step, walk
from moe.router.router import balanced_logits
from moe.verify.cases import FORMS, SLICED, Case, attentions
from moe.verify.rows.pipeline import LAYERS
from parallel.errors import BadInput
from parallel.mesh.grids import SMALLEST
from parallel.pipeline.schedules import SCHEDULES
from parallel.process.process import World
from parallel.rehearse.pretended import RehearsalError
from tests.counted.alive import Alive
from tests.support.ranks import run_on_ranks


def run_of(case: Case) -> Run:
    run = check_run(case.run(), case.world)
    run, _ = carried(run)
    return run.model_copy(update={"experts": run.experts.model_copy(update={"kernels": "auto"})})


def rehearsed(case: Case, *, rank: int, device: str = "cpu") -> Walked:
    return walk(run_of(case), World(rank, case.world, place=device))


def staged(schedule: str, model: str = "gshard", kind: str = "ddp", *, microbatches: int = 2) -> Case:
    """Return a case of two pipeline stages x two replicas."""
    layers = LAYERS[2][int(SCHEDULES[schedule].chunks != 1)]
    return Case(model, kind, 4, 2 if model != "dense" else 1, microbatches, "fp32", pp=2, schedule=schedule, layers=layers, batch=8)


# --- collectives and memory of real ranks -----------------------------------------------------------------------------

REAL = [
    Case("dense", "ddp", 2, 1, 3, "fp32"),
    Case("dense", "fsdp", 2, 1, 1, "bf16", "full"),
    Case("dense", "ddp", 4, 1, 1, "fp32", tp=2, tensor="sliced"),
    Case("dense", "ddp", 2, 1, 1, "fp32", sp=2, length=SLICED),
    replace(staged("1f1b", "dense"), precision="bf16"),
    Case("gshard", "ddp", 2, 2, 1, "fp32"),
]


def real(rank: int, world: int, run: Run) -> tuple[dict[str, list[int]], int]:
    """Run two steps on a real rank. Return the second step's collectives, "axis name" -> [calls, bytes, sent], and its peak bytes."""
    with Alive() as alive:
        job = open_job(run, World(rank, world, place="cpu"))
        for _ in range(2):
            alive.most = alive.now
            take_step(job)
    return {" ".join(key): [c.calls, c.bytes, c.sent] for key, c in job.mesh.communicator.counts().items()}, alive.most


@pytest.mark.parametrize("case", REAL, ids=lambda case: f"{case.layout} {case.kind}")
def test_counts_and_peak_are_those_of_real_ranks(case: Case) -> None:
    rank = case.world // 2
    counts, most = run_on_ranks(real, case.world, case.world, run_of(case))[rank]
    walked = rehearsed(case, rank=rank)
    found = {" ".join(key): [c.calls, c.bytes, c.sent] for key, c in walked.counts.items()}
    if case.ep > 1:  # real routing is not balanced: calls must be equal, bytes only similar
        rows, pretended = counts.pop("ep all_to_all"), found.pop("ep all_to_all")
        assert rows[0] == pretended[0] and abs(rows[1] / pretended[1] - 1) < 0.3
    assert found == counts
    if case.kind == "ddp" and case.ep == 1:
        assert walked.peak_bytes == pytest.approx(most, rel=0.05)
    assert sum(walked.held.values()) == walked.peak_bytes


def test_model_states_at_the_peak_are_16_bytes_a_parameter() -> None:
    """With DDP in fp32 each parameter has 4 bytes of weight, 4 of gradient and 8 of moments, for any number of ranks."""
    case = replace(Case("dense", "ddp", 6, 1, 1, "fp32"), batch=12)
    walked = rehearsed(case, rank=3)
    elements = sum(torch.Size(shape).numel() for shape in walked.parameters.values())
    assert walked.held["parameters"] == 4 * elements
    assert walked.held["gradients"] == 4 * elements
    assert 8 * elements <= walked.held["optimizer"] <= 8 * elements + 8 * len(walked.parameters)
    assert walked.saved_bytes == 0 and rehearsed(case, rank=0).saved_bytes == 12 * elements


@pytest.mark.parametrize(("tied", "reshard", "recompute"), [(True, True, "none"), (True, False, "full"), (False, True, "full")])
def test_predicted_bytes_of_fsdp_are_those_of_a_rehearsed_gpu(tied: bool, reshard: bool, recompute: str) -> None:
    """The planner predicts FSDP's peak bytes within 7 %, with sizes for which gathered weights take more than activations."""
    model = {"num_layers": 4, "d_model": 512, "d_ff": 1536, "num_heads": 8, "vocab_size": 1000, "max_length": 96, "positions": "rotary"}
    run = build_run(
        {
            "model": model | {"tied_embeddings": tied},
            "train": {"global_batch": 8, "eval_sequences": 8},
            "precision": {"compute": "bf16"},
            "sharding": {"kind": "fsdp", "reshard": reshard},
            "recompute": {"kind": recompute},
        }
    ).resolve(8)
    walked = walk(run, World(5, 8, place="cuda"))
    (said,) = memory(network_of(run), plan_of(run), OURS)
    assert said.allocated == pytest.approx(walked.peak_bytes, rel=0.07)


WIDE = {"num_layers": 3, "d_model": 384, "d_ff": 1280, "num_heads": 6, "vocab_size": 640, "max_length": 320}
ROWS_OF_8 = {"model": {"moe_every": 2}, "experts": {"num_experts": 8}, "router": {"preset": "switch", "capacity_factor": None}}
LONG = {"num_layers": 2, "max_length": 800, "num_kv_heads": 1, "d_ff": 320}
T5 = {"positions": "t5", "num_layers": 2}
BOTH_WAYS = {
    "model": {"num_layers": 4},
    "sharding": {"kind": "fsdp", "allow_slow": True},
    "degrees": {"pp": 2, "dp": 2},
    "pipeline": {"schedule": "dualpipe", "microbatches": 4},
    "train": {"global_batch": 8, "eval_sequences": 8},
}
PREDICTED: dict[str, dict[str, Any]] = {
    "relu, recomputed": {"model": {"ffn": "relu"}, "recompute": {"kind": "full"}},
    "gated, recomputed": {"model": {"ffn": "swiglu"}, "recompute": {"kind": "selective"}, "precision": {"compute": "fp32"}},
    "grouped heads": {"model": {"num_kv_heads": 2, "qk_norm": "heads"}},
    "long windows": {"model": LONG | {"sliding_window": 500}},
    "documents": {"model": LONG | {"document_mask": True}},
    "experts": ROWS_OF_8 | {"recompute": {"kind": "selective"}},
    "t5": {"model": T5, "pipeline": {"microbatches": 2}},
    "halves": {"model": T5 | {"kind": "encoder_decoder", "num_layers": 4}, "data": {"objective": "span_corruption"}},
    "halves with documents": {
        "model": T5 | {"kind": "encoder_decoder", "num_layers": 4, "document_mask": True},
        "data": {"objective": "span_corruption"},
    },
    "a half that a stage passes on": {
        "model": T5 | {"kind": "encoder_decoder", "max_length": 128, "d_ff": 128, "d_model": 128, "num_heads": 2, "vocab_size": 300},
        "data": {"objective": "span_corruption"},
        "recompute": {"kind": "full"},
        "degrees": {"pp": 2},
        "pipeline": {"schedule": "gpipe", "microbatches": 16},
        "train": {"global_batch": 16, "eval_sequences": 16},
        "rank": 1,
    },
    "halves in 2d": {
        "model": T5 | {"kind": "encoder_decoder", "num_layers": 4},
        "data": {"objective": "span_corruption"},
        "degrees": {"dp": 1, "tp": 4},
        "tensor": {"kind": "2d"},
    },
    "stages": {"degrees": {"pp": 2}, "pipeline": {"microbatches": 2}},
    "I and W, recomputed": {"degrees": {"pp": 2}, "pipeline": {"schedule": "zb_h1", "microbatches": 2}, "recompute": {"kind": "full"}},
    "I and W of experts": ROWS_OF_8
    | {
        "degrees": {"pp": 2, "dp": 2, "ep": 2},
        "pipeline": {"schedule": "zb_h1", "microbatches": 3},
        "recompute": {"kind": "full"},
        "train": {"global_batch": 6, "eval_sequences": 6},
    },
    "I and W of further tokens": {
        "model": {"ahead": 1, "num_layers": 2, "tied_embeddings": False},
        "degrees": {"pp": 2},
        "pipeline": {"schedule": "zb_h1", "microbatches": 4},
        "rank": 1,  # the last stage, which has these layers
    },
    "every I before the first W": {
        "model": {"num_layers": 2, "tied_embeddings": False},
        "degrees": {"pp": 2},
        "pipeline": {"schedule": "zb_h1", "microbatches": 2},
        "rank": 1,
    },
    "every I of further tokens before the first W": {
        "model": {"ahead": 1, "num_layers": 2, "tied_embeddings": False},
        "degrees": {"pp": 2},
        "pipeline": {"schedule": "zb_h1", "microbatches": 2},
        "rank": 1,
    },
    "both ways": {"degrees": {"pp": 2}, "pipeline": {"schedule": "dualpipe", "microbatches": 4}, "recompute": {"kind": "full"}},
    "sums of stages": {"model": {"num_layers": 2}, "degrees": {"pp": 2, "dp": 2}, "pipeline": {"microbatches": 2}},
    "scattered after each pass": {
        "model": {"num_layers": 4},
        "sharding": {"kind": "fsdp", "allow_slow": True},
        "degrees": {"pp": 2, "dp": 2},
        "pipeline": {"schedule": "zb_h1", "microbatches": 2},
    },
    "both ways, scattered after each pass": BOTH_WAYS,
    "both ways, scattered once": BOTH_WAYS | {"sharding": {"kind": "fsdp", "reshard": False}},
    "both ways of experts": ROWS_OF_8
    | BOTH_WAYS
    | {"model": {"num_layers": 4, "moe_every": 2}, "degrees": {"pp": 2, "dp": 2, "ep": 2}, "recompute": {"kind": "full"}},
    "scattered once": BOTH_WAYS | {"sharding": {"kind": "fsdp", "reshard": False}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
    "16 bits alone": {"precision": {"master": "bf16"}},
    "a wide table": {"model": {"vocab_size": 20_000, "num_layers": 1, "max_length": 160, "d_ff": 320}, "pipeline": {"microbatches": 4}},
    "a table, two ranks": {"model": {"vocab_size": 9_000, "num_layers": 1, "max_length": 16, "d_ff": 320}, "degrees": {"dp": 2}},
}


@pytest.mark.parametrize("name", PREDICTED)
def test_predicted_bytes_are_those_of_a_rehearsed_gpu(name: str) -> None:
    """The planner predicts peak bytes within 5 %. Weights and activations are of similar size here, so temporary tensors count too."""
    values = {"precision": {"compute": "bf16"}, "train": {"global_batch": 4, "eval_sequences": 4}} | PREDICTED[name]
    rank = values.pop("rank", 0)
    values["precision"] = {"compute": "bf16"} | values["precision"]
    values["model"] = WIDE | {"positions": "rotary"} | PREDICTED[name].get("model", {})
    degrees = values.get("degrees", {})
    world = math.prod(degrees.get(axis, 1) for axis in ("pp", "dp", "tp"))
    run = check_run(build_run(values), world)
    said = memory(network_of(run), plan_of(run), OURS)[rank]
    assert said.allocated == pytest.approx(walk(run, World(rank, world, place="cuda")).peak_bytes, rel=0.05)


# --- every engine and layout (others: test_order.py), on CPU and on a GPU that this machine lacks --------------------------------------

plain = Case("dense", "ddp", 4, 1, 1, "fp32", layers=1)
sparse = Case("deepseek", "ddp", 4, 4, 1, "fp32")
EVERY = {
    "ddp": Case("gshard", "ddp", 4, 2, 1, "bf16", "selective"),
    "zero3": Case("dense", "zero3", 2, 1, 1, "fp32"),
    "fp16": Case("dense", "ddp", 8, 1, 1, "fp16", "full", batch=24),
    "fsdp": Case("gshard", "fsdp", 2, 2, 1, "bf16", "full", tiles=2, head_tiles=3, chunks=2),
    "chimera": staged("chimera", "gshard"),
    "1f1b 1d": replace(staged("1f1b", "dense"), tp=2, tensor="1d"),
    **{form: replace(plain, tp=2, tensor=form) for form in ("copied", "dtensor", *FORMS)},
    **{grid: Case("dense", "ddp", world, 1, 1, "bf16", layers=1, tp=world, tensor=grid, batch=24) for grid, world in SMALLEST.items()},
    "2d gshard": Case("gshard", "ddp", 4, 2, 1, "fp32", tp=4, tensor="2d", batch=24),
    **{way: replace(plain, sp=4 if way == "heads2" else 2, attention=way, length=SLICED, recompute="full") for way in attentions()},
    **{rows: replace(sparse, rows=rows, ep=2 if rows == "overlapped" else 4) for rows in examples()},
    **{router: Case(router, "ddp", 4, 2, 1, "fp32") for router in ("expert_choice", "sinkhorn", "packed")},
}


@pytest.mark.parametrize("name", EVERY)
def test_every_kind_goes_through_on_a_gpu_that_is_not_there(name: str) -> None:
    case = EVERY[name]
    walked = walk(run_of(case), World(case.world // 2, case.world, place="cuda"), steps=1)
    assert walked.peak_bytes >= walked.built_bytes > 0 and walked.saved_bytes >= 0


@pytest.mark.parametrize("name", ["zero3", "chimera", "2d", "hierarchical"])
def test_kinds_go_through_on_cpu(name: str) -> None:
    case = EVERY[name]
    assert walk(run_of(case), World(1, case.world, place="cpu"), steps=1).peak_bytes > 0


def test_kfac_fills_the_waits_of_a_gpu_that_is_not_there_and_auto_is_bf16_there() -> None:
    values = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_length": 32, "vocab_size": 256}
    choices = {"optimizer": {"kind": "kfac"}, "degrees": {"pp": 2}, "pipeline": {"microbatches": 3}, "train": {"global_batch": 6}}
    run = check_run(build_run({"model": values, "precision": {"compute": "auto"}, **choices}), 2)
    walked = walk(run, World(1, 2, place="cuda"))
    assert walked.counts["pp", "send"].bytes == 3 * (2 * 32 * 16) * 2  # gradients of 3 micro-batches of 2 sequences, 2 bytes an element


@pytest.mark.parametrize("world", [8, 1024])
def test_a_world_of_any_size_costs_one_process(world: int) -> None:
    case = Case("gshard", "fsdp", world, 4, 1, "bf16", pp=2, layers=3, batch=world // 2)
    walked = rehearsed(case, rank=world // 2 + 3, device="cuda")
    assert walked.counts["world", "all_reduce"].calls >= 1 and walked.counts["dp", "all_gather"].bytes > 0


# --- routing ----------------------------------------------------------------------------------------------------------


def test_a_selection_bias_of_as_many_experts_as_deepseek_v3_has_goes_through() -> None:
    values = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16, "max_length": 32, "vocab_size": 256, "moe_every": 1}
    run = check_run(build_run({"model": values, "experts": {"num_experts": 256, "d_ff": 8}, "router": {"preset": "deepseek_v3"}}), 4)
    assert walk(run, World(1, 4, place="cuda"), steps=1).peak_bytes > 0


@pytest.mark.parametrize(("tokens", "experts", "choices"), [(12, 6, 2), (7, 4, 1), (40, 16, 6)])
def test_balanced_logits_choose_every_expert_equally_often(tokens: int, experts: int, choices: int) -> None:
    logits_TE = balanced_logits(tokens, num_experts=experts, num_choices=choices)
    counts = torch.bincount(logits_TE.topk(choices).indices.flatten(), minlength=experts)
    assert int(counts.sum()) == tokens * choices and int(counts.max() - counts.min()) <= 1


# --- errors that a rehearsal finds ------------------------------------------------------------------------------------


def test_a_tensor_on_the_wrong_device_is_named_by_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = attention.turned

    def wrong(x_BHLC: torch.Tensor, turns: Turns) -> torch.Tensor:
        return turned(x_BHLC, turns) + torch.zeros(x_BHLC.shape)  # without `device`: in host memory, also if x is on a GPU

    monkeypatch.setattr(attention, "turned", wrong)
    case = Case("dense", "ddp", 2, 1, 1, "fp32")
    rehearsed(case, rank=1)
    with pytest.raises(RehearsalError, match=rf"{Path(__file__).name}:\d+ in wrong: add: Expected all tensors to be on the same device"):
        rehearsed(case, rank=1, device="cuda")


def test_a_collective_of_a_host_tensor_is_found() -> None:
    from parallel.mesh import collectives
    from parallel.mesh.mesh import Degrees
    from parallel.process.process import connect
    from parallel.rehearse.stage import rehearsal

    world = World(3, 8, place="cuda")
    with rehearsal(world), pytest.raises(RehearsalError, match=r"collectives\.py:\d+ in .*allreduce of a tensor on cpu"):
        collectives.sum_over(torch.zeros(3), connect(Degrees(dp=8), world).axis("dp"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--world 4 --rank 4", "--rank: got 4, needed 0 to 3 in a world of 4, or all; fix: --rank 2"),
        ("--world 0", "--world: got 0"),
        ("", "--world: got nothing"),
        ("--world 4 --device tpu", "--device: got tpu, needed one of cpu, cuda; fix: --device cuda"),
        ("--world 6 --degrees.tp 4", "degrees"),
        ("--world 1 --sharding.kind dp --sharding.replicas 2", "sharding.kind: got dp, whose replicas are threads"),
        (
            "--world 4 --sharding.kind zero --sharding.stage 2 --sharding.offload.optimizer cpu",
            "sharding.offload: got offload, which copies tensors to the host",
        ),
    ],
)
def test_bad_input_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "switch_tiny", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"error: {line}") and "; fix: " in said


def test_the_verb_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rehearsal.json"
    words = ["--world", "8", "--rank", "5", "--device", "cuda", "--degrees.ep", "4", "--model.num_layers", "2", "--train.global_batch", "8"]
    assert main(["rehearse", "switch_tiny", *words, "--json", str(path)]) == 0
    written: dict[str, Any] = json.loads(path.read_text())
    (row,) = written["rows"]
    assert (row["rank"], row["world"], written["failed"]) == (5, 8, 0)
    assert f"{row['peak_bytes']:,} bytes" in capsys.readouterr().out
    assert {"axis", "collective", "calls", "bytes", "sent"} == set(row["collectives"][0])


def test_a_refused_layout_is_refused_as_the_run_would_be() -> None:
    with pytest.raises(BadInput, match="ep"):
        check_run(replace(Case("gshard", "ddp", 4, 2, 1, "fp32"), ep=3).run(), 4)
