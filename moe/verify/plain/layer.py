"""One Mixture-of-Experts layer written from the papers, as plain loops: the second implementation that `moe verify` compares with.

    logits = W x ; probs ; chosen experts ; capacity slots ; gates ; y = sum of gate * expert(x) ; losses

It uses nothing from moe/router, moe/experts or moe/kernels, so that a fault there is not in both. It shares only data: the recipe's
RouterSpec and the hash that draws keyed random numbers (parallel/numerics/random.py). Choices and slots are decided in Python lists, token
by token. Everything with a gradient is computed over all experts, with zeros for experts that a token did not choose, instead of gathers.
Sources: Switch (arXiv 2101.03961), GShard (2006.16668, algorithm 1), V-MoE (2106.05974), Expert Choice (2202.09368), Shazeer et al.
(1701.06538), ST-MoE (2202.08906), DeepSeek-V3 (2412.19437), BASE (2103.16716), Hash layers (2106.04426), PR-MoE (2201.05596).
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

# T tokens, D model, E experts, F hidden

Cast = Callable[[Tensor], Tensor]  # casts to the dtype that the model computes in
Weights = dict[str, Tensor]  # name in checkpoints -> tensor


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


@dataclass(frozen=True)
class Layer:
    """The layer's results. `gates` [T, E]: 0 for tokens without a slot; `counts`: choices of each expert before dropping; `kept`: number of
    choices with a slot. Losses are unweighted, with gradient, over the given tokens.
    """

    y: Tensor
    gates: Tensor
    counts: list[int]
    kept: int
    balance: Tensor
    importance: Tensor
    z: Tensor
    load: Tensor

    def auxiliary(self, spec: RouterSpec) -> Tensor:
        return (
            spec.balance_weight * self.balance
            + spec.importance_weight * self.importance
            + spec.load_weight * self.load
            + spec.z_weight * self.z
        )


@dataclass(frozen=True)
class Kind:
    """The settings of a layer: its router and its networks."""

    spec: RouterSpec
    num_experts: int  # number of experts of the router; the last `skip` and `zero` ones compute nothing
    ffn: str
    dropout: float
    swiglu: tuple[float, float | None, float] = (1.0, None, 0.0)  # alpha, limit, offset
    skip: int = 0  # experts that return the token
    zero: int = 0  # experts that return zero
    norm_eps: float | None = None  # eps of the router's norm
    products: str = "plain"  # how the experts' products round


def wide(x: Tensor) -> Tensor:
    """x in fp32, or unchanged if it is float64."""
    return x if x.dtype is torch.float64 else x.float()


def moe_layer(x: Tensor, weights: Weights, name: str, tokens: Tokens, kind: Kind, cast: Cast) -> Layer:
    """Run x [T, D] through the layer called `name` (such as layers.3), in training."""
    spec, num_experts = kind.spec, kind.num_experts
    seen = wide(x)
    if spec.jitter:
        seen = seen * (1 - spec.jitter + 2 * spec.jitter * tokens.draw(f"{name}.router.jitter", x.shape[1]))
    if spec.input_norm == "rmsnorm":
        size = (seen.square().mean(1, keepdim=True) + (kind.norm_eps or 1e-6)).sqrt()
        seen = seen / size * wide(weights[f"{name}.router.input_norm.weight"])
    logits = seen @ wide(weights[f"{name}.router.weight"]).t()
    if spec.logits == "affine":
        logits = logits + wide(weights[f"{name}.router.logit_bias"])
    if spec.logit_cap is not None:  # tanh by its exponentials
        powers = torch.exp(2 * logits / spec.logit_cap)
        logits = spec.logit_cap * (1 - 2 / (powers + 1))
    noisy = sizes = logits
    if spec.noise == "noisy_top_k":
        size = F.softplus(seen @ wide(weights[f"{name}.router.noise_weight"]).t())
        sizes, noisy = size, logits + size * _normal(tokens.draw(f"{name}.router.noise", num_experts))
    scores = score(noisy, spec)
    bias = weights.get(f"{name}.router.bias")
    mixed = _mixed(noisy, name, tokens, spec) if spec.select == "sparsemixer" else None
    chosen = mixed[0] if mixed is not None else choose(scores.detach(), noisy.detach(), bias, name, tokens, spec)
    asks = ask(chosen, scores.detach(), name, tokens, spec)
    kept = admit(chosen, asks, scores.detach(), noisy.detach(), name, tokens, spec)
    gates = spec.gate_scale * mixed[1] if mixed is not None else gates_of(scores, noisy, chosen, kept, spec)
    if spec.expert_scale == "learned":
        gates = gates * wide(weights[f"{name}.router.expert_scale"])
    taken = _mask(kept, num_experts)
    y = _experts(x, gates, kept, weights, name, tokens, kind, cast, of_inputs=spec.gate_on == "input")
    valid = torch.tensor(tokens.valid)
    probs = scores / scores.sum(1, keepdim=True)
    counted = _counted(chosen, scores.detach(), tokens, spec)
    groups = _groups(tokens, spec) if spec.balance_scope == "sequence" else [range(len(x))]
    uneven = logits.new_zeros(())
    if spec.importance_weight:
        uneven = _mean_over(groups, tokens.valid, lambda rows: _uneven(gates[rows].mean(0)))
    uneven_load = logits.new_zeros(())
    if spec.load_weight:
        chances = torch.stack([_chances(logits[t], noisy[t], sizes[t], spec.num_choices) for t in range(len(x))])
        uneven_load = _mean_over(groups, tokens.valid, lambda rows: _uneven(chances[rows].mean(0)))
    return Layer(
        y,
        (gates * taken).detach(),
        [sum(e in chosen[t] for t in range(len(x)) if tokens.valid[t]) for e in range(num_experts)],
        sum(map(len, kept)),
        _mean_over(groups, tokens.valid, lambda rows: _balance(probs, counted, rows, num_experts)),
        uneven,
        (torch.logsumexp(logits, 1) ** 2)[valid].mean() if valid.any() else logits.new_zeros(()),
        uneven_load,
    )


# --- scores and gates -----------------------------------------------------------------------------------------------------


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
        gates = gates * _mask(kept, experts)
    if spec.gates != "as_is":
        total = gates.double().sum(1, keepdim=True)
        gates = (gates.double() / torch.where(total > 0, total, 1.0)).to(gates.dtype)
    return gates * spec.gate_scale


def _raw_gates(scores: Tensor, logits: Tensor, chosen: list[list[int]], spec: RouterSpec) -> Tensor:
    """[T, E]: the probability of each chosen expert, or its share of a softmax over the chosen ones; 0 elsewhere."""
    mask = _mask(chosen, scores.shape[1])
    return logits.masked_fill(~mask, -math.inf).softmax(1) if spec.softmax_over == "chosen" else scores * mask


def _normal(numbers: Tensor) -> Tensor:
    """Uniform to normal numbers, by the inverse distribution function. Clamped, because it is infinite at 0 and 1."""
    return math.sqrt(2) * torch.erfinv(2 * numbers.clamp(2.0**-24, 1 - 2.0**-24) - 1)


# --- chosen experts: lists, token by token ----------------------------------------------------------------------------------


def choose(scores: Tensor, logits: Tensor, bias: Tensor | None, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    """The experts of each token, best first; for expert choice, in order of their numbers."""
    liked = logits if spec.softmax_over == "chosen" else scores
    if spec.noise == "gumbel":
        drawn = logits + _gumbel(tokens.draw(f"{name}.router.gumbel", scores.shape[1]))
        liked = drawn if spec.softmax_over == "chosen" else score(drawn, spec)
    return CHOOSE[spec.select](liked if bias is None else liked + bias, logits, name, tokens, spec)


def _top_k(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    return [_best(row, spec.num_choices) for row in liked.tolist()]


def _group_limited(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    return [_best(_limited(row, spec), spec.num_choices) for row in liked.tolist()]


def _sinkhorn(liked: Tensor, logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    plan = torch.cat([_even_plan(logits[rows], [tokens.valid[t] for t in rows]) for rows in _groups(tokens, spec)])
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
    for group in _groups(tokens, spec):
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


def _mixed(logits: Tensor, name: str, tokens: Tokens, spec: RouterSpec) -> tuple[list[list[int]], Tensor]:
    """SparseMixer: experts drawn one after another among the nearly best, and gates [T, E] with the gradient of their probabilities."""
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


def _best(row: list[float], count: int) -> list[int]:
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
    open_runs = _best(goodness, spec.top_groups)
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


# --- capacity slots -----------------------------------------------------------------------------------------------------------


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
    for group in _groups(tokens, spec):
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


def _groups(tokens: Tokens, spec: RouterSpec) -> list[range]:
    """Ranges of tokens that share a capacity."""
    each = len(tokens.ids) if spec.group == "rank" else tokens.sequence_tokens * (1 if spec.group == "sequence" else spec.group)
    return [range(start, start + each) for start in range(0, len(tokens.ids), each)]


# --- experts ------------------------------------------------------------------------------------------------------------------


def _experts(
    x: Tensor,
    gates: Tensor,
    kept: list[list[int]],
    weights: Weights,
    name: str,
    tokens: Tokens,
    kind: Kind,
    cast: Cast,
    *,
    of_inputs: bool,
) -> Tensor:
    """The sum of gate times expert output, in fp32 at least, expert after expert. `of_inputs`: gates multiply the inputs instead."""
    y = gates.new_zeros(x.shape)
    scale = None
    if kind.dropout:
        width = weights[f"{name}.experts.0.w1"].shape[1]
        scale = (tokens.draw(f"{name}.experts.dropout", width) >= kind.dropout).float() / (1 - kind.dropout)
    for expert in range(kind.num_experts):
        rows = torch.tensor([t for t in range(len(x)) if expert in kept[t]], dtype=torch.int64)
        if expert >= kind.num_experts - kind.skip - kind.zero:
            if expert < kind.num_experts - kind.zero:
                y = y.index_add(0, rows, wide(x[rows]) * gates[rows, expert].unsqueeze(1))
            continue
        matrices = [weights.get(f"{name}.experts.{expert}.{matrix}") for matrix in ("w1", "w2", "w3")]
        biases = (weights.get(f"{name}.experts.{expert}.b1"), weights.get(f"{name}.experts.{expert}.b3"))
        taken = None if scale is None else scale[rows]
        share = gates[rows, expert].unsqueeze(1)
        seen, share = (cast(wide(x[rows]) * share), torch.ones_like(share)) if of_inputs else (x[rows], share)
        multiply = PRODUCTS[kind.products]
        out = wide(network(seen, *matrices, ffn=kind.ffn, cast=cast, scale=taken, biases=biases, swiglu=kind.swiglu, multiply=multiply))
        if f"{name}.output_bias" in weights:
            out = out + wide(weights[f"{name}.output_bias"][expert])
        y = y.index_add(0, rows, out * share)
    return cast(y)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"plain": torch.matmul}  # rows [R, I] and a matrix [I, O] -> [R, O]


def network(
    x: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    w3: Tensor | None,
    *,
    ffn: str,
    cast: Cast,
    scale: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    swiglu: tuple[float, float | None, float] = (1.0, None, 0.0),
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """relu(x w1) w2, gelu(x w1) w2, (gelu(x w1) * x w3) w2 or (silu(x w1) * x w3) w2; matrices [in, out].

    `biases` are added to x w1 and x w3. `swiglu` (alpha, limit, offset): h sigmoid(alpha h) (g + offset), with h and |g| at most limit.
    """
    assert w1 is not None and w2 is not None
    hidden, up = (None if w is None else cast(multiply(x, cast(w))) for w in (w1, w3))
    hidden, up = (y if b is None or y is None else cast(y + cast(b)) for y, b in zip((hidden, up), biases, strict=True))
    assert hidden is not None
    if ffn == "swiglu" and swiglu != (1.0, None, 0.0):
        alpha, limit, offset = swiglu
        most = math.inf if limit is None else limit
        assert up is not None
        kept, added = (torch.where(y > most, most, y) for y in (wide(hidden), wide(up)))
        added = torch.where(added < -most, -most, added)
        hidden = cast(kept / (1 + torch.exp(-alpha * kept)) * (added + offset))
    else:
        hidden = hidden.clamp(min=0) if ffn == "relu" else cast(F.silu(hidden) if ffn == "swiglu" else F.gelu(hidden, approximate="tanh"))
        hidden = hidden if up is None else cast(hidden * up)
    if scale is not None:
        hidden = cast(hidden * cast(scale))
    return cast(multiply(hidden, cast(w2)))


# --- losses -------------------------------------------------------------------------------------------------------------------


def _counted(chosen: list[list[int]], scores: Tensor, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    """The choices that count as load: all, each token's first, or its best experts without bias and groups. Padding never counts."""
    if spec.balance_counts == "unbiased":
        chosen = [_best(row, spec.num_choices) for row in scores.tolist()]
    most = 1 if spec.balance_counts == "first" else None
    return [experts[:most] if tokens.valid[t] else [] for t, experts in enumerate(chosen)]


