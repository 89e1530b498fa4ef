"""`moe plan RECIPE --cluster NAME --order order.csv`: an order of actions for the best plan's stages, if one is faster than its schedule.

The plan's own stages, with their predicted seconds and messages, go to the search of orders (parallel/pipeline/schedules/search.py). It may
keep as many micro-batches as the plan's schedule does, and begins with every schedule of the catalog that places the stages in the same
way: what it finds is never slower. If it is faster, it is written, and --out's recipe names it as its pipeline.schedule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moe.plan.choose.planned import Planned
from moe.plan.job.network import Plan
from moe.plan.time.timeline import priced
from moe.recipe.sections import Run
from parallel.pipeline.order_file import write_order
from parallel.pipeline.schedules.catalog import kind_of, placed
from parallel.pipeline.schedules.search import search
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import makespan

LEAST = 1e-4  # of its schedule's seconds: what an order must save


def with_order(made: Planned, path: Path) -> tuple[Planned, str]:
    """The plan with the order in its recipe, and what is said of it."""
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
        return made, f"order: none found is faster than {plan.schedule}, {before:.4g} s of its stages; {path} is not written"
    write_order(found, path, what="--order")
    runs = (_with(made.runs[0], plan, path), *made.runs[1:])
    said = f"order: {after:.4g} s of its stages, {plan.schedule} {before:.4g} ({after / before - 1:.1%}); wrote {path}"
    return replace(made, runs=runs), said


def _nothing_to_search(plan: Plan) -> str | None:
    if plan.pp == 1:
        return "the best plan has no stages"
    if kind_of(plan.schedule).continuous or placed(plan.schedule) == "both_ways":
        return f"{plan.schedule} is more than an order of one step's actions"
    if plan.stage >= 2:
        return f"an order may put weight gradients off, and {plan.engine} has summed them before"
    return None


def _with(run: Run, plan: Plan, path: Path) -> Run:
    pipeline = run.pipeline.model_copy(update={"schedule": str(path), "chunks": plan.chunks if plan.chunks > 1 else None})
    return run.model_copy(update={"pipeline": pipeline})
