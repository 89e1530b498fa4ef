"""Measures how many steps K-FAC saves, and how much time it costs at the end of steps or in the bubbles of a pipeline (PipeFisher).

    steps      tiny models on the source text of Python's standard library: steps until the mean loss of ten steps reaches AdamW's final
               loss. Each optimizer has the best of three learning rates
    bubbles    a pipeline of 4 processes with one stage each: seconds per step with AdamW, with K-FAC at the end of steps, and with K-FAC in
               bubbles. Every pass and every unit of K-FAC's work also sleeps, as if a device were computing, so that two cores suffice
    time       such a pipeline on the same text: seconds until the mean loss of ten steps reaches AdamW's final loss. The learning rate is
               the best of three in one process

`python -m tests.measured kfac --json FILE`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe.checks.together import check_run
from moe.data import open_data
from moe.data.token_shard import TokenShard
from moe.launch import exit_codes
from moe.model.transformer import Block, Transformer
from moe.parallelize.build import build
from moe.parallelize.engines import start_engine
from moe.recipe.sections import Run
from moe.records.results import write_json
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import Pipelined, Single, fillers, pipelined
from moe.train.parts.learning_rate import learning_rate
from parallel.kfac.fisher import BubbleFiller
from parallel.kfac.grafted import KfacEngine
from parallel.kfac.kfac import Kfac, KfacUnit
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World

CPU = torch.device("cpu")
RATES = {"adamw": (0.006, 0.012, 0.024), "kfac": (0.012, 0.024, 0.048)}
LAST = 10  # number of steps over which losses are averaged
FORWARD_S, BACKWARD_S = 0.03, 0.06
UNIT_S = {"curvature": 0.004, "inversion": 0.012}  # seconds of a unit for one Kronecker factor; together a third of a step
ALLOWED = 1.10  # largest allowed ratio of K-FAC's step time to AdamW's, in the same schedule
KFAC_ENDS, KFAC_BUBBLES = "kfac at the ends", "kfac in the bubbles"
WAYS = ("adamw", KFAC_ENDS, KFAC_BUBBLES)  # the optimizers: AdamW, K-FAC at the end of steps, K-FAC in bubbles


def values_of(kind: str, lr: float, steps: int, *, sparse: bool, delay: int = 0) -> dict[str, Any]:
    """Return the recipe of a model with two layers, for one process. kind: adamw or kfac; delay: steps by which K-FAC's factors are old."""
    model = {"num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 256, "ffn": "relu", "norm": "layernorm", "max_length": 128}
    kfac = {"kfac": {"delay": delay}} if kind == "kfac" else {}
    values: dict[str, Any] = {
        "model": model | {"tied_embeddings": False, "init_scale": 0.1, "moe_every": 2 if sparse else 0},
        "optimizer": {"kind": kind, "lr": lr, "warmup_steps": 20} | kfac,
        "train": {"steps": steps, "global_batch": 16, "eval_sequences": 16},
    }
    if sparse:
        values |= {"experts": {"num_experts": 4}, "router": {"preset": "switch", "capacity_factor": 2.0}}
    return values


# --- steps until AdamW's loss ---------------------------------------------------------------------------------------------


def losses_of(values: dict[str, Any]) -> tuple[list[float], float]:
    """Train the recipe in one process. Return (loss of each step, mean seconds per step)."""
    run = check_run(Run(**values), 1)
    mesh = process.connect(run.mesh_degrees(), World(0, 1))
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed, log=lambda _: None)
    model, layouts = build(run, mesh, device=CPU)
    executor, scale = Single(start_engine(run, model, layouts, mesh)), LossScale.of("none")
    shard = TokenShard.whole(run.train.global_batch, run.model.max_length)
    losses, seconds = [], []
    for step in range(run.train.steps):
        started = time.perf_counter()
        batch = torch.from_numpy(data.train.batch(step, shard))
        numbers = accumulate(executor, batch, shard=shard, microbatches=1, seed=run.train.seed, step=step)
        rate = learning_rate(step, run.optimizer, total=run.train.steps)
        finish(executor.engine, numbers, world=mesh.axis("world"), scale=scale, lr=rate, clip_norm=run.optimizer.clip_norm, device=CPU)
        losses.append(numbers.loss)
        seconds.append(time.perf_counter() - started)
    return losses, statistics.mean(seconds)


def smoothed(losses: list[float]) -> list[float]:
    """Moving average of the losses over LAST steps."""
    return [statistics.mean(losses[i - LAST : i]) for i in range(LAST, len(losses) + 1)]


