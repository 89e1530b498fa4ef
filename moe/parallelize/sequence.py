"""Sets the parts of layers that exchange tokens in sequence parallelism: attention's cores, and the routers' groups.

The sp axis is sp_ring x sp_heads: a ring of groups, in each of which neighbours trade heads for tokens. Either may be 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from moe.data.token_shard import TokenShard, order_of
from moe.model.transformer import Block, Transformer, moe_layers
from moe.nn.context import Context
from moe.recipe.sections import Run
from moe.router.slices import whole_sequences
from parallel.mesh.mesh import Mesh
from parallel.numerics.position_bias import Bias
from parallel.sequence.method import Method
from parallel.sequence.order import Order
from parallel.sequence.ulysses import Ulysses
from parallel.tensor.grid import Turn


@dataclass(frozen=True)
class Exchanging:
    """An attention core (moe/nn/core.py) for tokens on several ranks.
    `keep`: the name by which its output is kept for a recomputed pass; None: it is computed again.
    """

    method: Method | Ulysses
    keep: str | None

    def __call__(
        self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, context: Context, bias: Bias | None, sink_H: Tensor | None = None
    ) -> Tensor:
        name = self.keep
        once = None if name is None else (lambda attend: context.once(name, attend))
        return self.method(q_BHLC, k_BKLC, v_BKLC, bias=bias, sink_H=sink_H, document_BS=context.document_BS, once=once)


def shard_of(run: Run, mesh: Mesh, num_sequences: int) -> TokenShard:
    """Return the shard of a batch that this rank reads, in the recipe's order of positions."""
    over = ("dp", "tp_depth", "tp_row") if run.tp_grid().sequences > 1 else ("dp",)
    m, order = run.model, run.sequence.position_order
    return TokenShard.of(mesh, num_sequences=num_sequences, length=m.read_length, order=order, over=over, source=m.source_length)


def slice_sequences(run: Run, model: Transformer, mesh: Mesh) -> None:
    """Set the exchanges of sequence parallelism in the layers held here, and of document ids for tensor.kind 3d."""
    if run.tensor.kind == "3d" and run.degrees.tp > 1:  # 3d: ranks have other sequences in attention than between layers
        turn = Turn(replace(mesh.axis("tp_row"), label="documents"), replace(mesh.axis("tp_col"), label="documents"))
        model.inner_sequences = turn
    if mesh.axis("sp").size == 1:
        return
    order = order_of(mesh, run.sequence.position_order, run.model.max_length)
    blocks = [*model.layers, *(depth.block for depth in model.ahead)]
    for block in (layer for layer in blocks if isinstance(layer, Block)):
        label = f"layers.{block.layer}.attention"
        block.attention.core = Exchanging(_method(run, mesh, order, block), label if run.sequence.keep_attention else None)
    sp, places = mesh.axis("sp"), tuple(order.positions(rank) for rank in range(mesh.axis("sp").size))
    model.whole_sequences = partial(whole_sequences, axis=replace(sp, label="documents"), positions=places)
    for moe in moe_layers(model):
        assert moe.spread is not None
        moe.spread.positions = places


def _method(run: Run, mesh: Mesh, order: Order, block: Block) -> Method | Ulysses:
    label = f"layers.{block.layer}.attention"
    method = run.sequence.named.make(mesh.axis("sp_ring", label=label), replace(order, inner=1), block.attention.window)
    return method if order.inner == 1 else Ulysses(mesh.axis("sp_heads", label=label), method)
