"""Checks of degrees.tp: sizes that it must divide, and keys that it excludes. A refusal names the degrees that work."""

from __future__ import annotations

from collections.abc import Iterator

from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.grids import GRIDS, LINES, Grid, grid_of
from parallel.mesh.mesh import divisors


def check_tensor(run: Run) -> None:
    """Refuse sizes that the ranks of tp cannot share out, and methods that need whole matrices. Raises BadInput."""
    tp = run.degrees.tp
    if tp < 1:
        raise BadInput("degrees.tp", got=tp, needed="a whole number of at least 1", fix=Set("degrees.tp", 1))
    if run.tensor.sequence_parallel:
        _check_slices(run)
    if run.tensor.overlap_chunks > 1:
        _check_overlap(run)
    if tp == 1:
        return
    if run.tensor.kind in LINES:
        _check_line(run)
    if run.tensor.kind in GRIDS:
        _check_grid(run)
    if run.optimizer.kind == "kfac" and run.tensor.kind != "copied":
        raise BadInput(
            "optimizer.kind",
            got=f"kfac with degrees.tp={tp}",
            needed="adamw: a direction is made of a whole matrix, and ranks of tp hold parts",
            fix=Set("optimizer.kind", "adamw") | Set("degrees.tp", 1),
        )
    if run.model.qk_norm == "whole" and run.tensor.kind != "copied":
        raise BadInput(
            "degrees.tp",
            got=f"{tp} with model.qk_norm=whole",
            needed="1: the mean is over all heads, of which each rank of tp would have some",
            fix=Set("degrees.tp", 1) | Set("tensor.kind", "copied"),
        )
    if run.model.latent.key_rank is not None and run.tensor.kind not in ("copied", "1d"):
        raise BadInput(
            "tensor.kind",
            got=f"{run.tensor.kind} with model.latent.key_rank={run.model.latent.key_rank}",
            needed="1d: neither a grid nor DTensor cuts latent attention, whose latents belong to all heads",
            fix=Set("tensor.kind", "1d"),
        )
    key = next((key for key in ("qkv_bias", "out_bias") if getattr(run.model, key)), None)
    if key is not None and run.tensor.kind in GRIDS:
        raise BadInput(
            "tensor.kind",
            got=f"{run.tensor.kind} with model.{key}",
            needed=f"{' or '.join(LINES)}: no grid cuts biases with their columns",
            fix=Set("tensor.kind", "1d"),
        )
    if run.sharding.named.threads:
        raise BadInput(
            "sharding.kind", got=f"dp with degrees.tp={tp}", needed="ddp, fsdp or zero: dp is one process", fix=Set("sharding.kind", "ddp")
        )
    _check_sequences(run)


def _check_slices(run: Run) -> None:
    """Refuse sequence parallelism without 1D tensor parallelism (this toolkit's or DTensor's), or with sequences that do not divide."""
    tp, length = run.degrees.tp, run.model.max_length
    if tp == 1 or run.tensor.kind not in LINES:
        raise BadInput(
            "tensor.sequence_parallel",
            got=f"true with degrees.tp={tp} and tensor.kind={run.tensor.kind}",
            needed="tensor.kind 1d or dtensor on several ranks: it splits tensors that these ranks would hold as copies",
            fix=Set("degrees.tp", 2) & Set("tensor.kind", "1d") | Set("tensor.sequence_parallel", False),
        )
    ways, words = run.degrees.sp * tp, f"degrees.sp * degrees.tp = {run.degrees.sp} * {tp}" if run.degrees.sp > 1 else f"degrees.tp={tp}"
    if length % ways:
        raise BadInput(
            "model.max_length",
            got=length,
            needed=f"a multiple of {words} with tensor.sequence_parallel",
            fix=Set("it", max(1, round(length / ways)) * ways),
        )


def _check_overlap(run: Run) -> None:
    """Refuse overlap except with 1D: chunks of tokens are summed over tp while the next chunk of the product is computed."""
    if run.degrees.tp == 1 or run.tensor.kind != "1d":
        raise BadInput(
            "tensor.overlap_chunks",
            got=f"{run.tensor.overlap_chunks} with degrees.tp={run.degrees.tp} and tensor.kind={run.tensor.kind}",
            needed="tensor.kind 1d on several ranks, which sums what a product gives",
            fix=Set("tensor.overlap_chunks", 1) | Set("degrees.tp", 2) & Set("tensor.kind", "1d"),
        )
    if run.tiling.ffn > 1:
        raise BadInput(
            "tensor.overlap_chunks",
            got=f"{run.tensor.overlap_chunks} with tiling.ffn={run.tiling.ffn}",
            needed="whole networks: of tiles only the last one's product is followed by the sum over tp",
            fix=Set("tensor.overlap_chunks", 1) | Set("tiling.ffn", 1),
        )


