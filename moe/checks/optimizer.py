"""Refuses recipes that K-FAC cannot train, in one line each, before torch is imported."""

from __future__ import annotations

from moe.recipe.sections import Kfac, Run
from parallel.errors import BadInput


def check_optimizer(run: Run) -> None:
    """Refuse what the recipe's optimizer cannot do with the rest of the recipe. Raises BadInput for the first reason found."""
    o, s = run.optimizer, run.sharding
    if o.kind != "kfac":
        for key in Kfac.model_fields:
            value = getattr(o.kfac, key)
            if value != Kfac.model_fields[key].default:
                raise BadInput(
                    f"optimizer.kfac.{key}",
                    got=f"{str(value).lower()} with optimizer.kind={o.kind}",
                    needed="optimizer.kind kfac",
                    fix=f"set optimizer.kind to kfac, or leave optimizer.kfac.{key} out",
                )
        return
    if s.kind != "ddp" and not (s.kind == "zero" and s.stage == 0):
        got = f"kfac with sharding.kind={s.kind}" + (f" and stage {s.stage}" if s.kind == "zero" else "")
        reason = "a hook sees each copy of a linear once" if s.kind == "dp" else "a direction is made of a whole matrix, not of a shard"
        raise BadInput("optimizer.kind", got=got, needed=f"ddp: {reason}", fix="set sharding.kind to ddp, or optimizer.kind to adamw")
    if o.kfac.delay >= o.kfac.refresh_every:
        raise BadInput(
            "optimizer.kfac.delay",
            got=o.kfac.delay,
            needed=f"below optimizer.kfac.refresh_every={o.kfac.refresh_every}: one refresh ends before the next begins",
            fix=f"set it to {o.kfac.refresh_every - 1}, or raise optimizer.kfac.refresh_every",
        )
    if run.degrees.pp > 1 and run.pipeline.schedule in ("pipedream", "two_bw"):
        raise BadInput(
            "optimizer.kind",
            got=f"kfac with pipeline.schedule={run.pipeline.schedule}",
            needed="a schedule whose batches end: factors belong to the weights of one step",
            fix="set pipeline.schedule to 1f1b, or optimizer.kind to adamw",
        )
    if run.tiling.ffn > 1:
        raise BadInput(
            "tiling.ffn",
            got=f"{run.tiling.ffn} with optimizer.kind=kfac",
            needed="1: a factor is of a whole matrix",
            fix="set tiling.ffn to 1, or optimizer.kind to adamw",
        )
    _check_experts(run)


def _check_experts(run: Run) -> None:
    """Refuse experts that K-FAC cannot handle: it needs whole matrices, and experts that stay on their rank."""
    if not (run.optimizer.kfac.experts and run.model.layers_with_experts()):
        return
    for key, value, plain in (
        ("degrees.etp", run.degrees.etp, 1),
        ("dispatch.overlap_chunks", run.dispatch.overlap_chunks, 1),
        ("experts.rebalance_every", run.experts.rebalance_every, 0),
    ):
        if value != plain:
            raise BadInput(
                key,
                got=f"{value} with optimizer.kind=kfac",
                needed=f"{plain}: an expert's factors are of its whole matrices, in one place",
                fix=f"set {key} to {plain}, or optimizer.kfac.experts to false",
            )
