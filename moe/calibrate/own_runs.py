"""`moe plan --calibrate --runs FOLDER`: fits constants of a cluster to the measured steps of finished runs of `moe train` on it.

summary.json of each run has its recipe, number of ranks, hardware, and the median seconds of its steps. Each constant of CONSTANTS is
multiplied by a factor e^x, and the fit minimizes

    sum over runs of (log(predicted / measured) / noise)^2 + sum over constants of (x / PRIOR)^2

noise: standard deviation of the errors that remain, at least NOISE. The measured steps determine a constant if the standard deviation of
its x is below DETERMINED. If some constants are not determined, the one with the largest standard deviation keeps the cluster file's value,
and the others are fitted again.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from moe.launch import exit_codes
from moe.plan.choose.predicted import settled
from moe.plan.choose.recipe_of import with_values
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster, load_cluster, mapping_of
from moe.plan.time.cost import step_time
from moe.plan.time.stage_time import own_program
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.records.metrics import SUMMARY, read, read_summary
from parallel.errors import BadInput, counted, some
from parallel.store.files import check_writable, write_text

# smallest standard deviation of log(predicted / measured) that the fit assumes: even with the right constants, predictions for different
# layouts have errors of about this size (docs/parallel/planner_time.md)
NOISE = 0.05
# x: logarithm of the factor by which the fit multiplies a constant
PRIOR = math.log(2)  # prior standard deviation of x
DETERMINED = 0.25  # a constant counts as determined by the steps if the standard deviation of its x is below this
MOST = math.log(4)  # largest absolute value of x: a factor of 4
STEP = 0.02  # difference of x in numerical derivatives: large compared with the small jumps of predicted seconds


@dataclass(frozen=True)
class Step:
    """Measured training step of one run. run: name of the run's folder. network: sizes of its model. plan: its parallel layout. seconds:
    median seconds of a step."""

    run: str
    network: Network
    plan: Plan
    seconds: float

    def error(self, cluster: Cluster) -> float:
        """Return log(predicted / measured seconds)."""
        return math.log(step_time(self.network, self.plan, cluster.holding(self.plan.world)).step / self.seconds)


# --- constants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """A constant of a cluster file. value: returns the constant. scaled: returns the cluster with the constant multiplied by a factor.
    most: on accelerators, the largest value that a fit may give the constant; 1 if it is a share of the hardware's peak."""

    value: Callable[[Cluster], float]
    scaled: Callable[[Cluster, float], Cluster]
    most: float = math.inf

    def largest(self, cluster: Cluster) -> float:
        """Return the logarithm of the largest factor by which the fit may multiply this constant."""
        return MOST if cluster.cores else min(MOST, math.log(self.most / self.value(cluster)))


def _device(cluster: Cluster, **values: Any) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **values))


def _products(cluster: Cluster, factor: float) -> Cluster:
    one = cluster.device
    rates = {kind: {flops: rate * factor for flops, rate in of.items()} for kind, of in one.rates.items()}
    return _device(cluster, sustained=one.sustained * factor, rates=rates)


def _attention(cluster: Cluster, factor: float) -> Cluster:
    one, times = cluster.device, {kind: [time / factor for time in of] for kind, of in cluster.device.attention_times.items()}
    return _device(cluster, attention=tuple(share * factor for share in one.attention), attention_times=times)


def _links(cluster: Cluster, factor: float) -> Cluster:
    one = cluster.inside
    sums = one.sum_bus_gb_s and {ranks: rate * factor for ranks, rate in one.sum_bus_gb_s.items()}
    times = {
        kind: {ranks: {size: us / factor for size, us in row.items()} for ranks, row in table.items()} for kind, table in one.times.items()
    }
    bus = {ranks: rate * factor for ranks, rate in one.bus_gb_s.items()}
    return replace(cluster, inside=replace(one, bus_gb_s=bus, sum_bus_gb_s=sums, pair_gb_s=one.pair_gb_s * factor, times=times))


def _program(name: str) -> Constant:
    def value(cluster: Cluster) -> float:
        return float(getattr(own_program(cluster), name))

    return Constant(value, lambda cluster, factor: replace(cluster, program=cluster.program | {name: value(cluster) * factor}))


CONSTANTS = {
    "device.sustained": Constant(lambda c: c.device.sustained, _products, 1.0),
    "device.attention": Constant(lambda c: max(c.device.attention), _attention, 1.0),
    "device.memory_share": Constant(
        lambda c: c.device.memory_share, lambda c, factor: _device(c, memory_share=c.device.memory_share * factor), 1.0
    ),
    "program.launch_us": _program("launch_us"),
    "program.step_ms": _program("step_ms"),
    "inside.bus_gb_s": Constant(lambda c: max(c.inside.bus_gb_s.values()), _links),
    "between.share": Constant(
        lambda c: c.between.share, lambda c, factor: replace(c, between=replace(c.between, share=c.between.share * factor)), 1.0
    ),
}
TOGETHER = {  # constant -> other values of the cluster file that are multiplied by the same factor
    "device.sustained": "device.rates",
    "device.attention": "device.attention_times",
    "inside.bus_gb_s": "all of inside but latencies",
}


