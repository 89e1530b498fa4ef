"""The project's plan: the layout of each parameter on the mesh, and how rows reach the experts.

print(plan_of(run.dispatch, tensor="1d"))      the whole of it, as a table
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from torch import nn

from moe.experts.copies import Copies, Exchange
from moe.experts.dispatch.catalog import open_exchange
from moe.experts.dispatch.dispatcher import Sizes
from moe.experts.experts import HIDDEN_DIM
from moe.experts.layer import MoELayer
from moe.model.names import stack_of, tiled_dim
from moe.recipe import sections
from parallel.mesh.grids import GRIDS
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh
from parallel.tensor import style
from parallel.tensor.dtensor import DTensorColumn, DTensorRow
from parallel.tensor.grid import Channels, ChannelsNorm
from parallel.tensor.linear_1d import Column, Row
from parallel.tensor.linear_2d import Block
from parallel.tensor.linear_3d import Cube
from parallel.tensor.sliced import Exchanged, SlicedNorm
from parallel.tensor.style import Copied, Plan, Stacked, Style
from parallel.tensor.vocabulary import VocabularyBlock, VocabularyCube, VocabularyRows

FAMILIES = ("dense", "router", "expert")


def _name_of(path: str) -> str:
    name = stack_of(path)
    assert name is not None, f"{path} is no stack"
    return name


# how the ranks of tp hold one layer's tokens together: the axis, and the exchange that gives each rank whole sequences
SHARED: dict[str, tuple[str, Callable[[Axis], Exchange] | None]] = {
    "copies": ("tp", None),
    "slices": ("tp", partial(Exchanged, dim=1)),
    "channels": ("tp_col", partial(Exchanged, dim=2)),
}
EXPERTS = Stacked("ep", hidden="etp", hidden_dim=HIDDEN_DIM, name_of=_name_of)


@dataclass(frozen=True)
class Spread:
    """Stacked experts, with an exchange opened for all MoE layers that sends rows to the ranks that hold their experts.

    Each token is routed once. If the ranks of tp hold tokens as copies, slices or channels, each of them routes some of the sequences.
    """

    dispatch: sections.Dispatch
    held: str = "copies"  # how the ranks of tp hold tokens: a key of SHARED
    experts: Stacked = field(default=EXPERTS)

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        return self.experts.layout(name, shape)

    def fill(self, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> None:
        self.experts.fill(model, layouts, mesh)
        name, exchange = SHARED[self.held]
        shared = mesh.axis(name)
        layers = [cast(MoELayer, model.get_submodule(path.rpartition(".")[0])) for path in self.experts.modules(layouts)]
        first, experts = layers[0], max(layer.experts.num_experts for layer in layers)
        sizes = Sizes(first.experts.d_model, experts, first.router.spec.num_choices, first.experts.kernels)
        opened = open_exchange(self.dispatch, mesh, sizes)
        for layer in layers:
            axis = replace(shared, label=f"layers.{layer.layer}")
            layer.copies = Copies(axis, exchange and exchange(axis)) if axis.size > 1 else None
            layer.dispatcher = opened.layer(axis.label)


NORMS = ("layers.*.attention_norm.weight", "layers.*.ffn_norm.weight", "norm.weight")
OF_HEADS = Copied(alike=())  # norms of queries and keys: each rank has other heads, so copies see other tokens' channels


def _one_dimension(*, sliced: bool) -> tuple[tuple[str, Style], ...]:
    """Styles of 1D. Keys and values are sharded over tp_row_heads, which is tp unless there are fewer key-value heads than ranks."""
    column, keys, table = Column(sliced=sliced), Column("tp_row_heads", sliced=sliced), Column(dim=1, sliced=sliced)
    return _line(column, keys, table, Row(sliced=sliced), sliced=sliced, key_heads="tp_row_heads")


def _by_dtensor(*, sliced: bool) -> tuple[tuple[str, Style], ...]:
    """Styles of 1D with the same shards, and torch's collectives within layers."""
    column, table = DTensorColumn(sliced=sliced), DTensorColumn(dim=1, sliced=sliced)
    return _line(column, column, table, DTensorRow(sliced=sliced), sliced=sliced, key_heads="tp")


