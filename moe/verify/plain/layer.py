"""Computes the Mixture-of-Experts layer of the plain twin (the second implementation, twin.py), written from the papers as plain loops.

    logits = W x ; probabilities ; chosen experts ; their slots ; gates ; y = sum of gate * expert(x) ; losses

This code shares nothing with moe/router, moe/experts and moe/kernels except the recipe's settings, so that it does not repeat their
faults. Experts and slots are chosen token by token with Python lists.
Gates have an entry for every token and expert, which is 0 if the token was not sent to the expert.
Sources: Switch (arXiv 2101.03961), GShard (2006.16668, algorithm 1), V-MoE (2106.05974), Expert Choice (2202.09368), Shazeer et al.
(1701.06538), ST-MoE (2202.08906), DeepSeek-V3 (2412.19437), BASE (2103.16716), Hash layers (2106.04426), PR-MoE (2201.05596).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.plugin import is_plugin, loaded
from moe.recipe.router_spec import RouterSpec
from moe.recipe.sections import Run, Swiglu
from moe.verify.plain.kfac import Watched
from moe.verify.plain.router import Tokens, best, capped, groups_of, inside, mask_of, route, score, wide

# T tokens, D model, E experts, F hidden

Cast = Callable[[Tensor], Tensor]  # casts to the model's compute dtype
Weights = dict[str, Tensor]  # name in checkpoints -> tensor


@dataclass(frozen=True)
class Layer:
    """Results of an MoE layer. y [T, D]: output. gates [T, E]: 0 for a choice without a slot. counts: for each expert, the number of tokens
    that chose it, with or without a slot. kept: number of choices with a slot. balance, importance, z, load: losses, not yet
    multiplied by their weights in the recipe."""

    y: Tensor
    gates: Tensor
    counts: list[int]
    kept: int
    balance: Tensor
    importance: Tensor
    z: Tensor
    load: Tensor

    def auxiliary(self, spec: RouterSpec) -> Tensor:
        """Sum of the layer's losses, each multiplied by its weight in the recipe."""
        weighted = spec.balance_weight * self.balance + spec.importance_weight * self.importance
        return weighted + spec.load_weight * self.load + spec.z_weight * self.z


def moe_layer(x: Tensor, weights: Weights, name: str, tokens: Tokens, run: Run, num_experts: int, cast: Cast) -> Layer:
    """Run x [T, D] through the MoE layer `name`, such as layers.3, in training. tokens: which tokens of x are padding, and random draws for
    each token. num_experts includes skip experts, which return their input, and zero experts, which return 0."""
    spec, seen = run.router, wide(x)
    if spec.jitter:
        seen = seen * (1 - spec.jitter + 2 * spec.jitter * tokens.draw(f"{name}.router.jitter", x.shape[1]))
    if spec.input_norm == "rmsnorm":
        size = (seen.square().mean(1, keepdim=True) + (run.model.norm_eps or 1e-6)).sqrt()
        seen = seen / size * wide(weights[f"{name}.router.input_norm.weight"])
    logits = seen @ wide(weights[f"{name}.router.weight"]).t()
    if spec.logits == "affine":
        logits = logits + wide(weights[f"{name}.router.logit_bias"])
    logits = capped(logits, spec.logit_cap)
    noisy = sizes = logits
    if spec.noise == "noisy_top_k":
        size = F.softplus(seen @ wide(weights[f"{name}.router.noise_weight"]).t())
        normal = math.sqrt(2) * torch.erfinv(2 * inside(tokens.draw(f"{name}.router.noise", num_experts)) - 1)
        sizes, noisy = size, logits + size * normal
    scores = score(noisy, spec)
    bias = weights.get(f"{name}.router.bias")
    chosen, kept, gates = route(scores, noisy, bias, name, tokens, spec)
    if spec.expert_scale == "learned":
        gates = gates * wide(weights[f"{name}.router.expert_scale"])
    taken = mask_of(kept, num_experts)
    y = _experts(x, gates, kept, weights, name, tokens, run, cast)
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
        _mean_over(groups, tokens.valid, lambda rows: _balance(probs, counted, rows, num_experts, spec.balance_loss)),
        uneven,
        (torch.logsumexp(logits, 1) ** 2)[valid].mean() if valid.any() else logits.new_zeros(()),
        uneven_load,
    )


