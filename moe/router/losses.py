"""Losses that keep experts evenly used, or logits small (z), as pure functions of a routing, in fp32. Tokens with `valid_T`
False (padding) do not count.

    balance    = E * sum_e f_e P_e, or a user's function of f and P (moe/router/own.py)
                                        f_e: share of the choices that went to e, before dropping, no gradient
                                        P_e: mean router probability of e            (Switch, arXiv 2101.03961, eq. 4-6)
    importance = CV^2 of the experts' summed gates: variance / mean^2                (Shazeer et al., arXiv 1701.06538, eq. 6-7)
    load       = CV^2 of the experts' expected loads: sum_t P(token t chooses e)     (the same paper, eq. 8-11; moe/router/scores.py)
    z          = mean_t logsumexp(logits_t)^2                                        (ST-MoE, arXiv 2202.08906, eq. 5)

A loss over the global batch is not a sum of losses of its micro-batches and ranks. So each micro-batch of each rank gets the means over
the whole step (`StepMeans`). Each micro-batch then computes its share of the gradient, and the mean of all micro-batches' losses is the
step's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

# T tokens, K choices, E experts, G groups, S tokens of a group

Mask = Tensor | None  # bool, True for the tokens or choices that count; None: all do
Own = Callable[[Tensor, Tensor], Tensor]  # a user's balance loss: (f_GE, P_GE) -> a loss for each group [G]


def _unchanged(sums: Tensor) -> Tensor:
    return sums


def balance_loss(
    probs_TE: Tensor,
    expert_TK: Tensor,
    *,
    num_groups: int = 1,
    valid_T: Mask = None,
    counted_TK: Mask = None,
    step: StepMeans | None = None,
    group_T: Tensor | None = None,
    summed: Callable[[Tensor], Tensor] = _unchanged,
) -> Tensor:
    """Return the balance loss, scalar fp32, with gradient to `probs_TE` only. With `step`, the shares of choices f_e are the whole step's.
    `num_groups`: number of groups of consecutive tokens. Result: mean of the groups' losses, weighted by their numbers of valid tokens.

    `group_T` int64: number of each token's group, if groups have tokens on other ranks too; `summed` sums counts, fp32 [G, E], over these
    ranks. The result is then this rank's part: the loss is the mean of the parts, weighted by the ranks' numbers of valid tokens.
    """
    num_experts = probs_TE.shape[1]
    if step is not None:
        return num_experts * (step.share_E * group_means(probs_TE, num_groups=1, valid_T=valid_T)[0]).sum()
    which = {"valid_T": valid_T, "counted_TK": counted_TK, "group_T": group_T}
    chosen_GE = summed(count_choices(expert_TK, num_groups=num_groups, num_experts=num_experts, **which).float())
    f_GE = chosen_GE / chosen_GE.sum(1, keepdim=True).clamp(min=1)
    if group_T is not None:
        return num_experts * mean_over_tokens((f_GE[group_T] * probs_TE).sum(1), valid_T=valid_T)
    p_GE = group_means(probs_TE, num_groups=num_groups, valid_T=valid_T)
    return num_experts * _weighted((f_GE * p_GE).sum(1), valid_T)


def own_balance_loss(
    probs_TE: Tensor,
    expert_TK: Tensor,
    *,
    own: Own,
    num_groups: int = 1,
    valid_T: Mask = None,
    counted_TK: Mask = None,
    step: StepMeans | None = None,
    group_T: Tensor | None = None,
    summed: Callable[[Tensor], Tensor] = _unchanged,
) -> Tensor:
    """Return the user's balance loss, scalar fp32, with gradient to `probs_TE` only. Arguments and result: as of `balance_loss`, but
    `summed` gets fp32 [G, 2 E + 1], and with `step` the value is the whole step's, and the gradient this rank's and micro-batch's share.

    A token's gradient is its group's gradient by the mean P / the group's tokens. So `own` may be any function of whole groups' f and P,
    and each rank needs only its own tokens' probabilities. A group without tokens counts as even.
    """
    num_experts = probs_TE.shape[1]
    if step is not None:
        assert step.prob_E is not None
        group_T, f_GE, p_GE = torch.zeros_like(expert_TK[:, 0]), step.share_E.unsqueeze(0), step.prob_E.unsqueeze(0)
    else:
        which = {"valid_T": valid_T, "counted_TK": counted_TK, "group_T": group_T}
        count_GE = count_choices(expert_TK, num_groups=num_groups, num_experts=num_experts, **which).float()
        if group_T is None:
            group_T = torch.arange(len(expert_TK), device=expert_TK.device) // max(1, len(expert_TK) // num_groups)
        mine_GT = _masked(torch.nn.functional.one_hot(group_T, num_groups).float(), valid_T).t()
        sums = summed(torch.cat((count_GE, mine_GT @ probs_TE.detach().float(), mine_GT.sum(1, keepdim=True)), 1))
        count_GE, prob_GE, tokens_G1 = sums.split((num_experts, num_experts, 1), 1)
        f_GE, p_GE = count_GE / count_GE.sum(1, keepdim=True).clamp(min=1), prob_GE / tokens_G1.clamp(min=1)
        f_GE, p_GE = (torch.where(tokens_G1 > 0, x_GE, 1 / num_experts) for x_GE in (f_GE, p_GE))
    if not (torch.is_grad_enabled() and probs_TE.requires_grad):
        return mean_over_tokens(own(f_GE, p_GE).float()[group_T], valid_T=valid_T)
    p_GE = p_GE.detach().requires_grad_()
    loss_G = own(f_GE, p_GE).float()
    (slope_GE,) = torch.autograd.grad(loss_G.sum(), p_GE)
    loss_T = loss_G.detach()[group_T] + (slope_GE[group_T] * (probs_TE - probs_TE.detach())).sum(1)
    return mean_over_tokens(loss_T, valid_T=valid_T)


def importance_loss(gate_TE: Tensor, *, num_groups: int = 1, valid_T: Mask = None, step: StepMeans | None = None) -> Tensor:
    """Return the importance loss, scalar fp32, of gates [T, E] (`spread_gates`). num_groups: as in `balance_loss`.
    With `step`, the value is the whole step's, and the gradient is this rank's and micro-batch's share of it.
    """
    if step is None:
        return _weighted(cv_squared(group_means(gate_TE, num_groups=num_groups, valid_T=valid_T)), valid_T)
    mean_E = group_means(gate_TE, num_groups=1, valid_T=valid_T)[0]
    return cv_squared(step.gate_E + (mean_E - mean_E.detach()))


def load_loss(chance_TE: Tensor, *, num_groups: int = 1, valid_T: Mask = None, step: StepMeans | None = None) -> Tensor:
    """Return the load loss, scalar fp32, of each expert's probability of being chosen [T, E]. With `step`,
    the value is the whole step's, and the gradient is this rank's and micro-batch's share of it."""
    if step is None or step.chance_E is None:
        return importance_loss(chance_TE, num_groups=num_groups, valid_T=valid_T)
    return importance_loss(chance_TE, valid_T=valid_T, step=replace(step, gate_E=step.chance_E))


