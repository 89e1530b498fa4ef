"""The steps of a router after its logits, in two kernels: scores, choice of experts, gates, and the sums for losses and logged values. A
third kernel computes the gradient.

    choose     blocks of tokens    logits -> scores -> the K best -> gates;  of each block: sums of probabilities, choices, z loss, entropy
    finish     one program         these sums, in the order of the blocks -> balance loss, z loss, entropy, load of experts, drops
               (between the two, ranks that share a group of tokens sum its counts, or exchange its choices if experts have a capacity)
    backward   blocks of tokens    gradients of gates and loss -> gradient of the logits, with the scores computed again

The formulas are those in moe/router/scores.py and moe/router/losses.py, in fp32. `Router._fuses` decides which routers use these kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.triton.device import on
from moe.kernels.triton.moves import best

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, W = max(E, 4), K choices of a token (the argument `choices`), G groups, B blocks of a group's tokens

_PROGRAMS = 256  # programs of `choose`, about two for each multiprocessor; `finish` reads the sums of each
_TINY = 1e-20  # least sum of a token's scores; moe/router/scores.py has the same value
_LEAST = torch.finfo(torch.float32).tiny  # smaller probabilities are raised to this value before their logarithm
_ELEMENTS = 1024  # elements of each tensor in a block: 8 for each thread
TINY, LEAST = tl.constexpr(_TINY), tl.constexpr(_LEAST)


class Fused(NamedTuple):
    """Results for T tokens. `expert_TK` int64: chosen experts. `gate_TK` fp32, with gradient. `loss` fp32, with gradient: the weighted
    balance and z losses. `probs_TE` fp32, without gradient: rows sum to 1. `means` fp32 [5]: balance loss, 0, 0, z loss, entropy (these
    kernels do not compute the importance and load losses). `counts` int64 [E + 2]: number of choices of each expert before dropping, then
    the numbers of kept and of dropped choices. `load_TK` int64: experts that the balance loss counts; None: it counts the chosen ones.
    """

    expert_TK: Tensor
    gate_TK: Tensor
    probs_TE: Tensor
    loss: Tensor
    means: Tensor
    counts: Tensor
    load_TK: Tensor | None


class Given(NamedTuple):
    """Inputs of a router in addition to its logits. `num_groups`: number of groups of tokens. `slots`: slots of an expert in a group of
    tokens; None if dropless. `bias_E` fp32 is added to the scores that are compared. `valid_T` bool: False for padding, which is not
    counted. `open_groups`: (number of groups of experts from which a token chooses, number of all groups of experts). `expert_TK`
    int64: experts that were chosen before; None: the kernel chooses. `load_TK` int64: experts that the balance loss counts; None: the
    chosen ones. `exchange`: None unless other ranks have tokens of the same groups of tokens. exchange(this rank's choices, int64 [T, K];
    counts of each block of tokens, fp32 [G, B, E]) returns a Together. Each loss is then this rank's part of the loss over all ranks
    (moe/router/losses.py).
    """

    num_groups: int
    slots: int | None
    bias_E: Tensor | None
    valid_T: Tensor | None
    open_groups: tuple[int, int] = (1, 1)
    expert_TK: Tensor | None = None
    load_TK: Tensor | None = None
    exchange: Callable[[Tensor, Tensor], Together] | None = None


class Together(NamedTuple):
    """Results of an exchange between ranks that share groups of tokens. `counted_GE` fp32 or int32: each expert's count for the balance
    loss, over all ranks' tokens; None: the kernel counts this rank's tokens. `kept_TK` bool: whether each of this rank's choices got a
    slot; None: without a capacity."""

    counted_GE: Tensor | None = None
    kept_TK: Tensor | None = None


@triton.jit
def _softmax(logit_TE, real_E):
    """Return the softmax of each token's logits, and the logits' log-sum-exp. real_E: False for columns beyond E."""
    most_T = tl.max(tl.where(real_E[None, :], logit_TE, float("-inf")), axis=1)
    grown_TE = tl.where(real_E[None, :], tl.exp(logit_TE - most_T[:, None]), 0.0)
    sum_T = tl.sum(grown_TE, axis=1)
    return grown_TE / sum_T[:, None], most_T + tl.log(sum_T)


@triton.jit
def _sigmoid(logit_TE, real_E):
    return tl.where(real_E[None, :], 1.0 / (1.0 + tl.exp(-logit_TE)), 0.0)


@triton.jit
def _scores(logit_TE, real_E, SIGMOID: tl.constexpr):
    """Return the scores, the scores normalized to sum to 1, and the logarithm of the sum of the logits' exponentials."""
    prob_TE, logsum_T = _softmax(logit_TE, real_E)
    score_TE = prob_TE
    if SIGMOID:
        score_TE = _sigmoid(logit_TE, real_E)
        prob_TE = score_TE / tl.maximum(tl.sum(score_TE, axis=1), TINY)[:, None]
    return score_TE, prob_TE, logsum_T


