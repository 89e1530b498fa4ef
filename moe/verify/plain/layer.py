"""One Mixture-of-Experts layer written from the papers, as plain loops: the second opinion of `moe verify`.

    logits = W x ; probs ; who is chosen ; who has a slot ; gates ; y = sum of gate * expert(x) ; losses

Nothing here is taken from moe/router, moe/experts or moe/kernels, so a fault there cannot hide by being in both. What is shared is
data alone: the recipe's words (RouterSpec) and the hash that draws keyed random numbers (parallel/numerics/random.py). Who is chosen and
who has a slot is decided over Python lists, token by token; what needs a gradient is written over all experts at once, with zeros where
a token did not go, in place of gathered choices.
Sources: Switch (arXiv 2101.03961), GShard (2006.16668, algorithm 1), V-MoE (2106.05974), Expert Choice (2202.09368), Shazeer et al.
(1701.06538), ST-MoE (2202.08906), DeepSeek-V3 (2412.19437), BASE (2103.16716), Hash layers (2106.04426), PR-MoE (2201.05596).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.router_spec import RouterSpec
from moe.verify.plain.router import Tokens, admit, ask, best, choose, gates_of, groups_of, mask_of, mixed_choices, normal, score, wide

# T tokens, D model, E experts, F hidden

Cast = Callable[[Tensor], Tensor]  # casts to the dtype that the model computes in
Weights = dict[str, Tensor]  # name in checkpoints -> tensor


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
        sizes, noisy = size, logits + size * normal(tokens.draw(f"{name}.router.noise", num_experts))
    scores = score(noisy, spec)
    bias = weights.get(f"{name}.router.bias")
    mixed = mixed_choices(noisy, name, tokens, spec) if spec.select == "sparsemixer" else None
    chosen = mixed[0] if mixed is not None else choose(scores.detach(), noisy.detach(), bias, name, tokens, spec)
    asks = ask(chosen, scores.detach(), name, tokens, spec)
    kept = admit(chosen, asks, scores.detach(), noisy.detach(), name, tokens, spec)
    gates = spec.gate_scale * mixed[1] if mixed is not None else gates_of(scores, noisy, chosen, kept, spec)
    if spec.expert_scale == "learned":
        gates = gates * wide(weights[f"{name}.router.expert_scale"])
    taken = mask_of(kept, num_experts)
    y = _experts(x, gates, kept, weights, name, tokens, kind, cast, of_inputs=spec.gate_on == "input")
    valid = torch.tensor(tokens.valid)
    probs = scores / scores.sum(1, keepdim=True)
    counted = _counted(chosen, scores.detach(), tokens, spec)
    groups = groups_of(tokens, spec) if spec.balance_scope == "sequence" else [range(len(x))]
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


def _counted(chosen: list[list[int]], scores: Tensor, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    """The choices that count as load: all, each token's first, or its best experts without bias and groups. Padding never counts."""
    if spec.balance_counts == "unbiased":
        chosen = [best(row, spec.num_choices) for row in scores.tolist()]
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
