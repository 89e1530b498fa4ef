"""All-to-all of equal blocks: each rank sends one block of slots to each expert, so all messages have the same size.

    tokens --permute--> [ranks * experts held, slots, D] --all-to-all, equal sizes--> --permute--> rows of the held experts, by expert
                        |r r r . .|r . . . .|r r . . .|    (. = an empty slot)

With a capacity (router.capacity_factor), a block has all slots that its expert has for the sending rank: capacity times the rank's number
of token groups. So no shape depends on the routing, and the host reads no value from a GPU: a CUDA graph can capture the layer. Without a
capacity (dropless), a block has as many slots as the largest number of rows that any rank sends to one expert; the host waits for this
number. Experts compute filled slots only. An empty slot has a copy of some token, which is never read. Source: GShard (arXiv 2006.16668,
section 3.2).
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.mesh.mesh import Mesh
from parallel.mesh.traffic import Load, Message, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.experts import Experts
    from moe.kernels.rows import Plan
    from moe.router.routing import Routing

# T tokens, K choices, D model, E experts, H experts on this rank, P ranks of the ep axis, N ranks of the etp axis, S slots


class Padded(Dispatcher):
    name = "padded"
    about = "links, compilers or CUDA graphs that need blocks of fixed size"

    def traffic(self, load: Load) -> Traffic:
        slots = load.rows * load.busiest if load.slots is None else load.slots  # dropless: all blocks have the size of the largest
        blocks = Message("ep", "all_to_all", slots * load.row_bytes, load.ranks)
        agreed = [Message("ep", "all_reduce", 8, load.ranks)] if load.slots is None else []
        return Traffic.there_and_back(*agreed, Message("ep", "counts", 8 * load.bins, load.ranks), rows=blocks, meanwhile=1.0)

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        return Slots.over(("ep",), mesh, sizes)


class Slots(Exchange):
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        from parallel.mesh.collectives import all_gather, all_to_all, finish_rows, reduce_scatter, start_all_to_all
        from parallel.mesh.exchange import exchange_counts

        tokens, kernels, etp = len(x_TD), self.kernels, self.etp
        if not tokens:
            x_TD, routing, dropout = _one_token(x_TD, routing, dropout)
        plan, slots = self._plan(routing)
        even = [len(plan.choice_R) // self.axis.size] * self.axis.size
        counts_PH = exchange_counts(plan.counts_E.view(self.axis.size, -1), self.axis)
        arrived = _arrived(all_gather(counts_PH.unsqueeze(0), etp), slots, kernels)
        dropped_RF = None
        if dropout is not None:
            position_S = all_gather(all_to_all(dropout.position_T[plan.token_R], self.axis, send=even, receive=even), etp)
            dropped_RF = dropout.scale(position_S[arrived.choice_R])[:, experts.hidden]
        started = start_all_to_all(kernels.permute(x_TD, plan), self.axis, send=even, receive=even)
        self.meanwhile()
        rows_RD = kernels.permute(all_gather(finish_rows(started), etp), arrived)
        out_RD = experts(rows_RD, counts=arrived.counts_E, dropped_RF=dropped_RF)
        out_SD = kernels.combine(out_RD if etp.size == 1 else out_RD.float(), None, arrived)
        back_SD = all_to_all(reduce_scatter(out_SD, etp).to(x_TD.dtype), self.axis, send=even, receive=even)
        y_TD: Tensor = kernels.combine(back_SD, routing.gate_TK, plan)
        return y_TD[:tokens]

    def _plan(self, routing: Routing) -> tuple[Plan, int]:
        """Return (a plan with one row for each of this rank's slots; the number of slots that this rank has for each expert)."""
        import torch

        from moe.kernels.rows import Plan
        from parallel.mesh.collectives import max_over
        from parallel.mesh.host import read_later

        num_experts, place_TK = routing.probs_TE.shape[1], self.places(routing)
        plan = self.kernels.plan(place_TK, routing.kept_TK, num_experts=num_experts)
        counts_E, row_TK, device = plan.counts_E, plan.row_TK, place_TK.device
        if routing.capacity is None:
            (slots,) = read_later(max_over(max_over(counts_E.max(), self.axis), self.etp))()
        else:
            slots = routing.capacity * routing.num_groups
        shift_E = torch.arange(num_experts, device=device) * slots - (counts_E.cumsum(0) - counts_E)
        slot_TK = (row_TK + shift_E[place_TK]).where(row_TK >= 0, -1)
        choice_S = place_TK.new_zeros(num_experts * slots + 1)
        choice_S[slot_TK.view(-1)] = torch.arange(slot_TK.numel(), device=device)  # dropped choices go to the last element
        return Plan(choice_S[:-1], slot_TK, counts_E), slots


def _arrived(counts_NPH: Tensor, slots: int, kernels: ModuleType) -> Plan:
    """Return the plan that sorts received rows by expert. N * P * H blocks of `slots` slots were received; only filled slots are sorted.
    The plan treats each slot as a token with one choice: the expert to which the slot's block was sent."""
    import torch

    filled_NPHS = torch.arange(slots, device=counts_NPH.device) < counts_NPH.unsqueeze(3)
    held_H1 = torch.arange(counts_NPH.shape[2], device=counts_NPH.device).unsqueeze(1)
    plan: Plan = kernels.plan(held_H1.expand_as(filled_NPHS).reshape(-1, 1), filled_NPHS.view(-1, 1), num_experts=len(held_H1))
    return plan


def _one_token(x_TD: Tensor, routing: Routing, dropout: Dropout | None) -> tuple[Tensor, Routing, Dropout | None]:
    """Add one token, with all choices dropped, to the input of a rank without tokens, because empty slots must copy some token."""
    import torch.nn.functional as F

    def one(values: Tensor) -> Tensor:
        return F.pad(values, (*(0, 0) * (values.ndim - 1), 0, 1))

    routing = replace(routing, expert_TK=one(routing.expert_TK), gate_TK=one(routing.gate_TK), kept_TK=one(routing.kept_TK))
    return one(x_TD), routing, None if dropout is None else replace(dropout, position_T=one(dropout.position_T))
