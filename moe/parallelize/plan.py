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


# how ranks of tp hold a MoE layer's tokens -> (axis that shares them, constructor of the exchange to whole sequences, None for copies)
SHARED: dict[str, tuple[str, Callable[[Axis], Exchange] | None]] = {
    "copies": ("tp", None),
    "slices": ("tp", partial(Exchanged, dim=1)),
    "channels": ("tp_col", partial(Exchanged, dim=2)),
}
EXPERTS = Stacked("ep", hidden="etp", hidden_dim=HIDDEN_DIM, name_of=_name_of)


@dataclass(frozen=True)
class Spread:
    """The style of the experts: stacked tensors, sharded over ep and etp, and an exchange that sends rows to the ranks that hold them.

    Each token is routed once. If ranks of tp share tokens (`held`: a key of SHARED), each of them routes some of the sequences.
    """

    dispatch: sections.Dispatch
    held: str = "copies"
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
OF_HEADS = Copied(alike=())  # norms of queries and keys: ranks have different heads, so the gradients of the copies differ and are summed


def _line(
    columns: type[Column | DTensorColumn], rows: type[Row | DTensorRow], *, sliced: bool, key_heads: str = "tp"
) -> tuple[tuple[str, Style], ...]:
    """Return (pattern of parameters, style) for 1D: weights are split by `columns` or `rows`. `sliced`: with tensor.sequence_parallel.

    `key_heads`: the axis over which keys and values are sharded; tp_row_heads is tp unless there are fewer key-value heads than ranks.
    Parameters applied after the sum over tp, to latents, or to the joined input of multi-token prediction are copied. Each rank applies
    them to the tokens that it holds: to all, or to its slice.
    """
    column, table, row = columns(sliced=sliced), columns(dim=1, sliced=sliced), rows(sliced=sliced)
    keys = column if key_heads == "tp" else Column(key_heads, sliced=sliced)
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
    """Return (pattern of parameters, style) for a grid: `keys` for k and v, `second` for out and w2, else `first`. `heads`: heads' axis."""
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


# tensor.kind -> its styles, by patterns of parameters; "sliced": with tensor.sequence_parallel
TENSOR: dict[str, tuple[tuple[str, Style], ...]] = {
    "copied": (),
    "1d": _line(Column, Row, sliced=False, key_heads="tp_row_heads"),
    "1d sliced": _line(Column, Row, sliced=True, key_heads="tp_row_heads"),
    "dtensor": _line(DTensorColumn, DTensorRow, sliced=False),
    "dtensor sliced": _line(DTensorColumn, DTensorRow, sliced=True),
    "2d": _grid(Block(), Block("tp_col_heads"), Block(), VocabularyBlock(), heads="tp_col"),
    "2.5d": _grid(Block(), Block("tp_col_heads"), Block(), VocabularyBlock(), heads="tp_col"),
    "3d": _grid(Cube("first"), Cube("first", copied=True), Cube("second"), VocabularyCube(), heads="tp_row"),
}
# how the ranks of tp hold tokens (a key of SHARED), if not as copies
HELD = {"1d sliced": "slices", "dtensor sliced": "slices"} | dict.fromkeys(GRIDS, "channels")


def plan_of(dispatch: sections.Dispatch, *, tensor: str = "copied", chunks: int = 1) -> Plan:
    """Return the plan: patterns of parameters, each with a style. `tensor`: a key of TENSOR. `chunks`: tensor.overlap_chunks.

    Parameters that no pattern matches are copied, and all copies see the same tokens. In a MoE layer each token is on one rank alone
    (moe/experts/copies.py), so there the copies of the router, and of the networks next to the experts, see different tokens.
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
