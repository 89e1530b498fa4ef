"""`moe plan RECIPE --cluster NAME --order order.csv`: searches an order of pipeline actions that is faster than the best plan's schedule.

The search (parallel/pipeline/schedules/search.py) gets the plan's own stages with their predicted seconds and messages. It may keep as many
micro-batches as the plan's schedule does. It begins with every schedule of the catalog that places the stages in the same way, so its
result is never slower. A faster order is written, and --out's recipe names it as its pipeline.schedule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moe.plan.choose.planned import Planned
from moe.plan.job.network import Plan
from moe.plan.time.stage_time import priced
from moe.recipe.sections import Run
from parallel.pipeline.order_file import write_order
from parallel.pipeline.schedules.catalog import kind_of, placed
from parallel.pipeline.schedules.search import search
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import makespan

LEAST = 1e-4  # share of the schedule's seconds that an order must save


def with_order(made: Planned, path: Path) -> tuple[Planned, str]:
    """(the plan with the order in its recipe, one line about the search). The plan is unchanged if no faster order is found."""
    plan = made.found.ranked[0].plan
    if why := _nothing_to_search(plan):
        return made, f"order: {why}; {path} is not written"
    own, cost, transfer = priced(made.network, plan, made.cluster)
    found = search(
        "v" if placed(plan.schedule) == "v" else "loop" if plan.chunks > 1 else "line",
        plan.pp,
        plan.microbatches,
        cost,
        chunks=plan.chunks,
        transfer_time=transfer,
        memory=max(peak_held(own)) / plan.chunks,
    )
    before, after = (makespan(schedule, cost, transfer_time=transfer) for schedule in (own, found))
    if after > (1 - LEAST) * before:
        return made, f"order: none found is faster than {plan.schedule}, which takes {before:.4g} s; {path} is not written"
    write_order(found, path, what="--order")
    runs = (_with(made.runs[0], plan, path), *made.runs[1:])
    said = f"order: {after:.4g} s, {plan.schedule} {before:.4g} s ({after / before - 1:.1%}); wrote {path}"
    return replace(made, runs=runs), said


def _nothing_to_search(plan: Plan) -> str | None:
    if plan.pp == 1:
        return "the best plan has no stages"
    if kind_of(plan.schedule).continuous or placed(plan.schedule) == "both_ways":
        return f"{plan.schedule} cannot be written as an order of one step's actions"
    if plan.stage >= 2:
        return f"an order may delay weight gradients, but {plan.engine} sums them earlier"
    return None


def _with(run: Run, plan: Plan, path: Path) -> Run:
    pipeline = run.pipeline.model_copy(update={"schedule": str(path), "chunks": plan.chunks if plan.chunks > 1 else None})
    return run.model_copy(update={"pipeline": pipeline})