def steps_to(losses: list[float], target: float) -> int | None:
    """Return after how many steps the moving average of the losses is at most `target`; None if never."""
    return next((i + LAST for i, mean in enumerate(smoothed(losses)) if mean <= target), None)


def steps_row(model: str, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the table row of a model (dense or sparse): for each optimizer, steps until AdamW's final loss. say: prints a line."""
    best: dict[str, tuple[list[float], float, float]] = {}
    for name, kind, delay in (("adamw", "adamw", 0), ("kfac", "kfac", 0), ("kfac, 4 steps late", "kfac", 4)):
        tried = {lr: losses_of(values_of(kind, lr, steps, sparse=model == "sparse", delay=delay)) for lr in RATES[kind]}
        lr = min(tried, key=lambda lr: smoothed(tried[lr][0])[-1])
        best[name] = (*tried[lr], lr)
        ends = ", ".join(f"{smoothed(losses)[-1]:.3f} at lr {lr:g}" for lr, (losses, _) in tried.items())
        say(f"{model:<8}{name:<20}ends at {ends}")
    target = smoothed(best["adamw"][0])[-1]
    row: dict[str, Any] = {"what": "steps", "model": model, "steps": steps, "target_loss": target}
    for name, (losses, seconds, lr) in best.items():
        row[name] = {"lr": lr, "steps_to_target": steps_to(losses, target), "final_loss": smoothed(losses)[-1], "seconds_a_step": seconds}
    row["passed"] = (row["kfac"]["steps_to_target"] or steps + 1) < row["adamw"]["steps_to_target"]
    return row


# --- seconds per step of a pipeline ---------------------------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    """Identity function that sleeps in its forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return grad


def _sleeping(model: nn.Module) -> None:
    for block in model.modules():
        if isinstance(block, Block):
            block.register_forward_hook(lambda _, inputs, output: (_Sleep.apply(output[0]), output[1]))


def _slow(kfac: Kfac) -> None:
    plain = kfac.do

    def do(unit: KfacUnit) -> None:
        time.sleep(UNIT_S[unit.kind])
        plain(unit)

    kfac.do = do  # type: ignore[method-assign]


@dataclass
class Started:
    """One rank of a pipeline, whose passes and K-FAC units also sleep. filler: does K-FAC's work in bubbles; None for other optimizers."""

    run: Run
    mesh: Mesh
    executor: Pipelined
    filler: BubbleFiller | None

    def step(self, number: int, batch: Tensor, *, lr: float) -> tuple[float, float]:
        """Take one training step on the batch. Return (loss, seconds)."""
        started = time.perf_counter()
        shard = TokenShard.holding(self.mesh, batch.shape)
        numbers = accumulate(self.executor, batch, shard=shard, microbatches=self.run.pipeline.microbatches, seed=0, step=number)
        world, clip_norm = self.mesh.axis("world"), self.run.optimizer.clip_norm
        finish(self.executor.engine, numbers, world=world, scale=LossScale.of("none"), lr=lr, clip_norm=clip_norm, device=CPU)
        return numbers.loss, time.perf_counter() - started


def start(values: dict[str, Any], way: str, rank: int, ranks: int, schedule: str) -> Started:
    """Start one rank of a pipeline with this recipe. way: one of WAYS."""
    run = check_run(Run(**values | {"degrees": {"pp": ranks, "dp": 1}, "pipeline": {"schedule": schedule, "microbatches": ranks}}), ranks)
    mesh = process.connect(run.mesh_degrees(), World(rank, ranks))
    model, layouts = build(run, mesh, device=CPU)
    assert isinstance(model, Transformer)
    _sleeping(model)
    engine = start_engine(run, model, layouts, mesh)
    if isinstance(engine, KfacEngine):
        _slow(engine.kfac)
        if way == KFAC_ENDS:
            engine.kfac.defer(timed=False)
    watchers = fillers(run, engine, mesh) if way == KFAC_BUBBLES else []
    return Started(run, mesh, pipelined(run, engine, mesh, watchers=watchers), watchers[0] if watchers else None)


def staged(rank: int, ranks: int, schedule: str, way: str, steps: int) -> dict[str, float]:
    """Train on one rank. Return `seconds` per step and the last `loss`; for K-FAC in bubbles also the fraction of its work that is `placed`
    in bubbles, and the waiting time before (`waits`) and after it is placed (`filled`).
    """
    values = {
        "model": {"num_layers": ranks, "d_model": 32, "num_heads": 2, "d_ff": 64, "max_length": 16, "tied_embeddings": False},
        "optimizer": {"kind": "kfac", "kfac": {"refresh_every": 4, "delay": 3}} if way != "adamw" else {},
        "train": {"global_batch": ranks, "eval_sequences": ranks},
    }
    started, seconds, loss = start(values, way, rank, ranks, schedule), list[float](), 0.0
    for step in range(steps):
        batch = torch.randint(0, started.run.vocab_size, (ranks, 17), generator=torch.Generator().manual_seed(step))
        loss, took = started.step(step, batch, lr=1e-3)
        seconds.append(took)
    planned = seconds[12:]  # in the first 12 steps, the filler measures and does not place work yet
    whole = len(planned) // 4 * 4
    phases = [statistics.median(planned[i:whole:4]) for i in range(4)]  # K-FAC's factors are refreshed in every fourth step
    found, filler = {"seconds": statistics.mean(phases), "loss": loss}, started.filler
    return found | ({} if filler is None else {"placed": filler.placed_share, "waits": filler.waits[0], "filled": filler.waits[1]})


def bubbles_row(schedule: str, ranks: int, steps: int) -> dict[str, Any]:
    """Return the table row of a pipeline schedule: seconds per step with each of WAYS."""
    found = {way: run_on_ranks(staged, ranks, ranks, schedule, way, steps, timeout_s=300) for way in WAYS}
    seconds = {way: max(rank["seconds"] for rank in of) for way, of in found.items()}
    row: dict[str, Any] = {"what": "bubbles", "schedule": schedule, "stages": ranks, "microbatches": ranks, "seconds": seconds}
    row |= {f"{way} over adamw": seconds[way] / seconds["adamw"] for way in WAYS[1:]}
    row |= {
        f"bubble_{when}": statistics.mean(rank[key] for rank in found[KFAC_BUBBLES])
        for when, key in (("before", "waits"), ("after", "filled"))
    }
    row["placed_share"] = statistics.mean(rank["placed"] for rank in found[KFAC_BUBBLES])
    row["same_loss"] = len({rank["loss"] for way in WAYS[1:] for rank in found[way]}) == 1
    row["passed"] = row["same_loss"] and row[f"{KFAC_BUBBLES} over adamw"] <= ALLOWED and seconds[KFAC_BUBBLES] < seconds[KFAC_ENDS]
    return row


# --- seconds until AdamW's loss in a pipeline -----------------------------------------------------------------------------

DELAYS = (0, 1)  # optimizer.kfac.delay. With 1, curvature is computed in the bubbles of one step and inverses in those of the next


def timed_values(kind: str, delay: int, lr: float, steps: int, ranks: int) -> dict[str, Any]:
    """Return the recipe of a model with `ranks` layers, one for each stage."""
    values = values_of(kind, lr, steps, sparse=False, delay=delay)
    values["model"] |= {"num_layers": ranks, "d_model": 48, "d_ff": 192, "max_length": 64}
    if kind == "kfac":
        values["optimizer"]["kfac"]["refresh_every"] = 4
    return values


def until(rank: int, ranks: int, schedule: str, way: str, values: dict[str, Any], target: float) -> dict[str, Any]:
    """Train on one rank until the moving average of losses is at most `target` (`reached`), or to the last step."""
    started = start(values, way, rank, ranks, schedule)
    run, losses, seconds = started.run, list[float](), 0.0
    shard = TokenShard.whole(run.train.global_batch, run.model.max_length)
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed, log=lambda _: None)
    for step in range(run.train.steps):
        batch = torch.from_numpy(data.train.batch(step, shard))
        loss, took = started.step(step, batch, lr=learning_rate(step, run.optimizer, total=run.train.steps))
        losses.append(loss)
        seconds += took
        if steps_to(losses, target) is not None:
            break
    placed = 0.0 if started.filler is None else started.filler.placed_share
    return {"losses": losses, "seconds": seconds, "reached": steps_to(losses, target) is not None, "placed": placed}


