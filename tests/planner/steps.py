"""Predicted and measured steps and memory of this project's own trainer on this machine: every kind, on 2, 4 and 8 processes.

`python -m tests.planner steps --json F` first measures the machine (moe/calibrate/), then runs each layout of a small recipe on gloo ranks:

    memory    every live tensor over two steps (tests/counted/alive.py), of the rank with the largest error; with experts, of the busiest
              ranks of ep
    time      the fastest of some later steps, of the slowest rank
    core      seconds of a step in which a rank had a core, summed over all ranks, over the number of cores that they can use together

`time` is the time that a user waits, and includes effects of other work on the machine. `core` is nearly free of such effects. On an idle
machine with more ranks than cores both are equal, because a layout then waits for cores only. `core` is predicted as `time` without waits.

Predictions count the measured rows of the busiest rank in the second step (`busiest`, times the mean), not the default of a recipe.

The speed of a machine changes within minutes, which an earlier calibration cannot know. Therefore calibration and runs are repeated
`--rounds` times, and medians of measured and predicted values are compared.
"""

from __future__ import annotations

import time
from os import getloadavg
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from moe.bench.training.sharded import kind_of, load_engines
from moe.calibrate import calibrate
from moe.calibrate.own_step import WARM_UP, Training
from moe.checks.together import check_run
from moe.launch import exit_codes
from moe.plan.choose.predicted import Place, Prediction, predict
from moe.plan.choose.recipe_of import with_values
from moe.plan.machine.cluster import Cluster
from moe.plan.time.stage_time import rank_layers, stage_times
from moe.recipe.load import build_run
from moe.records.results import write_json
from moe.train.parts.numbers import Numbers
from parallel.mesh.mesh import Axis
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from tests.counted.alive import Alive

WITHIN = 0.10
MODEL = {"num_layers": 4, "d_model": 192, "num_heads": 8, "d_ff": 768, "max_length": 160, "vocab_size": 1024, "ffn": "swiglu"}
EXPERTS: dict[str, Any] = {
    "model": {"moe_every": 2},
    "experts": {"num_experts": 8},
    "router": {"preset": "switch", "capacity_factor": None},
}
HALVES: dict[str, Any] = {"model": {"kind": "encoder_decoder", "positions": "t5"}, "data": {"objective": "span_corruption"}}
LARGE: dict[str, Any] = {  # a model with more bytes of weights than of activations
    "model": {"num_layers": 8, "d_model": 256, "d_ff": 1024, "vocab_size": 512},
    "train": {"global_batch": 4, "eval_sequences": 4},
}
IN_CHUNKS: dict[str, Any] = {"model": {"d_model": 128, "d_ff": 256, "vocab_size": 8192}, "recompute": {"loss_chunks": 4}}
SEQUENCES, STEPS, ROUNDS, TIMEOUT_S = 16, 3, 3, 300.0