def z_loss(logits_TE: Tensor, *, valid_T: Mask = None) -> Tensor:
    return mean_over_tokens(torch.logsumexp(logits_TE.float(), dim=-1).square(), valid_T=valid_T)


@dataclass(frozen=True)
class StepMeans:
    """One layer's means over the whole step, fp32 [E]: `share_E` each expert's share of all counted choices, `gate_E` its mean gate over
    all tokens, `chance_E` its mean probability of being chosen (None without a load loss), `prob_E` its mean router probability (None
    without a user's balance loss).
    """

    share_E: Tensor
    gate_E: Tensor
    chance_E: Tensor | None = None
    prob_E: Tensor | None = None


def step_means(
    expert_TK: Tensor,
    gate_TE: Tensor | None,
    *,
    num_experts: int,
    valid_T: Mask = None,
    counted_TK: Mask = None,
    chance_TE: Tensor | None = None,
    probs_TE: Tensor | None = None,
    whole: Callable[[Tensor], Tensor],
) -> StepMeans:
    """Return the means over the step. Tensors are of one micro-batch of this rank. gate_TE: None if gate_E is to be 0. chance_TE: each
    expert's probability of being chosen; None without a load loss. probs_TE: router probabilities; None without a user's balance loss.
    `whole` sums a float64 tensor (`size_of_sums`) over all ranks and micro-batches of the step."""
    count_GE = count_choices(expert_TK, num_groups=1, num_experts=num_experts, valid_T=valid_T, counted_TK=counted_TK)
    count_E = count_GE[0].double()
    gate_E = torch.zeros_like(count_E) if gate_TE is None else _masked(gate_TE.detach(), valid_T).double().sum(0)
    tokens = count_E.new_full((1,), len(expert_TK)) if valid_T is None else valid_T.sum().double().reshape(1)
    more = [None if x_TE is None else _masked(x_TE.detach(), valid_T).double().sum(0) for x_TE in (chance_TE, probs_TE)]
    sums = whole(torch.cat((count_E, gate_E, tokens, *(x_E for x_E in more if x_E is not None))))
    sizes = [0 if x_E is None else num_experts for x_E in more]
    count_E, gate_E, tokens, *found = sums.split((num_experts, num_experts, 1, *sizes))
    of_token = tokens.clamp(min=1)
    means = [(x_E / of_token).float() if size else None for x_E, size in zip(found, sizes, strict=True)]
    return StepMeans((count_E / count_E.sum().clamp(min=1)).float(), (gate_E / of_token).float(), *means)


