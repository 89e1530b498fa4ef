"""Experts are spread evenly over an axis, rank i with the i-th run of them; rows go by an uneven all-to-all, and come back by another.

    x_TD --permute--> rows sorted by expert --exchange over ep--> rows of the experts held here --reorder--> by expert
    y_TD <--combine-- rows sorted by expert <--exchange over ep-- <-------------------------------------inverse------

Counts are agreed before rows move. `send` returns the rows and a `Sent` that knows the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from moe.dispatch.base import Dropout
from moe.experts import Experts
from moe.kernels import Plan, choose
from moe.router import Routing
from parallel.exchange import exchange_counts, exchange_rows
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
    def __init__(self, axis: Axis, kernels: str = "auto") -> None:
        self.axis = axis
        self.kernels: ModuleType = choose(kernels)

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        rows_RD, sent = self.send(x_TD, routing)
        dropped_RF = None if dropout is None else dropout.scale(self.follow(dropout.position_T.unsqueeze(1), sent)[:, 0])
        return self.bring_back(experts(rows_RD, counts=sent.counts, dropped_RF=dropped_RF), sent)

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        """Rows [R, D] for the experts held here, sorted by expert."""
        plan = self.kernels.plan(routing.expert_TK, routing.kept_TK, num_experts=routing.probs_TE.shape[1])
        mine_PE = plan.counts_E.view(self.axis.size, -1)
        theirs_PE = exchange_counts(mine_PE, self.axis)
        sent = Sent(
            plan,
            routing.gate_TK,
            theirs_PE.sum(0).tolist(),
            mine_PE.sum(1).tolist(),
            theirs_PE.sum(1).tolist(),
            by_expert(theirs_PE),
        )
        rows = exchange_rows(self.kernels.permute(x_TD, plan), self.axis, send=sent.send, receive=sent.receive)
        return self.kernels.reorder(rows, sent.order_R), sent

    def follow(self, values_TW: Tensor, sent: Sent) -> Tensor:
        """Other values of the same tokens along the same way: [R, W], no gradient."""
        rows = exchange_rows(values_TW[sent.plan.token_R], self.axis, send=sent.send, receive=sent.receive)
        return rows[sent.order_R]

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        """The experts' results as tokens [T, D], weighted by the gates."""
        back_R = torch.empty_like(sent.order_R)
        back_R[sent.order_R] = torch.arange(len(back_R), device=back_R.device)
        rows = exchange_rows(self.kernels.reorder(rows_RD, back_R), self.axis, send=sent.receive, receive=sent.send)
        out: Tensor = self.kernels.combine(rows, sent.gate_TK, sent.plan)
        return out


def by_expert(counts_PE: Tensor) -> Tensor:
    """Rows arrive sorted by (source rank, expert); the order that sorts them by (expert, source rank)."""
    experts = torch.arange(counts_PE.shape[1], device=counts_PE.device).repeat(counts_PE.shape[0])
    return torch.argsort(torch.repeat_interleave(experts, counts_PE.flatten()), stable=True)
