"""Makes one process take sums in the order of a layout's ranks. In 16 bits, this order decides which partial results are rounded
(moe/verify/expected.py).

    in parts     as 1D tensor parallelism: y = x W1_0 W2_0 + x W1_1 W2_1, with shards of rank 0 and 1. Each term is rounded to the compute
                 dtype
    in blocks    as a q x q grid of tensor-parallel ranks: y_j = sum over t of x_t W_tj, with blocks of columns x_t and y_j, and blocks W_tj
                 of the matrix. Each term is rounded to the compute dtype
    in slices    as sequence parallelism: attention to one slice of keys after another, then merged. Ranks of Colossal-AI's ring compute all
                 scores of a query together, so for this ring each rank's real code runs in turn, with the keys and values of all ranks

In the backward pass, gradients are summed in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from moe.model.transformer import Block, Transformer
from moe.nn.linear import Linear
from moe.nn.vocabulary import Product, Rows, TiledRows
from moe.parallelize.plan import lay_out, plan_for
from moe.parallelize.sequence import Exchanging
from moe.recipe.sections import Run, Sequence
from moe.verify.cases import Case, attentions
from parallel.mesh.layout import Box
from parallel.mesh.mesh import Axis, Mesh
from parallel.numerics.position_bias import Bias
from parallel.numerics.precision import sum_dtype
from parallel.sequence.colossal_ring import ColossalRing
from parallel.sequence.method import Known, Method, SavedTensors
from parallel.sequence.order import Order
from parallel.sequence.softmax import Gradients, Partial, attend, attend_backward, merge, nothing
from parallel.tensor.style import fits


def in_parts(model: Transformer, run: Run, *, first: int) -> None:
    """Make an unsharded model round as the tp ranks of `run` do: each layer, except MoE layers, computes the ranks' partial results one
    after another and sums them, beginning with rank `first`."""
    degrees = run.mesh_degrees()
    layouts = lay_out(model, plan_for(run))
    for number, block in enumerate(model.layers):
        for name in ("attention", "cross", "ffn"):
            layer = getattr(block, name)
            if layer is not None:
                held = {n: layouts[f"layers.{number}.{name}.{n}"] for n, _ in layer.named_parameters()}
                meshes = [Mesh.of(degrees, rank % degrees.tp) for rank in range(first, first + degrees.tp)]
                regions = [{n: layout.region(mesh) for n, layout in held.items()} for mesh in meshes]
                part = copy(layer)  # a shallow copy without hooks, so that the layer's own hooks see only the sum
                part._forward_hooks, part._forward_pre_hooks = type(layer._forward_hooks)(), type(layer._forward_pre_hooks)()
                layer.forward = partial(_summed, part, regions)


def _summed(layer: nn.Module, regions: list[dict[str, Box]], x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Return the sum of the ranks' partial results. regions: for each rank, parameter -> its slice. Each rank's part gets its own view of x
    and of the encoder's output, so that autograd sums their gradients within each part first, then over ranks. rest, named: the layer's
    other arguments."""
    held = dict(layer.named_parameters())
    shares = []
    for region in regions:
        part = {name: held[name][box] for name, box in region.items()}
        given = {name: _share_of(value, layer, region) for name, value in named.items()}
        shares.append(functional_call(layer, part, (x.view_as(x), *rest), given))
    total: Tensor = reduce(Tensor.add, shares)
    return total


