"""Whether the predicted order of plans is the measured one: the cost of choosing by predictions.

    ranking(...)     groups with the same network, batch and number of GPUs: measured time of the plan ranked first, over the best, minus 1
    in_order(...)    whether predictions never contradict the measured order of some rows
    crossing(...)    Megatron SC21, Table 2: ZeRO-3 compared with tensor and pipeline parallelism as GPUs grow and micro-batches shrink
    identity(...)    T = sum t + (m - 1) max t on measured times of stages, compared with measured steps (vocabulary parallelism's profiles)

Also makes the lines and the numbers of `python -m tests.planner` about time.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe.plan.job.network import Plan
from moe.plan.time.pipeline_time import pipeline_time
from tests.planner.read_tables import Row, Table
from tests.planner.time import Errors, Predicted, errors, predictions


@dataclass(frozen=True)
class Ranking:
    """Quality of choosing, in each group of comparable runs, the plan with the shortest predicted time.

    groups: their number. first: share of groups in which the chosen plan is the fastest. mean, largest: the regret over groups. A regret is
    the chosen plan's measured time over the fastest plan's, minus 1.
    """

    groups: int
    first: float
    mean: float
    largest: float


def group_key(row: Row) -> tuple[Any, ...]:
    """The key of a row's group: the network, the batch, the number of GPUs and their kind."""
    n = row.network
    return (row.table, n.layers, n.width, n.hidden, n.heads, n.length, n.vocab, row.plan.global_batch, row.gpus, row.gpu, row.precision)


def ranking(made: Sequence[Predicted], key: Callable[[Row], Any] = group_key) -> Ranking | None:
    """Return how well the plan with the shortest predicted time is chosen, over all groups with at least two plans; None without such a
    group.

    made: measured rows with their predictions. key: rows with the same key form a group, by default runs of the same model on the same
    GPUs.
    """
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
    """Return whether of any two rows, the one that was measured slower is also predicted slower."""
    return all(
        a.time.step < b.time.step
        for a in made
        for b in made
        if a.row.seconds and b.row.seconds and a.row.seconds < b.row.seconds * (1 - 1e-9)
    )


@dataclass(frozen=True)
class Crossing:
    """Time of ZeRO-3 over time of tensor and pipeline parallelism, for one network and number of GPUs: measured and predicted."""

    width: int
    gpus: int
    measured: float
    predicted: float


def crossing(made: Sequence[Predicted]) -> list[Crossing]:
    """Compare each ZeRO-3 run with the run with pipeline stages of the same network that has the nearest number of GPUs.

    Numbers of GPUs and batches may differ, so times are per sequence, times the number of GPUs.
    """
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
    """Relative errors of a pipeline's step time by formula, for rows whose notes give the microseconds of each stage's passes."""
    off = []
    for row in rows:
        found = re.search(r"fwd us per stage ([\d ]+); bwd us per stage ([\d ]+)", row.cells["notes"])
        if found and row.seconds and row.plan.schedule == "1f1b":
            forward, backward = ([1e-6 * float(word) for word in words.split()] for words in found.groups())
            plan = Plan(pp=len(forward), microbatches=row.plan.microbatches)
            off.append(pipeline_time(plan, forward, backward, [0.0] * len(forward)) / row.seconds - 1)
    return off


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The errors and rankings of one table's rows, for the JSON of `python -m tests.planner`."""
    made = predictions(rows)
    found, ranked, closed = errors(made), ranking(made), identity(rows)
    return {
        "time": asdict(found) if found else None,
        "ranking": asdict(ranked) if ranked else None,
        "identity_largest": max(map(abs, closed)) if closed else None,
        "crossing": [asdict(one) for one in crossing(made)],
    }


def time_lines(tables: Sequence[Table]) -> list[str]:
    """Lines about time: a row for each table, then all dense rows of A100 and H100, rows with experts, rankings, and single findings."""
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
    kinds = (
        (
            "dense rows of A100 and H100",
            [one for one in everything if one.row.network.experts is None and one.cluster[:4] in ("a100", "h100", "jean")],
        ),
        ("rows with experts", [one for one in everything if one.row.network.experts is not None]),
    )
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
