"""Sends rows (a token's vector, once for each chosen expert) to the ranks that hold their experts, and the results back. Each rank's
experts are cut into one or several chunks, and the rows of each chunk are sent in a step of their own.

x_TD --permute--> rows sorted by chunk, rank, expert --exchange over ep, reorder--> rows of this rank's experts, by expert
y_TD <--combine-- results in the same order          <--inverse, exchange---------- their results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.experts.dispatch.dispatcher import Exchange
from moe.experts.dispatch.network import Arrived, Dropout, compute
from moe.experts.experts import Experts
from moe.kernels.auto import by_bin
from moe.kernels.rows import Plan
from moe.router.routing import Routing
from parallel.mesh.collectives import StartedRows, all_gather, all_to_all, finish_rows, start_all_to_all
from parallel.mesh.exchange import exchange_counts
from parallel.mesh.host import read_later
from parallel.mesh.mesh import Axis

# T tokens, K choices of a token, D model, R rows, N chunks, P ranks of the ep axis, H experts held by a rank
# E experts that a rank has in one chunk; in probs_TE and plan.counts_E: all experts


@dataclass(frozen=True)
class Step:
    """The planned exchange over `axis` of one chunk's rows. `send`, `receive`: number of rows to and from each rank. `order_R`: indices
    that sort received rows by expert. `arrived`: number of rows that each etp rank received for each expert.
    """

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor
    arrived: Arrived

    def start(self, rows_RD: Tensor) -> StartedRows:
        """Start to send rows, without waiting for them."""
        return start_all_to_all(rows_RD, self.axis, send=self.send, receive=self.receive)

    def finish(self, started: StartedRows, kernels: Any) -> Tensor:
        """Wait for the rows of `start`, and return them in the order of experts."""
        rows_RD: Tensor = kernels.reorder(finish_rows(started), self.order_R)
        return rows_RD

    def follow(self, values_R: Tensor) -> Tensor:
        """Send one value for each row, such as its token's position, without gradient. Return the received values, in the order of the rows
        that `finish` returns."""
        return all_to_all(values_R, self.axis, send=self.send, receive=self.receive)[self.order_R]

    def back(self, rows_RD: Tensor, kernels: Any) -> StartedRows:
        """Start to send the results of received rows back to the ranks that sent the rows."""
        return start_all_to_all(kernels.reorder(rows_RD, self.order_R, undo=True), self.axis, send=self.receive, receive=self.send)


@dataclass(frozen=True)
class Steps(Exchange):
    """The exchange by all-to-alls, one for each of the `chunks` chunks into which each rank's experts are cut. While one chunk's experts
    compute, the next chunk's rows are sent."""

    chunks: int = 1

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        rows_RD, plan, steps = self._permuted(x_TD, routing)
        rows, positions = [*self._cut(rows_RD, steps)], list[Tensor | None]([None] * self.chunks)
        del rows_RD  # here and below: without this reference, the rows' memory is freed as soon as they are sent
        if dropout is not None:
            cut = self._cut(dropout.position_T[plan.token_R], steps)
            positions = [step.follow(position_R) for step, position_R in zip(steps, cut, strict=True)]
        backs, following = [], steps[0].start(rows.pop(0))
        for j, (step, weights) in enumerate(zip(steps, experts.chunks(self.chunks), strict=True)):
            current = following
            if j + 1 < self.chunks:
                following = steps[j + 1].start(rows.pop(0))
            if j == 0:
                self.meanwhile()
            rows_RD = step.finish(current, self.kernels)
            rows_RD = compute(
                rows_RD, experts, etp=self.etp, counts_E=step.arrived, weights=weights, position_R=positions[j], dropout=dropout
            )
            backs.append(step.back(rows_RD, self.kernels))
            del rows_RD
        results = [finish_rows(back) for back in backs]
        y_TD: Tensor = self.kernels.combine(results[0] if self.chunks == 1 else torch.cat(results), routing.gate_TK, plan)
        return y_TD

    def planned(self, routing: Routing) -> tuple[Plan, Callable[[], list[Step]]]:
        """Return the plan of the rows to send, and a function that returns a Step for each chunk. The function needs the numbers of rows on
        the host: their copy is started here, and the function waits for it. Collective.
        """
        ranks, held = self.axis.size, routing.probs_TE.shape[1] // self.axis.size
        each, order = held // self.chunks, None
        if self.chunks > 1:
            order = tuple(p * held + j * each + e for j in range(self.chunks) for p in range(ranks) for e in range(each))
        plan = self.kernels.plan(self.places(routing, order), routing.kept_TK, num_experts=ranks * held)
        send_NPE = plan.counts_E.view(self.chunks, ranks, each)
        receive_PH = exchange_counts(send_NPE.transpose(0, 1).reshape(ranks, held), self.axis)
        arrived_PH = all_gather(receive_PH.sum(0, keepdim=True), self.etp)  # rows of each held expert on each etp rank
        read = read_later(send_NPE, receive_PH, arrived_PH)

        def steps() -> list[Step]:
            sends, receives, arrives = read()
            found = []
            for j, counts_PE in enumerate(sends):
                chunk = slice(j * each, (j + 1) * each)
                receive, arrived = ([sum(counts_H[chunk]) for counts_H in counts_PH] for counts_PH in (receives, arrives))
                order_R = by_bin(receive_PH[:, chunk], total=sum(receive))
                found.append(Step(self.axis, [*map(sum, counts_PE)], receive, order_R, Arrived(arrived_PH[:, chunk], arrived)))
            return found

        return plan, steps

    def _permuted(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Plan, list[Step]]:
        """Return the rows to send [R, D], the plan of these R rows, and the steps. Without a capacity, a GPU gathers all T * K rows while
        the host waits for R. With a capacity, many choices may be dropped, so rows are gathered after R is known.
        """
        plan, planned = self.planned(routing)
        rows_RD = self.kernels.permute(x_TD, plan) if routing.capacity is None else None
        steps = planned()
        plan = plan.cut(sum(sum(step.send) for step in steps))
        if rows_RD is None:
            rows_RD = self.kernels.permute(x_TD, plan)
        return rows_RD if len(rows_RD) == len(plan.choice_R) else rows_RD[: len(plan.choice_R)], plan, steps

    def _cut(self, values_R: Tensor, steps: list[Step]) -> Sequence[Tensor]:
        """Split values of all R rows into the values of the rows that each step sends."""
        return (values_R,) if self.chunks == 1 else values_R.split([sum(step.send) for step in steps])