def _balance(probs: Tensor, counted: list[list[int]], rows: list[int], num_experts: int) -> Tensor:
    """E * sum over experts of (share of the choices) * (mean probability): 1 when even."""
    total = sum(len(counted[t]) for t in rows)
    mean = probs[rows].mean(0)
    terms = [sum(expert in counted[t] for t in rows) / max(1, total) * mean[expert] for expert in range(num_experts)]
    return num_experts * torch.stack(terms).sum()


def _uneven(gates: Tensor) -> Tensor:
    """The squared coefficient of variation."""
    mean = gates.mean()
    return ((gates - mean) ** 2).mean() / mean.square().clamp(min=1e-20)


def _chances(logits: Tensor, noisy: Tensor, sizes: Tensor, choices: int) -> Tensor:
    """[E] of one token: the probability that each expert is chosen if only its own noise is drawn again."""
    found = []
    for expert in range(len(logits)):
        others = [noisy[e] for e in range(len(logits)) if e != expert]
        least = sorted(others, key=lambda value: -value.item())[choices - 1]
        found.append(0.5 * (1 + torch.erf((logits[expert] - least) / sizes[expert].clamp(min=1e-6) / math.sqrt(2))))
    return torch.stack(found)


def _mean_over(groups: list[range], valid: list[bool], loss: Callable[[list[int]], Tensor]) -> Tensor:
    """The mean of each group's loss, weighted by the number of its tokens without padding."""
    there = [[t for t in group if valid[t]] for group in groups]
    parts = [len(rows) * loss(rows) for rows in there if rows]
    return torch.stack(parts).sum() / sum(map(len, there)) if parts else torch.zeros(())


def _mask(lists: list[list[int]], num_experts: int) -> Tensor:
    """bool [T, E]: whether each list contains the expert."""
    return torch.tensor([[expert in experts for expert in range(num_experts)] for experts in lists])
