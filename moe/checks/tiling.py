"""The sizes that tiles and chunks must divide or not exceed; others are refused in one line, before torch is imported."""

from __future__ import annotations

import math

from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.grids import LINES
from parallel.mesh.mesh import divisors


def check_tiling(run: Run) -> None:
    """Check that tiles divide every network's hidden units evenly, and that no vocabulary tile or token chunk is empty. Raises BadInput."""
    widths = _widths(run)
    wrong = {what: size for what, size in widths.items() if size % run.tiling.ffn}
    for what, size in wrong.items():
        needed = f"a divisor of {what}={size}: each tile has an equal part of the hidden units"
        raise BadInput("tiling.ffn", got=run.tiling.ffn, needed=needed, fix=Set("it", *divisors(math.gcd(*widths.values()))))
    rows, split = run.vocab_size // run.tp_grid().units, _split(run)
    if run.tiling.head > rows:
        needed = f"at most the vocabulary's {run.vocab_size}{split}"
        raise BadInput("tiling.head", got=run.tiling.head, needed=needed, fix=Set("it", 1) | "a few")
    read = int(run.degrees.dp) * run.tp_grid().sequences
    tokens = run.train.global_batch // (read * run.pipeline.microbatches) * run.model.max_length
    if run.recompute.loss_chunks > tokens:
        needed = f"at most the {tokens} tokens of a micro-batch"
        fix = Set("it", *range(min(tokens, 8), 0, -1), said=f"{tokens} or less; 8 is often enough")
        raise BadInput("recompute.loss_chunks", got=run.recompute.loss_chunks, needed=needed, fix=fix)


def _split(run: Run) -> str:
    """Return the text for the division of dense sizes by tp: "", " / degrees.tp=2", or the side of a grid."""
    parts = run.tp_grid().units
    return "" if parts == 1 else f" / degrees.tp={parts}" if run.tensor.kind in LINES else f" / {parts}, the side of tp's grid"


def _widths(run: Run) -> dict[str, int]:
    """Return the number of hidden units that a rank holds, by the name of each kind of network."""
    m, x, sparse = run.model, run.experts, run.model.layers_with_experts()
    units = x.d_ff or m.d_ff
    widths = {f"model.d_ff{_split(run)}": m.d_ff // run.tp_grid().units} if len(sparse) < m.num_layers or m.ahead else {}
    if sparse:
        split = f" / degrees.etp={run.degrees.etp}" if run.degrees.etp > 1 else ""
        widths[f"the experts' d_ff{split}"] = units // max(1, run.degrees.etp)  # etp below 1 is refused with the other degrees
        if x.shared:
            widths["the shared experts' width"] = (x.shared_d_ff or units) * x.shared
        if x.residual:
            widths["the residual network's d_ff"] = units
    return widths
