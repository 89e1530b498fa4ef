"""Changes a recipe so that it is trained as a plan says. plan_of (moe/plan/job/of_recipe.py) is the inverse."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import plan_of, stage_layers
from moe.recipe.sections import Run
from parallel.errors import BadInput


def recipe_of(plan: Plan, run: Run) -> Run:
    """Return the run with the plan's degrees, kinds, pipeline, batch and recomputation; model, data, precision and optimizer stay.

    train.eval_sequences is rounded up until the plan's ranks can share them. plan_of(recipe_of(plan, run)) == plan if the plan's element
    sizes are the recipe's, which `as_stored` sets. Raises BadInput otherwise. Call check_run (moe/checks/together.py) on the result.
    """
    fitting = as_stored(plan, run)
    for key in ("storage", "compute_bytes"):
        if getattr(plan, key) != getattr(fitting, key):
            needed, fix = (
                f"{getattr(fitting, key)}, as the recipe's precision has it",
                "plan with the recipe's precision, or call as_stored(plan, run)",
            )
            raise BadInput(f"plan.{key}", got=getattr(plan, key), needed=needed, fix=fix)
    return _changed(plan, run)


def as_stored(plan: Plan, run: Run) -> Plan:
    """Return the plan with the element sizes of the recipe's precision and the plan's engine."""
    made = plan_of(_changed(plan, run))
    return replace(plan, storage=made.storage, compute_bytes=made.compute_bytes)


def _changed(plan: Plan, run: Run) -> Run:
    changes: dict[str, dict[str, Any]] = {
        "degrees": {"dp": plan.dp, "tp": plan.tp, "sp": plan.sp, "pp": plan.pp, "ep": plan.ep, "etp": plan.etp},
        "sharding": {
            "stage": 1,
            "engine": "auto",
            "reshard": plan.reshard,
            "prefetch": run.sharding.prefetch if "prefetch" in plan.kind.keys else 1,
            "allow_slow": plan.stage >= 2 and plan.pp > 1,
            **plan.kind.sharding,
        },
        "tensor": {
            "kind": "1d" if plan.tensor == "sliced" else plan.tensor,
            "sequence_parallel": plan.tensor == "sliced",
            "depth": plan.depth if plan.tensor == "2.5d" else None,
        },
        "sequence": {"kind": plan.sequence, "order": None if plan.order == plan.method.orders[0] else plan.order},
        "pipeline": {
            "schedule": plan.schedule,
            "microbatches": plan.microbatches,
            "layers": plan.stage_layers,
            "chunks": plan.chunks if plan.chunks > 1 else None,
        },
        "recompute": {"kind": plan.recompute, "every": plan.recompute_every, "loss_chunks": plan.loss_chunks},
        "tiling": {"ffn": plan.tiles},
        "train": {"global_batch": plan.global_batch, "eval_sequences": _evaluated(plan, run)},
    }
    made = {section: getattr(run, section).model_copy(update=values) for section, values in changes.items()}
    offload = run.sharding.offload.model_copy(update={"optimizer": plan.offload_optimizer, "parameters": plan.offload_parameters})
    made["sharding"] = made["sharding"].model_copy(update={"offload": offload})
    made_run = run.model_copy(update=made)
    if plan.stage_layers is not None and plan.stage_layers == stage_layers(made_run):  # the trainer's default cut
        made_run = made_run.model_copy(update={"pipeline": made_run.pipeline.model_copy(update={"layers": None})})
    return made_run


def _evaluated(plan: Plan, run: Run) -> int:
    """Round train.eval_sequences up to a multiple that the ranks can share; otherwise 64 sequences, the default, would rule out dp=6."""
    unit, spec = plan.dp, run.router
    if run.model.layers_with_experts():
        grouped = isinstance(spec.group, int) and (plan.tp > 1 or spec.eval_capacity_factor is not None)
        unit *= plan.tp * (int(spec.group) if grouped else 1)
    else:
        unit *= plan.grid.sequences
    return ceil(run.train.eval_sequences / unit) * unit
