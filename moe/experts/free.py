"""Free experts: skip experts return the token, zero experts return zero, so a router can spend less on easy tokens.

    indices    0 .. E-1 experts    E .. E+S-1 skip    then zero            y = sum over chosen experts of g E(x)  +  (sum over skips of g) x

The router treats them like other experts: in scores, capacity, losses, loads and selection bias. Their choices are not dispatched.
Source: LongCat-Flash (arXiv 2509.01322, section 2.1); MoE++ (arXiv 2410.07348) calls them copy and zero experts.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe.router.router import Routing

# T tokens, K choices, E experts


def of_experts(routing: Routing, num_experts: int) -> Routing:
    """Return the routing for the dispatcher: choices of free experts count as dropped."""
    real_TK = routing.expert_TK < num_experts
    return replace(
        routing,
        expert_TK=routing.expert_TK.clamp(max=num_experts - 1),
        kept_TK=routing.kept_TK & real_TK,
        probs_TE=routing.probs_TE[:, :num_experts],
    )


def skipped(x_TD: Tensor, routing: Routing, num_experts: int, *, skip: int) -> Tensor:
    """Return the skip experts' output: fp32 [T, D]."""
    skip_TK = (routing.expert_TK >= num_experts) & (routing.expert_TK < num_experts + skip) & routing.kept_TK
    return x_TD.float() * (routing.gate_TK * skip_TK).sum(1, keepdim=True)
