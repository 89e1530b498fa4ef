"""Predicted step times compared with measured ones: errors by table, with and without a factor.

    predictions(rows)   step time (moe/plan/time/cost.py) of each row that states a speed, with the cluster and program that its text names
    errors(...)         mean, median and largest |predicted / measured - 1|. Calibrated: the prediction is first divided by the median
                        ratio of other rows with the same cluster and program (or of only those rows with the same layer)

Rankings are in tests/planner/choice.py. A row's program follows from its source and year (PROGRAM_OF), the same for all rows of a source.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from moe.plan.job.network import Plan
from moe.plan.machine.cluster import Cluster, load_cluster
from moe.plan.machine.program import Program
from moe.plan.time.cost import Time, step_time
from tests.planner.read_tables import Row
from tests.planner.software import PROGRAMS

# word in a GPU's description -> cluster file; the first word that is found counts
CLUSTER_OF = (
    ("jeanzay", "jeanzay"),
    ("500w", "h100-500w-8"),
    ("gb200", "gb200-72"),
    ("gb300", "gb200-72"),
    ("b200", "b200-8"),
    ("h200", "h200-8"),
    ("h800", "h800-8"),
    ("h100", "h100-8"),
    ("a100-40", "a100-40-8"),
    ("a100-sxm4-40", "a100-40-8"),
    ("a100_40", "a100-40-8"),
    ("a100", "a100-80-8"),
    ("p3.16xlarge", "v100-8"),
    ("v100", "v100-32"),
)
# word in a row's source -> name of its program (tests/planner/software.py); the first word that is found counts
PROGRAM_OF = (
    ("torchtitan", "fsdp"),
    ("llm-foundry", "fsdp"),
    ("llm_foundry", "fsdp"),
    ("nanotron", "nanotron"),
    ("modelzoo", "megatron-core"),
    ("bridge", "megatron-core"),
    ("megatron-core", "megatron-core"),
    ("vocabulary parallelism", "megatron-core"),
    ("korthikanti", "megatron-2022"),
    ("megatron-lm", "megatron-2021"),
    ("vtrain", "megatron-deepspeed"),
    ("bloom", "megatron-deepspeed"),
    ("bigscience", "megatron-deepspeed"),
    ("mt-nlg", "megatron-deepspeed"),
    ("alpa", "xla"),
    ("deepspeed", "deepspeed"),
)
# Rows of the busiest rank over the mean for table rows with "real routing" in their notes; 1 for the others, with routing that is
# balanced by force or not stated. Fitted to the measured time of real routing over forced balance, in the four layouts that have both.
REAL_ROUTING = 1.7


@dataclass(frozen=True)
class Predicted:
    """A measured row, its predicted time, and the cluster and program of the prediction."""

    row: Row
    time: Time
    cluster: str
    program: str

    @property
    def ratio(self) -> float:
        """Return predicted over measured seconds."""
        assert self.row.seconds
        return self.time.step / self.row.seconds


def cluster_of(row: Row) -> Cluster | None:
    """Return the cluster with the row's number of nodes; None if no cluster file describes its GPU."""
    name = next((name for word, name in CLUSTER_OF if word in row.gpu.lower()), None)
    if name is None:
        return None
    return _nodes(name, -(-row.gpus // _file(name).devices_per_node))


@lru_cache
def _file(name: str) -> Cluster:
    return load_cluster(name)


@lru_cache
def _nodes(name: str, nodes: int) -> Cluster:
    return _file(name).of(nodes)


def program_of(row: Row) -> Program:
    """Return the time model of the software that the row's source used, adjusted for the row's precision, plan and notes."""
    said = f"{row.cells['source']} {row.cells['source_ref']} {row.cells['seen']}".lower()
    name = next((name for word, name in PROGRAM_OF if word in said), "megatron-core")
    notes, precision = row.cells["notes"].lower(), row.precision.lower()
    if name == "fsdp" and "compile" in precision:
        name = "fsdp-compiled"
    if name == "megatron-core" and row.plan.stage == 3:
        name = "megatron-fsdp"
    if name == "megatron-deepspeed" and "bf16" in precision and row.plan.pp > 1:
        name = "megatron-deepspeed-bf16"
    if name == "megatron-2021" and row.plan.stage == 3:
        name = "deepspeed-zero3-2021"
    program = PROGRAMS[name]
    if "deepep" in notes or "hybridep" in notes:
        program = replace(program, dispatch="by_node")
    if "async tp" in notes or "asynctp" in notes or "asynctp" in precision:
        program = replace(program, tensor_overlap=0.7)
    if "1f1b overlap" in notes:
        program = replace(program, experts_overlap=0.7)
    if "8" in precision.replace("bf16", "").replace("fp16", ""):
        program = replace(program, products="fp8")
    return program


def plan_of(row: Row) -> Plan:
    """Return the row's plan with settings that affect only time: the order of positions, whether weights stay gathered, ZeRO-1."""
    plan, said = row.plan, f"{row.cells['source']} {row.cells['notes']}".lower()
    # torchtitan has contiguous positions (inferred from its times). With pipeline stages, weights stay gathered for all micro-batches.
    if "torchtitan" in said:
        plan = replace(plan, order="contiguous", reshard=plan.pp == 1)
    if "overlap on" in said and plan.stage == 0:  # this is Megatron's distributed optimizer
        plan = replace(plan, engine="zero1")
    return plan


def predictions(rows: Iterable[Row]) -> list[Predicted]:
    """Return predictions for the measured rows that state a speed and a known GPU."""
    made = []
    for row in rows:
        cluster = cluster_of(row)
        if row.seconds is None or row.status != "ok" or row.formula or cluster is None:
            continue
        program, plan = program_of(row), plan_of(row)
        network, experts = row.network, row.network.experts
        if experts is not None and "real routing" in row.cells["notes"].lower():
            network = replace(network, experts=replace(experts, busiest=REAL_ROUTING))
        made.append(Predicted(row, step_time(network, plan, cluster, program), cluster.name, program.name))
    return made


@dataclass(frozen=True)
class Errors:
    """Errors |predicted / measured - 1| over `rows` rows. `bias`: mean of predicted / measured - 1. `calibrated`: mean error after each
    prediction is divided by the median ratio predicted / measured of other runs with its cluster and program. `by_layer`: the same, but
    with the median of only the runs with the same layer, where there are any; `same_layer`: number of rows that have such runs."""

    rows: int
    mean: float
    median: float
    largest: float
    bias: float
    calibrated: float
    by_layer: float
    same_layer: int


def errors(made: Sequence[Predicted]) -> Errors | None:
    """Return the errors of these predictions; None without predictions."""
    if not made:
        return None
    off = [one.ratio - 1 for one in made]
    sizes = sorted(map(abs, off))
    alike, same = _grouped(made, _program), _grouped(made, _layer)
    left = [abs(one.ratio / (_others(alike[_program(one)], one) or 1.0) - 1) for one in made]
    taught = [_others(same[_layer(one)], one) for one in made]
    by_layer = [rest if other is None else abs(one.ratio / other - 1) for one, rest, other in zip(made, left, taught, strict=True)]
    return Errors(
        rows=len(made),
        mean=statistics.mean(sizes),
        median=statistics.median(sizes),
        largest=sizes[-1],
        bias=statistics.mean(off),
        calibrated=statistics.mean(left),
        by_layer=statistics.mean(by_layer),
        same_layer=sum(other is not None for other in taught),
    )


def _program(one: Predicted) -> tuple[Any, ...]:
    return one.cluster, one.program


def _layer(one: Predicted) -> tuple[Any, ...]:
    """Return everything on which the seconds of one layer and micro-batch depend: not the number of layers, stages or replicas."""
    network, plan = replace(one.row.network, layers=1, sparse_layers=()), one.row.plan
    return one.cluster, one.program, network, plan.tp, plan.sp, plan.ep, plan.tensor, plan.microbatch, plan.recompute, one.row.precision


def _grouped(made: Sequence[Predicted], key: Callable[[Predicted], Any]) -> dict[Any, list[Predicted]]:
    found: dict[Any, list[Predicted]] = {}
    for one in made:
        found.setdefault(key(one), []).append(one)
    return found


def _others(made: Sequence[Predicted], one: Predicted) -> float | None:
    """Return the median ratio of the runs other than `one`; None without others. Rows with equal network and plan are one run."""
    of = one.row
    ratios = [other.ratio for other in made if (other.row.network, other.row.plan) != (of.network, of.plan)]
    return statistics.median(ratios) if ratios else None