# --- the fit ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Result of `fitted`. cluster: with the fitted constants. determined: name of a fitted constant -> standard deviation of x, the
    logarithm of its factor. undetermined: names of the constants that the steps do not determine."""

    cluster: Cluster
    determined: dict[str, float]
    undetermined: tuple[str, ...]


def fitted(cluster: Cluster, steps: Sequence[Step]) -> Fit:
    """Fit the constants that the steps determine. The other constants keep their values."""
    every = [name for name, one in CONSTANTS.items() if one.value(cluster) > 0]
    made, noise, determined = cluster, NOISE, dict[str, float]()
    for _ in every:  # ends earlier, once the set of determined constants no longer changes
        names, determined = list(determined), _determined(made, steps, every, noise)
        if list(determined) == names:
            break
        made, noise = _least_squares(cluster, steps, list(determined))
    return Fit(made, determined, tuple(name for name in every if name not in determined))


def _scaled(cluster: Cluster, names: Sequence[str], x: Sequence[float]) -> Cluster:
    for name, of in zip(names, x, strict=True):
        cluster = CONSTANTS[name].scaled(cluster, math.exp(of))
    return cluster


def _errors(cluster: Cluster, steps: Sequence[Step]) -> Any:
    import numpy as np

    return np.array([step.error(cluster) for step in steps])


def _slopes(cluster: Cluster, steps: Sequence[Step], name: str) -> Any:
    """Return the derivative of each step's error with respect to x, the logarithm of the factor on the constant `name`."""
    up, down = (_errors(CONSTANTS[name].scaled(cluster, math.exp(by)), steps) for by in (STEP, -STEP))
    return (up - down) / (2 * STEP)


def _determined(cluster: Cluster, steps: Sequence[Step], names: Sequence[str], noise: float) -> dict[str, float]:
    """Return a dict: constant in `names` that the steps determine -> standard deviation of the logarithm of its factor. Constants are left
    out, the largest deviation first, until all are below DETERMINED. noise: standard deviation of the steps' errors."""
    import numpy as np

    slopes, left = np.stack([_slopes(cluster, steps, name) for name in names]) / noise, list(range(len(names)))
    while left:
        variances = np.diag(np.linalg.inv(slopes[left] @ slopes[left].T + np.eye(len(left)) / PRIOR**2))
        if variances.max() < DETERMINED**2:
            return {names[at]: math.sqrt(of) for at, of in zip(left, variances, strict=True)}
        left.pop(int(variances.argmax()))
    return {}


def _least_squares(cluster: Cluster, steps: Sequence[Step], names: Sequence[str]) -> tuple[Cluster, float]:
    """Return (the cluster, in which the constants `names` are fitted; standard deviation of the errors that remain, at least NOISE)."""
    import numpy as np
    from scipy.optimize import least_squares

    x: Any = np.zeros(len(names))
    noise, made = NOISE, cluster
    bounds = [-MOST] * len(names), [CONSTANTS[name].largest(cluster) for name in names]

    def errors(x: Any) -> Any:
        return np.concatenate([_errors(_scaled(cluster, names, x), steps) / noise, x / PRIOR])

    def slopes(x: Any) -> Any:
        there = _scaled(cluster, names, x)
        return np.concatenate([np.stack([_slopes(there, steps, name) for name in names], 1) / noise, np.eye(len(names)) / PRIOR])

    for _ in range(2):  # first with NOISE, then with the noise that the first fit leaves
        x = least_squares(errors, x, jac=slopes, bounds=bounds, xtol=1e-4).x if names else x
        made = _scaled(cluster, names, x)
        noise = max(NOISE, math.sqrt(float(np.sum(_errors(made, steps) ** 2)) / max(1, len(steps) - len(names))))
    return made, noise


def off(cluster: Cluster, steps: Sequence[Step]) -> float:
    """Return the mean over the runs of |predicted / measured - 1|."""
    return statistics.mean(abs(math.expm1(step.error(cluster))) for step in steps)


def left_out(cluster: Cluster, steps: Sequence[Step]) -> float:
    """Cross-validate: return the mean of |predicted / measured - 1|, each run predicted with constants fitted to the other runs."""
    return statistics.mean(off(fitted(cluster, [*steps[:at], *steps[at + 1 :]]).cluster, [step]) for at, step in enumerate(steps))


# --- runs ---------------------------------------------------------------------------------------------------------------