def size_of_sums(num_experts: int, *, chances: bool = False, probabilities: bool = False) -> int:
    """Return the number of elements of one layer's tensor that `step_means` sums over ranks. `chances`: whether there is a load loss.
    `probabilities`: whether there is a user's balance loss."""
    return (2 + chances + probabilities) * num_experts + 1


def count_choices(
    expert_TK: Tensor,
    *,
    num_groups: int,
    num_experts: int,
    valid_T: Mask = None,
    counted_TK: Mask = None,
    group_T: Tensor | None = None,
) -> Tensor:
    """Count the choices of each expert in each group, before dropping: int64 [G, E]. Choices with valid_T or counted_TK False do not
    count. `group_T` int64: group of each token; None: groups are consecutive and have equal sizes."""
    if group_T is None:
        group_T = torch.arange(expert_TK.shape[0], device=expert_TK.device) // (expert_TK.shape[0] // num_groups)
    key_TK = group_T.unsqueeze(1) * num_experts + expert_TK
    bins = num_groups * num_experts
    for mask in (None if valid_T is None else valid_T.unsqueeze(1), counted_TK):
        if mask is not None:
            key_TK = torch.where(mask, key_TK, bins)
    key_N = key_TK.flatten()
    if key_N.is_cuda:  # on a GPU bincount makes the host wait twice, for the least and the largest key
        counts = key_N.new_zeros(bins + 1).scatter_add_(0, key_N, torch.ones_like(key_N))
    else:
        counts = torch.bincount(key_N, minlength=bins + 1)
    return counts[:bins].view(num_groups, num_experts)


def spread_gates(gate_TK: Tensor, expert_TK: Tensor, *, num_experts: int) -> Tensor:
    """Return each token's gates at the experts that it chose, and 0 elsewhere: fp32 [T, E]."""
    return gate_TK.new_zeros((len(gate_TK), num_experts), dtype=torch.float32).scatter(1, expert_TK, gate_TK.float())


def group_means(x_TE: Tensor, *, num_groups: int, valid_T: Mask = None) -> Tensor:
    """Return the means over the valid tokens of each group: fp32 [G, E]. A group without valid tokens has mean 0."""
    x_GSE = rearrange(_masked(x_TE.float(), valid_T), "(g s) e -> g s e", g=num_groups)
    if valid_T is None and len(x_TE):
        return x_GSE.mean(1)
    return x_GSE.sum(1) / (1 if valid_T is None else valid_T.view(num_groups, -1, 1).sum(1).clamp(min=1))


def mean_over_tokens(x_T: Tensor, *, valid_T: Mask = None) -> Tensor:
    return group_means(x_T.unsqueeze(1), num_groups=1, valid_T=valid_T)[0, 0]


def cv_squared(x: Tensor) -> Tensor:
    """Return the squared coefficient of variation along the last dim: population variance / mean^2. Rows of zeros give 0."""
    return x.var(-1, correction=0) / x.mean(-1).square().clamp(min=1e-20)


def _weighted(x_G: Tensor, valid_T: Mask) -> Tensor:
    """Return the mean over groups, weighted by their numbers of valid tokens."""
    if valid_T is None:
        return x_G.mean()
    tokens_G = valid_T.view(len(x_G), -1).sum(1)
    return (x_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


def _masked(x_TE: Tensor, valid_T: Mask) -> Tensor:
    return x_TE if valid_T is None else x_TE.masked_fill(~valid_T.unsqueeze(1), 0.0)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if isinstance(ctx.scale, Tensor):
            return grad, ctx.scale.to(ctx.like.dtype).expand_as(ctx.like), None
        return grad, torch.full_like(ctx.like, ctx.scale), None


def join(x: Tensor, loss: Tensor, *, scale: float | Tensor) -> Tensor:
    """Return x unchanged; backward adds the gradient of scale * loss, as if this term were part of the final loss."""
    out: Tensor = _Join.apply(x, loss, scale)
    return out


def updated_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """Return bias + rate * sign(mean load - load), [E], for experts chosen load_E times (integers) in the global batch, before dropping."""
    return bias_E + rate * (load_E.sum() - load_E * len(load_E)).sign().to(bias_E.dtype)
