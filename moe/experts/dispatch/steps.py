"""Rows are sent in one or more steps, each an exchange over one axis; results come back by the same steps in reverse order.

x_TD --permute--> rows sorted by destination --exchange over an axis, reorder-->  ...  --> rows of the experts held here, by expert
y_TD <--combine-- rows sorted by destination <--inverse, exchange---------------  ...  <--
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.experts.dispatch.dispatcher import Exchange
from moe.experts.dispatch.network import Arrived, Dropout, compute
from moe.experts.dispatch.placement import plan_rows
from moe.experts.experts import Experts
from moe.kernels.auto import by_bin
from moe.kernels.rows import Plan
from moe.router.router import Routing
from parallel.mesh.collectives import StartedRows, all_gather, all_to_all, start_all_to_all
from parallel.mesh.exchange import exchange_counts
from parallel.mesh.host import read_later
from parallel.mesh.mesh import Axis

# T tokens, D model, R rows, P ranks of a step, B bins: the experts (places) that rows sent to one of these ranks can reach


@dataclass(frozen=True)
class Step:
    """A planned exchange over `axis`. `send`, `receive`: rows to and from each rank.
    `order_R`: index of each received row, in the new order.
    """

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor

    @property
    def rows(self) -> int:
        """Return the number of rows that this rank sends."""
        return sum(self.send)

    def start(self, rows: Tensor) -> StartedRows:
        """Start sending rows without waiting for them. They arrive in the order of their source ranks."""
        return start_all_to_all(rows, self.axis, send=self.send, receive=self.receive)

    def there(self, rows: Tensor, kernels: Any = None) -> Tensor:
        """Send rows, and return the received ones in their new order. Without kernels, `rows` are values that need no gradient."""
        rows = all_to_all(rows, self.axis, send=self.send, receive=self.receive)
        return rows[self.order_R] if kernels is None else kernels.reorder(rows, self.order_R)

    def back(self, rows: Tensor, kernels: Any) -> Tensor:
        """Send the results of received rows back to their sources, and return the results of the rows that this rank sent."""
        return all_to_all(kernels.reorder(rows, self.order_R, undo=True), self.axis, send=self.receive, receive=self.send)


Planned = Callable[[], tuple[list[Step], list[Arrived]]]


@dataclass(frozen=True)
class Route:
    """One layer's plan of rows. `planned()`: the exchanges, and the rows that arrive for each chunk of the experts held here. The host
    waits for their numbers.
    """

    plan: Plan
    planned: Planned


def uneven(exchange: Exchange, routing: Routing) -> Route:
    """Plan a step for each axis. Rows are sorted by their destination: its index on the first axis, then on the second, then the expert."""
    axes, num_experts, order = exchange.axes, routing.probs_TE.shape[1], None
    if len(axes) > 1:  # the first axis connects consecutive ranks of ep (hierarchical.py)
        ranks = math.prod(axis.size for axis in axes)
        held = num_experts // ranks
        order = tuple(rank * held + e for rank in sorted(range(ranks), key=lambda rank: rank % axes[0].size) for e in range(held))
    plan = plan_rows(exchange.kernels, routing, placement=exchange.placement, order=order)
    counts_B, sends, receives = plan.counts_E, list[Tensor](), list[Tensor]()
    for axis in axes:
        sends.append(counts_B.view(axis.size, -1))
        receives.append(exchange_counts(sends[-1], axis))
        counts_B = receives[-1].sum(0)
    return Route(plan, planned(axes, sends, receives, [counts_B], exchange.etp))


def planned(axes: Sequence[Axis], sends: Sequence[Tensor], receives: Sequence[Tensor], chunks: Sequence[Tensor], etp: Axis) -> Planned:
    """Return the function of a Route, given the counts of rows [P, B] that this rank sends and receives over each axis, and the counts of
    the rows that arrive for each chunk of experts. All counts go to the host in one copy, which starts now. Collective over etp.
    """
    sizes = [len(counts_E) for counts_E in chunks]
    of_chunks = all_gather(torch.cat([*chunks]).unsqueeze(0), etp).split(sizes, dim=1)  # [etp ranks, experts] of each chunk
    read = read_later(*sends, *receives, *of_chunks)

    def found() -> tuple[list[Step], list[Arrived]]:
        numbers, n = [[sum(counts_B) for counts_B in counts_PB] for counts_PB in read()], len(axes)
        pairs = zip(axes, numbers[:n], numbers[n : 2 * n], receives, strict=True)
        steps = [Step(axis, send, receive, by_bin(arrived_PB, total=sum(receive))) for axis, send, receive, arrived_PB in pairs]
        return steps, [Arrived(*both) for both in zip(of_chunks, numbers[2 * n :], strict=True)]

    return found


def permuted(
    exchange: Exchange, x_TD: Tensor, routing: Routing, route: Route, *, together: bool = False
) -> tuple[Tensor, Plan, list[Step], list[Arrived]]:
    """Return (rows to send [R, D], plan of these R rows, steps, rows that arrive). `together`: each step sends other rows; False: the first
    sends all.
    A GPU gathers the rows while the host waits for their number, if no choice can be dropped; otherwise it would gather too many.
    """
    rows_RD = exchange.kernels.permute(x_TD, route.plan) if routing.capacity is None else None
    steps, arrived = route.planned()
    plan = route.plan.cut(sum(step.rows for step in (steps if together else steps[:1])))
    if rows_RD is None:
        rows_RD = exchange.kernels.permute(x_TD, plan)
    return rows_RD if len(rows_RD) == len(plan.choice_R) else rows_RD[: len(plan.choice_R)], plan, steps, arrived


class Steps(Exchange):
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        route = uneven(self, routing)
        rows_RD, plan, steps, (arrived,) = permuted(self, x_TD, routing, route)
        position_R = None if dropout is None else dropout.position_T[plan.token_R]
        for step in steps:
            rows_RD = step.there(rows_RD, self.kernels)
            position_R = None if position_R is None else step.there(position_R)
        rows_RD = compute(rows_RD, experts, etp=self.etp, counts_E=arrived, position_R=position_R, dropout=dropout)
        for step in reversed(steps):
            rows_RD = step.back(rows_RD, self.kernels)
        y_TD: Tensor = self.kernels.combine(rows_RD, routing.gate_TK, plan)
        return y_TD