def layout(ranks: int, *, schedule: str = "1f1b", microbatches: int = 1, chunks: int | None = None, **values: Any) -> dict[str, Any]:
    """Return a case: number of ranks, degrees by name, and sections of the recipe."""
    degrees = {name: values.pop(name) for name in ("tp", "sp", "pp", "ep", "etp") if name in values}
    apart = degrees.get("tp", 1) * degrees.get("sp", 1) * degrees.get("pp", 1)
    pipeline = {"schedule": schedule, "microbatches": microbatches, "chunks": chunks}
    return {"ranks": ranks, "degrees": {"dp": ranks // apart, **degrees}, "pipeline": pipeline, **values}


def zero(stage: int) -> dict[str, Any]:
    return {"sharding": {"kind": "zero", "stage": stage}}


def fsdp(**values: Any) -> dict[str, Any]:
    return {"sharding": {"kind": "fsdp", **values}}


CASES: dict[str, dict[str, Any]] = {
    "ddp": layout(2),
    "ddp, 4 micro-batches": layout(2, microbatches=4),
    "ddp, full recompute": layout(2, recompute={"kind": "full"}),
    "ddp, selective recompute": layout(2, recompute={"kind": "selective"}),
    "ddp, bf16": layout(2, precision={"compute": "bf16"}),
    "ddp, loss in chunks": layout(2, **IN_CHUNKS),
    "fsdp": layout(2, **fsdp()),
    "fsdp, 4 micro-batches": layout(2, microbatches=4, **fsdp()),
    "fsdp, loss in chunks": layout(2, **fsdp(), **IN_CHUNKS),
    "fsdp, large": layout(2, **fsdp(), **LARGE),
    "fsdp, large, kept whole": layout(2, **fsdp(reshard=False), **LARGE),
    "zero1": layout(2, **zero(1)),
    "zero2": layout(2, **zero(2)),
    "zero3": layout(2, **zero(3)),
    "zero1, large": layout(2, **zero(1), **LARGE),
    "zero2, large": layout(2, **zero(2), **LARGE),
    "zero3, large": layout(2, **zero(3), **LARGE),
    "tp 2": layout(2, tp=2),
    "tp 2 sliced": layout(2, tp=2, tensor={"sequence_parallel": True}),
    "tp 2 dtensor": layout(2, tp=2, tensor={"kind": "dtensor"}),
    "sp 2 ring": layout(2, sp=2, sequence={"kind": "ring"}),
    "sp 2 ulysses": layout(2, sp=2, sequence={"kind": "ulysses"}),
    "sp 2 lightseq": layout(2, sp=2, sequence={"kind": "lightseq"}),
    "sp 2 colossal_ring": layout(2, sp=2, sequence={"kind": "colossal_ring"}),
    "pp 2 1f1b": layout(2, pp=2, microbatches=4),
    "pp 2 gpipe": layout(2, pp=2, schedule="gpipe", microbatches=4),
    "pp 2 interleaved": layout(2, pp=2, schedule="interleaved", chunks=2, microbatches=4),
    "pp 2 zb_h1": layout(2, pp=2, schedule="zb_h1", microbatches=4),
    "pp 2 zb_v": layout(2, pp=2, schedule="zb_v", microbatches=4),
    "ep 2": layout(2, ep=2, **EXPERTS),
    "experts, dp 2": layout(2, ep=1, **EXPERTS),
    "t5, dp 2": layout(2, **HALVES),
    "t5, full recompute": layout(2, **HALVES, recompute={"kind": "full"}),
    "t5, fsdp": layout(2, **HALVES, **fsdp()),
    "t5, tp 2": layout(2, tp=2, **HALVES),
    "t5, ep 2": layout(2, ep=2, **(HALVES | EXPERTS | {"model": EXPERTS["model"] | HALVES["model"]})),
    "ddp, dp 4": layout(4),
    "fsdp, dp 4": layout(4, **fsdp()),
    "fsdp, pp 2": layout(4, pp=2, microbatches=4, **fsdp(allow_slow=True)),
    "zero1, dp 4": layout(4, **zero(1)),
    "tp 4": layout(4, tp=4),
    "tp 4 2d": layout(4, tp=4, tensor={"kind": "2d"}),
    "tp 2 dp 2": layout(4, tp=2),
    "tp 2 pp 2": layout(4, tp=2, pp=2, microbatches=4),
    "sp 4 ring": layout(4, sp=4, sequence={"kind": "ring"}),
    "sp 2 dp 2": layout(4, sp=2, sequence={"kind": "ring"}),
    "pp 4 1f1b": layout(4, pp=4, microbatches=8),
    "pp 2 dp 2": layout(4, pp=2, microbatches=4),
    "ep 4": layout(4, ep=4, **EXPERTS),
    "ep 2 etp 2": layout(4, ep=2, etp=2, **EXPERTS),
    "ddp, dp 8": layout(8),
    "tp 8 3d": layout(8, tp=8, tensor={"kind": "3d"}),
    "tp 8 2.5d": layout(8, tp=8, tensor={"kind": "2.5d", "depth": 2}),
    "tp 2 pp 2 dp 2": layout(8, tp=2, pp=2, microbatches=4),
    "sp 2 tp 2 dp 2": layout(8, sp=2, tp=2, sequence={"kind": "ring"}),
    "ep 4 dp 8": layout(8, ep=4, **EXPERTS),
}


def main(*, only: str | None = None, json: str | None = None, rounds: int = ROUNDS) -> int:
    """Measure all cases, or the cases with the text `only` in their name, in `rounds` calibrations and runs each. Returns 1 if the median
    |error| of memory or time exceeds a tenth."""
    torch.set_num_threads(1)
    chosen = [case for case in CASES if only is None or only in case]
    load_engines([kind_of(name) for name in ("zero1", "fsdp") if any(name[:4] in str(CASES[case].get("sharding")) for case in chosen)])
    pair = f"{'predicted':>11}{'error':>8}"
    print(f"{'case':<26}{'ranks':>6}{'step s':>9}{pair}{'core s':>9}{pair}{'MiB':>9}{'error':>8}", flush=True)
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in chosen}
    programs: list[dict[str, float]] = []
    found: dict[str, float] = {}
    for number in range(rounds):
        machine = calibrate.host(max(CASES[case]["ranks"] for case in chosen))
        programs.append(machine.program)
        for case in chosen:
            one = _run(case, machine)
            if one is None:
                continue
            runs[case].append(one)
            if number + 1 == rounds:
                print(_line(_row(case, runs[case])), flush=True)
            rows = [_row(case, of) for case, of in runs.items() if of]
            found = {name: median([abs(row[name]) for row in rows]) for name in ("step_error", "core_error", "memory_error")}
            if json:  # written after each run, so that an interruption loses nothing
                write_json(
                    json, verb="bench planner-steps", rows=rows, medians=found, rounds=number + 1, cores=machine.cores, programs=programs
                )
    words = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
    print(f"{len(rows)} layouts, medians of absolute errors: {words}; {rounds} rounds, load {getloadavg()[0]:.1f} on {machine.cores} cores")
    return exit_codes.of(bool(found) and found["step_error"] <= WITHIN and found["memory_error"] <= WITHIN)


def _run(case: str, machine: Cluster) -> dict[str, Any] | None:
    """Run a case once. Returns measured and predicted values; None if the run failed, which is printed."""
    ranks, values = CASES[case]["ranks"], recipe(case)
    try:
        measured = run_on_ranks(measure, ranks, ranks, values, STEPS, timeout_s=TIMEOUT_S)
    except RuntimeError as error:
        print(f"{case:<26}{ranks:>6}  did not run: {str(error).splitlines()[-1][:90]}", flush=True)
        return None
    cluster = machine.holding(ranks)
    busiest = max(one["busiest"] for one in measured)
    found = predict(with_values(check_run(build_run(values), ranks), {"dispatch.busiest": busiest}), Place.of(cluster, ranks))
    assert found.time is not None
    pairs = ((one["bytes"], found.ranks[one["stage"]].allocated) for one in measured if one["busiest"] == busiest)
    held, said = max(pairs, key=lambda pair: abs(pair[1] / pair[0] - 1))
    return {
        "busiest": busiest,
        "parts": found.time.parts,
        "step": (max(one["seconds"] for one in measured), found.time.step),
        "core": (sum(one["core_seconds"] for one in measured) / min(ranks, machine.cores), core_seconds(found, cluster)),
        "memory": (held, said),
    }


def _row(case: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a case's row: medians of measured and predicted values over its runs, and the parts of the last prediction."""
    row: dict[str, Any] = {"case": case, "ranks": CASES[case]["ranks"], "busiest": runs[-1]["busiest"], "parts": runs[-1]["parts"]}
    for name in ("step", "core", "memory"):
        was, predicted = (median(run[name][i] for run in runs) for i in (0, 1))
        row |= {f"{name}_measured": was, f"{name}_predicted": predicted, f"{name}_error": predicted / was - 1}
    row["passed"] = abs(row["step_error"]) <= WITHIN and abs(row["memory_error"]) <= WITHIN
    return row


def _line(row: dict[str, Any]) -> str:
    times = "".join(f"{row[f'{n}_measured']:>9.3f}{row[f'{n}_predicted']:>11.3f}{row[f'{n}_error']:>8.0%}" for n in ("step", "core"))
    return f"{row['case']:<26}{row['ranks']:>6}{times}{row['memory_measured'] / 2**20:>9.1f}{row['memory_error']:>8.1%}"


def core_seconds(found: Prediction, cluster: Cluster) -> float:
    """Return the predicted seconds of a step without waits between stages: work of all ranks / cores, plus messages."""
    network, plan, time = found.network, found.plan, found.time
    assert time is not None
    stages = stage_times(network, plan, cluster, tuple(map(sum, rank_layers(network, plan))))
    work = sum(stage.work for stage in stages) / len(stages)
    sent = sum(stage.total for stage in stages) / len(stages) - work
    passes = plan.microbatches * (cluster.crowd(plan.world) * work + sent)
    return passes + time.gradients + time.parameters + time.optimizer


def recipe(case: str) -> dict[str, Any]:
    """Return the recipe of a case, section -> key -> value."""
    values = {name: value for name, value in CASES[case].items() if name != "ranks"}
    train = {"global_batch": SEQUENCES, "eval_sequences": SEQUENCES} | values.pop("train", {})
    precision = values.pop("precision", {"compute": "fp32"})
    model = MODEL | values.pop("model", {})
    return values | {"model": model, "train": train, "precision": precision, "optimizer": {"warmup_steps": 0}}


def measure(rank: int, ranks: int, values: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return this rank's peak of live bytes and its rows over the mean in the second step, its seconds of a later step, and its stage."""
    with Alive() as alive:
        trained = Training.start(values, World(rank, ranks, rank, ranks))
        for number in range(2):
            alive.most = alive.now
            numbers = trained.random_step(number)
        held, busiest = alive.most, busiest_of(numbers, trained.mesh.axis("ep"))
    seconds, core = [], []
    for number in range(2, WARM_UP + steps):
        dist.barrier()
        began, had = time.perf_counter(), time.process_time()
        trained.random_step(number)
        seconds.append(time.perf_counter() - began)
        core.append(time.process_time() - had)
    fastest = torch.tensor(seconds[WARM_UP - 2 :])
    dist.all_reduce(fastest, dist.ReduceOp.MAX)
    core = core[WARM_UP - 2 :]
    times = {"seconds": float(fastest.min()), "core_seconds": median(core)}
    return {"bytes": held, "busiest": busiest, "stage": trained.mesh.axis("pp").index} | times


def busiest_of(numbers: Numbers, ep: Axis, *, one_layer: bool = False) -> float:
    """Return the rows of this rank's experts over the mean of the ranks of ep; 1 without experts. A mean over layers or, with `one_layer`,
    the largest: with full recompute, only the layer at work has rows."""
    loads = [torch.tensor(layer.load).reshape(ep.size, -1).sum(1) * ep.size for layer in numbers.layers]
    of_layers = torch.stack(loads)[:, ep.index] if loads else torch.ones(1)
    return float(of_layers.max() if one_layer else of_layers.mean())
