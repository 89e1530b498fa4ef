"""Checks of optimizer.kind: each optimizer works only with some kinds of sharding and tiling (table in docs/use/optimizers.md)."""

from __future__ import annotations

from moe.checks.clash import check_others, clash
from moe.experts.dispatch import dispatcher_of
from moe.plan.pipeline import continuous
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedules import ADVISED

_ADAMW = Set("optimizer.kind", "adamw")


def check_optimizer(run: Run) -> None:
    """Raise BadInput for an optimizer that does not work with other values of the recipe."""
    o, s = run.optimizer, run.sharding
    if o.of_matrices and run.carrier.steps == "elements":
        why = "DeepSpeed updates flat ranges of elements, not matrices"
        raise clash(run, "optimizer.kind", "sharding.engine", "adamw", why, Set("sharding.engine", "auto", said="auto, which is FSDP"))
    if o.kind != "adamw" and s.offload.optimizer != "none":
        got, needed = f"{o.kind} with sharding.offload.optimizer={s.offload.optimizer}", "adamw, the only optimizer with a step on the host"
        raise BadInput("optimizer.kind", got=got, needed=needed, fix=Set("sharding.offload.optimizer", "none") | _ADAMW)
    if o.kind in ("muon", "adafactor"):
        keys = ("tiling.ffn", "tiling.head") if o.kind == "adafactor" else ("tiling.ffn",)
        check_others(run, "optimizer.kind", {key: (1, "a tile is a part of a matrix") for key in keys}, _ADAMW)
    if o.kind == "kfac":
        _check_kfac(run)


def _check_kfac(run: Run) -> None:
    o, s = run.optimizer, run.sharding
    if s.named.steps != "matrices" or s.named.threads:
        got = f"kfac with sharding.kind={s.kind}" + (f" and stage {s.stage}" if "stage" in s.named.sharding else "")
        reason = (
            "K-FAC's hooks expect one replica of each layer" if s.named.threads else "K-FAC's direction needs a whole matrix, not a shard"
        )
        raise BadInput("optimizer.kind", got=got, needed=f"ddp: {reason}", fix=Set("sharding.kind", "ddp") | _ADAMW)
    if o.kfac.delay >= (every := o.kfac.refresh_every):
        needed = f"below optimizer.kfac.refresh_every={every}, so that one refresh ends before the next begins"
        fix = Set("it", every - 1) | "raise optimizer.kfac.refresh_every"
        raise BadInput("optimizer.kfac.delay", got=o.kfac.delay, needed=needed, fix=fix)
    if continuous(run):
        needed = "a schedule that drains after each batch: K-FAC's factors belong to the weights of one step"
        raise clash(run, "optimizer.kind", "pipeline.schedule", "adamw", "", Set("pipeline.schedule", ADVISED), needed=needed)
    if run.tiling.ffn > 1:
        raise clash(run, "tiling.ffn", "optimizer.kind", 1, "a K-FAC factor belongs to a whole matrix", _ADAMW)
    if o.kfac.experts and run.model.layers_with_experts():
        whole, dense_only = "K-FAC needs an expert's whole matrices, on one rank", Set("optimizer.kfac.experts", False)
        check_others(run, "optimizer.kind", {"degrees.etp": (1, whole), "experts.rebalance_every": (0, whole)}, dense_only)
        if (chunks := dispatcher_of(run.dispatch).chunks) != 1:  # not the key's value, because a user's dispatcher may not read the key
            fix = Set("dispatch.overlap_chunks", 1) | dense_only
            raise BadInput("dispatch.overlap_chunks", got=f"{chunks} with optimizer.kind=kfac", needed=f"1: {whole}", fix=fix)
