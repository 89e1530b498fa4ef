"""Writes a plan's settings into a recipe. The inverse is plan_of (moe/plan/job/of_recipe.py)."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import plan_of, stage_layers
from moe.recipe.sections import Run
from parallel.errors import BadInput

Values = dict[str, Any]  # full name of a recipe key, such as train.global_batch -> its value


def recipe_of(plan: Plan, run: Run) -> Run:
    """Return `run` with the plan's parallelism, batch, recomputation and offload. Model, data, precision and optimizer stay as they are.

    Rounds train.eval_sequences up to a number that the plan's ranks can share. Raises BadInput if the plan's bytes per element differ from
    the recipe's (`as_stored` corrects them). If they are equal, plan_of(recipe_of(plan, run)) == plan. The result is not checked yet: call
    check_run (moe/checks/).
    """
    fitting = as_stored(plan, run)
    for key in ("storage", "compute_bytes"):
        if getattr(plan, key) != getattr(fitting, key):
            needed = f"{getattr(fitting, key)}, which follows from the recipe's precision"
            fix = "plan with the recipe's precision, or call as_stored(plan, run)"
            raise BadInput(f"plan.{key}", got=getattr(plan, key), needed=needed, fix=fix)
    return _changed(plan, run)


def as_stored(plan: Plan, run: Run) -> Plan:
    """Return the plan with the bytes per element that follow from the recipe's precision and the plan's engine."""
    made = plan_of(_changed(plan, run))
    return replace(plan, storage=made.storage, compute_bytes=made.compute_bytes)


def _changed(plan: Plan, run: Run) -> Run:
    kind, offload = plan.kind, "sharding.offload"
    degrees = {f"degrees.{name}": getattr(plan, name) for name in ("dp", "tp", "sp", "pp", "ep", "etp")}
    sharding = {"sharding.stage": 1, "sharding.engine": "auto"} | {f"sharding.{key}": value for key, value in kind.sharding.items()}
    changed = with_values(
        run,
        {
            **degrees,
            **sharding,
            "sharding.reshard": plan.reshard,
            "sharding.prefetch": run.sharding.prefetch if "prefetch" in kind.keys else 1,
            "sharding.allow_slow": plan.stage >= 2 and plan.pp > 1 and plan.reshard,
            f"{offload}.optimizer": plan.offload_optimizer,
            f"{offload}.parameters": plan.offload_parameters,
            "tensor.kind": "1d" if plan.tensor == "sliced" else plan.tensor,
            "tensor.sequence_parallel": plan.tensor == "sliced",
            "tensor.depth": plan.depth if plan.tensor == "2.5d" else None,
            "sequence.kind": plan.sequence,
            "sequence.order": None if plan.order == plan.method.orders[0] else plan.order,
            "pipeline.schedule": plan.schedule,
            "pipeline.microbatches": plan.microbatches,
            "pipeline.layers": plan.stage_layers,
            "pipeline.chunks": plan.chunks if plan.chunks > 1 else None,
            "recompute.kind": plan.recompute,
            "recompute.every": plan.recompute_every,
            "recompute.loss_chunks": plan.loss_chunks,
            "tiling.ffn": plan.tiles,
            "train.global_batch": plan.global_batch,
            "train.eval_sequences": _evaluated(plan, run),
        },
    )
    by_default = plan.stage_layers is not None and plan.stage_layers == stage_layers(changed)
    return with_values(changed, {"pipeline.layers": None}) if by_default else changed


def with_values(run: Run, values: Values) -> Run:
    """Return the run with some keys changed, without any check."""
    for key, value in values.items():
        run = _with(run, key.split("."), value)
    return run


def _with(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with(getattr(section, path[0]), path[1:], value)
    return section.model_copy(update={path[0]: inner})


def _evaluated(plan: Plan, run: Run) -> int:
    """Return train.eval_sequences, rounded up to a number that the plan's ranks can share. (dp=6 cannot share the default, 64.)"""
    unit, spec = plan.dp, run.router
    if run.model.layers_with_experts():
        grouped = isinstance(spec.group, int) and (plan.tp > 1 or spec.eval_capacity_factor is not None)
        unit *= plan.tp * (int(spec.group) if grouped else 1)
    else:
        unit *= plan.grid.sequences
    return ceil(run.train.eval_sequences / unit) * unit
