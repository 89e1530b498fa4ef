"""Choices that cost nothing: skip experts give a token back as it is, zero experts give nothing (LongCat-Flash, arXiv 2509.01322, section
2.1; MoE++, arXiv 2410.07348, where they are copy and zero experts). So a router spends less on easy tokens.

    numbers    0 .. E-1 experts    E .. E+S-1 skip    then zero            y = sum over chosen experts of g E(x)  +  (sum over skips of g) x

To the router they are experts like any other: in scores, capacity, losses, loads and selection bias. Nothing of them travels.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe.router.router import Routing

# T tokens, K choices, E experts


def of_experts(routing: Routing, num_experts: int) -> Routing:
    """The same choices for those who run the experts: of others none has a slot."""
    real_TK = routing.expert_TK < num_experts
    return replace(
        routing,
        expert_TK=routing.expert_TK.clamp(max=num_experts - 1),
        kept_TK=routing.kept_TK & real_TK,
        probs_TE=routing.probs_TE[:, :num_experts],
    )


def skipped(x_TD: Tensor, routing: Routing, num_experts: int, *, skip: int) -> Tensor:
    """What skip experts give: fp32 [T, D]."""
    back_TK = (routing.expert_TK >= num_experts) & (routing.expert_TK < num_experts + skip) & routing.kept_TK
    return x_TD.float() * (routing.gate_TK * back_TK).sum(1, keepdim=True)