def best_rate(delay: int, steps: int, ranks: int, target: float, say: Callable[[str], None]) -> float:
    """Return K-FAC's learning rate with the fewest steps to the target loss. One process suffices, because losses do not depend on the
    pipeline.
    """
    taken = {}
    for lr in RATES["kfac"]:
        taken[lr] = steps_to(losses_of(timed_values("kfac", delay, lr, steps, ranks))[0], target) or steps + 1
    say(f"kfac, delay {delay}, steps in one process: " + ", ".join(f"{n} at lr {lr:g}" for lr, n in taken.items()))
    return min(taken, key=lambda lr: taken[lr])


def time_row(schedule: str, ranks: int, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the table row of a pipeline schedule: seconds until each optimizer reaches AdamW's final loss. say: prints a line."""
    ends = {lr: smoothed(losses_of(timed_values("adamw", 0, lr, steps, ranks))[0])[-1] for lr in RATES["adamw"]}
    say("adamw, loss in one process: " + ", ".join(f"{end:.3f} at lr {lr:g}" for lr, end in ends.items()))
    rates = {("adamw", 0): min(ends, key=lambda lr: ends[lr])}
    target = math.ceil(min(ends.values()) * 1000) / 1000  # rounded up, because a pipeline sums in another order
    rates |= {("kfac", delay): best_rate(delay, steps, ranks, target, say) for delay in DELAYS}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for way, delay in (("adamw", 0), *((way, delay) for delay in DELAYS for way in WAYS[1:])):
        kind = way.split()[0]
        values = timed_values(kind, delay, rates[kind, delay], steps, ranks)
        of = run_on_ranks(until, ranks, ranks, schedule, way, values, target, timeout_s=300)
        seconds, placed = max(rank["seconds"] for rank in of), statistics.mean(rank["placed"] for rank in of)
        found[way, delay] = of[0] | {"lr": rates[kind, delay], "seconds": seconds, "placed": placed}
        taken = f"after {len(of[0]['losses'])} steps" if of[0]["reached"] else f"not within {steps} steps"
        say(f"{way}, delay {delay}: loss {target:.3f} {taken}, {seconds:.1f} s, {placed:.2f} placed")
    row: dict[str, Any] = {"what": "time", "schedule": schedule, "stages": ranks, "microbatches": ranks, "steps": steps}
    row["target_loss"] = target
    row["ways"] = [
        {"way": way, "delay": delay, "steps": len(of["losses"])} | {key: of[key] for key in ("reached", "seconds", "lr", "placed")}
        for (way, delay), of in found.items()
    ]
    row["same_losses"] = all(found[KFAC_ENDS, d]["losses"] == found[KFAC_BUBBLES, d]["losses"] for d in DELAYS)
    in_bubbles = [of for (way, _), of in found.items() if way == KFAC_BUBBLES and of["reached"]]
    others = [of for (way, _), of in found.items() if way != KFAC_BUBBLES and of["reached"]]
    first = min((of["seconds"] for of in in_bubbles), default=math.inf) < min((of["seconds"] for of in others), default=math.inf)
    fewer = all(len(of["losses"]) < len(found["adamw", 0]["losses"]) for of in in_bubbles)
    row["passed"] = row["same_losses"] and first and fewer
    return row


def main(*, only: str = "steps,bubbles,time", steps: int = 200, kinds: str = "1f1b,gpipe,chimera", json: str | None = None) -> int:
    """`python -m tests.measured kfac`. Returns 1 if K-FAC needs as many steps as AdamW, if in bubbles it makes a step over 10 % longer, or
    if in bubbles it is not the first to reach AdamW's loss."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if "bubbles" in only:
        print(f"{'schedule':<10}" + "".join(f"{way:>22}" for way in WAYS) + f"{'in the bubbles over':>22}{'placed':>8}{'bubble':>16}")
        for schedule in kinds.split(","):
            row = bubbles_row(schedule, 4, 24)
            rows.append(row)
            times = "".join(f"{1000 * row['seconds'][way]:>19.1f} ms" for way in WAYS)
            said = "" if row["passed"] else "  FAIL"
            waits = f"{row['bubble_before']:.3f} -> {row['bubble_after']:.3f}"
            print(
                f"{schedule:<10}{times}{row[f'{KFAC_BUBBLES} over adamw']:>22.3f}{row['placed_share']:>8.2f}{waits:>16}{said}", flush=True
            )
    if "steps" in only:
        for model in ("dense", "sparse"):
            row = steps_row(model, steps, lambda line: print(line, flush=True))
            rows.append(row)
            taken = ", ".join(f"{name} {row[name]['steps_to_target']}" for name in ("adamw", "kfac", "kfac, 4 steps late"))
            print(f"{model}: steps to a loss of {row['target_loss']:.3f}: {taken}{'' if row['passed'] else '  FAIL'}", flush=True)
    if "time" in only:
        rows.append(row := time_row(kinds.split(",")[0], 4, steps, lambda line: print(line, flush=True)))
        print("" if row["passed"] else "FAIL: K-FAC in the bubbles is not the first to AdamW's loss", flush=True)
    if json:
        write_json(json, verb="bench kfac", rows=rows, steps=steps, allowed=ALLOWED)
    return exit_codes.of(all(row["passed"] for row in rows))
