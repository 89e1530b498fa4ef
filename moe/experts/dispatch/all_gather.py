"""Every rank gathers the tokens of the whole axis and computes the rows of its own experts.

    x_TD, experts, gates --all-gather over ep--> tokens of all ranks --own experts' rows--> partial sums, fp32 --reduce-scatter--> y_TD

No rows are sorted for sending and no counts are exchanged. But each token is sent (ep - 1) times; the all-to-all sends it
k (ep - 1) / ep times. So this is for ep of at most about k.
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

# T tokens here, L tokens of the rank with the most, A = L * ranks tokens, D model, K choices (the most of any rank), E experts, R rows


class AllGather(Dispatcher):
    """All tokens to all ranks; partial sums are in fp32, and so are the sums of the backward pass."""

    name = "all_gather"
    about = "ep of about k or less"

    def traffic(self, load: Load) -> Traffic:
        def gather(token_bytes: float, calls: int = 1) -> Message:
            return Message("ep", "all_gather", load.tokens * token_bytes, load.ranks, calls=calls)

        def sums(numbers: int, calls: int = 1) -> Message:
            return Message("ep", "reduce_scatter", load.ranks * load.tokens * 4 * numbers, load.ranks, calls=calls)

        longest = Message("ep", "all_reduce", 16, load.ranks)
        decisions = gather((4 + 8) * load.choices, calls=2)  # gates fp32, places int64
        back = (gather(4 * load.width), sums(load.width + load.choices, calls=2))  # of tokens and of gates
        return Traffic((longest, decisions), (gather(load.row_bytes), sums(load.width)), back)

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        return Gathered.over(("ep",), mesh, sizes)


@dataclass(frozen=True)
class Sent:
    """Gathered tokens. `tokens` of this rank, `longest` of any; `counts`: rows of each expert held here."""

    plan: Plan
    gate_AK: Tensor
    counts: list[int]
    tokens: int
    longest: int


class Gathered(ThereAndBack[Sent]):
    """All-gather of tokens over ep, reduce-scatter of results."""

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Sent]:
        import torch
        from parallel.mesh.collectives import max_over

        tokens, choices = routing.expert_TK.shape  # with expert choice, K can differ between ranks
        longest, most = max_over(torch.tensor([tokens, choices], device=x_TD.device), self.axis).tolist()
        x_AD = self.gathered(x_TD, longest)
        gate_AK = self.gathered(routing.gate_TK, longest, wider=most - choices)
        plan = self._plan_held(self.gathered(self._places(routing), longest, wider=most - choices), routing)
        return self.kernels.permute(x_AD, plan), Sent(plan, gate_AK, plan.counts_E.tolist(), tokens, longest)

    def follow(self, values_T: Tensor, sent: Sent) -> Tensor:
        return self.gathered(values_T, sent.longest)[sent.plan.token_R]

    def bring_back(self, rows_RD: Tensor, sent: Sent) -> Tensor:
        from parallel.mesh.collectives import reduce_scatter

        partial_AD = self.kernels.combine(rows_RD.float(), sent.gate_AK, sent.plan)
        return reduce_scatter(partial_AD, self.axis)[: sent.tokens].to(rows_RD.dtype)

    def gathered(self, values_T: Tensor, longest: int, *, wider: int = 0) -> Tensor:
        """Gather the ranks' values [T, ...], each padded to `longest` tokens and `wider` by so many numbers a token."""
        import torch.nn.functional as F
        from parallel.mesh.collectives import all_gather

        lacks = longest - len(values_T)
        missing = (0, wider, 0, lacks) if values_T.ndim > 1 else (0, lacks)
        return all_gather(F.pad(values_T, missing) if any(missing) else values_T, self.axis)

    def _places(self, routing: Routing) -> Tensor:
        """Return each choice's place + 1. 0 means dropped, or padding of ranks with fewer tokens."""
        from moe.experts.dispatch.rows import place_of

        place_TK = place_of(routing.expert_TK, num_experts=routing.probs_TE.shape[1], placement=self.placement)
        return (place_TK + 1).where(routing.kept_TK, 0)

    def _plan_held(self, place_AK: Tensor, routing: Routing) -> Plan:
        held = routing.probs_TE.shape[1] // self.axis.size
        here_AK = place_AK - 1 - self.axis.index * held
        kept_AK = (place_AK > 0) & (here_AK >= 0) & (here_AK < held)
        plan: Plan = self.kernels.plan(here_AK.clamp(0, held - 1), kept_AK, num_experts=held)
        return plan
