"""No dispatch: this rank holds all experts, so one fused kernel call permutes, computes the experts and combines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.experts.dispatch.dispatcher import Exchange

if TYPE_CHECKING:
    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.experts import Experts
    from moe.router.router import Routing


class Local(Exchange):
    """The exchange of a rank that holds all experts, whatever the recipe's dispatcher."""

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        from moe.experts.experts import Routed

        plan = experts.kernels.plan(routing.expert_TK, routing.kept_TK, num_experts=routing.probs_TE.shape[1])
        dropped_RF = None if dropout is None else dropout.scale(dropout.position_T[plan.token_R])
        out: Tensor = experts(x_TD, counts=Routed(routing.gate_TK, plan), dropped_RF=dropped_RF)
        return out
