"""Computes routing for `moe verify`'s second implementation, the plain twin: scores, chosen experts, slots and gates, as plain loops,
and the twin's random numbers.

Arguments of several functions: name: the MoE layer, such as layers.3. spec: the recipe's section `router`. scores, logits: [T, E]. liked:
scores or logits [T, E] by which experts are chosen, with noise and selection bias.

Random numbers are drawn by the hash of parallel/numerics/random.py, here reimplemented with 64-bit integers.

h(x) = two rounds of xor-shift and multiply, 32 bits     number = 0.5 + signed h(h(token * 0x9E3779B9 + key) + column * 668265263) / 2^32
"""

from __future__ import annotations

import hashlib
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

_LOW = 0xFFFFFFFF  # the lower 32 bits


def key_of(*parts: object) -> int:
    """Return a 31-bit key: the first 32 bits (little-endian) of the SHA-256 of the parts' text, joined by slashes, divided by 2."""
    return int.from_bytes(hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()[:4], "little") // 2


def uniform(key: int, places_T: Tensor, width: int) -> Tensor:
    """Return random numbers in [0, 1], fp32 [T, width]. Each depends only on the key, the token's index (places_T) and the column."""
    rows_T1 = _mix(places_T.long() * 0x9E3779B9 + key).unsqueeze(1)
    bits_TD = _mix(rows_T1 + torch.arange(width) * 668265263)
    signed_TD = bits_TD - (bits_TD >= 2**31) * 2**32
    return signed_TD.float() / 2**32 + 0.5


def _mix(x: Tensor) -> Tensor:
    """Hash the lower 32 bits of int64 numbers by two rounds of xor-shift and multiply."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x & _LOW
        x = (x ^ (x >> shift)) * factor
    return x & _LOW


# T tokens, D model, E experts

Lists = list[list[int]]  # for each token, a list of experts


@dataclass(frozen=True)
class Tokens:
    """The tokens that an MoE layer gets. places [T]: their indices in the step's batch; valid: False for padding; sequence_tokens: number
    of tokens in a sequence."""

    ids: list[int]
    places: Tensor
    valid: list[bool]
    sequence_tokens: int
    seed: int
    step: int

    def draw(self, name: str, width: int) -> Tensor:
        """Random numbers [T, width], uniform in [0, 1]. They depend on seed, step, name and the token's index, but not on which rank has
        the token."""
        return uniform(key_of(self.seed, self.step, name), self.places, width)


def wide(x: Tensor) -> Tensor:
    """x in fp32; unchanged if it is float64."""
    return x if x.dtype is torch.float64 else x.float()


def capped(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap); x if cap is None."""
    return x if cap is None else cap * (1 - 2 / (torch.exp(2 * x / cap) + 1))


def score(logits: Tensor, spec: RouterSpec) -> Tensor:
    """Scores [T, E] of experts by spec.score: softmax, sigmoid, or the square root of softplus."""
    if spec.score == "softmax":
        powers = (logits - logits.amax(1, keepdim=True)).exp()
        return powers / powers.sum(1, keepdim=True)
    if spec.score == "sigmoid":
        return 1 / (1 + (-logits).exp())
    return F.softplus(logits).sqrt()


def route(scores: Tensor, logits: Tensor, bias: Tensor | None, name: str, tokens: Tokens, spec: RouterSpec) -> tuple[Lists, Lists, Tensor]:
    """Choose experts. Return (each token's chosen experts, those of them that have a slot for the token, gates [T, E])."""
    fixed, fixed_logits = scores.detach(), logits.detach()
    mixed = _sparsemixer(logits, name, tokens, spec) if spec.select == "sparsemixer" else None
    chosen = _choose(fixed, fixed_logits, bias, name, tokens, spec) if mixed is None else mixed[0]
    kept = _admit(chosen, _ask(chosen, fixed, name, tokens, spec), fixed, fixed_logits, name, tokens, spec)
    return chosen, kept, _gates(scores, logits, chosen, kept, spec) if mixed is None else spec.gate_scale * mixed[1]


def _gates(scores: Tensor, logits: Tensor, chosen: Lists, kept: Lists, spec: RouterSpec) -> Tensor:
    """Gates [T, E], 0 for experts not chosen. spec.gates says whether they are unchanged, or normalized so that they sum to 1 over a
    token's choices, or over its choices with a slot."""
    experts = scores.shape[1]
    gates = _raw_gates(scores, logits, chosen, spec)
    if spec.gates == "after_drop":
        gates = gates * mask_of(kept, experts)
    if spec.gates != "as_is":
        total = gates.double().sum(1, keepdim=True)
        gates = (gates.double() / torch.where(total > 0, total, 1.0)).to(gates.dtype)
    return gates * spec.gate_scale


