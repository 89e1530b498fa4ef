"""Every rank gathers the tokens of the whole axis and computes the rows of its own experts.

    x_TD, experts, gates --all-gather over ep--> tokens of all ranks --own experts' rows--> partial sums, fp32 --reduce-scatter--> y_TD

No rows are sorted for sending and no counts are exchanged. But each token is sent (ep - 1) times; the all-to-all sends it
k (ep - 1) / ep times. So this is for ep of at most about k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts.dispatch.base import Dropout, Network, place_of, whole
from moe.experts.experts import Experts
from moe.kernels import Plan, choose
from moe.router.router import Routing
from parallel.mesh.collectives import all_gather, max_over, reduce_scatter
from parallel.mesh.mesh import Axis

# T tokens here, A tokens of all ranks (each padded to the longest), D model, K choices, E experts


class AllGather:
    """Dispatcher: all-gather of tokens over `axis` (ep), reduce-scatter of results."""

    def __init__(self, axis: Axis, kernels: str = "auto", *, network: Network = whole, placement: tuple[int, ...] | None = None) -> None:
        self.axis, self.network, self.placement = axis, network, placement
        self.kernels = choose(kernels)

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        tokens, choices = routing.expert_TK.shape  # with expert choice, K can differ between ranks
        longest, most = max_over(torch.tensor([tokens, choices], device=x_TD.device), self.axis).tolist()

        def gathered(values: Tensor, *, wider: int = 0) -> Tensor:
            missing = (0, wider, 0, longest - tokens) if values.ndim > 1 else (0, longest - tokens)
            return all_gather(F.pad(values, missing) if any(missing) else values, self.axis)

        x_AD, gate_AK = gathered(x_TD), gathered(routing.gate_TK, wider=most - choices)
        plan = self._plan_held(gathered(self._places(routing), wider=most - choices), held=len(experts.held))
        position_R = None if dropout is None else gathered(dropout.position_T)[plan.token_R]
        rows_RD, counts = self.kernels.permute(x_AD, plan), plan.counts_E.tolist()
        out_RD = self.network(rows_RD, experts, counts=counts, position_R=position_R, dropout=dropout)
        partial_AD = self.kernels.combine(out_RD.float(), gate_AK, plan)
        return reduce_scatter(partial_AD, self.axis)[:tokens].to(x_TD.dtype)

    def _places(self, routing: Routing) -> Tensor:
        """Return each choice's place + 1. 0 means dropped, or padding of ranks with fewer tokens."""
        place_TK = place_of(routing.expert_TK, num_experts=routing.probs_TE.shape[1], placement=self.placement)
        return torch.where(routing.kept_TK, place_TK + 1, 0)

    def _plan_held(self, place_AK: Tensor, *, held: int) -> Plan:
        here_AK = place_AK - 1 - self.axis.index * held
        kept_AK = (place_AK > 0) & (here_AK >= 0) & (here_AK < held)
        plan: Plan = self.kernels.plan(here_AK.clamp(0, held - 1), kept_AK, num_experts=held)
        return plan