def _share_of(given: Any, layer: nn.Module, region: dict[str, Box]) -> Any:
    """Return a layer's argument as one rank gets it: for a position bias, the columns of the rank's heads; for a tensor, a new view."""
    if isinstance(given, Bias):
        rows = region["q.weight"][0]
        return given._replace(table_UH=given.table_UH[:, rows.start // layer.head_size : rows.stop // layer.head_size])
    return given.view_as(given) if isinstance(given, Tensor) else given


def in_blocks(model: Transformer, side: int) -> None:
    """Make an unsharded model multiply matrices in side x side blocks in attention, cross attention, dense networks and an untied head, but
    not in MoE layers."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and any(fits(f"layers.*.{part}.*", name) for part in ("attention", "cross", "ffn")):
            module.product = partial(_products, side=side)
    if isinstance(model.head, Rows | TiledRows):
        model.head.others = _Alone(side)


def _products(x: Tensor, weights_OI: Iterable[Tensor], narrow_rI: Iterable[Tensor], *, side: int) -> list[Tensor]:
    """Return the products of x with the weights, then with LoRA's narrow matrices, each in blocks (`_product`)."""
    return [_product(x, matrix, side=side) for matrix in (*weights_OI, *narrow_rI)]


def _product(x: Tensor, weight_OI: Tensor, *, side: int) -> Tensor:
    """Compute x W^T in side x side blocks. Each block of outputs gets its own view of x, so that each view's gradient is rounded
    before the sum over views."""
    outputs = []
    for rows in weight_OI.to(x.dtype).tensor_split(side, 0):
        pairs = zip(x.view_as(x).tensor_split(side, -1), rows.tensor_split(side, 1), strict=True)
        shares = torch.stack([F.linear(x_t, matrix) for x_t, matrix in pairs])
        outputs.append(shares.to(sum_dtype(x.dtype)).sum(0).to(x.dtype))
    return torch.cat(outputs, -1)


class _Alone:
    """The head's interface to other ranks (`Others` in moe/nn/vocabulary.py) for one process: sends nothing. Its `product` multiplies in
    blocks, and so rounds as a grid of `side` x `side` ranks does."""

    def __init__(self, side: int) -> None:
        self.product: Product | None = partial(_product, side=side)

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    columns = rows = enter = targets = scores = loss = logits = tokens


# --- in slices ----------------------------------------------------------------------------------------------------------


def in_slices(model: Transformer, case: Case) -> None:
    """Replace every attention of the model by one that rounds as the method `case.attention` does on `case.slices` ranks."""
    form = Sequence(**attentions()[case.attention])
    kind = _ColossalInSlices if form.named.keeps_scores else _InSlices
    slices = case.slices // form.heads_of(case.slices)  # ring combined with ulysses: the ranks of a ulysses group have one slice together
    sizes, alone = case.run().model, Axis("alone")
    decoder = Order(form.position_order, slices, sizes.read_length - sizes.source_length)
    for block in model.layers:
        assert isinstance(block, Block)
        encodes = block.layer < sizes.decoder_begins
        order = Order("contiguous", slices, sizes.source_length, causal=False) if encodes else decoder
        block.attention.core = Exchanging(kind(alone, order, block.attention.window), None, block.attention.core_scale)
        if block.cross is not None:
            block.cross.core = Exchanging(kind(alone, replace(order, causal=False)), None, block.cross.core_scale, cross=True)


class _InSlices(Method):
    """Computes the ring attention of all ranks in one process, rank after rank. self.order: the sequence positions of each rank's slice."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        out, lse = torch.empty_like(q), nothing(q).lse_BHL
        for here, work in self._ranks(q, known, k.shape[2]):
            q_here = q[:, :, here]
            merged = nothing(q_here, known.sink_H)
            for rows, there, about in work:
                merge(merged, attend(q_here[:, :, rows], k[:, :, there], v[:, :, there], **about), rows)
            out[:, :, here], lse[:, :, here] = merged.out_BHLC.to(q.dtype), merged.lse_BHL
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        (out, lse), total = kept, Gradients.zeros(q, k, v, known.bias)
        for here, work in self._ranks(q, known, k.shape[2]):
            for rows, there, about in work:
                queries = here[rows]
                block = grad[:, :, queries], q[:, :, queries], k[:, :, there], v[:, :, there]
                found = attend_backward(*block, Partial(out[:, :, queries], lse[:, :, queries]), **about)
                total.q_BHLC[:, :, queries] += found.q_BHLC
                total.k_BKSC[:, :, there] += found.k_BKSC
                total.v_BKSC[:, :, there] += found.v_BKSC
                total.add(found, queries=None, keys=None)  # the gradient of the position biases; the others are added above
        return total

    def _ranks(self, like: Tensor, known: Known, num_keys: int) -> Iterator[tuple[Tensor, list[tuple[slice, Tensor, dict[str, Any]]]]]:
        """Yield for each rank (positions of its queries, blocks of scores). A block: (slice of these queries, positions of the keys that
        they attend to, other arguments of `attend`). num_keys: number of keys. In cross attention the keys are the encoder's positions, of
        which each rank has a contiguous slice."""
        tokens, keys = ([of(rank, like) for rank in range(self.order.size)] for of in (known.tokens, known.keys))
        other = torch.arange(num_keys, device=like.device).chunk(self.order.size)
        places = [own.place_L for own in keys] if num_keys == sum(len(own.place_L) for own in keys) else other
        for rank, mine in enumerate(tokens):
            work = []
            for source in ((rank - step) % self.order.size for step in range(self.order.size)):
                for rows, columns, triangle in self.order.blocks(rank, source):
                    about = {"triangle": triangle, "queries": mine[rows], "keys": keys[source][columns], "bias": known.bias}
                    work.append((rows, places[source][columns], about))
            yield mine.place_L, work


class _ColossalInSlices(Method):
    """Computes Colossal-AI's ring attention of all ranks in one process: runs each rank's code in turn, and sums the gradients of keys and
    values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        found = [rank.forward(self._mine(q, rank), self._mine(k, rank), self._mine(v, rank), known) for rank in self._ranks(k, v)]
        outs, weights, *sinks = zip(*found, strict=True)
        return (torch.cat(outs, dim=2), *weights, *(torch.cat(sink, dim=2) for sink in sinks))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        found = []
        for rank in self._ranks(v, k):
            grad_, out, q_, k_, v_ = (self._mine(x, rank) for x in (grad, kept[0], q, k, v))
            found.append(rank.backward(grad_, q_, k_, v_, (out, kept[1 + rank.axis.index]), known))
        dk, dv = (torch.stack(parts).sum(0) for parts in zip(*((f.k_BKSC, f.v_BKSC) for f in found), strict=True))
        tables = [f.table_UH for f in found if f.table_UH is not None]
        return Gradients(torch.cat([f.q_BHLC for f in found], dim=2), dk, dv, torch.stack(tables).sum(0) if tables else None)

    def share_of_sinks(self, kept: SavedTensors, sink_H: Tensor) -> Tensor:
        return kept[-1]

    def _ranks(self, *rounds: Tensor) -> list[_Rank]:
        """Return the `_Rank` of each rank. rounds: as in `_Rank`."""
        axes = [Axis("alone", tuple(range(self.order.size)), rank) for rank in range(self.order.size)]
        return [_Rank(axis, self.order, self.window, list(rounds)) for axis in axes]

    def _mine(self, x: Tensor, rank: _Rank) -> Tensor:
        """Return the rank's slice of a tensor along the sequence."""
        return x.chunk(self.order.size, dim=2)[rank.axis.index]


@dataclass(frozen=True)
class _Rank(ColossalRing):
    """One rank of Colossal-AI's ring, in a process that computes all ranks in turn. rounds: the whole tensor (keys or values) of each
    trip around the ring, in order; its shards go around."""

    rounds: list[Tensor] = field(default_factory=list)

    def _round(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        theirs = self.rounds.pop(0).chunk(self.axis.size, dim=2)
        for step in range(self.axis.size):
            source = (self.axis.index - step) % self.axis.size
            yield source, theirs[source]

    def _own(self, parts_NBKSC: Tensor) -> Tensor:
        return torch.cat(parts_NBKSC.unbind(), dim=2)