def _experts(x: Tensor, gates: Tensor, kept: list[list[int]], weights: Weights, name: str, tokens: Tokens, run: Run, cast: Cast) -> Tensor:
    """The layer's output [T, D]: the sum over experts of gate * expert(x), or of expert(gate * x) if gate_on is input. It is summed in fp32
    at least. kept: for each token, the experts in which it has a slot."""
    y, experts, scale = gates.new_zeros(x.shape), run.experts, None
    zeros = gates.shape[1] - experts.zero  # index of the first zero expert
    skips = zeros - experts.skip  # index of the first skip expert
    if experts.dropout:
        width = weights[f"{name}.experts.0.w1"].shape[1]
        scale = (tokens.draw(f"{name}.experts.dropout", width) >= experts.dropout).float() / (1 - experts.dropout)
    for expert in range(zeros):
        rows = torch.tensor([t for t in range(len(x)) if expert in kept[t]], dtype=torch.int64)
        gate, seen = gates[rows, expert].unsqueeze(1), x[rows]
        if expert >= skips:  # a skip expert returns its input
            y = y.index_add(0, rows, wide(seen) * gate)
            continue
        if run.router.gate_on == "input":
            seen, gate = cast(wide(seen) * gate), torch.ones_like(gate)
        path, multiply = f"{name}.experts.{expert}", PRODUCTS[experts.products]
        how: dict[str, Any] = {"ffn": experts.ffn or run.model.ffn, "swiglu": run.model.swiglu, "multiply": multiply}
        out = wide(network(seen, weights, path, cast=cast, scale=None if scale is None else scale[rows], **how))
        if f"{name}.output_bias" in weights:
            out = out + wide(weights[f"{name}.output_bias"][expert])
        y = y.index_add(0, rows, out * gate)
    return cast(y)


Multiply = Callable[[Tensor, Tensor], Tensor]  # (rows [R, I], a matrix [I, O]) -> [R, O]
PRODUCTS: dict[str, Multiply] = {"plain": torch.matmul}  # experts.products -> function that multiplies
_PLAIN_GATING = Swiglu()


def product(x: Tensor, weights: Weights, name: str, cast: Cast, *, multiply: Multiply = torch.matmul) -> Tensor:
    """Return x [R, I] times the matrix `name`, rounded by `cast`. An expert's matrix is stored as [in, out], all others as [out, in]."""
    matrix = cast(weights[name] if "experts" in name.split(".") else weights[name].t())
    y = cast(multiply(x, matrix))
    if isinstance(weights, Watched):
        weights.note(name, x, y)
    return y


