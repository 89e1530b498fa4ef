"""Simulates the pipeline of a plan's step: a Timeline with the schedule's order of actions and the predicted seconds of each stage.

    layers of each stage (counts.py)  ->  seconds of F and B (cost.py)  ->  simulate  ->  Timeline, which draw.py draws

It contains only forward and backward passes, without gradient sums, the optimizer and other work that is done once a step. A plan without
pipeline stages gives the passes of one rank, one after another.
"""

from __future__ import annotations

from moe.plan.job.counts import stages_of
from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import Program
from moe.plan.time.cost import own_program, stage_times, transfer_time
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules.catalog import SCHEDULES, make_schedule
from parallel.pipeline.simulator.simulate import Cost, Timeline, costs, simulate

MOST_ACTIONS = 4000  # most actions in a picture; more bars cannot be distinguished


def timeline(
    network: Network, plan: Plan, cluster: Cluster, program: Program | None = None, *, microbatches: int | None = None
) -> Timeline:
    """Timeline in seconds of a step, or of its first `microbatches` micro-batches. Raises BadInput for impossible schedule sizes."""
    made, times, transfer = priced(network, plan, cluster, program, microbatches=microbatches)
    return simulate(made, times, transfer_time=transfer)


def priced(
    network: Network, plan: Plan, cluster: Cluster, program: Program | None = None, *, microbatches: int | None = None
) -> tuple[Schedule, Cost, float]:
    """(the plan's schedule, cost of its actions in seconds, seconds of a message between stages)."""
    chunks = plan.chunks if plan.chunks > 1 else None
    made = make_schedule(plan.schedule, ranks=plan.pp, microbatches=microbatches or plan.microbatches, chunks=chunks)
    layers = tuple(len(stage) for stage in stages_of(network, plan, made.num_stages))
    stages = stage_times(network, plan, cluster, layers, program)
    share = sum(stage.weights for stage in stages) / sum(stage.back for stage in stages)
    times = costs([stage.ahead for stage in stages], [stage.back for stage in stages], weight_share=min(0.99, share))
    return made, times, transfer_time(network, plan, cluster, program or own_program(cluster))


def pictured(plan: Plan) -> int:
    """Number of micro-batches for a readable picture: four, three or two a rank, as MOST_ACTIONS allows."""
    kind = SCHEDULES.get(plan.schedule)
    splits = 3 if kind is not None and kind.splits_backward else 2
    for each in (4, 3, 2):
        if plan.pp * plan.pp * each * plan.chunks * splits <= MOST_ACTIONS:
            break
    return min(plan.microbatches, each * plan.pp)
