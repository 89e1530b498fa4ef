"""Uneven exchange of rows in one or more steps, each over one axis: rank by rank of the first axis, then of the second, ...

    x_TD --permute--> rows sorted by destination --exchange over an axis, reorder-->  ...  --> rows of the experts held here, by expert
    y_TD <--combine-- rows sorted by destination <--inverse, exchange---------------  ...  <--

Counts are exchanged before rows. A step sorts the rows that it received by the destination of the next step, or by expert after the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from parallel.mesh.exchange import by_bin, exchange_counts, exchange_rows
from parallel.mesh.mesh import Axis
from torch import Tensor

from moe.experts.dispatch.dispatcher import ThereAndBack
from moe.experts.dispatch.rows import plan_rows
from moe.kernels import Plan
from moe.router.router import Routing

# T tokens, D model, R rows, K choices, P ranks of a step, B bins: places of experts behind one of them


@dataclass(frozen=True)
class Step:
    """A planned exchange over `axis`. `send`, `receive`: rows to and from each rank. `order_R` sorts received rows."""

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor

    @classmethod
    def of(cls, axis: Axis, send_PB: Tensor, receive_PB: Tensor) -> Step:
        return cls(axis, send_PB.sum(1).tolist(), receive_PB.sum(1).tolist(), by_bin(receive_PB))

    def follow(self, values: Tensor) -> Tensor:
        """Send values of rows, sorted by destination, without gradient; return those of received rows, in their order."""
        return exchange_rows(values, self.axis, send=self.send, receive=self.receive)[self.order_R]


@dataclass(frozen=True)
class Sent:
    """A finished exchange. `counts`: rows of each expert held here."""

    plan: Plan
    gate_TK: Tensor
    counts: list[int]
    steps: list[Step]


class Steps(ThereAndBack[Sent]):
    """An exchange over `axes`, one after the other. The first axis has the neighbours among the ranks of ep."""

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        sent = self._plan(routing)
        rows_RD = self.kernels.permute(x_TD, sent.plan)
        for step in sent.steps:
            rows_RD = self.kernels.reorder(exchange_rows(rows_RD, step.axis, send=step.send, receive=step.receive), step.order_R)
        return rows_RD, sent

    def follow(self, values_T: Tensor, sent: Sent) -> Tensor:
        values_R = values_T[sent.plan.token_R]
        for step in sent.steps:
            values_R = step.follow(values_R)
        return values_R

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        for step in reversed(sent.steps):
            rows_RD = self.kernels.reorder(rows_RD, inverse(step.order_R))
            rows_RD = exchange_rows(rows_RD, step.axis, send=step.receive, receive=step.send)
        y_TD: Tensor = self.kernels.combine(rows_RD, sent.gate_TK, sent.plan)
        return y_TD

    def _plan(self, routing: Routing) -> Sent:
        """Plan all steps, with rows sorted by their destination's (index on the first axis, index on the second, ..., expert)."""
        plan = plan_rows(self.kernels, routing, placement=self.placement, order=self._order(routing.probs_TE.shape[1]))
        counts_B, steps = plan.counts_E, []
        for axis in self.axes:
            send_PB = counts_B.view(axis.size, -1)
            receive_PB = exchange_counts(send_PB, axis)
            steps.append(Step.of(axis, send_PB, receive_PB))
            counts_B = receive_PB.sum(0)
        return Sent(plan, routing.gate_TK, counts_B.tolist(), steps)

    def _order(self, num_experts: int) -> tuple[int, ...] | None:
        if len(self.axes) == 1:
            return None
        ranks = math.prod(axis.size for axis in self.axes)
        held = num_experts // ranks
        by_first = sorted(range(ranks), key=lambda rank: rank % self.axis.size)
        return tuple(rank * held + e for rank in by_first for e in range(held))


def inverse(order_R: Tensor) -> Tensor:
    """Return the inverse permutation, int64 [R]."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(inverse_R), device=inverse_R.device)
    return inverse_R
