"""Kernels in torch operations only, which run on any device. Time and memory are proportional to the number of routed rows. The docstrings
of functions without one here are in moe/kernels/reference.py."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.grouped import grouped_ffn, routed_ffn
from moe.kernels.rows import Plan, combine, permute, reorder
from parallel.mesh.exchange import by_bin
from parallel.mesh.regions import in_region
from parallel.numerics.supposed import pretended

__all__ = ["by_bin", "combine", "grouped_ffn", "kept", "permute", "plan", "reorder", "routed_ffn", "top_k"]

# T tokens, K choices, N = T * K, R rows, E experts, D model, P rows gathered from ranks (tokens and padding), G tokens among them

_FEW_CHOICES = 32  # up to this number of choices (T * K), `plan` runs in Python


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    if k > 2:
        return _top_k_above_2(scores_TE, k)
    rest_TE, found = scores_TE, []
    for choice in range(k):
        expert_T1 = rest_TE.argmax(-1, keepdim=True)
        found.append(expert_T1)
        if choice < k - 1:
            rest_TE = rest_TE.scatter(1, expert_T1, -torch.inf)
    return torch.cat(found, 1)


def _top_k_above_2(scores_TE: Tensor, k: int) -> Tensor:
    """Return top_k for k > 2. Take torch.topk's k + 1 highest scores. Sort only the rows in which two of them are equal, because torch.topk
    breaks ties in any order. Sorting all rows would take ten times as long."""
    best, expert = scores_TE.topk(min(k + 1, scores_TE.shape[1]))
    expert_TK = expert[:, :k].contiguous()
    rows = (best[:, 1:] == best[:, :-1]).any(1).nonzero()[:, 0]
    if len(rows):
        expert_TK[rows] = torch.argsort(scores_TE[rows], dim=-1, descending=True, stable=True)[:, :k]
    return expert_TK


def kept(expert_TK: Tensor, active_TK: Tensor | None, *, num_groups: int, num_experts: int, slots_each: int) -> Tensor:
    tokens, choices = expert_TK.shape
    group_T = torch.arange(tokens, device=expert_TK.device) // (tokens // num_groups)
    key_TK = group_T.unsqueeze(1) * num_experts + expert_TK
    if active_TK is not None:
        key_TK = torch.where(active_TK, key_TK, num_groups * num_experts)
    key_N = key_TK.t().reshape(-1)  # the first choices of all tokens come before second ones
    order_N = torch.argsort(key_N, stable=True)
    counts = torch.bincount(key_N, minlength=num_groups * num_experts + 1)
    slot_N = torch.empty_like(key_N)
    slot_N[order_N] = torch.arange(len(key_N), device=key_N.device) - (counts.cumsum(0) - counts)[key_N[order_N]]
    kept_TK = slot_N.view(choices, tokens).t() < slots_each
    return kept_TK if active_TK is None else active_TK & kept_TK


def kept_of_rows(
    expert_PK: Tensor, row_G: Tensor, *, mine: range, num_groups: int, num_experts: int, slots_each: int, counted: int
) -> Tensor:
    """Return whether each of this rank's choices gets a slot, bool [T, K], if several ranks hold tokens of the same group. `expert_PK`: the
    choices gathered from these ranks, -1 for one that needs no slot. `row_G`: rows of expert_PK in the order in which slots are given:
    sequence after sequence. `mine`: this rank's rows of expert_PK. `slots_each`: slots of an expert in a group. `counted`: not used; only
    the Triton kernel `queues`, which has the same arguments, needs it."""
    expert_GK, kept_PK = expert_PK[row_G], torch.zeros_like(expert_PK, dtype=torch.bool)
    sizes = {"num_groups": num_groups, "num_experts": num_experts, "slots_each": slots_each}
    kept_PK[row_G] = kept(expert_GK.clamp(min=0), expert_GK >= 0, **sizes)
    return kept_PK[mine.start : mine.stop]


@in_region("dispatch")
def plan(expert_TK: Tensor, kept_TK: Tensor, *, num_experts: int) -> Plan:
    if expert_TK.numel() <= _FEW_CHOICES and expert_TK.device.type == "cpu" and not pretended(expert_TK):
        return _plan_of_few(expert_TK, kept_TK, num_experts=num_experts)
    key_N = torch.where(kept_TK, expert_TK, num_experts).reshape(-1)
    counts_E = torch.bincount(key_N, minlength=num_experts + 1)[:num_experts]
    choice_R = torch.argsort(key_N, stable=True)[: int(counts_E.sum())]
    row_N = torch.full_like(key_N, -1)
    row_N[choice_R] = torch.arange(len(choice_R), device=key_N.device)
    return Plan(choice_R, row_N.view_as(expert_TK), counts_E)


def _plan_of_few(expert_TK: Tensor, kept_TK: Tensor, *, num_experts: int) -> Plan:
    """Make the plan in Python for the few choices of a generated token, which takes less time than one torch operation."""
    expert_N, counts = expert_TK.flatten().tolist(), [0] * num_experts
    choices = sorted((n for n, kept in enumerate(kept_TK.flatten().tolist()) if kept), key=expert_N.__getitem__)
    rows = [-1] * len(expert_N)
    for row, choice in enumerate(choices):
        rows[choice] = row
        counts[expert_N[choice]] += 1
    choice_R, row_N, counts_E = (torch.tensor(numbers, dtype=torch.int64) for numbers in (choices, rows, counts))
    return Plan(choice_R, row_N.view_as(expert_TK), counts_E)
