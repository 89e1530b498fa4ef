"""Losses that keep experts evenly used, as pure functions of a routing; all in fp32.

    balance = E * sum_e f_e P_e     f_e: share of choices for e, before dropping, over all k choices, no gradient
                                    P_e: mean router probability of e            (Switch, arXiv 2101.03961, eq. 4-6)
    z       = mean_t logsumexp(logits_t)^2                                       (ST-MoE, arXiv 2202.08906, eq. 5)

The balance loss is 1 when all is even, whatever k is. It is taken per capacity group and averaged over groups, so that
its value and gradient do not depend on how groups are spread over ranks and micro-batches. Layers are summed.
`join` puts a loss into the backward pass where it arises, so that it needs no global list and crosses pipeline stages.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

# T tokens, K choices, E experts, G groups, S tokens of a group


def balance_loss(probs_TE: Tensor, expert_TK: Tensor, *, num_groups: int) -> Tensor:
    """Scalar fp32; gradient through probs only."""
    num_experts = probs_TE.shape[1]
    chosen_GE = count_choices(expert_TK, num_groups=num_groups, num_experts=num_experts)
    f_GE = chosen_GE.float() * (num_groups / expert_TK.numel())
    p_GE = rearrange(probs_TE.float(), "(g s) e -> g s e", g=num_groups).mean(1)
    return num_experts * (f_GE * p_GE).sum(1).mean()


def count_choices(expert_TK: Tensor, *, num_groups: int, num_experts: int) -> Tensor:
    """Choices of each expert in each group, before dropping: int64 [G, E]."""
    group_T = torch.arange(expert_TK.shape[0], device=expert_TK.device) // (expert_TK.shape[0] // num_groups)
    key_TK = group_T.unsqueeze(1) * num_experts + expert_TK
    return torch.bincount(key_TK.flatten(), minlength=num_groups * num_experts).view(num_groups, num_experts)


def z_loss(logits_TE: Tensor) -> Tensor:
    """Scalar fp32."""
    return torch.logsumexp(logits_TE.float(), dim=-1).square().mean()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.like, ctx.scale), None


def join(x: Tensor, loss: Tensor, *, scale: float) -> Tensor:
    """x unchanged; backward adds the gradient of scale * loss, as if it stood in the final loss."""
    out: Tensor = _Join.apply(x, loss, scale)
    return out
