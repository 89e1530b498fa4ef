"""Predictions for well-known runs (recipes/published/), compared with their authors' figures: parameters, seconds of a step, memory.

`python -m tests.planner published --json FILE`. Each run is one Published: its recipe, the cluster file of its machine, the printed
figures, and how seconds follow from them. The recipe's own plan is predicted twice: with the run's own software
(tests/planner/software.py; chosen by its source and year, never by its result), and with this project's trainer. No constant of
the planner was fitted to these runs, except where `seen` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe.checks.together import check_run
from moe.plan.choose.choose import described
from moe.plan.job.flops import counted_training, size
from moe.plan.job.network import Recomputed
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.job.states import BF16, FP32, MIXED, MIXED_FP32_GRADIENTS, Storage
from moe.plan.machine.cluster import load_cluster
from moe.plan.machine.program import Program
from moe.plan.memory.memory import peak
from moe.plan.memory.stack import OURS, Stack
from moe.plan.time.cost import step_time
from moe.recipe.load import load
from moe.recipe.sections import Run
from tests.planner.software import DEEPSEEK, FSDP, MEGATRON, MEGATRON_2022, MEGATRON_DEEPSPEED, MIXED_BOTH_GRADIENTS, PROGRAMS, TORCHTITAN

GIB = 2**30
SAME = 0.035  # tolerance of the printed number of parameters: GLaM's 1.2T is rounded by this much


@dataclass(frozen=True)
class Published:
    """One run. `parameters`, `active`: number of all, and of those that a token uses, in 10^9 as printed. Speed is printed in at most one
    way: `seconds` of a step, `tflops` of a device, or `device_seconds` of a token.

    `recomputed`: the printed TFLOP/s count recomputed layers too, a third more. `memory_gib`: as nvidia-smi shows it. `differs`: how the
    recipe or the planner differs from the run. `seen`: constants of the planner were fitted to this run or to similar rows. `recompute`:
    what the run's own software recomputes, if not what the recipe recomputes. `same`: tolerance of the printed number of parameters.
    `changes`: values of the run that the recipe has otherwise. `storage` None: the recipe's, with Adafactor's states.
    """

    recipe: str
    cluster: str
    parameters: float
    active: float | None
    program: Program
    stack: Stack
    storage: Storage | None
    source: str
    differs: str
    seen: str = ""
    seconds: float | None = None
    tflops: float | None = None
    recomputed: bool = False
    device_seconds: float | None = None
    memory_gib: float | None = None
    recompute: Recomputed | None = None
    same: float = SAME
    changes: Mapping[str, Any] = field(default_factory=dict)


BF16_STATES = {"precision.master": "bf16", "pipeline.microbatches": 16}  # of NeMo Automodel's benchmarks
CORE = PROGRAMS["megatron-core"]
RUNS = (
    Published(
        *("gpt3_175b", "a100-80-8x48", 174.6, None, PROGRAMS["megatron-2021"], MEGATRON_2022, MIXED),
        source="SC21 (arXiv 2104.04473), table 2: 153 TFLOP/s on 384 GPUs, recomputation counted",
        differs="positions, biases; two chunks a rank assumed",
        seen="the row is one of SC21's table 2",
        tflops=153,
        recomputed=True,
    ),
    Published(
        *("bloom_176b", "jeanzayx48", 176.247, None, PROGRAMS["megatron-deepspeed-bf16"], MEGATRON_DEEPSPEED, MIXED_BOTH_GRADIENTS),
        source="BigScience's notes of 2022-02-28: 104.5 s and 59 GB for this layout and 112 heads",
        differs="positions, a norm after the embedding, biases",
        seen="the row is one of BLOOM's, to which the engine's share was fitted",
        seconds=104.5,
        memory_gib=59,
    ),
    Published(
        *("glam_64b_64e", "tpu-v4x16", 1200, 96.6, PROGRAMS["xla"], OURS, None),
        source="GLaM (arXiv 2112.06905): 280B tokens in 574 hours on 1,024 chips, stops included",
        differs="the axes of its sharding; dispatch by products with masks, whose time is not predicted",
        device_seconds=574 * 3600 * 1024 / 280e9,
    ),
    Published(
        *("switch_c", "tpu-v3x16", 1571, None, PROGRAMS["xla"], OURS, None),
        source="Switch Transformer (arXiv 2101.03961), table 9; no time is printed",
        differs="the number of cores",
    ),
    *(
        Published(
            *(f"switch_{name}", cluster, billions, None, PROGRAMS["xla"], OURS, None),
            source="Switch Transformer (arXiv 2101.03961), table 9; no time is printed",
            differs="the number of cores",
            same=same,
        )
        for name, cluster, billions, same in (("base", "tpu-v3", 7, 0.06), ("large", "tpu-v3", 26, 0.045), ("xxl", "tpu-v3x8", 395, SAME))
    ),
    Published(
        *("mixtral_8x7b", "h100-8x8", 46.7, 12.9, CORE, MEGATRON, MIXED_FP32_GRADIENTS),
        source="Megatron-LM's page on MoE, version 0.9: 468 TFLOP/s; layout of Megatron-MoE-ModelZoo",
        differs="the source does not say that the speed belongs to this layout",
        seen="other models of the same software are among the tables",
        tflops=468,
    ),
    Published(
        "deepseek_v3",
        "h800-8x256",
        671,
        37,
        replace(CORE, dispatch="by_node", experts_overlap=0.7, products="fp8"),
        DEEPSEEK,
        replace(MIXED_FP32_GRADIENTS, optimizer=8),  # moments in bf16
        source="DeepSeek-V3 (arXiv 2412.19437), section 1: 180,000 GPU-hours for 10^12 tokens",
        differs="no multi-token prediction, other layers in its stages; its overlap is an assumed share",
        device_seconds=180e3 * 3600 / 1e12,
        recompute="selective",  # norms, up-projections and SwiGLU's output are recomputed; in the recipe whole layers
    ),
    Published(
        *("llama3_405b", "h100-8x2048", 405, None, PROGRAMS["fsdp"], TORCHTITAN, FP32),
        source="Llama 3 (arXiv 2407.21783), table 4: 400 TFLOP/s on 16,384 GPUs; taken as 6 N + 12 L w s",
        differs="the number of chunks; micro-batches in groups of pp",
        tflops=400,
    ),
    Published(
        *("qwen3_30b_a3b", "h100-8", 30.5, 3.3, PROGRAMS["fsdp"], FSDP, BF16),
        source="NeMo Automodel's performance summary of 2025-10: 12,040 tokens/s a GPU",
        differs="exchanges by DeepEP, norms and products by Transformer Engine",
        device_seconds=1 / 12_040,
        changes=BF16_STATES,
    ),
    Published(
        *("gpt_oss_20b", "h100-8", 20.91, 3.61, PROGRAMS["fsdp"], FSDP, BF16),
        source="NeMo Automodel's performance summary of 2025-10: 13,058 tokens/s a GPU",
        differs="exchanges by DeepEP, attention by FlexAttention; the loss in chunks",
        device_seconds=1 / 13_058,
        changes=BF16_STATES,
    ),
    Published(
        *("olmoe_1b_7b", "h100-8x32", 6.9, 1.3, PROGRAMS["fsdp"], FSDP, FP32),
        source="OLMoE (arXiv 2409.02060); no time is known",
        differs="experts by MegaBlocks' block-sparse products; its micro-batch and recomputation are not printed",
    ),
    Published(
        *("deepseek_v2_lite", "h800-8x8", 15.7, 2.4, CORE, MEGATRON, MIXED_FP32_GRADIENTS),
        source="DeepSeek-V2 (arXiv 2405.04434), appendix B; no time is printed",
        differs="the number of devices",
    ),
    Published(
        *("moonlight_16b", "h100-8x8", 16, 2.24, CORE, MEGATRON, replace(MIXED_FP32_GRADIENTS, optimizer=8)),  # Muon has one moment
        source="Muon is Scalable for LLM Training (arXiv 2502.16982); no time is printed",
        differs="the layout",
    ),
)


def resolved(run: Published) -> Run:
    """Return the run's recipe, resolved for the run's number of devices. Raises BadInput if the checks refuse it."""
    return check_run(load(f"published/{run.recipe}", run.changes)[0], load_cluster(run.cluster).world)


def published_seconds(of: Published, run: Run, devices: int) -> float | None:
    """Return the seconds of a step by the printed speed; None if no speed is printed."""
    tokens = run.train.global_batch * run.model.max_length
    if of.device_seconds is not None:
        return of.device_seconds * tokens / devices
    if of.tflops is not None:
        return _printed_flops(of, run) * tokens / devices / (of.tflops * 1e12)
    return of.seconds


def _printed_flops(of: Published, run: Run) -> float:
    """Return the FLOPs of a token as the run's source counts them. Recomputation repeats the layers' forward pass, but not the head's."""
    counted = counted_training(run)
    head = 6.0 * run.vocab_size * run.model.d_model
    return counted + (counted - head) / 3 if of.recomputed else counted


