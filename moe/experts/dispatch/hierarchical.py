"""All-to-all in two steps: within the node to the neighbour that stands where the expert's rank does, then between nodes.

    ep 4 = 2 nodes x 2        rank 0 (node 0, seat 0)  --step 1: node 0-->  rank 1 (node 0, seat 1)  --step 2: seat 1-->  rank 3
    row for an expert         of rank 3 (node 1, seat 1)

Across nodes a rank then sends one message to each other node instead of one to each other rank: `ep_inner` times fewer
and larger ones, and the same bytes; within the node it sends more. Rows reach an expert in the order of their source
ranks, as by one all-to-all, so that results are the same to the bit. Source: Tutel (arXiv 2206.03382, section 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.experts.dispatch.all_to_all import inverse
from moe.experts.dispatch.base import Dropout, Network, plan_rows, whole
from moe.experts.experts import Experts
from moe.kernels import Plan, choose
from moe.router.router import Routing
from parallel.exchange import by_bin, exchange_counts, exchange_rows
from parallel.mesh import Axis

# T tokens, D model, R rows, O nodes, I ranks of a node, E experts held by a rank


@dataclass(frozen=True)
class Step:
    """One exchange: `order_R` sorts what arrived for what comes next."""

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor


class Hierarchical:
    """`inner` are the ranks of one node, `outer` the ranks of the same seat; rank (o, i) of ep is o * inner + i."""

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
            rows_RD = self.kernels.reorder(_there(rows_RD, step), step.order_R)
            position_R = None if position_R is None else _there(position_R, step)[step.order_R]
        rows_RD = self.network(rows_RD, experts, counts=counts, position_R=position_R, dropout=dropout)
        for step in reversed(steps):
            rows_RD = self.kernels.reorder(rows_RD, inverse(step.order_R))
            rows_RD = exchange_rows(rows_RD, step.axis, send=step.receive, receive=step.send)
        y_TD: Tensor = self.kernels.combine(rows_RD, routing.gate_TK, plan)
        return y_TD

    def _plan(self, routing: Routing) -> tuple[Plan, list[Step], list[int]]:
        """Rows sorted by (seat, node, expert) of their destination; the two steps; rows of each expert held here."""
        nodes, seats = self.outer.size, self.inner.size
        held = routing.probs_TE.shape[1] // (nodes * seats)
        order = tuple((o * seats + i) * held + e for i in range(seats) for o in range(nodes) for e in range(held))
        plan = plan_rows(self.kernels, routing, placement=self.placement, order=order)
        mine_IB = plan.counts_E.view(seats, nodes * held)
        near_IB = exchange_counts(mine_IB, self.inner)  # what each neighbour has for my seat, by (node, expert)
        far_OE = exchange_counts(near_IB.sum(0).view(nodes, held), self.outer)
        steps = [
            Step(self.inner, mine_IB.sum(1).tolist(), near_IB.sum(1).tolist(), by_bin(near_IB)),
            Step(self.outer, near_IB.sum(0).view(nodes, held).sum(1).tolist(), far_OE.sum(1).tolist(), by_bin(far_OE)),
        ]
        return plan, steps, far_OE.sum(0).tolist()


def _there(rows: Tensor, step: Step) -> Tensor:
    return exchange_rows(rows, step.axis, send=step.send, receive=step.receive)
