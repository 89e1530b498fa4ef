"""Computes attention on one process with the roundings of sequence-parallel ranks: one slice of keys after another, then merged. The
ranks of Colossal-AI's ring compute all scores of a query at once, so their code runs instead, with the keys and values of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe.model.transformer import Block, Transformer
from moe.parallelize.sequence import Exchanging
from moe.recipe import sections
from moe.verify.cases import Case, attentions
from parallel.mesh.mesh import Axis
from parallel.sequence.colossal_ring import ColossalRing
from parallel.sequence.method import Known, Method, SavedTensors
from parallel.sequence.order import Order
from parallel.sequence.softmax import Gradients, Partial, Tokens, attend, attend_backward, merge, nothing


def in_slices(model: Transformer, case: Case) -> None:
    """Replace every attention of the model by one that rounds as the method `case.attention` does on `case.slices` ranks."""
    form = sections.Sequence(**attentions()[case.attention])
    kind = _ColossalInSlices if form.named.keeps_scores else _InSlices
    slices = case.slices // form.heads_of(case.slices)  # ring with ulysses: ranks that exchange heads use one slice
    order = Order(form.position_order, slices, case.length)
    for block in model.layers:
        assert isinstance(block, Block)
        block.attention.core = Exchanging(kind(Axis("alone"), order, block.attention.window), keep=None)


class _InSlices(Method):
    """Ring attention of all simulated ranks, one after another. self.order: the sequence positions of each rank's slice."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        out, lse = torch.empty_like(q), nothing(q).lse_BHL
        for here, work in self._ranks(q, known):
            q_here = q[:, :, here]
            merged = nothing(q_here, known.sink_H)
            for rows, there, about in work:
                merge(merged, attend(q_here[:, :, rows], k[:, :, there], v[:, :, there], **about), rows)
            out[:, :, here], lse[:, :, here] = merged.out_BHLC.to(q.dtype), merged.lse_BHL
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        (out, lse), total = kept, Gradients.zeros(q, k, v, known.bias)
        for here, work in self._ranks(q, known):
            for rows, there, about in work:
                queries = here[rows]
                block = grad[:, :, queries], q[:, :, queries], k[:, :, there], v[:, :, there]
                found = attend_backward(*block, Partial(out[:, :, queries], lse[:, :, queries]), **about)
                total.q_BHLC[:, :, queries] += found.q_BHLC
                total.k_BKSC[:, :, there] += found.k_BKSC
                total.v_BKSC[:, :, there] += found.v_BKSC
                total.add(found, queries=None, keys=None)  # without slices, `add` adds only the gradient of the bias table
        return total

    def _ranks(self, like: Tensor, known: Known) -> Iterator[tuple[Tensor, list[tuple[slice, Tensor, dict[str, Any]]]]]:
        """Yield for each rank (positions of its queries, blocks): (slice of queries, positions of keys, more arguments of `attend`)."""
        tokens = [Tokens(self.order.ranges(rank), like.device, known.document_BS, known.window) for rank in range(self.order.size)]
        for rank, mine in enumerate(tokens):
            work = []
            for source in ((rank - step) % self.order.size for step in range(self.order.size)):
                for rows, columns, triangle in self.order.blocks(rank, source):
                    about = {"triangle": triangle, "queries": mine[rows], "keys": tokens[source][columns], "bias": known.bias}
                    work.append((rows, tokens[source].place_L[columns], about))
            yield mine.place_L, work


class _ColossalInSlices(Method):
    """Colossal-AI's ring attention of all simulated ranks: runs each rank's code in turn, and sums the gradients of keys and values."""

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
        axes = [Axis("alone", tuple(range(self.order.size)), rank) for rank in range(self.order.size)]
        return [_Rank(axis, self.order, self.window, list(rounds)) for axis in axes]

    def _mine(self, x: Tensor, rank: _Rank) -> Tensor:
        return x.chunk(self.order.size, dim=2)[rank.axis.index]


@dataclass(frozen=True)
class _Rank(ColossalRing):
    """One simulated rank. rounds: for each trip of keys or values around the ring, the tensor of all ranks that it brings."""

    rounds: list[Tensor] = field(default_factory=list)

    def _round(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        theirs = self.rounds.pop(0).chunk(self.axis.size, dim=2)
        for step in range(self.axis.size):
            source = (self.axis.index - step) % self.axis.size
            yield source, theirs[source]

    def _own(self, parts_NBKSC: Tensor) -> Tensor:
        return torch.cat(parts_NBKSC.unbind(), dim=2)