@triton.jit
def _counted(valid, token_T, here_T):
    """Return a mask of the tokens that exist (`here_T`) and are not padding."""
    counts_T = here_T
    if valid is not None:
        counts_T = here_T & (tl.load(valid + token_T, mask=here_T, other=0) != 0)
    return counts_T


@triton.jit
def _log_score(logit_TE, SIGMOID: tl.constexpr):
    """Return the logarithms of the scores. For softmax scores, return the logits instead: they differ by one constant per token, which
    cancels in NORMED gates."""
    if SIGMOID:
        return tl.minimum(logit_TE, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(logit_TE)))
    else:
        return logit_TE


@triton.jit
def _in_best_groups(prefer_TE, real_TE, expert_E, E, OPEN: tl.constexpr, GROUPS: tl.constexpr, BEST: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return a mask of the experts in the OPEN best of GROUPS groups of experts. A group's score is the sum of its BEST (1 or 2) highest
    scores in prefer_TE. real_TE: False for columns beyond E."""
    group_E, group_G = expert_E // (E // GROUPS), tl.arange(0, BLOCK_G)
    zero_TG = tl.zeros((prefer_TE.shape[0], BLOCK_G), tl.float32)
    sum_TG, left_TG, open_TE = zero_TG, (group_G < GROUPS)[None, :] & (zero_TG == 0), real_TE & (group_E < 0)[None, :]
    for group in range(GROUPS):
        left_TE = real_TE & (group_E == group)[None, :]
        for _ in range(BEST):
            mine_TE = expert_E[None, :] == best(prefer_TE, left_TE, expert_E)[:, None]
            sum_T = tl.sum(tl.where(mine_TE, prefer_TE, 0.0), axis=1)
            sum_TG += tl.where(group_G[None, :] == group, sum_T[:, None], 0.0)
            left_TE = left_TE & (mine_TE == 0)
    for _ in range(OPEN):
        best_T = best(sum_TG, left_TG, group_G)
        left_TG = left_TG & (group_G[None, :] != best_T[:, None])
        open_TE = open_TE | (real_TE & (group_E[None, :] == best_T[:, None]))
    return open_TE


@triton.jit(do_not_specialize=["tokens", "each"])
def choose(logits, bias, valid, given, load, expert, gate, probs, parts, tokens, each, E, W, choices, counted, SIGMOID: tl.constexpr,
           CHOSEN: tl.constexpr, NORMED: tl.constexpr, SCALE: tl.constexpr, OPEN: tl.constexpr, GROUPS: tl.constexpr, BEST: tl.constexpr,
           BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Route one block of `each` tokens. All G groups of tokens have `tokens` tokens, cut into B blocks.

    bias     [E], added to the compared scores
    given    [T, K], experts chosen before; None: choose them from the OPEN best of GROUPS groups of experts
    load     [T, K], experts that the balance loss counts: the ones with the highest scores without bias. Written if `given` is None, else
             read. None: the loss counts the chosen experts
    CHOSEN   compare logits instead of scores, because the softmax is over the chosen experts only
    NORMED   gates sum to SCALE

    Write four rows of sums over the block's tokens to parts [G, B, 4, W]. Rows 0 to 2 have one number for each expert: the sum of its
    probabilities; how often it was chosen; how often the balance loss counts it, among the first `counted` experts of each token.
    Row 3: z loss, entropy and number of tokens.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    expert_E, choice_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    real_E, end = expert_E < E, tl.minimum((block + 1) * each, tokens)
    zero_E, zero_T = tl.zeros((BLOCK_E,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    prob_E, load_E, counted_E, z_T, entropy_T, number_T = zero_E, zero_E, zero_E, zero_T, zero_T, zero_T
    for begin in range(block * each, end, BLOCK_T):
        place_T = begin + tl.arange(0, BLOCK_T)
        here_T, token_T = place_T < end, group.to(tl.int64) * tokens + place_T
        here_TE = here_T[:, None] & real_E[None, :]
        at_TE = token_T[:, None] * E + expert_E[None, :]
        logit_TE = tl.load(logits + at_TE, mask=here_TE, other=0.0).to(tl.float32)
        score_TE, prob_TE, logsum_T = _scores(logit_TE, real_E, SIGMOID)
        tl.store(probs + at_TE, prob_TE, mask=here_TE)
        counts_T = _counted(valid, token_T, here_T)
        prob_E += tl.sum(tl.where(counts_T[:, None], prob_TE, 0.0), axis=0)
        z_T += tl.where(counts_T, logsum_T * logsum_T, 0.0)
        entropy_T -= tl.where(counts_T, tl.sum(prob_TE * tl.log(tl.maximum(prob_TE, LEAST)), axis=1), 0.0)
        number_T += counts_T.to(tl.float32)
        prefer_TE = logit_TE if CHOSEN else score_TE
        if bias is not None:
            prefer_TE += tl.load(bias + expert_E, mask=real_E, other=0.0)[None, :]
        value_TE = _log_score(logit_TE, SIGMOID) if NORMED else score_TE
        open_TE = real_E[None, :] & (place_T >= 0)[:, None]
        left_TE = open_TE
        if GROUPS > 1 and given is None:
            open_TE = _in_best_groups(prefer_TE, open_TE, expert_E, E, OPEN, GROUPS, BEST, BLOCK_G)
        value_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        for k in range(choices):
            if given is None:
                best_T = best(prefer_TE, open_TE, expert_E)
                tl.store(expert + token_T * choices + k, best_T.to(tl.int64), mask=here_T)
            else:
                best_T = tl.load(given + token_T * choices + k, mask=here_T, other=0).to(tl.int32)
            mine_TE = expert_E[None, :] == best_T[:, None]
            open_TE = open_TE & (expert_E[None, :] != best_T[:, None])
            value_T = tl.sum(tl.where(mine_TE, value_TE, 0.0), axis=1)
            value_TK = tl.where(choice_K[None, :] == k, value_T[:, None], value_TK)
            chosen_E = tl.sum((mine_TE & counts_T[:, None]).to(tl.float32), axis=0)
            load_E += chosen_E
            if load is not None:
                if given is None:
                    load_T = best(score_TE, left_TE, expert_E)
                    left_TE = left_TE & (expert_E[None, :] != load_T[:, None])
                    tl.store(load + token_T * choices + k, load_T.to(tl.int64), mask=here_T)
                else:
                    load_T = tl.load(load + token_T * choices + k, mask=here_T, other=0).to(tl.int32)
                mine_TE = expert_E[None, :] == load_T[:, None]
                chosen_E = tl.sum((mine_TE & counts_T[:, None]).to(tl.float32), axis=0)
            counted_E += tl.where(k < counted, chosen_E, 0.0)
        real_K = choice_K < choices
        if NORMED:
            value_TK, _ = _softmax(value_TK, real_K)
        at_TK = gate + token_T[:, None] * choices + choice_K[None, :]
        tl.store(at_TK, value_TK * SCALE, mask=here_T[:, None] & real_K[None, :])
    at = parts + (group.to(tl.int64) * tl.num_programs(0) + block) * 4 * W + expert_E
    tl.store(at, prob_E, mask=expert_E < W)
    tl.store(at + W, load_E, mask=expert_E < W)
    tl.store(at + 2 * W, counted_E, mask=expert_E < W)
    last_E = tl.where(expert_E == 0, tl.sum(z_T, axis=0), tl.where(expert_E == 1, tl.sum(entropy_T, axis=0), tl.sum(number_T, axis=0)))
    tl.store(at + 3 * W, last_E, mask=expert_E < W)


@triton.jit(do_not_specialize=["G", "B", "slots", "stride", "N"])
def finish(parts, counted, kept, share, loss, means, counts, G, B, E, W, slots, stride, N, BALANCE: tl.constexpr, Z: tl.constexpr,
           BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Add up `parts`, the sums that `choose` wrote. For each group of tokens, write into share [G, E] the fraction of the group's counted
    choices that each expert got, times E. Also write the fields loss, counts and means of Fused. `means` has a sixth number here: the
    number of tokens (at least 1). `counted`: counted_GE of Together, with rows `stride` elements apart. `kept`: kept_TK of Together, with
    N elements. BALANCE, Z: weights of the losses. `slots`: number of an expert's slots in a group.
    """
    expert_E = tl.arange(0, BLOCK_E)
    zero_E, load_E = tl.zeros((BLOCK_E,), tl.float32), tl.zeros((BLOCK_E,), tl.int64)
    kept_E, last_E, balance_E = load_E, zero_E, zero_E
    for group in range(G):
        prob_E, group_E, counted_E = zero_E, zero_E, zero_E
        for first in range(0, B, BLOCK_B):
            block_B = first + tl.arange(0, BLOCK_B)
            at_BE = parts + (group * B + block_B)[:, None] * 4 * W + expert_E[None, :]
            mask_BE = (block_B < B)[:, None] & (expert_E < W)[None, :]
            prob_E += tl.sum(tl.load(at_BE, mask=mask_BE, other=0.0), axis=0)
            group_E += tl.sum(tl.load(at_BE + W, mask=mask_BE, other=0.0), axis=0)
            counted_E += tl.sum(tl.load(at_BE + 2 * W, mask=mask_BE, other=0.0), axis=0)
            last_E += tl.sum(tl.load(at_BE + 3 * W, mask=mask_BE, other=0.0), axis=0)
        if counted is not None:
            counted_E = tl.load(counted + group * stride + expert_E, mask=expert_E < E, other=0).to(tl.float32)
        share_E = counted_E * E / tl.maximum(tl.sum(counted_E, axis=0), 1.0)
        tl.store(share + group * E + expert_E, share_E, mask=expert_E < E)
        balance_E += share_E * prob_E
        load_E += group_E.to(tl.int64)
        kept_E += tl.minimum(group_E, slots.to(tl.float32)).to(tl.int64)
    number = tl.maximum(tl.sum(tl.where(expert_E == 2, last_E, 0.0), axis=0), 1.0)
    z = tl.sum(tl.where(expert_E == 0, last_E, 0.0), axis=0) / number
    entropy = tl.sum(tl.where(expert_E == 1, last_E, 0.0), axis=0) / number
    balance, slotted = tl.sum(balance_E, axis=0) / number, tl.sum(kept_E, axis=0)
    if kept is not None:
        place_N, kept_N = tl.arange(0, 4096), tl.zeros((4096,), tl.int32)
        for first in range(0, N, 4096):
            kept_N += (tl.load(kept + first + place_N, mask=first + place_N < N, other=0) != 0).to(tl.int32)
        slotted = tl.sum(kept_N, axis=0).to(tl.int64)
    tl.store(loss, BALANCE * balance + Z * z)
    tl.store(means, balance)
    tl.store(means + 1, 0.0)
    tl.store(means + 2, 0.0)
    tl.store(means + 3, z)
    tl.store(means + 4, entropy)
    tl.store(means + 5, number)
    tl.store(counts + expert_E, load_E, mask=expert_E < E)
    tl.store(counts + E, slotted)
    tl.store(counts + E + 1, tl.sum(load_E, axis=0) - slotted)


@triton.jit(do_not_specialize=["T", "tokens"])
def backward(logits, expert, valid, share, means, grad_gate, grad_loss, out, T, tokens, E, choices, SIGMOID: tl.constexpr,
             NORMED: tl.constexpr, SCALE: tl.constexpr, BALANCE: tl.constexpr, Z: tl.constexpr, BLOCK_T: tl.constexpr,
             BLOCK_E: tl.constexpr):  # fmt: skip
    """Write the gradient of the logits, [T, E] in their dtype, into `out`. Written by `finish`: `share` [G, E], each expert's fraction of
    its group's counted choices, times E; `means`, of which the sixth is the number of counted tokens. `tokens`: number of tokens of a
    group. `grad_gate`, `grad_loss`: None if they are 0."""
    token_T, expert_E = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    here_T, real_E = token_T < T, expert_E < E
    here_TE = here_T[:, None] & real_E[None, :]
    at_TE = token_T.to(tl.int64)[:, None] * E + expert_E[None, :]
    logit_TE = tl.load(logits + at_TE, mask=here_TE, other=0.0).to(tl.float32)
    soft_TE, logsum_T = _softmax(logit_TE, real_E)
    zero_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    out_TE, of_score_TE, of_prob_TE = zero_TE, zero_TE, zero_TE
    if grad_loss is not None:
        counts_T = _counted(valid, token_T, here_T)
        each_T = tl.where(counts_T, tl.load(grad_loss) / tl.load(means + 5), 0.0)
        share_TE = tl.load(share + (token_T // tokens)[:, None] * E + expert_E[None, :], mask=here_TE, other=0.0)
        of_prob_TE += BALANCE * each_T[:, None] * share_TE
        out_TE += (2.0 * Z * each_T * logsum_T)[:, None] * soft_TE
    rest_TE = 1.0 / (1.0 + tl.exp(logit_TE))  # 1 - sigmoid
    if grad_gate is not None:
        gate_TE, chosen_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32), tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
        for k in range(choices):
            at_T = token_T.to(tl.int64) * choices + k
            mine_TE = expert_E[None, :] == tl.load(expert + at_T, mask=here_T, other=0).to(tl.int32)[:, None]
            gate_TE += tl.where(mine_TE, SCALE * tl.load(grad_gate + at_T, mask=here_T, other=0.0).to(tl.float32)[:, None], 0.0)
            chosen_TE += mine_TE.to(tl.int32)
        if NORMED:
            kept_TE = tl.where(chosen_TE > 0, _log_score(logit_TE, SIGMOID), float("-inf"))
            share_of_TE = tl.exp(kept_TE - tl.max(kept_TE, axis=1)[:, None])
            share_of_TE /= tl.sum(share_of_TE, axis=1)[:, None]
            of_log_TE = share_of_TE * (gate_TE - tl.sum(share_of_TE * gate_TE, axis=1)[:, None])
            out_TE += of_log_TE * rest_TE if SIGMOID else of_log_TE
        else:
            of_score_TE += gate_TE
    if SIGMOID:
        score_TE = _sigmoid(logit_TE, real_E)
        sum_T = tl.sum(score_TE, axis=1)
        mean_T = tl.where(sum_T < TINY, 0.0, tl.sum(score_TE * of_prob_TE, axis=1) / tl.maximum(sum_T, TINY))
        of_score_TE += (of_prob_TE - mean_T[:, None]) / tl.maximum(sum_T, TINY)[:, None]
        out_TE += of_score_TE * score_TE * rest_TE
    else:
        of_score_TE += of_prob_TE
        out_TE += soft_TE * (of_score_TE - tl.sum(soft_TE * of_score_TE, axis=1)[:, None])
    tl.store(out + at_TE, out_TE, mask=here_TE)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, given: Given, spec: RouterSpec) -> tuple[Tensor | None, ...]:
        (total, num_experts), choices = logits_TE.shape, spec.num_choices
        tokens, width, block_e = total // given.num_groups, max(4, num_experts), max(4, triton.next_power_of_2(num_experts))
        block_t = max(1, min(32, _ELEMENTS // block_e))
        programs = min(triton.cdiv(max(1, tokens), block_t), max(1, _PROGRAMS // given.num_groups))
        each = block_t * triton.cdiv(max(1, tokens), block_t * programs)
        blocks, normed = triton.cdiv(max(1, tokens), each), spec.gates == "before_drop" or spec.softmax_over == "chosen"
        expert_TK = logits_TE.new_empty(total, choices, dtype=torch.int64) if given.expert_TK is None else given.expert_TK
        load_TK = torch.empty_like(expert_TK) if given.expert_TK is None and spec.balance_counts == "unbiased" else given.load_TK
        gate_TK, probs_TE = logits_TE.new_empty(total, choices), torch.empty_like(logits_TE)
        parts, share_GE = logits_TE.new_empty(given.num_groups, blocks, 4, width), logits_TE.new_empty(given.num_groups, num_experts)
        loss, means, counts = logits_TE.new_empty(()), logits_TE.new_empty(6), expert_TK.new_empty(num_experts + 2)
        valid_T = None if given.valid_T is None else given.valid_T.contiguous()
        open_groups, all_groups = given.open_groups
        same = {"SIGMOID": spec.score == "sigmoid", "NORMED": normed, "SCALE": spec.gate_scale, "BLOCK_E": block_e}
        weights = {"BALANCE": spec.balance_weight, "Z": spec.z_weight}
        with on(logits_TE):
            choose[(blocks, given.num_groups)](
                *(logits_TE, given.bias_E, valid_T, given.expert_TK, load_TK, expert_TK, gate_TK, probs_TE, parts),
                *(tokens, each, num_experts, width, choices, 1 if spec.balance_counts == "first" else choices),
                **same,
                **{"CHOSEN": spec.softmax_over == "chosen", "BLOCK_T": block_t, "BLOCK_K": max(2, triton.next_power_of_2(choices))},
                **{"OPEN": open_groups, "GROUPS": all_groups, "BEST": 1 if spec.group_score == "best" else 2},
                BLOCK_G=max(2, triton.next_power_of_2(all_groups)),
            )
            slots = tokens if given.slots is None else given.slots
            all_ranks = Together() if given.exchange is None else given.exchange(expert_TK, parts[:, :, 2, :num_experts])
            sizes = [given.num_groups, blocks, num_experts, width, slots]
            sizes += [0 if all_ranks.counted_GE is None else all_ranks.counted_GE.stride(0)]
            sizes += [0 if all_ranks.kept_TK is None else all_ranks.kept_TK.numel()]
            finish[(1,)](
                *(parts, *all_ranks, share_GE, loss, means, counts, *sizes), **weights, BLOCK_B=max(1, 2048 // block_e), BLOCK_E=block_e
            )
        ctx.save_for_backward(logits_TE, expert_TK, valid_T, share_GE, means)
        ctx.sizes, ctx.constants = (total, tokens, num_experts, choices), same | weights | {"BLOCK_T": block_t}
        means = means[:5]
        ctx.mark_non_differentiable(*(x for x in (expert_TK, probs_TE, means, counts, load_TK) if x is not None))
        ctx.set_materialize_grads(False)
        return expert_TK, gate_TK, probs_TE, loss, means, counts, load_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad_gate: Tensor | None, __: None, grad_loss: Tensor | None, *___: None) -> tuple[Tensor, None, None]:
        logits_TE, *saved = ctx.saved_tensors
        grad_gate, out_TE = None if grad_gate is None else grad_gate.contiguous(), torch.empty_like(logits_TE)
        with on(logits_TE):
            backward[(triton.cdiv(len(logits_TE), ctx.constants["BLOCK_T"]),)](
                logits_TE, *saved, grad_gate, grad_loss, out_TE, *ctx.sizes, **ctx.constants
            )
        return out_TE, None, None


def route(logits_TE: Tensor, given: Given, spec: RouterSpec) -> Fused:
    """Choose experts for tokens with logits [T, E] in fp32. The tokens of each group are consecutive."""
    return Fused(*_Route.apply(logits_TE.contiguous(), given, spec))
