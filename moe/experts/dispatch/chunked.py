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

from moe.experts.dispatch.dispatcher import Exchange
from moe.experts.dispatch.network import Dropout, compute
from moe.experts.dispatch.placement import plan_rows
from moe.experts.dispatch.steps import Step, inverse
from moe.experts.experts import Experts
from moe.kernels import Plan
from moe.router.router import Routing
from parallel.mesh.collectives import StartedRows, finish_all_to_all, start_all_to_all
from parallel.mesh.exchange import exchange_counts

# T tokens, D model, R rows, N chunks, P ranks of the ep axis, E experts of a chunk


@dataclass(frozen=True)
class Chunked(Exchange):
    """All-to-all over ep in `chunks` chunks of the held experts."""

    chunks: int = 2

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        plan, steps, counts = self._plan(routing)
        sizes = [sum(step.send) for step in steps]
        rows = self.kernels.permute(x_TD, plan).split(sizes)
        positions: list[Tensor | None] = [None] * self.chunks
        if dropout is not None:
            positions = [step.there(keys) for step, keys in zip(steps, dropout.position_T[plan.token_R].split(sizes), strict=True)]
        backs = []
        following = _start(rows[0], steps[0])
        for j, (step, weights) in enumerate(zip(steps, experts.chunks(self.chunks, x_TD.dtype), strict=True)):
            current = following
            if j + 1 < self.chunks:
                following = _start(rows[j + 1], steps[j + 1])
            rows_RD = self.kernels.reorder(finish_all_to_all(current), step.order_R)
            out_RD = compute(rows_RD, experts, etp=self.etp, counts=counts[j], weights=weights, position_R=positions[j], dropout=dropout)
            out_RD = self.kernels.reorder(out_RD, inverse(step.order_R))
            backs.append(start_all_to_all(out_RD, self.axis, send=step.receive, receive=step.send))
        y_TD: Tensor = self.kernels.combine(torch.cat([finish_all_to_all(back) for back in backs]), routing.gate_TK, plan)
        return y_TD

    def _plan(self, routing: Routing) -> tuple[Plan, list[Step], list[list[int]]]:
        """Return the plan, with rows sorted by their destination's (chunk, rank, expert), each chunk's exchange, and its experts' rows."""
        ranks, held = self.axis.size, routing.probs_TE.shape[1] // self.axis.size
        each = held // self.chunks
        order = tuple(p * held + j * each + e for j in range(self.chunks) for p in range(ranks) for e in range(each))
        plan = plan_rows(self.kernels, routing, placement=self.placement, order=order)
        send_NPE = plan.counts_E.view(self.chunks, ranks, each)
        receive_NPE = exchange_counts(send_NPE.transpose(0, 1).reshape(ranks, held), self.axis).split(each, dim=1)
        steps = [Step.of(self.axis, send, receive) for send, receive in zip(send_NPE, receive_NPE, strict=True)]
        return plan, steps, [receive.sum(0).tolist() for receive in receive_NPE]


def _start(rows: Tensor, step: Step) -> StartedRows:
    return start_all_to_all(rows, step.axis, send=step.send, receive=step.receive)
