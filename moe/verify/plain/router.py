"""The router's part of the plain MoE layer: scores, chosen experts, slots and gates, written from the papers as plain loops.

Which experts are chosen and which choices have a slot is decided over Python lists, token by token. What needs a gradient is written over
all experts at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.router_spec import RouterSpec
from parallel.numerics.random import key_of, uniform

# T tokens, D model, E experts


@dataclass(frozen=True)
class Tokens:
    """Some whole sequences of one step: ids, indices in the step, whether each is a token (not padding), and the keys of random numbers."""

    ids: list[int]
    places: Tensor
    valid: list[bool]
    sequence_tokens: int
    seed: int
    step: int

    def draw(self, name: str, width: int) -> Tensor:
        """Uniform numbers [T, width], which depend only on a token's index in the step, not on the rank."""
        return uniform(key_of(self.seed, self.step, name), self.places, width)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or unchanged if it is float64."""
    return x if x.dtype is torch.float64 else x.float()


def score(logits: Tensor, spec: RouterSpec) -> Tensor:
    """Scores [T, E], by which experts are chosen and weighted."""
    if spec.score == "softmax":
        powers = (logits - logits.amax(1, keepdim=True)).exp()
        return powers / powers.sum(1, keepdim=True)
    if spec.score == "sigmoid":
        return 1 / (1 + (-logits).exp())
    return F.softplus(logits).sqrt()


def gates_of(scores: Tensor, logits: Tensor, chosen: list[list[int]], kept: list[list[int]], spec: RouterSpec) -> Tensor:
    """Gates [T, E] of the chosen experts, 0 elsewhere. The spec says over which choices they are normalised."""
    experts = scores.shape[1]
    gates = _raw_gates(scores, logits, chosen, spec)
    if spec.gates == "after_drop":
        gates = gates * mask_of(kept, experts)
    if spec.gates != "as_is":
        total = gates.double().sum(1, keepdim=True)
        gates = (gates.double() / torch.where(total > 0, total, 1.0)).to(gates.dtype)
    return gates * spec.gate_scale


def _raw_gates(scores: Tensor, logits: Tensor, chosen: list[list[int]], spec: RouterSpec) -> Tensor:
    """[T, E]: the probability of each chosen expert, or its share of a softmax over the chosen ones; 0 elsewhere."""
    mask = mask_of(chosen, scores.shape[1])
    return logits.masked_fill(~mask, -math.inf).softmax(1) if spec.softmax_over == "chosen" else scores * mask


def normal(numbers: Tensor) -> Tensor:
    """Uniform to normal numbers, by the inverse distribution function. Clamped, because it is infinite at 0 and 1."""
    return math.sqrt(2) * torch.erfinv(2 * numbers.clamp(2.0**-24, 1 - 2.0**-24) - 1)


def choose(scores: Tensor, logits: Tensor, bias: Tensor | None, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    """The experts of each token, best first; for expert choice, in order of their numbers."""
    liked = logits if spec.softmax_over == "chosen" else scores
    if spec.noise == "gumbel":
        drawn = logits + _gumbel(tokens.draw(f"{name}.router.gumbel", scores.shape[1]))
        liked = drawn if spec.softmax_over == "chosen" else score(drawn, spec)
    return CHOOSE[spec.select](liked if bias is None else liked + bias, logits, name, tokens, spec)


def _top_k(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    return [best(row, spec.num_choices) for row in liked.tolist()]


def _group_limited(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    return [best(_limited(row, spec), spec.num_choices) for row in liked.tolist()]


def _sinkhorn(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    plan = torch.cat([_even_plan(logits[rows], [tokens.valid[t] for t in rows]) for rows in groups_of(tokens, spec)])
    return _top_k(plan, logits, name, tokens, spec)


def _hash(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    if spec.hash_table is None:
        return _top_k(uniform(key_of("hash", f"{name}.router"), torch.tensor(tokens.ids), liked.shape[1]), logits, name, tokens, spec)
    table = json.loads(Path(spec.hash_table).read_text())
    rows_of_ids = table[name.removeprefix("layers.")] if isinstance(table, dict) else table
    return [found if isinstance(found := rows_of_ids[token], list) else [found] for token in tokens.ids]


def _experts_choose(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    rows: list[list[float]] = liked.tolist()
    chosen: list[list[int]] = [[] for _ in rows]
    num_experts = len(rows[0])
    for group in groups_of(tokens, spec):
        slots = slots_of(spec, len(group), num_experts)
        assert slots is not None
        for expert in range(num_experts):
            best_first = sorted((t for t in group if tokens.valid[t]), key=lambda t: (-rows[t][expert], t))
            for t in best_first[:slots]:
                chosen[t].append(expert)
    return chosen


CHOOSE: dict[str, Callable[[Tensor, Tensor, str, Tokens, RouterSpec], list[list[int]]]] = {
    "top_k": _top_k,
    "group_limited": _group_limited,
    "expert_choice": _experts_choose,
    "hash": _hash,
    "sinkhorn": _sinkhorn,
}  # router.select -> function; sparsemixer, which also makes gates, is `_mixed`


def mixed_choices(logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> tuple[list[list[int]], Tensor]:
    """SparseMixer: experts drawn one after another among those near the best, and gates [T, E] whose gradient is their probabilities'."""
    rows: list[list[float]] = logits.tolist()
    experts, count = len(rows[0]), spec.num_choices
    noise = [_gumbel(tokens.draw(f"{name}.router.mixer.{k}", experts)).tolist() for k in range(count)]
    halfway = tokens.draw(f"{name}.router.midpoint", count).tolist()
    chosen: list[list[int]] = [[] for _ in rows]
    gates = []
    for t, row in enumerate(rows):
        gate = torch.zeros(experts, dtype=logits.dtype)
        for k in range(count):
            left = [e for e in range(experts) if e not in chosen[t]]
            best = max(left, key=lambda e: (row[e], -e))
            near = [e for e in left if row[best] - row[e] <= 2 * spec.mixer_margin * max(abs(row[e]), row[best])]
            drawn = max(near, key=lambda e: row[e] + noise[k][t][e])
            powers = (logits[t] - logits[t][best].detach()).exp()
            share = powers[drawn] / powers[near].sum()
            less = 0.0 if drawn == best or halfway[t][k] > 0.75 else 2 / 3 * share.item()
            gate = gate + F.one_hot(torch.tensor(drawn), experts) * (share - less)
            chosen[t].append(drawn)
        gates.append(gate)
    return chosen, torch.stack(gates)


