"""Checks of degrees.tp and tiling: ranks, tiles and chunks must divide sizes, and some keys cannot be combined with degrees.tp."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe.checks.clash import clash
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.mesh.grids import GRIDS, LINES, Grid, grid_of
from parallel.mesh.mesh import divisors


def check_tensor(run: Run) -> None:
    """Raise BadInput for sizes that cannot be divided equally among the ranks of tp, and for methods that need unsharded matrices."""
    tp, kind, m = run.degrees.tp, run.tensor.kind, run.model
    if run.tensor.sequence_parallel:
        _check_sequence_parallel(run)
    if run.tensor.overlap_chunks > 1:
        _check_overlap(run)
    if tp == 1:
        return
    if kind in LINES:
        _check_line(run)
    if kind in GRIDS:
        _check_grid(run)
    if run.optimizer.kind == "kfac" and kind != "copied":
        why = "K-FAC's direction needs a whole matrix, and ranks of tp hold shards"
        raise clash(run, "optimizer.kind", "degrees.tp", "adamw", why, Set("degrees.tp", 1))
    if m.latent.key_rank is not None and kind in GRIDS:
        why = "no grid cuts latent attention, whose latents belong to all heads"
        raise clash(run, "tensor.kind", "model.latent.key_rank", "1d", why)
    _check_sequences(run)


def _check_sequence_parallel(run: Run) -> None:
    sp, tp, length = run.degrees.sp, run.degrees.tp, run.model.max_length
    if tp == 1 or run.tensor.kind not in LINES:
        got = f"true with degrees.tp={tp} and tensor.kind={run.tensor.kind}"
        needed = "tensor.kind 1d or dtensor with degrees.tp above 1: it shards activations that are otherwise copied on all tp ranks"
        fix = Set("degrees.tp", 2) & Set("tensor.kind", "1d") | Set("tensor.sequence_parallel", False)
        raise BadInput("tensor.sequence_parallel", got=got, needed=needed, fix=fix)
    ways, words = sp * tp, f"degrees.sp * degrees.tp = {sp} * {tp}" if sp > 1 else f"degrees.tp={tp}"
    if length % ways and run.model.kind == "decoder":  # moe/checks/model.py checks the two lengths of an encoder-decoder
        needed, fix = f"a multiple of {words} with tensor.sequence_parallel", Set("it", max(1, round(length / ways)) * ways)
        raise BadInput("model.max_length", got=length, needed=needed, fix=fix)


def _check_overlap(run: Run) -> None:
    if run.degrees.tp == 1 or run.tensor.kind != "1d":
        got = f"{run.tensor.overlap_chunks} with degrees.tp={run.degrees.tp} and tensor.kind={run.tensor.kind}"
        needed = "tensor.kind 1d with degrees.tp above 1: it overlaps the all-reduce of tp ranks with the product before it"
        fix = Set("tensor.overlap_chunks", 1) | Set("degrees.tp", 2) & Set("tensor.kind", "1d")
        raise BadInput("tensor.overlap_chunks", got=got, needed=needed, fix=fix)
    if run.tiling.ffn > 1:
        needed = "networks without tiles: with several tiles, the all-reduce over tp can follow only the last one"
        raise clash(run, "tensor.overlap_chunks", "tiling.ffn", 1, "", Set("tiling.ffn", 1), needed=needed)


def _cuts(run: Run, shape: Grid) -> Iterator[tuple[str, int, int]]:
    """Yield (key, value, number of shards) for each size of the model that is sharded over the grid of tp ranks, `shape`."""
    m = run.model
    dense = m.d_ff if len(m.layers_with_experts()) < m.num_layers or m.ahead else 0
    return shape.cuts(width=m.d_model, heads=m.num_heads, groups=m.num_kv_heads or m.num_heads, hidden=dense)


def _check_line(run: Run) -> None:
    tp, kind = run.degrees.tp, run.tensor.kind

    def works(n: int) -> bool:
        return n <= run.vocab_size and all(size % ways == 0 for _, size, ways in _cuts(run, grid_of(kind, n, sides=())))

    fix = Set("degrees.tp", *filter(works, divisors(run.model.num_heads)))
    for what, size, ways in _cuts(run, run.tp_grid()):
        if size % ways == 0:
            continue
        if what != "model.num_kv_heads":
            raise BadInput("degrees.tp", got=tp, needed=f"a divisor of {what}={size}: each rank of tp holds an equal part", fix=fix)
        if kind == "dtensor":
            needed = f"a divisor of {what}={size}: with dtensor, no two ranks of tp hold the same heads"
            fix = Set("tensor.kind", "1d", said="1d, which holds copies of heads") if tp % size == 0 else fix
            raise BadInput("degrees.tp", got=f"{tp} with tensor.kind=dtensor", needed=needed, fix=fix)
        needed = f"a divisor or a multiple of {what}={size}: each rank has equally many heads, or each head is on equally many ranks"
        raise BadInput("degrees.tp", got=tp, needed=needed, fix=fix)
    if run.vocab_size < tp:
        raise BadInput("degrees.tp", got=tp, needed=f"at most the vocabulary size {run.vocab_size}", fix=fix)


def _check_grid(run: Run) -> None:
    shape = run.tp_grid()
    for what, size, ways in _cuts(run, shape):
        if size % ways:
            got = f"{run.degrees.tp} with tensor.kind={run.tensor.kind}, a grid of {shape}, which cuts {what}={size} into {ways}"
            fix = Set(what, *sorted({ways, -(-size // ways) * ways}), said=f"a multiple of {ways}") | Set("tensor.kind", "1d")
            raise BadInput("degrees.tp", got=got, needed="a grid that cuts this size into equal parts", fix=fix)
    if run.vocab_size < shape.units:
        needed = f"a grid with sides of at most the vocabulary size {run.vocab_size}"
        raise BadInput("degrees.tp", got=f"a grid of {shape}", needed=needed, fix=Set("tensor.kind", "1d"))


def _check_sequences(run: Run) -> None:
    """Raise BadInput unless, in training and evaluation, sequences can be divided equally among the rows of tp's grid, in whole groups of
    router.group sequences. In a MoE model tp ranks divide tokens for routing: a sequence on an sp rank needs a token for each tp rank."""
    tp, group, rows, dp, m = run.degrees.tp, run.router.group, run.tp_grid().sequences, int(run.degrees.dp), run.model
    unit, words, each = rows, f"the {rows} rows of tp's grid", "each row reads an equal part of them"
    if m.layers_with_experts():
        if rows > 1 and isinstance(group, int):
            unit, words = rows * group, f"the rows of tp's grid * router.group = {rows} * {group}"
        tokens = min(m.max_length, m.target_length or m.max_length) // run.degrees.sp
        if tokens < tp:
            needed = f"at most the {counted(tokens, 'token')} of a sequence on a rank of sp: each rank of tp routes at least one"
            raise BadInput("degrees.tp", got=tp, needed=needed, fix=Set("degrees.tp", 1) | Set("model.max_length", tp * run.degrees.sp))
    held = run.train.global_batch // (dp * run.pipeline.microbatches)
    if held % unit:
        least, got = dp * run.pipeline.microbatches * unit, f"{tp} for {counted(held, 'sequence')} of a micro-batch"
        fix = Set("train.global_batch", least, said=f"a multiple of {least}") | Set("degrees.tp", 1)
        raise BadInput("degrees.tp", got=got, needed=f"a number of sequences that is a multiple of {words}: {each}", fix=fix)
    if (sequences := run.train.eval_sequences) % (dp * unit):
        needed, fix = f"a multiple of degrees.dp={dp} times {words}", Set("it", max(1, round(sequences / (dp * unit))) * dp * unit)
        raise BadInput("train.eval_sequences", got=sequences, needed=needed, fix=fix)


def check_tiling(run: Run) -> None:
    """Raise BadInput unless tiles divide every network's hidden units evenly, and no tile of the vocabulary or chunk of tokens is empty."""
    widths = _widths(run)
    wrong = {what: size for what, size in widths.items() if size % run.tiling.ffn}
    for what, size in wrong.items():
        needed = f"a divisor of {what}={size}: each tile has an equal part of the hidden units"
        raise BadInput("tiling.ffn", got=run.tiling.ffn, needed=needed, fix=Set("it", *divisors(math.gcd(*widths.values()))))
    rows, split = run.vocab_size // run.tp_grid().units, _split(run)
    if run.tiling.head > rows:
        needed = f"at most the vocabulary size {run.vocab_size}{split}"
        raise BadInput("tiling.head", got=run.tiling.head, needed=needed, fix=Set("it", 1) | "to a few tiles")
    read = int(run.degrees.dp) * run.tp_grid().sequences
    tokens = run.train.global_batch // (read * run.pipeline.microbatches) * run.model.max_length
    if run.recompute.loss_chunks > tokens:
        needed = f"at most the {counted(tokens, 'token')} of a micro-batch"
        fix = Set("it", *range(min(tokens, 8), 0, -1), said=f"{tokens} or less; 8 is often enough")
        raise BadInput("recompute.loss_chunks", got=run.recompute.loss_chunks, needed=needed, fix=fix)


def _split(run: Run) -> str:
    """Return the words that follow a size in messages if tp divides it: " / degrees.tp=2" or " / 2, the side of tp's grid"; "" if tp does
    not divide it."""
    parts = run.tp_grid().units
    return "" if parts == 1 else f" / degrees.tp={parts}" if run.tensor.kind in LINES else f" / {parts}, the side of tp's grid"


def _widths(run: Run) -> dict[str, int]:
    """Return for each kind of network: name of its width in messages -> number of its hidden units on one rank."""
    m, x, sparse = run.model, run.experts, run.model.layers_with_experts()
    units = x.d_ff or m.d_ff
    widths = {f"model.d_ff{_split(run)}": m.d_ff // run.tp_grid().units} if len(sparse) < m.num_layers or m.ahead else {}
    if sparse:
        split = f" / degrees.etp={run.degrees.etp}" if run.degrees.etp > 1 else ""
        widths[f"the experts' d_ff{split}"] = units // run.degrees.etp
        if x.shared:
            widths["the shared experts' width"] = (x.shared_d_ff or units) * x.shared
        if x.residual:
            widths["the residual network's d_ff"] = units
    return widths
