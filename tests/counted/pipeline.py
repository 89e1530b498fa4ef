"""Measures the bytes of activations that pipeline ranks keep, and compares them with the prediction of simulator/held.py.

For each stage, the bytes of one micro-batch are measured alone: between F and its backward pass, and between I and W. The prediction
multiplies them with the number of micro-batches in flight. Copies of older weights are excluded and counted as versions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from moe.bench.grids.pipeline import Stages, connect, descend, runtime_for, schedule_for
from moe.launch import exit_codes
from moe.recipe.sections import Model
from moe.records.results import write_json
from parallel.mesh.mesh import Mesh
from parallel.numerics.weight_gradient import defer_gradients, splittable
from parallel.pipeline.schedule import Op, Schedule, Span, Watcher
from parallel.pipeline.schedules import SCHEDULES, kind_of
from parallel.pipeline.simulator.held import peak_kept, weight_versions
from parallel.process.fork import run_on_ranks
from tests.counted.alive import Alive
from tests.support.stages import batch, layers

WITHIN = 0.05


def weighed(rank: int, ranks: int, names: list[str], microbatches: int, config: dict[str, int], size: int) -> list[dict[str, Any]]:
    """Return for each schedule in `names` the bytes that this rank keeps (keys: see `_weighed`). size: sequences in a micro-batch."""
    mesh = connect(rank, ranks)
    return [_weighed(mesh, schedule_for(name, ranks, microbatches), Model(**config), size) for name in names]


def _weighed(mesh: Mesh, schedule: Schedule, config: Model, size: int) -> dict[str, Any]:
    rank = mesh.axis("pp").index
    inputs, targets = batch(schedule.microbatches, size, config.max_length)
    model, stages = layers(config, schedule, inputs[0])
    if any(action.op is Op.I for action in schedule.orders[rank]):
        splittable(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    mine = {stage: stages[stage] for stage in schedule.stages_of(rank)}
    crossing = (size, config.max_length, config.d_model)
    runtime = runtime_for(schedule, mesh, stages)
    work = Stages(
        mine,
        schedule,
        rank,
        inputs=inputs,
        crossing=crossing,
        loss=lambda y, j: F.cross_entropy(y.flatten(0, 1), targets[j].flatten()),
        change=descend if schedule.num_updates > 1 else None,
    )
    there = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *inputs, *targets]
    peak = 0
    with Alive(there) as alive:
        alone = {stage: _alone(work, stage, alive) for stage in mine}
        before = alive.now

        look = _Look(work, alive, before)
        alive.most = alive.now
        runtime.run(work, watchers=[look])
        peak = alive.most - before
    kept, after_i = ({str(stage): found[i] for stage, found in alone.items()} for i in (0, 1))
    return {"held": look.held, "peak": peak, "versions": max(1, look.versions), "kept": kept, "after_i": after_i}


class _Look(Watcher):
    """Watcher that records the peak of the bytes that are alive between actions. before: bytes before the first action; subtracted."""

    def __init__(self, work: Stages, alive: Alive, before: int) -> None:
        self.work, self.alive, self.start = work, alive, before
        self.held, self.versions = 0, 0

    def begin(self) -> None:
        self._weigh()

    def after(self, at: int, took: Span) -> None:
        self._weigh()

    def _weigh(self) -> None:
        versions = self.work.versions.values()
        weights = [t for v in versions for of in ([p.data for p in v.parameters], *v.stashed.values()) for t in of]
        self.held = max(self.held, self.alive.now - self.start - self.alive.new(weights))
        self.versions = max([self.versions, *(v.count for v in versions)])


def _alone(work: Stages, stage: int, alive: Alive) -> tuple[int, int]:
    """Return the bytes that one micro-batch keeps on a stage: (between F and its backward pass, between I and W)."""
    before = alive.now
    x = torch.randn(work.crossing).requires_grad_() if stage else None
    output = torch.autograd.graph.get_gradient_edge(work.forward(stage, 0, x))
    work.losses.clear()
    kept = alive.now - before
    with defer_gradients() as pending:
        work.backward(output, torch.ones(work.crossing) if stage < work.schedule.num_stages - 1 else None)
    del x, output
    left = alive.now - before
    pending.compute()
    return kept, left


def memory_rows(ranks: int, names: list[str], *, microbatches: int, width: int = 64, size: int = 4) -> list[dict[str, Any]]:
    """Return a row for each schedule, with the measured and predicted peak bytes of each rank. width: of the model. size: sequences in a
    micro-batch."""
    config = {"num_layers": 4 * ranks, "d_model": width, "num_heads": 2, "d_ff": 4 * width, "max_length": 128, "tied_embeddings": False}
    by_rank = run_on_ranks(weighed, ranks, ranks, names, microbatches, config, size, timeout_s=300)
    rows = []
    for name, *found in zip(names, *by_rank, strict=True):
        schedule = schedule_for(name, ranks, microbatches)
        sizes = [{int(s): value for rank in found for s, value in rank[which].items()} for which in ("kept", "after_i")]
        said = peak_kept(schedule, lambda stage, of=sizes[0]: of[stage], lambda stage, of=sizes[1]: of[stage])  # type: ignore[misc]
        held = [rank["held"] for rank in found]
        errors = [theirs / ours - 1 for theirs, ours in zip(said, held, strict=True)]
        versions, wanted = [rank["versions"] for rank in found], list(weight_versions(schedule))
        rows.append(
            {"what": "memory", "schedule": name, "ranks": ranks, "stages": schedule.num_stages, "microbatches": schedule.microbatches}
            | {"measured_bytes": held, "simulated_bytes": list(said), "errors": errors, "error": max(errors, key=abs)}
            | {"peak_bytes": [rank["peak"] for rank in found], "weight_versions": versions, "simulated_weight_versions": wanted}
            | {"passed": max(map(abs, errors)) <= WITHIN and versions == wanted}
        )
    return rows


def main(*, nproc: int | None = None, kinds: str | None = None, json: str | None = None) -> int:
    """Print a row for each schedule on 2 and 4 ranks, or on nproc. Return 1 if a rank's measured bytes differ from the prediction.
    kinds: names of schedules, separated by commas; None: all."""
    torch.set_num_threads(1)
    names = kinds.split(",") if kinds else list(SCHEDULES)
    for name in names:
        kind_of(name)
    print(
        f"{'schedule':<12}{'ranks':>6}{'stages':>7}{'micro':>7}{'kept, MiB a rank':>30}{'simulated':>30}{'error':>9}{'versions':>12}",
        flush=True,
    )
    rows = [row for ranks in ([nproc] if nproc else [2, 4]) for row in memory_rows(ranks, names, microbatches=2 * ranks)]
    for row in rows:
        kept, simulated = (", ".join(f"{n / 2**20:.2f}" for n in row[key]) for key in ("measured_bytes", "simulated_bytes"))
        versions, said = ", ".join(str(n) for n in row["weight_versions"]), "" if row["passed"] else "  FAIL"
        about = f"{row['schedule']:<12}{row['ranks']:>6}{row['stages']:>7}{row['microbatches']:>7}"
        print(f"{about}{kept:>30}{simulated:>30}{row['error']:>+9.2%}{versions:>12}{said}", flush=True)
    if json:
        write_json(json, verb="counted pipeline", rows=rows)
    return exit_codes.of(all(row["passed"] for row in rows))
