"""All-to-all in chunks: the experts held by a rank are cut into n chunks. While one chunk computes, the next one's rows are sent.

    link     | rows 0  | rows 1  | back 0, rows 2 | back 1, rows 3 | back 2  | back 3 |
    compute            | chunk 0 | chunk 1        | chunk 2        | chunk 3 |          backward pass: likewise, last chunk first

One exchange of counts serves all chunks. Each expert gets the same rows in the same order as in a single exchange, so results are
equal. Autograd runs the calls below in reverse order, so the backward pass overlaps too: it starts the exchange of all results'
gradients before it computes the first network. Sources: FasterMoE (PPoPP 2022), Tutel (arXiv 2206.03382, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.experts.dispatch.all_to_all import inverse
from moe.experts.dispatch.base import Dropout, Network, plan_rows, whole
from moe.experts.experts import Experts
from moe.kernels import Plan, choose
from moe.router.router import Routing
from parallel.mesh.collectives import Flight, finish_all_to_all, start_all_to_all
from parallel.mesh.exchange import by_bin, exchange_counts, exchange_rows
from parallel.mesh.mesh import Axis

# T tokens, D model, R rows, N chunks, P ranks of the ep axis, E experts of a chunk


@dataclass(frozen=True)
class Chunk:
    """The exchange of one chunk of experts.

    `counts`: rows of each of its experts here. `send`, `receive`: rows to and from each rank. `order_R` sorts received rows by expert.
    """

    counts: list[int]
    send: list[int]
    receive: list[int]
    order_R: Tensor


class Chunked:
    """Dispatcher: all-to-all over `axis` (ep) in `chunks` chunks of the held experts."""

    def __init__(
        self, axis: Axis, chunks: int, kernels: str = "auto", *, network: Network = whole, placement: tuple[int, ...] | None = None
    ) -> None:
        self.axis, self.chunks, self.network, self.placement = axis, chunks, network, placement
        self.kernels = choose(kernels)

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        plan, chunks = self._plan(routing)
        sizes = [sum(chunk.send) for chunk in chunks]
        rows = self.kernels.permute(x_TD, plan).split(sizes)
        positions: list[Tensor | None] = [None] * self.chunks
        if dropout is not None:
            keys = dropout.position_T[plan.token_R].split(sizes)
            positions = [exchange_rows(k, self.axis, send=c.send, receive=c.receive)[c.order_R] for k, c in zip(keys, chunks, strict=True)]
        backs = []
        following = self._start(rows[0], chunks[0])
        for j, (chunk, weights) in enumerate(zip(chunks, experts.chunks(self.chunks, x_TD.dtype), strict=True)):
            current = following
            if j + 1 < self.chunks:
                following = self._start(rows[j + 1], chunks[j + 1])
            rows_RD = self.kernels.reorder(finish_all_to_all(current), chunk.order_R)
            out_RD = self.network(rows_RD, experts, weights=weights, counts=chunk.counts, position_R=positions[j], dropout=dropout)
            out_RD = self.kernels.reorder(out_RD, inverse(chunk.order_R))
            backs.append(start_all_to_all(out_RD, self.axis, send=chunk.receive, receive=chunk.send))
        y_TD: Tensor = self.kernels.combine(torch.cat([finish_all_to_all(back) for back in backs]), routing.gate_TK, plan)
        return y_TD

    def _start(self, rows: Tensor, chunk: Chunk) -> Flight:
        return start_all_to_all(rows, self.axis, send=chunk.send, receive=chunk.receive)

    def _plan(self, routing: Routing) -> tuple[Plan, list[Chunk]]:
        """Return the plan, with rows sorted by their destination's (chunk, rank, expert), and each chunk's exchange."""
        ranks, held = self.axis.size, routing.probs_TE.shape[1] // self.axis.size
        each = held // self.chunks
        order = tuple(p * held + j * each + e for j in range(self.chunks) for p in range(ranks) for e in range(each))
        plan = plan_rows(self.kernels, routing, placement=self.placement, order=order)
        send_NPE = plan.counts_E.view(self.chunks, ranks, each)
        receive_PE = exchange_counts(send_NPE.transpose(0, 1).reshape(ranks, held), self.axis)
        chunks = [
            Chunk(receive.sum(0).tolist(), send.sum(1).tolist(), receive.sum(1).tolist(), by_bin(receive))
            for send, receive in zip(send_NPE, receive_PE.split(each, dim=1), strict=True)
        ]
        return plan, chunks
