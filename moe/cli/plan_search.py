"""`moe plan --search` searches for shardings of the model's operator graph; `moe plan --order` for an order of pipeline actions.

--search alpa | flexflow | mesh-tf | gspmd uses the method of the Alpa, FlexFlow, Mesh-TensorFlow or GSPMD paper (moe/plan/search/search.py,
layouts.py). The recipe sets the number of micro-batches. The result is converted to the nearest plan that the trainer can run. That plan's
seconds and bytes are predicted as for every other plan.

--order order.csv uses the predicted seconds of the best plan's stages and messages to search for an order that is faster than the plan's
schedule and stores no more activations (parallel/pipeline/schedules/search.py). If one is found, it is written to the file, and the
recipe that --out writes has this file's path as pipeline.schedule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moe.checks.together import check_run
from moe.plan.choose.choose import Ranked
from moe.plan.choose.planned import Planned
from moe.plan.choose.predicted import held_bytes
from moe.plan.choose.recipe_of import as_stored, recipe_of
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import compute_bytes, network_of, plan_of
from moe.plan.machine.cluster import Cluster
from moe.plan.operators.links import machine_of
from moe.plan.operators.of_recipe import graph_of
from moe.plan.search.layouts import gspmd, mesh_tf
from moe.plan.search.search import alpa, flexflow
from moe.plan.search.strategies import Settings
from moe.plan.time.cost import step_time
from moe.plan.time.layer_messages import KIND
from moe.plan.time.stage_time import priced
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import divisors
from parallel.pipeline.order_file import write_order
from parallel.pipeline.schedules import kind_of, placed
from parallel.pipeline.schedules.search import search as search_order
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import makespan

BY_LAYOUT = {"mesh-tf": mesh_tf, "gspmd": gspmd}
# fields of a plan that are copied from the recipe, because no search method decides them
OF_RECIPE = ("recompute_every", "loss_chunks", "tiles", "offload_optimizer", "offload_parameters")
LEAST_SAVED = 1e-4  # an order of pipeline actions is written only if it saves at least this share of a step's time


def searched(run: Run, cluster: Cluster, search: str) -> tuple[Ranked, Run, str]:
    """Search for a plan by the method `search`. Return (the plan with predicted seconds and bytes, its recipe, a line on the search)."""
    batch, m = run.train.global_batch, run.pipeline.microbatches
    if batch % m:
        fix = Set("it", *divisors(batch))
        raise BadInput("pipeline.microbatches", got=m, needed=f"a divisor of train.global_batch={batch}", fix=fix)
    own = plan_of(run.resolve(cluster.world))
    kept = {name: getattr(own, name) for name in (*OF_RECIPE, *(["recompute"] if search in BY_LAYOUT else []))}

    def filled(plan: Plan) -> Plan:
        return as_stored(plan.but(microbatches=m, microbatch=max(1, batch // m // plan.dp), **kept), run)

    def allowed(plan: Plan) -> bool:
        try:
            made = check_run(recipe_of(filled(plan), run), cluster.world)
        except BadInput:
            return False
        return held_bytes(network_of(made), filled(plan), cluster) <= cluster.memory_bytes()

    graph, machine = graph_of(run, sequences=batch // m), machine_of(cluster, kind=KIND[compute_bytes(run)])
    if search in BY_LAYOUT:
        found = BY_LAYOUT[search](graph, machine, m, allowed=allowed)
    else:
        settings = Settings(microbatches=m, sharded=(0, 1, 3))
        found = (alpa if search == "alpa" else flexflow)(graph, machine, settings, allowed=allowed)
    plan = filled(found.plan)
    made = check_run(recipe_of(plan, run), cluster.world)
    network = network_of(made)
    said = f"{search}: {found.said}; {found.seconds:.4g} s by the search's own cost model"
    return Ranked(plan, step_time(network, plan, cluster).step, held_bytes(network, plan, cluster)), made, said


def with_order(made: Planned, path: Path) -> tuple[Planned, str]:
    """Search for a faster order of actions for the best plan. If one is found, write it to the file `path`, and set pipeline.schedule in
    the best plan's recipe to this file. Return (the plans, with that recipe; a line about the search)."""
    plan = made.found.ranked[0].plan
    if why := _nothing_to_search(plan):
        return made, f"order: {why}; {path} is not written"
    own, cost, transfer = priced(made.network, plan, made.cluster)
    placement, kept = "v" if placed(plan.schedule) == "v" else "loop" if plan.chunks > 1 else "line", max(peak_held(own)) / plan.chunks
    found = search_order(placement, plan.pp, plan.microbatches, cost, chunks=plan.chunks, transfer_time=transfer, memory=kept)
    before, after = (makespan(schedule, cost, transfer_time=transfer) for schedule in (own, found))
    if after > (1 - LEAST_SAVED) * before:
        return made, f"order: none found is faster than {plan.schedule}, which takes {before:.4g} s; {path} is not written"
    write_order(found, path, what="--order")
    best = made.runs[0]
    pipeline = best.pipeline.model_copy(update={"schedule": str(path), "chunks": plan.chunks if plan.chunks > 1 else None})
    runs = (best.model_copy(update={"pipeline": pipeline}), *made.runs[1:])
    said = f"order: {after:.4g} s, {plan.schedule} {before:.4g} s ({after / before - 1:.1%}); wrote {path}"
    return replace(made, runs=runs), said


def _nothing_to_search(plan: Plan) -> str | None:
    if plan.pp == 1:
        return "the best plan has no stages"
    if kind_of(plan.schedule).continuous or placed(plan.schedule) == "both_ways":
        return f"{plan.schedule} cannot be written as an order of one step's actions"
    if plan.stage >= 2:
        return f"an order may delay weight gradients, but {plan.engine} sums gradients during the backward pass"
    return None
