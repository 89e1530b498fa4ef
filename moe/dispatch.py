"""Tokens to the experts that were chosen for them, and their results back.

    x_TD --permute--> rows sorted by expert --exchange over ep--> rows of the experts held here --reorder--> by expert
    y_TD <--combine-- rows sorted by expert <--exchange over ep-- <-------------------------------------inverse------

`send` returns the rows and a `Sent` that knows the way back; nothing is kept in the dispatcher between the two.
Memory goes with routed rows (tokens x choices x width). Source: GShard (arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moe.kernels import Plan, choose
from moe.router import Routing
from parallel.exchange import exchange_counts, exchange_rows
from parallel.mesh import Axis

# T tokens, D model, R rows held here, K choices, E experts, P ranks of the ep axis


@dataclass(frozen=True)
class Sent:
    """The way back. `counts`: rows of each expert held here, in order."""

    plan: Plan
    gate_TK: Tensor
    counts: list[int]
    send: list[int]
    receive: list[int]
    order_R: Tensor | None


class Dispatcher(Protocol):
    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        """Rows [R, D] for the experts held here, sorted by expert."""
        ...

    def follow(self, values_TW: Tensor, sent: Sent) -> Tensor:
        """Other values of the same tokens along the same way: [R, W], no gradient."""
        ...

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        """The experts' results as tokens [T, D], weighted by the gates; zero where every choice was dropped."""
        ...


class Local:
    """All experts are here."""

    def __init__(self, kernels: str = "auto") -> None:
        self.kernels: ModuleType = choose(kernels)

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        plan = self.kernels.plan(routing.expert_TK, routing.kept_TK, num_experts=routing.probs_TE.shape[1])
        sent = Sent(plan, routing.gate_TK, plan.counts_E.tolist(), [], [], None)
        return self.kernels.permute(x_TD, plan), sent

    def follow(self, values_TW: Tensor, sent: Sent) -> Tensor:
        return values_TW[sent.plan.token_R]

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        out: Tensor = self.kernels.combine(rows_RD, sent.gate_TK, sent.plan)
        return out


class AllToAll:
    """Experts are spread evenly over an axis: rank i holds the i-th run of them."""

    def __init__(self, axis: Axis, kernels: str = "auto") -> None:
        self.axis = axis
        self.kernels: ModuleType = choose(kernels)

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        plan = self.kernels.plan(routing.expert_TK, routing.kept_TK, num_experts=routing.probs_TE.shape[1])
        mine_PE = plan.counts_E.view(self.axis.size, -1)
        theirs_PE = exchange_counts(mine_PE, self.axis)
        sent = Sent(
            plan,
            routing.gate_TK,
            theirs_PE.sum(0).tolist(),
            mine_PE.sum(1).tolist(),
            theirs_PE.sum(1).tolist(),
            _by_expert(theirs_PE),
        )
        rows = exchange_rows(self.kernels.permute(x_TD, plan), self.axis, send=sent.send, receive=sent.receive)
        return self.kernels.reorder(rows, sent.order_R), sent

    def follow(self, values_TW: Tensor, sent: Sent) -> Tensor:
        rows = exchange_rows(values_TW[sent.plan.token_R], self.axis, send=sent.send, receive=sent.receive)
        return rows[sent.order_R]

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        assert sent.order_R is not None
        back_R = torch.empty_like(sent.order_R)
        back_R[sent.order_R] = torch.arange(len(back_R), device=back_R.device)
        rows = exchange_rows(self.kernels.reorder(rows_RD, back_R), self.axis, send=sent.receive, receive=sent.send)
        out: Tensor = self.kernels.combine(rows, sent.gate_TK, sent.plan)
        return out


def _by_expert(counts_PE: Tensor) -> Tensor:
    """Rows arrive sorted by (source rank, expert); the order that sorts them by (expert, source rank)."""
    experts = torch.arange(counts_PE.shape[1], device=counts_PE.device).repeat(counts_PE.shape[0])
    return torch.argsort(torch.repeat_interleave(experts, counts_PE.flatten()), stable=True)
