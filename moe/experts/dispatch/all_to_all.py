"""Experts are spread evenly over an axis, rank i with the i-th run of them; rows go by an uneven all-to-all, and come back by another.

    x_TD --permute--> rows sorted by expert --exchange over ep--> rows of the experts held here --reorder--> by expert
    y_TD <--combine-- rows sorted by expert <--exchange over ep-- <-------------------------------------inverse------

Counts are agreed before rows move. `send` returns the rows and a `Sent` that knows the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.experts.dispatch.base import Dropout, Network, plan_rows, whole
from moe.experts.experts import Experts
from moe.kernels import Plan, choose
from moe.router.router import Routing
from parallel.exchange import by_bin, exchange_counts, exchange_rows
from parallel.mesh import Axis

# T tokens, D model, R rows held here, W any width, K choices, E experts, P ranks of the ep axis


@dataclass(frozen=True)
class Sent:
    """The way back. `counts`: rows of each expert held here, in order; `order_R` sorts rows as they arrived by expert."""

    plan: Plan
    gate_TK: Tensor
    counts: list[int]
    send: list[int]
    receive: list[int]
    order_R: Tensor


class AllToAll:
    def __init__(self, axis: Axis, kernels: str = "auto", *, network: Network = whole, placement: tuple[int, ...] | None = None) -> None:
        self.axis, self.network, self.placement = axis, network, placement
        self.kernels = choose(kernels)

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        rows_RD, sent = self.send(x_TD, routing)
        position_R = None if dropout is None else self.follow(dropout.position_T.unsqueeze(1), sent)[:, 0]
        out_RD = self.network(rows_RD, experts, counts=sent.counts, position_R=position_R, dropout=dropout)
        return self.bring_back(out_RD, sent)

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        """Rows [R, D] for the experts held here, sorted by expert."""
        plan = plan_rows(self.kernels, routing, placement=self.placement)
        mine_PE = plan.counts_E.view(self.axis.size, -1)
        theirs_PE = exchange_counts(mine_PE, self.axis)
        sent = Sent(
            plan,
            routing.gate_TK,
            theirs_PE.sum(0).tolist(),
            mine_PE.sum(1).tolist(),
            theirs_PE.sum(1).tolist(),
            by_bin(theirs_PE),
        )
        rows = exchange_rows(self.kernels.permute(x_TD, plan), self.axis, send=sent.send, receive=sent.receive)
        return self.kernels.reorder(rows, sent.order_R), sent

    def follow(self, values_TW: Tensor, sent: Sent) -> Tensor:
        """Other values of the same tokens along the same way: [R, W], no gradient."""
        rows = exchange_rows(values_TW[sent.plan.token_R], self.axis, send=sent.send, receive=sent.receive)
        return rows[sent.order_R]

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        """The experts' results as tokens [T, D], weighted by the gates."""
        rows = self.kernels.reorder(rows_RD, inverse(sent.order_R))
        rows = exchange_rows(rows, self.axis, send=sent.receive, receive=sent.send)
        out: Tensor = self.kernels.combine(rows, sent.gate_TK, sent.plan)
        return out


def inverse(order_R: Tensor) -> Tensor:
    """The permutation that undoes this one."""
    back_R = torch.empty_like(order_R)
    back_R[order_R] = torch.arange(len(back_R), device=back_R.device)
    return back_R
