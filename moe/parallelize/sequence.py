"""Sets up sequence parallelism: attention cores that exchange tokens between ranks, and the positions that routers need.

The sp axis is sp_ring x sp_heads. The sp_heads ranks of a group exchange heads for tokens (Ulysses), and the groups form a ring. Either
size may be 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from moe.data.token_shard import TokenShard, orders_of
from moe.model.transformer import Block, Transformer, moe_layers
from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.latent import LatentAttention
from moe.recipe.sections import Run
from moe.router.slices import whole_sequences
from parallel.mesh.mesh import Mesh
from parallel.numerics.position_bias import Bias
from parallel.sequence.method import Method
from parallel.sequence.order import Order
from parallel.sequence.ulysses import Ulysses
from parallel.tensor.grid import Turn
from parallel.tensor.sliced import own_columns


@dataclass(frozen=True)
class Exchanging:
    """An attention core (moe/nn/core.py) for sequences that are sharded over ranks.
    `keep`: name under which the output is stored, so that a recomputed pass can reuse it; None: it is computed again. `scale`: factor on
    the logits; None: 1 / sqrt(C), with C channels of a head. `cross`: the keys are the encoder's.
    """

    method: Method | Ulysses
    keep: str | None
    scale: float | None = None
    cross: bool = False

    def __call__(
        self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, context: Context, bias: Bias | None, sink_H: Tensor | None = None
    ) -> Tensor:
        name, q_BHLC = self.keep, q_BHLC if self.scale is None else q_BHLC * (self.scale * q_BHLC.shape[-1] ** 0.5)
        once = None if name is None else (lambda attend: context.once(name, attend))
        documents = {"document_BS": context.document_BS, "source_document_BS": context.source_document_BS if self.cross else None}
        return self.method(q_BHLC, k_BKLC, v_BKLC, bias=bias, sink_H=sink_H, once=once, **documents)


def shard_of(run: Run, mesh: Mesh, num_sequences: int) -> TokenShard:
    """Return which tokens of a batch of `num_sequences` sequences this rank reads, in the recipe's order of positions."""
    over = ("dp", "tp_depth", "tp_row") if run.tp_grid().sequences > 1 else ("dp",)
    m, order = run.model, run.sequence.position_order
    return TokenShard.of(mesh, num_sequences=num_sequences, length=m.read_length, order=order, over=over, source=m.source_length)


def slice_sequences(run: Run, model: Transformer, mesh: Mesh) -> None:
    """Give this rank's layers the exchanges of sequence parallelism (axis sp). With tensor.sequence_parallel, also make the
    model shard activations along the tokens over tp. With tensor.kind 3d, also give it the exchange of document ids."""
    if run.tensor.kind == "3d" and run.degrees.tp > 1:  # attention on a rank computes other sequences than the rank holds between layers
        turn = Turn(replace(mesh.axis("tp_row"), label="documents"), replace(mesh.axis("tp_col"), label="documents"))
        model.inner_sequences = turn
    if run.tensor.sequence_parallel and run.degrees.tp > 1:
        model.slices, model.columns = run.degrees.tp, partial(own_columns, axis=mesh.axis("tp"))
    if mesh.axis("sp").size == 1:
        return
    sp = mesh.axis("sp")
    of_halves = orders_of(mesh, run.sequence.position_order, run.model.read_length, source=run.model.source_length)
    orders = dict(zip(sorted({0, run.model.decoder_begins}), of_halves, strict=True))  # first layer of encoder or decoder -> order

    def places(layer: int) -> tuple[tuple[int, ...], ...]:
        """Return each rank's positions in the sequences that this layer reads: the encoder's or the decoder's."""
        order = orders[run.model.half_of(layer).start]
        return tuple(order.positions(rank) for rank in range(sp.size))

    blocks = [*model.layers, *(depth.block for depth in model.ahead)]
    for block in (layer for layer in blocks if isinstance(layer, Block)):
        order, name = orders[run.model.half_of(block.layer).start], f"layers.{block.layer}"
        _exchange(run, mesh, order, block.attention, f"{name}.attention")
        if block.cross is not None:
            _exchange(run, mesh, replace(order, causal=False), block.cross, f"{name}.cross", cross=True)
    gathered = partial(whole_sequences, axis=replace(sp, label="documents"))
    model.whole_sequences = partial(gathered, positions=places(run.model.decoder_begins))
    if model.halves:
        source, pairs = run.model.source_length, zip(places(0), places(run.model.decoder_begins), strict=True)
        model.whole_rows = partial(gathered, positions=[(*read, *(source + place for place in written)) for read, written in pairs])
    for moe in moe_layers(model):
        assert moe.spread is not None
        moe.spread.positions = places(moe.layer)


def _exchange(run: Run, mesh: Mesh, order: Order, attention: Attention | LatentAttention, label: str, *, cross: bool = False) -> None:
    """Give an attention layer a core that communicates between ranks. In cross attention, `order` is the order of the queries. label: the
    layer's name in error messages about collectives."""
    kind = run.sequence.named
    make = kind.make if order.causal else kind.open_make or kind.make
    method = make(mesh.axis("sp_ring", label=label), replace(order, inner=1), attention.window)
    exchanging = method if order.inner == 1 else Ulysses(mesh.axis("sp_heads", label=label), method)
    attention.core = Exchanging(exchanging, label if run.sequence.keep_attention else None, attention.core_scale, cross)
