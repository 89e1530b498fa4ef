"""All-to-all of equal blocks: one block of slots for each rank and expert, so all messages have the same size.

    rows sorted by expert --spread--> [ranks * experts held, slots, D] --all-to-all, equal sizes--> --collect--> rows by expert
                                      |r r r . .|r . . . .|r r . . .|    (. = an empty slot)

A block has as many slots as the router's capacity, or (dropless) as the largest count on any rank. The number of filled slots is
sent too, also in equal sizes. Experts compute filled slots only: an empty slot costs its bytes, but no row of a matrix product. For
links and compilers that want static shapes (GShard, arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.mesh.mesh import Mesh

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes, ThereAndBack
from parallel.traffic import Load, Message, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from moe.kernels import Plan
    from moe.router.router import Routing

# T tokens, D model, R rows, S slots in a block, E experts, P ranks of the ep axis


class Padded(Dispatcher):
    """Blocks of equal sizes."""

    name = "padded"
    about = "links or compilers that want equal, static blocks"

    def traffic(self, load: Load) -> Traffic:
        blocks = Message("ep", "all_to_all", (load.rows if load.places is None else load.places) * load.row_bytes, load.ranks)
        agreed = [Message("ep", "all_reduce", 8, load.ranks)] if load.places is None else []
        return Traffic.there_and_back(*agreed, Message("ep", "counts", 8 * load.bins, load.ranks), rows=(blocks,))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        return Blocks.over(("ep",), mesh, sizes)


@dataclass(frozen=True)
class Sent:
    """A finished exchange.

    `counts`: rows of each expert held here. `parts`: slots sent to each rank. `slot_R`: the slot of each row sent. `order_R`: the
    filled slots received, sorted by expert.
    """

    plan: Plan
    gate_TK: Tensor
    counts: list[int]
    parts: list[int]
    slot_R: Tensor
    order_R: Tensor


class Blocks(ThereAndBack[Sent]):
    """The exchange of equal blocks over ep."""

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        sent = self._plan(routing)
        return self._exchanged(self.kernels.permute(x_TD, sent.plan), sent, put=sent.slot_R, take=sent.order_R), sent

    def follow(self, values_T: Tensor, sent: Sent) -> Tensor:
        return self._exchanged(values_T[sent.plan.token_R], sent, put=sent.slot_R, take=sent.order_R)

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        rows_RD = self._exchanged(rows_RD, sent, put=sent.order_R, take=sent.slot_R)
        y_TD: Tensor = self.kernels.combine(rows_RD, sent.gate_TK, sent.plan)
        return y_TD

    def _exchanged(self, rows: Tensor, sent: Sent, *, put: Tensor, take: Tensor) -> Tensor:
        """Put rows into slots, exchange all slots, and take filled ones."""
        from parallel.mesh.exchange import collect, exchange_rows, spread

        return collect(exchange_rows(spread(rows, put, slots=sum(sent.parts)), self.axis, send=sent.parts, receive=sent.parts), take)

    def _plan(self, routing: Routing) -> Sent:
        from parallel.mesh.collectives import max_over
        from parallel.mesh.exchange import exchange_counts, runs

        from moe.experts.dispatch.rows import plan_rows

        plan = plan_rows(self.kernels, routing, placement=self.placement)
        slots = None if routing.capacity is None else routing.capacity * routing.num_groups
        slots = int(max_over(plan.counts_E.max(), self.axis)) if slots is None else slots
        receive_PE = exchange_counts(plan.counts_E.view(self.axis.size, -1), self.axis)
        ranks, held = receive_PE.shape
        start_E = plan.counts_E.new_tensor(range(ranks * held)) * slots
        return Sent(
            plan,
            routing.gate_TK,
            receive_PE.sum(0).tolist(),
            [held * slots] * ranks,
            runs(plan.counts_E, start_E),
            runs(receive_PE.t().flatten(), start_E.view(ranks, held).t().flatten()),
        )