def _cuts(run: Run, shape: Grid) -> Iterator[tuple[str, int, int]]:
    """Yield (key, size, number of shards that must divide it) on this grid."""
    m = run.model
    dense = m.d_ff if len(m.layers_with_experts()) < m.num_layers or m.ahead else 0
    return shape.cuts(width=m.d_model, heads=m.num_heads, groups=m.num_kv_heads or m.num_heads, hidden=dense)


def _check_line(run: Run) -> None:
    """Refuse heads, hidden units or a vocabulary that tp cannot share out."""
    tp, kind = run.degrees.tp, run.tensor.kind

    def works(n: int) -> bool:
        return n <= run.vocab_size and all(size % ways == 0 for _, size, ways in _cuts(run, grid_of(kind, n, sides=())))

    fix = Set("degrees.tp", *filter(works, divisors(run.model.num_heads)))
    for what, size, ways in _cuts(run, run.tp_grid()):
        if size % ways == 0:
            continue
        if what != "model.num_kv_heads":
            raise BadInput("degrees.tp", got=tp, needed=f"a divisor of {what}={size}: each of its ranks holds an equal part", fix=fix)
        if kind == "dtensor":
            raise BadInput(
                "degrees.tp",
                got=f"{tp} with tensor.kind=dtensor",
                needed=f"a divisor of {what}={size}: each of its ranks holds other ones",
                fix=Set("tensor.kind", "1d", said="1d, which holds copies") if tp % size == 0 else fix,
            )
        raise BadInput(
            "degrees.tp",
            got=tp,
            needed=f"a divisor or a multiple of {what}={size}: ranks hold equally many, or equally many hold one",
            fix=fix,
        )
    if run.vocab_size < tp:
        raise BadInput("degrees.tp", got=tp, needed=f"at most the vocabulary's {run.vocab_size}", fix=fix)


def _check_grid(run: Run) -> None:
    """Refuse sizes that a grid's sides do not divide: heads, hidden units, and d_model (by both sides of a cube)."""
    shape = run.tp_grid()
    for what, size, ways in _cuts(run, shape):
        if size % ways:
            raise BadInput(
                "degrees.tp",
                got=f"{run.degrees.tp} with tensor.kind={run.tensor.kind}, a grid of {shape}",
                needed=f"{ways} to divide {what}={size}",
                fix=Set(what, *sorted({ways, -(-size // ways) * ways}), said=f"a multiple of {ways}") | Set("tensor.kind", "1d"),
            )
    if run.vocab_size < shape.units:
        needed = f"at most the vocabulary's {run.vocab_size} a side"
        raise BadInput("degrees.tp", got=f"a grid of {shape}", needed=needed, fix=Set("tensor.kind", "1d"))


def _check_sequences(run: Run) -> None:
    """Refuse a batch that tp cannot share out: a grid's rows read equal parts of it, and in a MoE model every rank of tp routes whole
    groups.

    Checked for training and evaluation. Ranks of 1D in a dense model all read the same, so any number passes.
    """
    tp, group, rows, dp = run.degrees.tp, run.router.group, run.tp_grid().sequences, int(run.degrees.dp)
    unit, words, each = rows, f"the {rows} rows of tp's grid", "each row reads an equal part of them"
    if run.model.layers_with_experts():
        unit, words, each = tp, f"degrees.tp={tp}", "each rank of tp routes an equal part of them"
        if isinstance(group, int):
            unit, words = tp * group, f"degrees.tp * router.group = {tp} * {group}"
    held = run.train.global_batch // (dp * run.pipeline.microbatches)
    if held % unit:
        least = dp * run.pipeline.microbatches * unit
        raise BadInput(
            "degrees.tp",
            got=f"{tp} for {held} sequences of a micro-batch",
            needed=f"sequences that are a multiple of {words}: {each}",
            fix=Set("train.global_batch", least, said=f"a multiple of {least}") | Set("degrees.tp", 1),
        )
    if run.train.eval_sequences % (dp * unit):
        raise BadInput(
            "train.eval_sequences",
            got=run.train.eval_sequences,
            needed=f"a multiple of degrees.dp={dp} times {words}",
            fix=Set("it", max(1, round(run.train.eval_sequences / (dp * unit))) * dp * unit),
        )
