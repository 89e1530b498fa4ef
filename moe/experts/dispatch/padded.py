"""All-to-all of equal blocks: one block of slots for each rank and expert, so all messages have the same size.

    rows sorted by expert --spread--> [ranks * experts held, slots, D] --all-to-all, equal sizes--> --collect--> rows by expert
                                      |r r r . .|r . . . .|r r . . .|    (. = an empty slot)

A block has as many slots as the router's capacity, or (dropless) as the largest count on any rank. Experts compute filled slots only.
For links and compilers that want static shapes (GShard, arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.mesh.mesh import Mesh
from parallel.mesh.traffic import Load, Message, Traffic

if TYPE_CHECKING:
    from moe.experts.dispatch.steps import Route
    from moe.router.router import Routing

# R rows, E experts, P ranks of the ep axis


class Padded(Dispatcher):
    name = "padded"
    about = "links or compilers that want equal, static blocks"

    def traffic(self, load: Load) -> Traffic:
        blocks = Message("ep", "all_to_all", (load.rows if load.slots is None else load.slots) * load.row_bytes, load.ranks)
        agreed = [Message("ep", "all_reduce", 8, load.ranks)] if load.slots is None else []
        return Traffic.there_and_back(*agreed, Message("ep", "counts", 8 * load.bins, load.ranks), rows=(blocks,))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        from moe.experts.dispatch.steps import Steps

        return Steps.over(("ep",), mesh, sizes, route=blocks)


def blocks(exchange: Exchange, routing: Routing) -> Route:
    import torch

    from moe.experts.dispatch.placement import plan_rows
    from moe.experts.dispatch.steps import Route, Step
    from parallel.mesh.collectives import max_over
    from parallel.mesh.exchange import consecutive_indices, exchange_counts
    from parallel.mesh.host import read_later

    plan, axis = plan_rows(exchange.kernels, routing, placement=exchange.placement), exchange.axis
    most = max_over(plan.counts_E.max(), axis) if routing.capacity is None else None
    receive_PE = exchange_counts(plan.counts_E.view(axis.size, -1), axis)
    read = read_later(plan.counts_E.sum(), receive_PE.sum(), *(() if most is None else (most,)))

    def steps() -> list[Step]:
        sent, received, *largest = read()
        ranks, held = receive_PE.shape
        slots = largest[0] if routing.capacity is None else routing.capacity * routing.num_groups
        start_E = torch.arange(ranks * held, device=plan.counts_E.device) * slots
        order_R = consecutive_indices(receive_PE.t().flatten(), start_E.view(ranks, held).t().flatten(), total=received)
        slot_R = consecutive_indices(plan.counts_E, start_E, total=sent)
        return [Step(axis, [held * slots] * ranks, [held * slots] * ranks, order_R, slot_R)]

    return Route(plan, receive_PE.sum(0), steps)