def row_of(of: Published) -> dict[str, Any]:
    """Return one run's row of the JSON."""
    run, cluster = resolved(of), load_cluster(of.cluster)
    network, plan = network_of(run), plan_of(run)
    storage = replace(of.storage or plan.storage, update=plan.storage.update)  # the recipe's optimizer
    as_run = replace(plan, storage=storage, recompute=of.recompute or plan.recompute)
    equal = network.balanced  # the run's routing is not printed; programs were fitted to rows that count as balanced
    ours, theirs = step_time(network, plan, cluster), step_time(equal, as_run, cluster, of.program)
    here, there = peak(network, plan), peak(equal, as_run, of.stack)
    seconds = published_seconds(of, run, cluster.world)
    sizes = size(run)
    counted = counted_training(run) * run.train.global_batch * run.model.max_length / cluster.world / 1e12
    return {
        "run": of.recipe,
        "cluster": of.cluster,
        "devices": cluster.world,
        "plan": described(plan),
        "parameters": sizes.total,
        "published_parameters": of.parameters * 1e9,
        "active": sizes.active,
        "published_active": None if of.active is None else of.active * 1e9,
        "program": of.program.name,
        "seconds": theirs.step,
        "published_seconds": seconds,
        "error": None if seconds is None else theirs.step / seconds - 1,
        "seconds_here": ours.step,
        "tflops": counted / theirs.step,
        "published_tflops": None if seconds is None else counted / seconds,
        "held_gib": there.used / GIB,
        "published_gib": of.memory_gib,
        "memory_error": None if of.memory_gib is None else there.used / GIB / of.memory_gib - 1,
        "held_gib_here": here.used / GIB,
        "device_gib": cluster.device.memory_gib,
        "source": of.source,
        "differs": of.differs,
        "seen": of.seen,
        "time": theirs.parts,
        "memory": there.parts,
        "passed": abs(sizes.total / of.parameters / 1e9 - 1) < of.same,
    }