def network(
    x: Tensor,
    weights: Weights,
    path: str,
    *,
    ffn: str,
    cast: Cast,
    scale: Tensor | None = None,
    swiglu: Swiglu = _PLAIN_GATING,
    multiply: Multiply = torch.matmul,
) -> Tensor:
    """Return relu(x w1) w2, gelu(x w1) w2, (gelu(x w1) * x w3) w2 or (silu(x w1) * x w3) w2, with the matrices below `path`. Biases b1 and
    b3, if there are any, are added to x w1 and x w3; an expert's bias after w2 is added by the caller.

    ffn: the activation, as model.ffn. cast: rounds to the compute dtype. scale: multiplies hidden units (dropout). multiply: computes the
    matrix products. swiglu: settings of gpt-oss's variant (h sigmoid(alpha h) (g + offset)) w2, where h = min(x w1, limit) and g = x w3,
    clamped to [-limit, limit].
    """
    ending = "" if "experts" in path.split(".") else ".weight"

    def times(x: Tensor, part: str) -> Tensor:
        return product(x, weights, f"{path}.w{part}{ending}", cast, multiply=multiply)

    def biased(part: str) -> Tensor:
        y, bias = times(x, part), weights.get(f"{path}.b{part}")
        return y if bias is None else cast(y + cast(bias))

    hidden, up = biased("1"), biased("3") if f"{path}.w3{ending}" in weights else None
    if ffn == "swiglu" and swiglu != _PLAIN_GATING:
        most = math.inf if swiglu.limit is None else swiglu.limit
        assert up is not None
        kept, added = (torch.where(y > most, most, y) for y in (wide(hidden), wide(up)))
        added = torch.where(added < -most, -most, added)
        hidden = cast(kept / (1 + torch.exp(-swiglu.alpha * kept)) * (added + swiglu.offset))
    else:
        hidden = hidden.clamp(min=0) if ffn == "relu" else cast(F.silu(hidden) if ffn == "swiglu" else F.gelu(hidden, approximate="tanh"))
        hidden = hidden if up is None else cast(hidden * up)
    return times(hidden if scale is None else cast(hidden * cast(scale)), "2")


def _counted(chosen: list[list[int]], scores: Tensor, tokens: Tokens, spec: RouterSpec) -> list[list[int]]:
    """Return for each token the experts that the balance loss counts as its choices (router.balance_counts); none for padding."""
    if spec.balance_counts == "unbiased":
        chosen = [best(row, spec.num_choices) for row in scores.tolist()]
    most = 1 if spec.balance_counts == "first" else None
    return [experts[:most] if tokens.valid[t] else [] for t, experts in enumerate(chosen)]


def _balance(probs: Tensor, counted: list[list[int]], rows: list[int], num_experts: int, kind: str) -> Tensor:
    """Balance loss over the tokens with indices `rows`: E * sum over experts of (fraction of choices) * (mean probability), or the user's
    function of the two. counted: result of `_counted`. kind: router.balance_loss."""
    total = sum(len(counted[t]) for t in rows)
    mean = probs[rows].mean(0)
    shares = [sum(expert in counted[t] for t in rows) / max(1, total) for expert in range(num_experts)]
    if is_plugin(kind):
        own: Tensor = loaded("router.balance_loss", kind, arguments=2)(torch.tensor([shares]), mean.unsqueeze(0))
        return own[0]
    return num_experts * torch.stack([share * mean[expert] for expert, share in enumerate(shares)]).sum()


def _uneven(loads: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' loads [E]: variance / mean^2."""
    mean = loads.mean()
    return ((loads - mean) ** 2).mean() / mean.square().clamp(min=1e-20)


def _chances(logits: Tensor, noisy: Tensor, sizes: Tensor, choices: int) -> Tensor:
    """For one token, the probability [E] that it chooses each expert if only this expert's noise is drawn again. logits [E]: without noise;
    noisy [E]: with noise; sizes [E]: std of the noise."""
    found = []
    for expert in range(len(logits)):
        others = [noisy[e] for e in range(len(logits)) if e != expert]
        least = sorted(others, key=lambda value: -value.item())[choices - 1]
        found.append(0.5 * (1 + torch.erf((logits[expert] - least) / sizes[expert].clamp(min=1e-6) / math.sqrt(2))))
    return torch.stack(found)


def _mean_over(groups: list[range], valid: list[bool], loss: Callable[[list[int]], Tensor]) -> Tensor:
    """Mean of loss(indices of a group's tokens) over groups, weighted by their numbers of tokens without padding. valid: for each token,
    False for padding."""
    there = [[t for t in group if valid[t]] for group in groups]
    parts = [len(rows) * loss(rows) for rows in there if rows]
    return torch.stack(parts).sum() / sum(map(len, there)) if parts else torch.zeros(())
