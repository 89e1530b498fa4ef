"""Every rank gathers the tokens of the whole axis and computes the rows of its own experts.

    x_TD, experts, gates --all-gather over ep--> tokens of all ranks --own experts' rows--> partial sums, fp32 --reduce-scatter--> y_TD

Each token is sent (ep - 1) times; the all-to-all sends it k (ep - 1) / ep times. So this is for ep of at most about k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.mesh.mesh import Mesh
from parallel.mesh.traffic import Load, Message, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.experts import Experts
    from moe.kernels.rows import Plan
    from moe.router.router import Routing

# T tokens here, A tokens of all ranks (each padded to the longest), D model, K choices, E experts, R rows


class AllGather(Dispatcher):
    name = "all_gather"
    about = "ep of about k or less"

    def traffic(self, load: Load) -> Traffic:
        def gather(token_bytes: float, calls: int = 1) -> Message:
            return Message("ep", "all_gather", load.tokens * token_bytes, load.ranks, calls=calls)

        def sums(numbers: int, calls: int = 1) -> Message:
            return Message("ep", "reduce_scatter", load.ranks * load.tokens * 4 * numbers, load.ranks, calls=calls)

        longest = Message("ep", "all_reduce", 16, load.ranks)
        decisions = gather((4 + 8) * load.choices, calls=2)  # bytes of a choice: its gate in fp32, its expert's place in int64
        back = (gather(4 * load.width), sums(load.width + load.choices, calls=2))  # sums: gradients of tokens and of gates
        return Traffic((longest, decisions), (gather(load.row_bytes), sums(load.width)), back)

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        return Gathered.over(("ep",), mesh, sizes)


class Gathered(Exchange):
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        import torch

        from moe.experts.dispatch.network import compute
        from parallel.mesh.collectives import max_over, reduce_scatter
        from parallel.mesh.host import on_device

        tokens, choices = routing.expert_TK.shape  # if experts choose, K differs between ranks, so all pad to the largest K
        longest, most = max_over(on_device(torch.tensor([tokens, choices]), x_TD.device), self.axis).tolist()
        x_AD = self.gathered(x_TD, longest)
        gate_AK = self.gathered(routing.gate_TK, longest, wider=most - choices)
        place_AK = self.gathered(self._places(routing), longest, wider=most - choices)
        plan = self._plan_held(place_AK, held=routing.probs_TE.shape[1] // self.axis.size)
        plan = plan.cut(int(plan.counts_E.sum()))  # this rank computes only few of the rows
        position_R = None if dropout is None else self.gathered(dropout.position_T, longest)[plan.token_R]
        rows_RD = self.kernels.permute(x_AD, plan)
        out_RD = compute(rows_RD, experts, etp=self.etp, counts_E=plan.counts_E, position_R=position_R, dropout=dropout)
        partial_AD = self.kernels.combine(out_RD.float(), gate_AK, plan)
        return reduce_scatter(partial_AD, self.axis)[:tokens].to(x_TD.dtype)

    def gathered(self, values_T: Tensor, longest: int, *, wider: int = 0) -> Tensor:
        """Return values [A, ...] of all ranks, each padded to `longest` tokens and by `wider` zeros in its last dim."""
        import torch.nn.functional as F

        from parallel.mesh.collectives import all_gather

        lacks = longest - len(values_T)
        missing = (0, wider, 0, lacks) if values_T.ndim > 1 else (0, lacks)
        return all_gather(F.pad(values_T, missing) if any(missing) else values_T, self.axis)

    def _places(self, routing: Routing) -> Tensor:
        """Return [T, K]: 1 + the place of each choice's expert (placement.py), or 0 for a dropped choice, as for padding."""
        from moe.experts.dispatch.placement import place_of

        place_TK = place_of(routing.expert_TK, num_experts=routing.probs_TE.shape[1], placement=self.placement)
        return (place_TK + 1).where(routing.kept_TK, 0)

    def _plan_held(self, place_AK: Tensor, *, held: int) -> Plan:
        here_AK = place_AK - 1 - self.axis.index * held
        kept_AK = (place_AK > 0) & (here_AK >= 0) & (here_AK < held)
        plan: Plan = self.kernels.plan(here_AK.clamp(0, held - 1), kept_AK, num_experts=held)
        return plan
