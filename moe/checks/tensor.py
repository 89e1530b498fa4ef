"""What degrees.tp needs, and what it does not go with."""

from __future__ import annotations

from moe.recipe.sections import Run
from parallel.errors import BadInput


def check_tensor(run: Run) -> None:
    """Refuse a tensor kind that is not built, and sequences that its ranks cannot share out. Raises BadInput."""
    tp = run.degrees.tp
    if tp < 1:
        raise BadInput("degrees.tp", got=tp, needed="a whole number of at least 1", fix="set degrees.tp to 1")
    if tp == 1:
        return
    if run.tensor.kind != "copied":
        raise BadInput(
            "degrees.tp",
            got=f"{tp} with tensor.kind={run.tensor.kind}",
            needed=f"1: {run.tensor.kind} is not built yet",
            fix="set degrees.tp to 1 (tensor.kind copied saves nothing: it is there to check engines)",
        )
    if run.sharding.kind == "dp":
        raise BadInput(
            "sharding.kind", got=f"dp with degrees.tp={tp}", needed="ddp, fsdp or zero: dp is one process", fix="set sharding.kind to ddp"
        )
    if run.model.layers_with_experts():
        _check_sequences(run)


def _check_sequences(run: Run) -> None:
    """A MoE layer's tokens are cut over tp by whole groups of sequences, in training and in evaluation."""
    tp, group, dp = run.degrees.tp, run.router.spec.group, int(run.degrees.dp)
    unit = tp * group if isinstance(group, int) else tp
    words = f"degrees.tp * router.group = {tp} * {group}" if isinstance(group, int) else f"degrees.tp={tp}"
    held = run.train.global_batch // (dp * run.pipeline.microbatches)
    if held % unit:
        raise BadInput(
            "degrees.tp",
            got=f"{tp} for {held} sequences of a micro-batch",
            needed=f"sequences that are a multiple of {words}: each rank of tp routes an equal part of them",
            fix=f"set train.global_batch to a multiple of {dp * run.pipeline.microbatches * unit}, or degrees.tp to 1",
        )
    if run.train.eval_sequences % (dp * unit):
        raise BadInput(
            "train.eval_sequences",
            got=run.train.eval_sequences,
            needed=f"a multiple of degrees.dp={dp} times {words}",
            fix=f"set it to {max(1, round(run.train.eval_sequences / (dp * unit))) * dp * unit}",
        )
