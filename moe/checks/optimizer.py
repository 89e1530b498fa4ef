"""Optimizers and the ways to hold weights that they go with (table in docs/use/optimizers.md). All else is refused before torch is
imported.
"""

from __future__ import annotations

from moe.experts.dispatch.catalog import dispatcher_of
from moe.plan.pipeline import continuous
from moe.recipe.sections import Run
from parallel.data.kinds.catalog import CUT, PLAIN
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedules.catalog import ADVISED


def check_optimizer(run: Run) -> None:
    """Refuse an optimizer that does not work with the rest of the recipe. Raises BadInput for the first reason found."""
    o, s = run.optimizer, run.sharding
    if o.kind in ("muon", "adafactor", "sgd") or o.is_own:
        _check_deepspeed(run)
    if o.kind in ("muon", "adafactor"):
        _check_matrices(run)
    if o.kind == "adafactor" and run.experts.biases and run.model.layers_with_experts():
        raise BadInput(
            "optimizer.kind",
            got="adafactor with experts.biases",
            needed="adamw, muon, sgd or kfac: rows and columns of a stack of biases mean nothing together",
            fix=Set("optimizer.kind", "adamw") | Set("experts.biases", False),
        )
    if o.kind != "kfac":
        return
    if s.named.steps != "matrices" or s.named.threads:
        got = f"kfac with sharding.kind={s.kind}" + (f" and stage {s.stage}" if "stage" in s.named.sharding else "")
        reason = "a hook sees each copy of a linear once" if s.named.threads else "a direction is made of a whole matrix, not of a shard"
        raise BadInput("optimizer.kind", got=got, needed=f"ddp: {reason}", fix=Set("sharding.kind", "ddp") | Set("optimizer.kind", "adamw"))
    if o.kfac.delay >= o.kfac.refresh_every:
        raise BadInput(
            "optimizer.kfac.delay",
            got=o.kfac.delay,
            needed=f"below optimizer.kfac.refresh_every={o.kfac.refresh_every}: one refresh ends before the next begins",
            fix=Set("it", o.kfac.refresh_every - 1) | "raise optimizer.kfac.refresh_every",
        )
    if continuous(run):
        raise BadInput(
            "optimizer.kind",
            got=f"kfac with pipeline.schedule={run.pipeline.schedule}",
            needed="a schedule whose batches end: factors belong to the weights of one step",
            fix=Set("pipeline.schedule", ADVISED) | Set("optimizer.kind", "adamw"),
        )
    if run.tiling.ffn > 1:
        raise BadInput(
            "tiling.ffn",
            got=f"{run.tiling.ffn} with optimizer.kind=kfac",
            needed="1: a factor is of a whole matrix",
            fix=Set("tiling.ffn", 1) | Set("optimizer.kind", "adamw"),
        )
    _check_experts(run)


def _check_deepspeed(run: Run) -> None:
    """Refuse DeepSpeed's engine: it steps flat chunks of elements, here by AdamW only."""
    o, s = run.optimizer, run.sharding
    if s.carrier().steps == "elements":
        other = PLAIN if o.kind == "adafactor" else CUT
        raise BadInput(
            "optimizer.kind",
            got=f"{o.kind} with sharding.kind=zero and stage {s.stage}",
            needed="adamw: DeepSpeed steps flat runs of elements, without their matrices",
            fix=Set("sharding.kind", other) | Set("optimizer.kind", "adamw"),
        )


def _check_matrices(run: Run) -> None:
    """Refuse tiles, and for Adafactor every shard: a rank must hold weights as matrices, or as whole matrices."""
    kind, refused = run.optimizer.kind, [("tiling.ffn", run.tiling.ffn, "a tile is a part of a matrix")]
    if kind == "adafactor":
        tp = 1 if run.tensor.kind == "copied" else run.degrees.tp
        whole = "its means are of whole matrices, and ranks hold parts"
        refused += [("degrees.tp", tp, whole), ("degrees.etp", run.degrees.etp, whole), ("tiling.head", run.tiling.head, whole)]
        if run.sharding.named.steps != "matrices":
            got = f"adafactor with sharding.kind={run.sharding.kind}"
            raise BadInput(
                "optimizer.kind", got=got, needed=f"ddp: {whole}", fix=Set("sharding.kind", "ddp") | Set("optimizer.kind", "muon")
            )
    for key, value, why in refused:
        if value > 1:
            fix = Set(key, 1) | Set("optimizer.kind", "adamw")
            raise BadInput(key, got=f"{value} with optimizer.kind={kind}", needed=f"1: {why}", fix=fix)


def _check_experts(run: Run) -> None:
    """Refuse experts that K-FAC cannot handle: it needs whole matrices, and experts that stay on their rank."""
    if not (run.optimizer.kfac.experts and run.model.layers_with_experts()):
        return
    for key, value, plain in (
        ("degrees.etp", run.degrees.etp, 1),
        ("dispatch.overlap_chunks", dispatcher_of(run.dispatch).chunks, 1),
        ("experts.rebalance_every", run.experts.rebalance_every, 0),
    ):
        if value != plain:
            raise BadInput(
                key,
                got=f"{value} with optimizer.kind=kfac",
                needed=f"{plain}: an expert's factors are of its whole matrices, in one place",
                fix=Set(key, plain) | Set("optimizer.kfac.experts", False),
            )
