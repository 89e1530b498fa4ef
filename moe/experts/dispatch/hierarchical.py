"""All-to-all in two steps: within the node to the rank with the destination's local rank, then between nodes.

    ep 4 = 2 nodes x 2        rank 0 (node 0, local 0) --step 1: node 0--> rank 1 (node 0, local 1) --step 2: local 1--> rank 3
    row for an expert         of rank 3 (node 1, local 1)

A rank sends one message to each other node instead of one to each rank there: `ep_inner` times fewer and larger messages with the
same bytes. Within the node it sends more bytes. Rows reach an expert in the order of their source ranks, as in one all-to-all, so
results are equal to the bit. Source: Tutel (arXiv 2206.03382, section 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.experts.dispatch.all_to_all import inverse
from moe.experts.dispatch.base import Dropout, Network, plan_rows, whole
from moe.experts.experts import Experts
from moe.kernels import Plan, choose
from moe.router.router import Routing
from parallel.mesh.exchange import by_bin, exchange_counts, exchange_rows
from parallel.mesh.mesh import Axis

# T tokens, D model, R rows, O nodes, I ranks of a node, E experts held by a rank


@dataclass(frozen=True)
class Step:
    """One of the two exchanges. `order_R` sorts received rows: by destination node after the first step, by expert after the second."""

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor


class Hierarchical:
    """Dispatch over axes `inner` (ranks of a node) and `outer` (ranks with one local rank). Rank (o, i) of ep is o * inner + i."""

    def __init__(
        self, inner: Axis, outer: Axis, kernels: str = "auto", *, network: Network = whole, placement: tuple[int, ...] | None = None
    ) -> None:
        self.inner, self.outer, self.network, self.placement = inner, outer, network, placement
        self.kernels = choose(kernels)

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        plan, steps, counts = self._plan(routing)
        rows_RD = self.kernels.permute(x_TD, plan)
        position_R = None if dropout is None else dropout.position_T[plan.token_R]
        for step in steps:
            rows_RD = self.kernels.reorder(_send(rows_RD, step), step.order_R)
            position_R = None if position_R is None else _send(position_R, step)[step.order_R]
        rows_RD = self.network(rows_RD, experts, counts=counts, position_R=position_R, dropout=dropout)
        for step in reversed(steps):
            rows_RD = self.kernels.reorder(rows_RD, inverse(step.order_R))
            rows_RD = exchange_rows(rows_RD, step.axis, send=step.receive, receive=step.send)
        y_TD: Tensor = self.kernels.combine(rows_RD, routing.gate_TK, plan)
        return y_TD

    def _plan(self, routing: Routing) -> tuple[Plan, list[Step], list[int]]:
        """Return the plan, with rows sorted by their destination's (local rank, node, expert), both steps, and rows of each held expert."""
        nodes, local_ranks = self.outer.size, self.inner.size
        held = routing.probs_TE.shape[1] // (nodes * local_ranks)
        order = tuple((o * local_ranks + i) * held + e for i in range(local_ranks) for o in range(nodes) for e in range(held))
        plan = plan_rows(self.kernels, routing, placement=self.placement, order=order)
        mine_IB = plan.counts_E.view(local_ranks, nodes * held)
        near_IB = exchange_counts(mine_IB, self.inner)  # rows of each rank of this node for this local rank, by (node, expert)
        far_OE = exchange_counts(near_IB.sum(0).view(nodes, held), self.outer)
        steps = [
            Step(self.inner, mine_IB.sum(1).tolist(), near_IB.sum(1).tolist(), by_bin(near_IB)),
            Step(self.outer, near_IB.sum(0).view(nodes, held).sum(1).tolist(), far_OE.sum(1).tolist(), by_bin(far_OE)),
        ]
        return plan, steps, far_OE.sum(0).tolist()


def _send(rows: Tensor, step: Step) -> Tensor:
    return exchange_rows(rows, step.axis, send=step.send, receive=step.receive)
