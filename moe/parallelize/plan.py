"""The plan of a recipe: the style in which each parameter is sharded, and how rows reach the experts. print(plan) shows it as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from torch import nn

from moe.experts.dispatch import open_exchange
from moe.experts.dispatch.dispatcher import Sizes
from moe.experts.experts import HIDDEN_DIM
from moe.experts.layer import MoELayer
from moe.experts.spread import Columns, Copies, Exchange, Spread
from moe.model.initialize import stack_of, tiled_dim
from moe.recipe import sections
from parallel.mesh.grids import GRIDS
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh
from parallel.tensor import style
from parallel.tensor.dtensor import DTensorColumn, DTensorRow
from parallel.tensor.grid import Channels, ChannelsNorm, Exchanged
from parallel.tensor.linear_1d import Column, Row
from parallel.tensor.linear_2d import Block
from parallel.tensor.linear_3d import Cube
from parallel.tensor.sliced import SlicedNorm
from parallel.tensor.style import Copied, Plan, Stacked, Style
from parallel.tensor.vocabulary import VocabularyBlock, VocabularyCube, VocabularyRows

FAMILIES = ("dense", "router", "expert")  # groups of parameters; the norm of each group's gradient is reported


def _name_of(path: str) -> str:
    name = stack_of(path)
    assert name is not None, f"{path} is no stack"
    return name


# key: how tp ranks hold tokens outside of MoE layers: all tokens (copies), a chunk of each sequence (slices), some channels of all tokens
# (channels). value: (axes that shard sequences; axis whose ranks divide a MoE layer's tokens; class that divides them)
SHARED: dict[str, tuple[tuple[str, ...], str, Callable[[Axis], Exchange]]] = {
    "copies": (("sp",), "tp", Copies),
    "slices": (("sp",), "tp", Columns),
    "channels": (("sp_ring", "sp_heads"), "tp_col", Exchanged),
}
EXPERTS = Stacked("ep", hidden="etp", hidden_dim=HIDDEN_DIM, name_of=_name_of)


@dataclass(frozen=True)
class SpreadExperts(Style):
    """Style of the experts: stacked tensors, sharded over ep and etp, and an exchange that sends rows to the ranks of their experts.
    `held`: how tp ranks hold tokens outside of MoE layers (a key of SHARED). Each tp rank routes a part of the tokens.
    """

    dispatch: sections.Dispatch
    held: str = "copies"
    experts: Stacked = field(default=EXPERTS)

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        return self.experts.layout(name, shape)

    def fill(self, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> None:
        self.experts.fill(model, layouts, mesh)
        of_sp, name, exchange = SHARED[self.held]
        # `axes_of_tokens` has made the process groups of these axes
        shared, sp, both = mesh.axis(name), mesh.axis("sp"), mesh.axis(*of_sp, name)
        layers = [cast(MoELayer, model.get_submodule(path.rpartition(".")[0])) for path in self.experts.modules(layouts)]
        first, experts = layers[0], max(layer.experts.num_experts for layer in layers)
        sizes = Sizes(first.experts.d_model, experts, first.router.spec.num_choices, first.experts.kernels)
        opened = open_exchange(self.dispatch, mesh, sizes)
        for layer in layers:
            axis = replace(shared, label=f"layers.{layer.layer}")
            gathers = {"sp": replace(sp, label=layer.router.name), "both": replace(both, label=layer.router.name)}
            layer.spread = Spread(axis, exchange(axis), layer.router.spec, **gathers) if both.size > 1 else None
            layer.dispatcher = opened.layer(axis.label)


OF_HEADS = Copied(alike=())  # norms of queries and keys: tp ranks have different heads, so the copies' gradients are summed


def _weights(style: Style, *modules: str) -> tuple[tuple[str, Style], ...]:
    return tuple((f"{module}.weight", style) for module in modules)


def _line(
    columns: type[Column | DTensorColumn], rows: type[Row | DTensorRow], *, sliced: bool, key_heads: str = "tp"
) -> tuple[tuple[str, Style], ...]:
    """Return the plan's entries (path pattern of parameters, style) for 1D tensor parallelism. `columns`, `rows`: styles of weights that
    are split by outputs, or by inputs. `sliced`: whether the recipe has tensor.sequence_parallel. `key_heads`: axis over which keys and
    values are sharded; it is smaller than tp if there are fewer key-value heads than ranks.
    """
    column, row = columns(sliced=sliced), rows(sliced=sliced)
    keys = column if key_heads == "tp" else Column(key_heads, sliced=sliced)
    of_tokens = Copied(alike=() if sliced else ("tp",))
    of_attention = (
        *_weights(Channels("tp"), "q_bias", "sinks"),
        *_weights(Channels(key_heads), "k_bias", "v_bias"),
        *_weights(of_tokens, "out_bias", "q_down*", "kv_down*"),
        *_weights(OF_HEADS, "*_norm"),
        *_weights(column, "q", "q_up", "kv_up"),
        *_weights(keys, "k", "v"),
        *_weights(Channels("tp", dim=1), "bias"),
        *_weights(row, "out"),
    )
    of_block = (
        *((f"{of}.{pattern}", style) for of in ("attention", "cross") for pattern, style in of_attention),
        *_weights(column, "ffn.w1", "ffn.w3"),
        *_weights(row, "ffn.w2"),
        *(_weights(SlicedNorm(), "*_norm") if sliced else ()),
    )
    return (
        *((f"{block}.{pattern}", style) for block in ("layers.*", "ahead.*.block") for pattern, style in of_block),
        *_weights(of_tokens, "ahead.*.*"),
        *_weights(VocabularyRows(sliced=sliced), "embedding", "head"),
        *(_weights(SlicedNorm(), "norm", "encoder_norm") if sliced else ()),
    )


def _grid(first: Style, keys: Style, second: Style, vocabulary: Style, *, heads: str) -> tuple[tuple[str, Style], ...]:
    """Return the plan's entries (path pattern of parameters, style) for tensor parallelism on a grid. `keys`: style of k and v. `second`:
    style of out and w2. `first`: style of all other matrices. `vocabulary`: style of embedding and head. `heads`: axis that shards heads.
    """
    of_attention = (
        *_weights(OF_HEADS, "*_norm"),
        *_weights(keys, "k", "v"),
        *_weights(second, "out"),
        *_weights(Channels(heads, dim=1), "bias"),
        *_weights(Channels(heads), "sinks", "q_bias"),
        *_weights(Channels(f"{heads}_heads"), "k_bias", "v_bias"),
        *_weights(Channels(), "out_bias"),
        *_weights(first, "*"),
    )
    return (
        *((f"layers.*.{of}.{pattern}", style) for of in ("attention", "cross") for pattern, style in of_attention),
        *_weights(second, "layers.*.ffn.w2"),
        *_weights(first, "layers.*.ffn.*"),
        *_weights(ChannelsNorm(), "layers.*.*_norm", "norm", "encoder_norm"),
        *_weights(vocabulary, "embedding", "head"),
    )


# tensor.kind -> (path pattern of parameters, style); "sliced": with tensor.sequence_parallel
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
# tensor.kind -> how tp ranks hold tokens outside of MoE layers (a key of SHARED); other kinds: "copies"
HELD = {"1d sliced": "slices", "dtensor sliced": "slices"} | dict.fromkeys(GRIDS, "channels")


def plan_of(dispatch: sections.Dispatch, *, tensor: str = "copied", chunks: int = 1) -> Plan:
    """Return the plan: path patterns of parameters, each with a style. `tensor`: a key of TENSOR. `chunks`: tensor.overlap_chunks.
    Parameters without a pattern are replicated. In a MoE layer, each token is routed on one tp rank, so the gradients of replicated
    parameters differ between tp ranks and are summed.
    """
    return Plan(
        (
            ("layers.*.moe.experts.*", SpreadExperts(dispatch, held=HELD.get(tensor, "copies"))),
            ("layers.*.moe.router.**", Copied("router", alike=())),
            ("layers.*.moe.**", Copied(alike=())),
            *((pattern, replace(kind, chunks=chunks) if isinstance(kind, Column | Row) else kind) for pattern, kind in TENSOR[tensor]),
        )
    )


def _kind(run: sections.Run) -> str:
    """Return the key of TENSOR for the recipe: its kind of tensor parallelism."""
    kind = f"{run.tensor.kind} sliced" if run.tensor.sequence_parallel else run.tensor.kind
    return kind if run.degrees.tp > 1 else "copied"


def plan_for(run: sections.Run) -> Plan:
    plan = plan_of(run.dispatch, tensor=_kind(run), chunks=run.tensor.overlap_chunks)
    if run.model.qk_norm != "whole" or _kind(run) == "copied":
        return plan
    heads = "tp_col" if run.tensor.kind in ("2d", "2.5d") else "tp_row"
    norms = (("q_norm", ChannelsNorm(heads)), ("k_norm", ChannelsNorm(f"{heads}_heads")))
    return Plan((*((f"**.{of}.{name}.weight", kind) for of in ("attention", "cross") for name, kind in norms), *plan.rows))


def axes_of_tokens(run: sections.Run, mesh: Mesh) -> None:
    """Make the process groups of ranks that divide the tokens of MoE layers. Collective, so pipeline stages without such layers call it
    too."""
    if run.model.layers_with_experts():
        of_sp, name, _ = SHARED[HELD.get(_kind(run), "copies")]
        mesh.axis(*of_sp, name)


def lay_out(model: nn.Module, plan: Plan | None = None) -> dict[str, Layout]:
    """Return parameter's name -> layout for a model that is not sharded yet. Layouts do not depend on the dispatcher."""
    return style.lay_out(model, plan or plan_of(sections.Dispatch()), tiled_dim=tiled_dim)
