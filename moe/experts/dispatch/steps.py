"""Rows are sent in one or more steps, each an exchange over one axis; results come back by the same steps in reverse order.

x_TD --permute--> rows sorted by destination --exchange over an axis, reorder-->  ...  --> rows of the experts held here, by expert
y_TD <--combine-- rows sorted by destination <--inverse, exchange---------------  ...  <--
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe.experts.dispatch.dispatcher import Exchange
from moe.experts.dispatch.network import Dropout, compute
from moe.experts.dispatch.placement import plan_rows
from moe.experts.experts import Experts
from moe.kernels.rows import Plan, inverse
from moe.router.router import Routing
from parallel.mesh.collectives import StartedRows, all_to_all, start_all_to_all
from parallel.mesh.exchange import by_bin, collect, exchange_counts, spread
from parallel.mesh.mesh import Axis

# T tokens, D model, R rows, P ranks of a step, B bins: the experts (places) that rows sent to one of these ranks can reach


@dataclass(frozen=True)
class Step:
    """A planned exchange over `axis`. `send`, `receive`: rows to and from each rank.
    `order_R`: index of each received row, in the new order. With `slot_R`, slots are exchanged, of which some are empty: `send` and
    `receive` count slots, `slot_R` is the slot of each row sent, and `order_R` lists the received slots that have a row.
    """

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor
    slot_R: Tensor | None = None

    @classmethod
    def of(cls, axis: Axis, send_PB: Tensor, receive_PB: Tensor) -> Step:
        return cls(axis, send_PB.sum(1).tolist(), receive_PB.sum(1).tolist(), by_bin(receive_PB))

    def start(self, rows: Tensor) -> StartedRows:
        """Start sending rows without waiting for them. They arrive in the order of their source ranks."""
        return start_all_to_all(rows, self.axis, send=self.send, receive=self.receive)

    def there(self, rows: Tensor, kernels: Any = None) -> Tensor:
        """Send rows, and return the received ones in their new order. Without kernels, `rows` are values that need no gradient."""
        rows = rows if self.slot_R is None else spread(rows, self.slot_R, slots=sum(self.send))
        rows = all_to_all(rows, self.axis, send=self.send, receive=self.receive)
        if self.slot_R is not None:
            return collect(rows, self.order_R)
        return rows[self.order_R] if kernels is None else kernels.reorder(rows, self.order_R)

    def back(self, rows: Tensor, kernels: Any) -> Tensor:
        """Send the results of received rows back to their sources, and return the results of the rows that this rank sent."""
        if self.slot_R is None:
            return all_to_all(kernels.reorder(rows, inverse(self.order_R)), self.axis, send=self.receive, receive=self.send)
        slots = spread(rows, self.order_R, slots=sum(self.receive))
        return collect(all_to_all(slots, self.axis, send=self.receive, receive=self.send), self.slot_R)


@dataclass(frozen=True)
class Route:
    """One layer's plan of rows, and the `steps` that send them. `counts`: number of rows received for each expert held here."""

    plan: Plan
    counts: list[int]
    steps: list[Step]


def uneven(exchange: Exchange, routing: Routing) -> Route:
    """Plan a step for each axis. Rows are sorted by their destination: its index on the first axis, then on the second, then the expert."""
    axes, num_experts, order = exchange.axes, routing.probs_TE.shape[1], None
    if len(axes) > 1:  # the first axis connects consecutive ranks of ep (hierarchical.py)
        ranks = math.prod(axis.size for axis in axes)
        held = num_experts // ranks
        order = tuple(rank * held + e for rank in sorted(range(ranks), key=lambda rank: rank % axes[0].size) for e in range(held))
    plan = plan_rows(exchange.kernels, routing, placement=exchange.placement, order=order)
    counts_B, steps = plan.counts_E, []
    for axis in axes:
        send_PB = counts_B.view(axis.size, -1)
        receive_PB = exchange_counts(send_PB, axis)
        steps.append(Step.of(axis, send_PB, receive_PB))
        counts_B = receive_PB.sum(0)
    return Route(plan, counts_B.tolist(), steps)


@dataclass(frozen=True)
class Steps(Exchange):
    route: Callable[[Exchange, Routing], Route] = uneven

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        sent = self.route(self, routing)
        rows_RD = self.kernels.permute(x_TD, sent.plan)
        position_R = None if dropout is None else dropout.position_T[sent.plan.token_R]
        for step in sent.steps:
            rows_RD = step.there(rows_RD, self.kernels)
            position_R = None if position_R is None else step.there(position_R)
        rows_RD = compute(rows_RD, experts, etp=self.etp, counts=sent.counts, position_R=position_R, dropout=dropout)
        for step in reversed(sent.steps):
            rows_RD = step.back(rows_RD, self.kernels)
        y_TD: Tensor = self.kernels.combine(rows_RD, routing.gate_TK, sent.plan)
        return y_TD