def _gumbel(numbers: Tensor) -> Tensor:
    """Uniform to Gumbel numbers. Clamped, because they are infinite at 0 and 1."""
    return -(-numbers.clamp(2.0**-24, 1 - 2.0**-24).log()).log()


def best(row: list[float], count: int) -> list[int]:
    """Indices of the highest values; equal values in order of their index."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:count]


def _limited(row: list[float], spec: RouterSpec) -> list[float]:
    """Scores of the experts in the best groups, -inf for all others. A group counts by its two best experts together, or by its best
    one.
    """
    size = len(row) // spec.expert_groups
    runs = [row[i * size : (i + 1) * size] for i in range(spec.expert_groups)]
    counted = 2 if spec.group_score == "two_best" else 1
    goodness = torch.tensor([sum(sorted(run, reverse=True)[:counted]) for run in runs], dtype=torch.float32).tolist()
    open_runs = best(goodness, spec.top_groups)
    return [value if place // size in open_runs else -math.inf for place, value in enumerate(row)]


def _even_plan(logits: Tensor, valid: list[bool]) -> Tensor:
    """Sinkhorn: logits of a group plus a correction that gives each expert the same share of the tokens. Rows and columns are scaled in
    turn, 20 times.
    """
    powers = logits.double().exp() * torch.tensor(valid).unsqueeze(1)
    column = torch.ones(1, logits.shape[1], dtype=torch.float64)
    for _ in range(20):
        shares = powers / (powers * column).sum(1, keepdim=True).clamp(min=1e-300)
        column = 1 / shares.sum(0, keepdim=True)
    return logits.double() + column.log()


def ask(chosen: list[list[int]], scores: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[bool]]:
    """Whether each choice needs a slot. Padding does not, nor a second choice that was declined (GShard keeps it with probability 2
    g_2).
    """
    asks = [[tokens.valid[t]] * len(experts) for t, experts in enumerate(chosen)]
    if spec.second == "random":
        lots = tokens.draw(f"{name}.router.second", 1)[:, 0].tolist()
        for t, (first, second) in enumerate(chosen):
            share = scores[t, second] / (scores[t, first] + scores[t, second])
            asks[t][1] = asks[t][1] and bool(2 * share > lots[t])
    return asks


def slots_of(spec: RouterSpec, group_tokens: int, num_experts: int) -> int | None:
    """The number of slots of one expert in one group; None: no limit."""
    if spec.capacity_factor is None:
        return None
    choices = spec.num_choices if spec.capacity_counts == "choices" else 1
    share = Fraction(str(spec.capacity_factor)) * group_tokens * choices / num_experts
    whole = math.ceil(share) if spec.capacity_rounding == "ceil" else math.floor(share)
    if spec.capacity_rounding == "round":
        whole = round(share)
    whole = math.ceil(Fraction(whole, spec.capacity_multiple)) * spec.capacity_multiple
    return min(group_tokens, max(whole, spec.min_capacity))


def admit(
    chosen: list[list[int]], asks: list[list[bool]], scores: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec
) -> list[list[int]]:
    """The experts of each token that have a slot for it. Choices are served one after another."""
    kept: list[list[int]] = [[] for _ in chosen]
    num_experts = scores.shape[1]
    for group in groups_of(tokens, spec):
        slots = None if spec.select == "expert_choice" else slots_of(spec, len(group), num_experts)
        free = [math.inf if slots is None else slots] * num_experts
        for t, k in _queue(list(group), chosen, scores, logits, name, tokens, spec):
            expert = chosen[t][k]
            if asks[t][k] and free[expert] > 0:
                free[expert] -= 1
                kept[t].append(expert)
    return kept


def _queue(
    group: list[int], chosen: list[list[int]], scores: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec
) -> list[tuple[int, int]]:
    """A group's choices (token, k) in the order in which they get slots."""
    most = max(map(len, chosen))
    if spec.queue == "choices_first":
        order = [(t, k) for k in range(most) for t in group if k < len(chosen[t])]
    else:
        order = [(t, k) for t in group for k in range(len(chosen[t]))]
    if spec.drop == "position" or spec.capacity_factor is None:
        return order
    if spec.drop == "random":
        first = tokens.draw(f"{name}.router.lot", most).tolist()
    else:
        gates = _raw_gates(scores, logits, chosen, spec)
        first = [[gates[t, e].item() for e in experts] for t, experts in enumerate(chosen)]
        if spec.queue == "choices_first":  # a token is ranked by its highest gate, for all its choices
            first = [[max(row)] * len(row) for row in first]
    if spec.queue == "choices_first":
        return sorted(order, key=lambda choice: (choice[1], -first[choice[0]][choice[1]]))  # sorting is stable
    return sorted(order, key=lambda choice: -first[choice[0]][choice[1]])


def groups_of(tokens: Tokens, spec: RouterSpec) -> list[range]:
    """Runs of tokens that share a capacity."""
    each = len(tokens.ids) if spec.group == "rank" else tokens.sequence_tokens * (1 if spec.group == "sequence" else spec.group)
    return [range(start, start + each) for start in range(0, len(tokens.ids), each)]


def mask_of(lists: list[list[int]], num_experts: int) -> Tensor:
    """Bool [T, E]."""
    return torch.tensor([[expert in experts for expert in range(num_experts)] for experts in lists])