HEAD = (
    f"{'run':<14}{'devices':>8}{'parameters':>12}{'printed':>9}{'s a step':>10}{'printed':>9}{'error':>8}"
    f"{'TFLOP/s':>9}{'printed':>9}{'GiB':>7}{'here':>7}{'of':>5}"
)


def rows() -> list[dict[str, Any]]:
    """Print and return a row for each run."""
    print(HEAD)
    found = []
    for of in RUNS:
        row = row_of(of)
        print(_line(row), flush=True)
        found.append(row)
    print("\nGiB: of the fullest rank by the modules of the run's software, and of this project's trainer (here); TFLOP/s: 6 N + 12 L w s")
    return found


def _line(row: dict[str, Any]) -> str:
    def printed(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    sizes = f"{row['parameters'] / 1e9:>11.1f}B{row['published_parameters'] / 1e9:>8.1f}B"
    times = f"{row['seconds']:>10.2f}{printed(row['published_seconds'], '.2f'):>9}{printed(row['error'], '+.1%'):>8}"
    speeds = f"{row['tflops']:>9.0f}{printed(row['published_tflops'], '.0f'):>9}"
    memory = f"{row['held_gib']:>7.1f}{row['held_gib_here']:>7.1f}{row['device_gib']:>5.0f}"
    return f"{row['run']:<14}{row['devices']:>8,}{sizes}{times}{speeds}{memory}"