def main(folder: Path, cluster: str, out: Path) -> int:
    """Fit constants of `cluster` to the runs in `folder`, print the fit, write the cluster file `out`. Raises BadInput for a folder
    without finished runs, and for runs on other hardware."""
    check_writable(out, what="--out")
    given = load_cluster(cluster)
    steps = list(measured(folder, given))
    found = fitted(given, steps)
    names = some(step.run for step in steps)
    sources = [f"{name}: replaced, fitted to steps of {counted(len(steps), 'run')} ({names})" for name in found.determined]
    made = replace(found.cluster, sources=(*given.sources, *sources))
    write_text(out, yaml.safe_dump(mapping_of(made), sort_keys=False), what="--out")
    print(*_lines(given, made, steps, found), f"wrote {out}", sep="\n")
    return exit_codes.DONE


def _lines(given: Cluster, made: Cluster, steps: Sequence[Step], found: Fit) -> Iterator[str]:
    yield f"{'run':<24}{'measured s':>11}{'before':>9}{'fitted':>9}"
    for step in steps:
        errors = "".join(f"{math.expm1(step.error(one)):>+9.1%}" for one in (given, made))
        yield f"{step.run:<24}{step.seconds:>11.4g}{errors}"
    for name, deviation in found.determined.items():
        one = CONSTANTS[name]
        also = f", and {TOGETHER[name]} with it" if name in TOGETHER else ""
        yield f"fitted: {name} {one.value(given):.4g} -> {one.value(made):.4g} (to about {deviation:.0%}){also}"
    if found.undetermined:
        yield f"not fitted, because these steps do not determine their values: {', '.join(found.undetermined)}"
    before, by_others = off(given, steps), left_out(given, steps) if len(steps) > 1 else 0.0
    yield f"mean error: {before:.1%} before, {off(made, steps):.1%} fitted" + (
        f", {by_others:.1%} if each run is predicted from the others" if by_others else ""
    )
    if by_others > before:
        yield "these runs do not improve the prediction of one another: use the cluster as it was"


def measured(folder: Path, cluster: Cluster) -> Iterator[Step]:
    """Yield a Step, with the median measured time, for each finished run in `folder`, which may also be the folder of a single run. Raises
    BadInput if there is no finished run, if a run's hardware is not the cluster's, and if runs have different hardware."""
    runs = sorted(path.parent for path in (*folder.glob(SUMMARY), *folder.glob(f"*/{SUMMARY}")))
    if not runs:
        raise BadInput("--runs", got=f"no {SUMMARY} in {folder}", needed="a folder of finished runs of moe train", fix="name one")
    hardware = None
    for path in runs:
        summary = read_summary(path) or {}
        seconds = (summary.get("predicted") or {}).get("measured_step_seconds")
        values, world, on = (summary.get(key) for key in ("recipe_values", "world", "hardware"))
        if not (isinstance(seconds, float) and seconds > 0 and isinstance(values, dict) and isinstance(world, int)):
            got = "a summary without step seconds or recipe"
            raise BadInput(str(path), got=got, needed="a finished run", fix="move it to another folder")
        if not _is_device(cluster.device.name, str(on)):
            needed = f"runs on the devices of --cluster, {cluster.device.name}"
            raise BadInput(str(path), got=f"a run on {on}", needed=needed, fix="give --cluster of this run, or move it to another folder")
        hardware = hardware or on
        if on != hardware:
            raise BadInput(str(path), got=f"a run on {on}", needed=f"runs on {hardware}", fix="move it to another folder")
        run = settled(build_run(values), cluster).resolve(world)
        run = with_values(run, {"dispatch.busiest": _busiest(path, run)})
        yield Step(path.resolve().name, network_of(run), plan_of(run), seconds)


def _is_device(name: str, hardware: str) -> bool:
    """Return whether a run's hardware is the device `name` of a cluster file: the names are equal, or both name the same GPU model (such as
    H100) and do not differ in memory size."""
    if hardware.rpartition(", ")[0] == name or hardware == name:  # a CPU's text ends with the number of threads
        return True
    (model, others), (size, sizes) = (
        (set(re.findall(pattern, name)), set(re.findall(pattern, hardware))) for pattern in (r"\b[A-Z]{1,2}\d{2,4}", r"(\d+) ?GB")
    )
    return bool(model & others) and (size == sizes or not size or not sizes)


def _busiest(path: Path, run: Run) -> float:
    """Return the imbalance of a run's ep ranks: rows of the busiest rank / mean rows of a rank, as the median over all layers and steps. It
    is 1 if ep is 1 or no loads were recorded."""
    ep = run.mesh_degrees().ep
    loads = [layer.get("load") or [] for line in read(path) for layer in line.get("moe") or ()]
    found = [max(shares(load, ep)) for load in loads if sum(load) > 0 and ep > 1]
    return statistics.median(found) if found else 1.0


def shares(load_E: Sequence[float], ranks: int) -> list[float]:
    """Return each rank's rows / mean rows of a rank. The ranks hold equal numbers of consecutive experts. load_E: rows of each expert."""
    each = len(load_E) // ranks
    return [sum(load_E[rank * each : (rank + 1) * each]) * ranks / sum(load_E) for rank in range(ranks)]
