"""Uneven all-to-all: rank i of ep holds the i-th chunk of experts; one all-to-all sends the kept rows, another brings results back.

With `overlap_chunks` above 1, the experts of a rank are cut into chunks, and one chunk's rows are sent while another computes:

    link     | rows 0  | rows 1  | back 0, rows 2 | back 1, rows 3 | back 2  | back 3 |
    compute            | chunk 0 | chunk 1        | chunk 2        | chunk 3 |          backward pass: likewise, last chunk first

One exchange of counts serves all chunks. Autograd runs the calls in reverse order, so the backward pass overlaps too. Sources: FasterMoE
(PPoPP 2022), Tutel (arXiv 2206.03382, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import Mesh, divisors
from parallel.mesh.traffic import Load, Message, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.dispatch.steps import Route
    from moe.experts.experts import Experts
    from moe.router.router import Routing

# T tokens, D model, R rows, N chunks, P ranks of the ep axis, E experts of a chunk


class AllToAll(Dispatcher):
    name = "all_to_all"
    about = "the usual choice"
    reads = {"overlap_chunks": "only all_to_all can be cut"}
    examples = {"all_to_all": {}, "overlapped": {"overlap_chunks": 2}}

    @property
    def chunks(self) -> int:
        return self.settings.overlap_chunks

    def check(self, *, ranks: int, held: int) -> None:
        if held % self.chunks:
            needed = f"a divisor of the {held} experts that a rank holds (num_experts / ep)"
            fix = Set("it", *divisors(held)) | "lower degrees.ep"
            raise BadInput("dispatch.overlap_chunks", got=self.chunks, needed=needed, fix=fix)

    def traffic(self, load: Load) -> Traffic:
        rows = Message("ep", "all_to_all", load.rows * load.row_bytes, load.ranks, calls=self.chunks, busiest=load.busiest)
        return Traffic.there_and_back(Message("ep", "counts", 8 * load.bins, load.ranks), rows=(rows,))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        from moe.experts.dispatch.steps import Steps

        if self.chunks > 1 and mesh.axis("ep").size > 1:
            return Chunked.over(("ep",), mesh, sizes, chunks=self.chunks)
        return Steps.over(("ep",), mesh, sizes)


@dataclass(frozen=True)
class Chunked(Exchange):
    chunks: int = 2

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        import torch

        from moe.experts.dispatch.network import compute
        from moe.experts.dispatch.steps import permuted
        from parallel.mesh.collectives import finish_all_to_all, start_all_to_all

        rows_RD, plan, steps, arrived = permuted(self, x_TD, routing, self._plan(routing), together=True)
        sizes = [step.rows for step in steps]
        rows = rows_RD.split(sizes)
        positions: list[Tensor | None] = [None] * self.chunks
        if dropout is not None:
            positions = [step.there(keys) for step, keys in zip(steps, dropout.position_T[plan.token_R].split(sizes), strict=True)]
        backs, following = [], steps[0].start(rows[0])
        for j, (step, weights) in enumerate(zip(steps, experts.chunks(self.chunks, x_TD.dtype), strict=True)):
            current = following
            if j + 1 < self.chunks:
                following = steps[j + 1].start(rows[j + 1])
            rows_RD = self.kernels.reorder(finish_all_to_all(current), step.order_R)
            out_RD = compute(rows_RD, experts, etp=self.etp, counts_E=arrived[j], weights=weights, position_R=positions[j], dropout=dropout)
            out_RD = self.kernels.reorder(out_RD, step.order_R, undo=True)
            backs.append(start_all_to_all(out_RD, self.axis, send=step.receive, receive=step.send))
        y_TD: Tensor = self.kernels.combine(torch.cat([finish_all_to_all(back) for back in backs]), routing.gate_TK, plan)
        return y_TD

    def _plan(self, routing: Routing) -> Route:
        """Return the route of rows, sorted by chunk, rank and expert, with a step for each chunk."""
        from moe.experts.dispatch.placement import plan_rows
        from moe.experts.dispatch.steps import Route, planned
        from parallel.mesh.exchange import exchange_counts

        ranks, held = self.axis.size, routing.probs_TE.shape[1] // self.axis.size
        each = held // self.chunks
        order = tuple(p * held + j * each + e for j in range(self.chunks) for p in range(ranks) for e in range(each))
        plan = plan_rows(self.kernels, routing, placement=self.placement, order=order)
        send_NPE = plan.counts_E.view(self.chunks, ranks, each)
        receive_NPE = exchange_counts(send_NPE.transpose(0, 1).reshape(ranks, held), self.axis).split(each, dim=1)
        chunks = [receive_PE.sum(0) for receive_PE in receive_NPE]
        return Route(plan, planned([self.axis] * self.chunks, send_NPE.unbind(), receive_NPE, chunks, self.etp))
