"""All-to-all of equal blocks: one block of slots for each rank and expert, so all messages have the same size.

    rows sorted by expert --spread--> [ranks * experts held, slots, D] --all-to-all, equal sizes--> --collect--> rows by expert
                                      |r r r . .|r . . . .|r r . . .|    (. = an empty slot)

A block has as many slots as the router's capacity, or (dropless) as the largest count on any rank. The number of filled slots is
sent too, also in equal sizes. Experts compute filled slots only: an empty slot costs its bytes, but no row of a matrix product. For
links and compilers that want static shapes (GShard, arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe.experts.dispatch.base import Dropout, Network, plan_rows, whole
from moe.experts.experts import Experts
from moe.kernels import Plan, choose
from moe.router.router import Routing
from parallel.mesh.collectives import max_over
from parallel.mesh.exchange import collect, consecutive_indices, exchange_counts, exchange_rows, spread
from parallel.mesh.mesh import Axis

# T tokens, D model, R rows, S slots in a block, E experts, P ranks of the ep axis


@dataclass(frozen=True)
class Sent:
    """A planned exchange.

    `counts`: rows of each expert held here. `parts`: slots sent to each rank. `slot_R`: the slot of each row sent. `order_R`: the
    filled slots received, sorted by expert.
    """

    plan: Plan
    counts: list[int]
    parts: list[int]
    slot_R: Tensor
    order_R: Tensor


class Padded:
    """Dispatcher: all-to-all of equal blocks over `axis` (ep)."""

    def __init__(self, axis: Axis, kernels: str = "auto", *, network: Network = whole, placement: tuple[int, ...] | None = None) -> None:
        self.axis, self.network, self.placement = axis, network, placement
        self.kernels = choose(kernels)

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        sent = self._plan(routing)
        rows_RD = self._send(self.kernels.permute(x_TD, sent.plan), sent)
        position_R = None if dropout is None else self._send(dropout.position_T[sent.plan.token_R], sent)
        out_RD = self.network(rows_RD, experts, counts=sent.counts, position_R=position_R, dropout=dropout)
        table = spread(out_RD, sent.order_R, slots=sum(sent.parts))
        rows_RD = collect(exchange_rows(table, self.axis, send=sent.parts, receive=sent.parts), sent.slot_R)
        y_TD: Tensor = self.kernels.combine(rows_RD, routing.gate_TK, sent.plan)
        return y_TD

    def _plan(self, routing: Routing) -> Sent:
        plan = plan_rows(self.kernels, routing, placement=self.placement)
        slots = self._slots(routing, plan)
        receive_PE = exchange_counts(plan.counts_E.view(self.axis.size, -1), self.axis)
        ranks, held = receive_PE.shape
        start_E = plan.counts_E.new_tensor(range(ranks * held)) * slots
        return Sent(
            plan,
            receive_PE.sum(0).tolist(),
            [held * slots] * ranks,
            consecutive_indices(plan.counts_E, start_E),
            consecutive_indices(receive_PE.t().flatten(), start_E.view(ranks, held).t().flatten()),
        )

    def _slots(self, routing: Routing, plan: Plan) -> int:
        if routing.capacity is not None:
            return routing.capacity * routing.num_groups
        return int(max_over(plan.counts_E.max(), self.axis))

    def _send(self, rows: Tensor, sent: Sent) -> Tensor:
        table = spread(rows, sent.slot_R, slots=sum(sent.parts))
        return collect(exchange_rows(table, self.axis, send=sent.parts, receive=sent.parts), sent.order_R)