def _raw_gates(scores: Tensor, logits: Tensor, chosen: Lists, spec: RouterSpec) -> Tensor:
    """Gates [T, E] before normalization, 0 for experts not chosen: scores, or the softmax over the logits of the chosen experts."""
    mask = mask_of(chosen, scores.shape[1])
    return logits.masked_fill(~mask, -math.inf).softmax(1) if spec.softmax_over == "chosen" else scores * mask


def inside(numbers: Tensor) -> Tensor:
    """Uniform numbers, clamped away from 0 and 1, at which inverse distribution functions are infinite."""
    return numbers.clamp(2.0**-24, 1 - 2.0**-24)


def _choose(scores: Tensor, logits: Tensor, bias: Tensor | None, name: str, tokens: Tokens, spec: RouterSpec) -> Lists:
    """For each token, the list of its chosen experts: best first; with expert choice, by ascending index."""
    liked = logits if spec.softmax_over == "chosen" else scores
    if spec.noise == "gumbel":
        drawn = logits + _gumbel(tokens.draw(f"{name}.router.gumbel", scores.shape[1]))
        liked = drawn if spec.softmax_over == "chosen" else score(drawn, spec)
    return CHOOSE[spec.select](liked if bias is None else liked + bias, logits, name, tokens, spec)


def _top_k(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> Lists:
    return [best(row, spec.num_choices) for row in liked.tolist()]


def _group_limited(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> Lists:
    return [best(_limited(row, spec), spec.num_choices) for row in liked.tolist()]


def _sinkhorn(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> Lists:
    plan = torch.cat([_even_plan(logits[rows], [tokens.valid[t] for t in rows]) for rows in groups_of(tokens, spec)])
    return _top_k(plan, logits, name, tokens, spec)


def _hash(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> Lists:
    if spec.hash_table is None:
        return _top_k(uniform(key_of("hash", f"{name}.router"), torch.tensor(tokens.ids), liked.shape[1]), logits, name, tokens, spec)
    table = json.loads(Path(spec.hash_table).read_text())
    rows_of_ids = table[name.removeprefix("layers.")] if isinstance(table, dict) else table
    return [found if isinstance(found := rows_of_ids[token], list) else [found] for token in tokens.ids]


def _experts_choose(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> Lists:
    rows: list[list[float]] = liked.tolist()
    chosen: Lists = [[] for _ in rows]
    num_experts = len(rows[0])
    for group in groups_of(tokens, spec):
        slots = slots_of(spec, len(group), num_experts)
        assert slots is not None
        for expert in range(num_experts):
            best_first = sorted((t for t in group if tokens.valid[t]), key=lambda t: (-rows[t][expert], t))
            for t in best_first[:slots]:
                chosen[t].append(expert)
    return chosen


CHOOSE: dict[str, Callable[[Tensor, Tensor, str, Tokens, RouterSpec], Lists]] = {
    "top_k": _top_k,
    "group_limited": _group_limited,
    "expert_choice": _experts_choose,
    "hash": _hash,
    "sinkhorn": _sinkhorn,
}  # router.select -> function of (scores with noise and bias, logits, name of the layer, tokens, spec); returns each token's experts


def _sparsemixer(logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> tuple[Lists, Tensor]:
    """Draw each token's experts from those with logits near the largest (SparseMixer). Return (experts of each token, gates [T, E])."""
    rows: list[list[float]] = logits.tolist()
    experts, count = len(rows[0]), spec.num_choices
    noise = [_gumbel(tokens.draw(f"{name}.router.mixer.{k}", experts)).tolist() for k in range(count)]
    halfway = tokens.draw(f"{name}.router.midpoint", count).tolist()
    chosen: Lists = [[] for _ in rows]
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
    """Uniform numbers turned into Gumbel noise."""
    return -(-inside(numbers).log()).log()


def best(row: list[float], count: int) -> list[int]:
    """Indices of the `count` highest values, highest first. Equal values are in the order of their indices."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:count]


def _limited(row: list[float], spec: RouterSpec) -> list[float]:
    """A token's scores, with -inf for experts outside the best groups. A group is as good as its best score, or as the sum of its two best
    scores if spec.group_score is "two_best"."""
    size = len(row) // spec.expert_groups
    groups = [row[i * size : (i + 1) * size] for i in range(spec.expert_groups)]
    counted = 2 if spec.group_score == "two_best" else 1
    goodness = torch.tensor([sum(sorted(group, reverse=True)[:counted]) for group in groups], dtype=torch.float32).tolist()
    top = best(goodness, spec.top_groups)
    return [value if expert // size in top else -math.inf for expert, value in enumerate(row)]


def _even_plan(logits: Tensor, valid: list[bool]) -> Tensor:
    """Sinkhorn: return the logits [T, E] of a group of tokens plus a constant for each expert. The constants are found by scaling rows and
    columns of exp(logits) to equal sums, 20 times."""
    powers = logits.double().exp() * torch.tensor(valid).unsqueeze(1)
    column = torch.ones(1, logits.shape[1], dtype=torch.float64)
    for _ in range(20):
        shares = powers / (powers * column).sum(1, keepdim=True).clamp(min=1e-300)
        column = 1 / shares.sum(0, keepdim=True)
    return logits.double() + column.log()


def _ask(chosen: Lists, scores: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[bool]]:
    """Return [token][choice]: whether the choice asks for a slot. Padding asks for none. With GShard's rule (second: random), a second
    choice asks with probability 2 g_2, where g_2 is its score divided by the sum of the token's two scores."""
    asks = [[tokens.valid[t]] * len(experts) for t, experts in enumerate(chosen)]
    if spec.second == "random":
        lots = tokens.draw(f"{name}.router.second", 1)[:, 0].tolist()
        for t, (first, second) in enumerate(chosen):
            share = scores[t, second] / (scores[t, first] + scores[t, second])
            asks[t][1] = asks[t][1] and bool(2 * share > lots[t])
    return asks


def slots_of(spec: RouterSpec, group_tokens: int, num_experts: int) -> int | None:
    """Capacity: number of slots that one expert has for a group of `group_tokens` tokens; None: no limit."""
    if spec.capacity_factor is None:
        return None
    choices = spec.num_choices if spec.capacity_counts == "choices" else 1
    share = Fraction(str(spec.capacity_factor)) * group_tokens * choices / num_experts
    rounding: dict[str, Callable[[Fraction], int]] = {"ceil": math.ceil, "floor": math.floor, "round": round}
    whole = rounding[spec.capacity_rounding](share)
    whole = math.ceil(Fraction(whole, spec.capacity_multiple)) * spec.capacity_multiple
    return min(group_tokens, max(whole, spec.min_capacity))


def _admit(chosen: Lists, asks: list[list[bool]], scores: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> Lists:
    """Return for each token those of its chosen experts that have a slot for it. Slots are given in the order of `_queue`. asks: result of
    `_ask`."""
    kept: Lists = [[] for _ in chosen]
    num_experts = scores.shape[1]
    for group in groups_of(tokens, spec):
        slots = None if spec.select == "expert_choice" else slots_of(spec, len(group), num_experts)
        free = [math.inf if slots is None else slots] * num_experts
        for t, k in _queue(group, chosen, scores, logits, name, tokens, spec):
            expert = chosen[t][k]
            if asks[t][k] and free[expert] > 0:
                free[expert] -= 1
                kept[t].append(expert)
    return kept


def _queue(
    group: range, chosen: Lists, scores: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec
) -> list[tuple[int, int]]:
    """All choices of a group's tokens as (token, index of the choice), in the order in which they get slots."""
    most = max(map(len, chosen))
    order = [(t, k) for t in group for k in range(len(chosen[t]))]
    if spec.queue == "choices_first":
        order.sort(key=lambda choice: choice[1])  # a stable sort: first choices of all tokens in order, then second choices
    if spec.drop == "position" or spec.capacity_factor is None:
        return order
    if spec.drop == "random":
        first = tokens.draw(f"{name}.router.lot", most).tolist()
    else:
        gates = _raw_gates(scores, logits, chosen, spec)
        first = [[gates[t, e].item() for e in experts] for t, experts in enumerate(chosen)]
        if spec.queue == "choices_first":  # all choices of a token get the priority of its highest gate
            first = [[max(row)] * len(row) for row in first]
    return sorted(order, key=lambda choice: (choice[1] if spec.queue == "choices_first" else 0, -first[choice[0]][choice[1]]))


def groups_of(tokens: Tokens, spec: RouterSpec) -> list[range]:
    """Groups of consecutive tokens over which an expert's capacity is counted, as ranges of token indices."""
    each = len(tokens.ids) if spec.group == "rank" else tokens.sequence_tokens * (1 if spec.group == "sequence" else spec.group)
    return [range(start, start + each) for start in range(0, len(tokens.ids), each)]


def mask_of(lists: Lists, num_experts: int) -> Tensor:
    """Bool [T, E]: whether the list of experts lists[t] contains expert e."""
    return torch.tensor([[expert in experts for expert in range(num_experts)] for experts in lists])
