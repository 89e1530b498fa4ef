"""Uneven all-to-all. Rank i of the axis holds the i-th chunk of experts; one all-to-all sends the rows, another brings results back.

    x_TD --permute--> rows sorted by expert --exchange over ep--> rows of the experts held here --reorder--> by expert
    y_TD <--combine-- rows sorted by expert <--exchange over ep-- <-------------------------------------inverse------

Counts are exchanged before rows. `send` returns the rows and a `Sent`, which `bring_back` needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.experts.dispatch.base import Dropout, Network, plan_rows, whole
from moe.experts.experts import Experts
from moe.kernels import Plan, choose
from moe.router.router import Routing
from parallel.mesh.exchange import by_bin, exchange_counts, exchange_rows
from parallel.mesh.mesh import Axis

# T tokens, D model, R rows held here, W any width, K choices, E experts, P ranks of the ep axis


@dataclass(frozen=True)
class Sent:
    """A finished exchange, for the way back.

    `counts`: rows of each expert held here. `send`, `receive`: rows to and from each rank. `order_R` sorts received rows by expert.
    """

    plan: Plan
    gate_TK: Tensor
    counts: list[int]
    send: list[int]
    receive: list[int]
    order_R: Tensor


class AllToAll:
    """Dispatcher: uneven all-to-all over `axis` (ep)."""

    def __init__(self, axis: Axis, kernels: str = "auto", *, network: Network = whole, placement: tuple[int, ...] | None = None) -> None:
        self.axis, self.network, self.placement = axis, network, placement
        self.kernels = choose(kernels)

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        rows_RD, sent = self.send(x_TD, routing)
        position_R = None if dropout is None else self.follow(dropout.position_T.unsqueeze(1), sent)[:, 0]
        out_RD = self.network(rows_RD, experts, counts=sent.counts, position_R=position_R, dropout=dropout)
        return self.bring_back(out_RD, sent)

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        """Return the rows [R, D] for the experts held here, sorted by expert, and the exchange."""
        plan = plan_rows(self.kernels, routing, placement=self.placement)
        send_PE = plan.counts_E.view(self.axis.size, -1)
        receive_PE = exchange_counts(send_PE, self.axis)
        sent = Sent(
            plan,
            routing.gate_TK,
            receive_PE.sum(0).tolist(),
            send_PE.sum(1).tolist(),
            receive_PE.sum(1).tolist(),
            by_bin(receive_PE),
        )
        rows = exchange_rows(self.kernels.permute(x_TD, plan), self.axis, send=sent.send, receive=sent.receive)
        return self.kernels.reorder(rows, sent.order_R), sent

    def follow(self, values_TW: Tensor, sent: Sent) -> Tensor:
        """Send other values [T, W] of the same tokens like their rows: [R, W], without gradient."""
        rows = exchange_rows(values_TW[sent.plan.token_R], self.axis, send=sent.send, receive=sent.receive)
        return rows[sent.order_R]

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        """Send the experts' results back and sum them, times their gates: rows [R, D] to tokens [T, D]."""
        rows = self.kernels.reorder(rows_RD, inverse(sent.order_R))
        rows = exchange_rows(rows, self.axis, send=sent.receive, receive=sent.send)
        out: Tensor = self.kernels.combine(rows, sent.gate_TK, sent.plan)
        return out


def inverse(order_R: Tensor) -> Tensor:
    """Return the inverse permutation, int64 [R]."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(inverse_R), device=inverse_R.device)
    return inverse_R
