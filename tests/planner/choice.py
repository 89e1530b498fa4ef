"""Compares the predicted order of plans with the measured order: what it costs to choose a plan by its predicted time.

    ranking(...)     for runs of one network, batch and number of GPUs: measured time of the plan with the least predicted time, over the
                     least measured time, minus 1
    in_order(...)    whether some rows are predicted in the order of their measured times
    crossing(...)    Megatron SC21, Table 2: ZeRO-3 compared with tensor and pipeline parallelism as GPUs grow and micro-batches shrink
    identity(...)    T = sum t + (m - 1) max t for measured stage times t, compared with the measured step (vocabulary parallelism)

The file also makes the lines and numbers of `python -m tests.planner` about time.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

from moe.plan.job.network import Plan
from moe.plan.time.pipeline_time import pipeline_time
from tests.planner.read_tables import Row, Table
from tests.planner.time import Errors, Predicted, errors, predictions


@dataclass(frozen=True)
class Ranking:
    """How good it is to choose, in each group of comparable runs, the plan with the shortest predicted time. groups: number of groups.
    first: fraction of groups in which the chosen plan is the fastest. mean, largest: regret over the groups. The regret of a group is the
    chosen plan's measured time over the fastest plan's, minus 1."""

    groups: int
    first: float
    mean: float
    largest: float


def group_key(row: Row) -> tuple[Any, ...]:
    """Return the key of a row's group: the network, the batch, the number and kind of GPUs."""
    n = row.network
    return (row.table, n.layers, n.width, n.hidden, n.heads, n.length, n.vocab, row.plan.global_batch, row.gpus, row.gpu, row.precision)


def ranking(made: Sequence[Predicted], key: Callable[[Row], Any] = group_key) -> Ranking | None:
    """Return the Ranking over all groups with at least two rows; None without such a group. key: rows with the same key form a group, by
    default runs of the same model on the same GPUs."""
    groups = defaultdict(list)
    for one in made:
        groups[key(one.row)].append(one)
    regrets = []
    for members in groups.values():
        measured = [one.row.seconds or 0.0 for one in members]
        if len(members) > 1:
            chosen = min(members, key=lambda one: one.time.step)
            regrets.append((chosen.row.seconds or 0.0) / min(measured) - 1)
    if not regrets:
        return None
    return Ranking(len(regrets), sum(regret < 1e-9 for regret in regrets) / len(regrets), statistics.mean(regrets), max(regrets))


def in_order(made: Sequence[Predicted]) -> bool:
    """Return whether, for any two rows, the row with the longer measured time also has the longer predicted time."""
    pairs = ((a, b) for a, b in permutations(made, 2) if a.row.seconds and b.row.seconds)
    return all(a.time.step < b.time.step for a, b in pairs if (a.row.seconds or 0.0) < (b.row.seconds or 0.0) * (1 - 1e-9))


@dataclass(frozen=True)
class Crossing:
    """Ratio of two times, measured and predicted: ZeRO-3 over tensor and pipeline parallelism, for a network of `width` on `gpus` GPUs."""

    width: int
    gpus: int
    measured: float
    predicted: float


def crossing(made: Sequence[Predicted]) -> list[Crossing]:
    """Compare each ZeRO-3 run with a run of the same network with pipeline stages: the one with the nearest number of GPUs. Times are
    GPU-seconds per sequence, because the two runs may have different numbers of GPUs and batches."""
    found = []
    for one in (o for o in made if o.row.plan.stage == 3 and o.row.plan.tp == 1):
        near = [o for o in made if o.row.plan.pp > 1 and o.row.network == one.row.network]
        if near:
            other = min(near, key=lambda o: abs(o.row.gpus - one.row.gpus))
            ratios = [_by_gpu(one, kind) / _by_gpu(other, kind) for kind in ("measured", "predicted")]
            found.append(Crossing(one.row.network.width, one.row.gpus, *ratios))
    return found


def _by_gpu(one: Predicted, kind: str) -> float:
    seconds = one.time.step if kind == "predicted" else one.row.seconds or 0.0
    return seconds * one.row.gpus / one.row.plan.global_batch


def identity(rows: Sequence[Row]) -> list[float]:
    """Return the relative errors of T = sum t + (m - 1) max t against the measured step, for rows whose notes have each stage's times t."""
    off = []
    for row in rows:
        found = re.search(r"fwd us per stage ([\d ]+); bwd us per stage ([\d ]+)", row.cells["notes"])
        if found and row.seconds and row.plan.schedule == "1f1b":
            forward, backward = ([1e-6 * float(word) for word in words.split()] for words in found.groups())
            plan = Plan(pp=len(forward), microbatches=row.plan.microbatches)
            off.append(pipeline_time(plan, forward, backward, [0.0] * len(forward)) / row.seconds - 1)
    return off


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the errors and rankings of one table's rows, for the JSON of `python -m tests.planner`."""
    made = predictions(rows)
    found, ranked, closed = errors(made), ranking(made), identity(rows)
    return {
        "time": asdict(found) if found else None,
        "ranking": asdict(ranked) if ranked else None,
        "identity_largest": max(map(abs, closed)) if closed else None,
        "crossing": [asdict(one) for one in crossing(made)],
    }


def time_lines(tables: Sequence[Table]) -> list[str]:
    """Return the printed lines about time: one for each table, one for the dense rows of A100 and H100, one for rows with experts; then the
    crossings of ZeRO-3, the order of one model's layouts, and the errors of T = sum t + (m - 1) max t."""
    lines = [
        f"{'table':<42}{'rows':>6}{'mean':>8}{'median':>8}{'largest':>9}{'bias':>8}"
        f"{'calibrated':>12}{'by layer':>10}{'groups':>8}{'first':>7}{'regret':>8}"
    ]
    everything: list[Predicted] = []
    for table in tables:
        made = predictions(table.rows)
        everything += made
        if found := errors(made):
            lines.append(_line(table.name, found, ranking(made)))
    dense = [one for one in everything if one.row.network.experts is None and one.cluster[:4] in ("a100", "h100", "jean")]
    sparse = [one for one in everything if one.row.network.experts is not None]
    kinds = (("dense rows of A100 and H100", dense), ("rows with experts", sparse))
    lines += [_line(name, found, ranking(made)) for name, made in kinds if (found := errors(made))]
    lines += [
        f"{one.width} wide on {one.gpus} GPUs: ZeRO-3 over tensor and pipelines {one.measured:.2f}, predicted {one.predicted:.2f}"
        for one in crossing(everything)
    ]
    for model, batch in (("Qwen3-235B-A22B", 2048),):
        rows = [one for one in everything if one.row.model == model and one.row.plan.global_batch == batch]
        if rows:
            lines.append(f"{model} at {batch} sequences: {len(rows)} layouts {'in' if in_order(rows) else 'not in'} the measured order")
    closed = [off for table in tables for off in identity(table.rows)]
    if closed:
        lines.append(f"T = sum t + (m - 1) max t: {len(closed)} rows, largest error {max(map(abs, closed)):.1%}")
    return lines


def _line(name: str, found: Errors, ranked: Ranking | None) -> str:
    shares = (found.mean, found.median, found.largest, found.bias, found.calibrated, found.by_layer)
    text = "".join(f"{share:>{width}.1%}" for share, width in zip(shares, (8, 8, 9, 8, 12, 10), strict=True))
    more = f"{ranked.groups:>8}{ranked.first:>7.0%}{ranked.mean:>8.1%}" if ranked else ""
    return f"{name:<42}{found.rows:>6}{text}{more}"
