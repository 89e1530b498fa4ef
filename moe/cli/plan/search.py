"""`moe plan --search alpa | flexflow | mesh-tf | gspmd`: searches a plan on the graph of operators (moe/plan/search/search.py, layouts.py).

The recipe sets the number of micro-batches. The strategy that a search finds is converted to the nearest plan that the trainer can run.
The seconds and bytes of that plan are then predicted as for every other plan.
"""

from __future__ import annotations

from moe.checks.together import check_run
from moe.plan.choose.choose import Ranked
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
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import divisors

BY_LAYOUT = {"mesh-tf": mesh_tf, "gspmd": gspmd}
# taken from the recipe: no search decides them
OF_RECIPE = ("recompute_every", "loss_chunks", "tiles", "offload_optimizer", "offload_parameters")
SEARCHES = ("enumerate", "alpa", "flexflow", "mesh-tf", "gspmd")


def searched(run: Run, cluster: Cluster, search: str) -> tuple[Ranked, Run, str]:
    """(the plan with its predicted seconds and bytes, its recipe, one line from the search). Raises BadInput if nothing fits."""
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
    said = f"{search}: {found.said}; by its own costs {found.seconds:.4g} s"
    return Ranked(plan, step_time(network, plan, cluster).step, held_bytes(network, plan, cluster)), made, said