def _line(column: Style, keys: Style, table: Style, row: Style, *, sliced: bool, key_heads: str) -> tuple[tuple[str, Style], ...]:
    """Styles of one axis of ranks. `key_heads`: the axis over which keys and values are sharded. `sliced`: with sequence parallelism.

    Parameters applied after the sum over tp, latents, and the joined input of multi-token prediction are copied. Each rank applies them
    to
    the tokens that it holds: to all, or to its slice.
    """
    of_tokens = Copied(alike=() if sliced else ("tp",))
    of_attention = (
        ("q_bias.weight", Channels("tp")),
        ("k_bias.weight", Channels(key_heads)),
        ("v_bias.weight", Channels(key_heads)),
        ("sinks.weight", Channels("tp")),
        ("out_bias.weight", of_tokens),
        ("q_down*.weight", of_tokens),
        ("kv_down*.weight", of_tokens),
        ("*_norm.weight", OF_HEADS),
        ("q.weight", column),
        ("q_up.weight", column),
        ("kv_up.weight", column),
        ("k.weight", keys),
        ("v.weight", keys),
        ("bias.weight", table),
        ("out.weight", row),
    )
    of_block = (
        *((f"{of}.{pattern}", style) for of in ("attention", "cross") for pattern, style in of_attention),
        ("ffn.w1.weight", column),
        ("ffn.w3.weight", column),
        ("ffn.w2.weight", row),
        *((("*_norm.weight", SlicedNorm()),) if sliced else ()),
    )
    return (
        *((f"{block}.{pattern}", style) for block in ("layers.*", "ahead.*.block") for pattern, style in of_block),
        ("ahead.*.*.weight", of_tokens),
        ("embedding.weight", VocabularyRows(sliced=sliced)),
        ("head.weight", VocabularyRows(sliced=sliced)),
        *((("norm.weight", SlicedNorm()),) if sliced else ()),
    )


def _grid(first: Style, keys: Style, second: Style, vocabulary: Style, *, heads: str) -> tuple[tuple[str, Style], ...]:
    """Styles of a grid. `keys`: the style of keys and values, which may have fewer heads than queries. `heads`: the axis of inner
    channels.
    """
    return (
        ("layers.*.attention.*_norm.weight", OF_HEADS),
        ("layers.*.attention.k.weight", keys),
        ("layers.*.attention.v.weight", keys),
        ("layers.*.attention.out.weight", second),
        ("layers.*.ffn.w2.weight", second),
        ("layers.*.attention.bias.weight", Channels(heads, dim=1)),
        ("layers.*.attention.sinks.weight", Channels(heads)),
        ("layers.*.attention.*.weight", first),
        ("layers.*.ffn.*.weight", first),
        *((norm, ChannelsNorm()) for norm in NORMS),
        ("embedding.weight", vocabulary),
        ("head.weight", vocabulary),
    )


# by tensor.kind; sliced: with tensor.sequence_parallel
TENSOR: dict[str, tuple[tuple[str, Style], ...]] = {
    "copied": (),
    "1d": _one_dimension(sliced=False),
    "1d sliced": _one_dimension(sliced=True),
    "dtensor": _by_dtensor(sliced=False),
    "dtensor sliced": _by_dtensor(sliced=True),
    "2d": _grid(Block(), Block("tp_col_heads"), Block(), VocabularyBlock(), heads="tp_col"),
    "2.5d": _grid(Block(), Block("tp_col_heads"), Block(), VocabularyBlock(), heads="tp_col"),
    "3d": _grid(Cube("first"), Cube("first", copied=True), Cube("second"), VocabularyCube(), heads="tp_row"),
}
HELD = {"1d sliced": "slices", "dtensor sliced": "slices"} | dict.fromkeys(
    GRIDS, "channels"
)  # how tp holds tokens in a MoE layer, if not as copies


def plan_of(dispatch: sections.Dispatch, *, tensor: str = "copied", chunks: int = 1) -> Plan:
    """Return the plan. Parameters that no row matches are copied, and their copies see the same tokens: norms, and dense ones without
    `tensor`.

    In a MoE layer every token is on one rank alone (moe/experts/copies.py), so each copy there sees other tokens: the router's, and the
    networks' next to the experts. `chunks`: tensor.overlap_chunks.
    """
    return Plan(
        (
            ("layers.*.moe.experts.*", Spread(dispatch, held=HELD.get(tensor, "copies"))),
            ("layers.*.moe.router.**", Copied("router", alike=())),
            ("layers.*.moe.**", Copied(alike=())),
            *((pattern, replace(kind, chunks=chunks) if isinstance(kind, Column | Row) else kind) for pattern, kind in TENSOR[tensor]),
        )
    )


def plan_for(run: sections.Run) -> Plan:
    """Return the recipe's plan."""
    kind = f"{run.tensor.kind} sliced" if run.tensor.sequence_parallel else run.tensor.kind
    kind = kind if run.degrees.tp > 1 else "copied"
    return plan_of(run.dispatch, tensor=kind, chunks=run.tensor.overlap_chunks)


def lay_out(model: nn.Module, plan: Plan | None = None) -> dict[str, Layout]:
    """Return layouts of the whole model by module name, before anything is cut. They do not depend on the dispatcher."""
    return style.lay_out(model, plan or plan_of(sections.Dispatch()), tiled_dim=tiled_dim)
