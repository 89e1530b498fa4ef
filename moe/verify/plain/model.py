"""Computes a Transformer for `moe verify`'s plain twin (a second implementation of training, twin.py), except routing and routed experts:
embedding, norms, attention, feed-forward networks, shared experts, loss. All are plain functions of unsharded tensors. `weights` maps a
weight's name in checkpoints to its tensor. Nothing of moe/nn is used.

    x = embedding[tokens] ; x = x + attention(norm x) ; x = x + ffn-or-experts(norm x) ; ... ; logits = head(norm x) ; loss

`cast` (a Rounding) is applied to every number that a 16-bit run would round. In the float64 twin it changes nothing. To measure the effect
of rounding, it changes each number at random (moe/verify/expected.py).
Sources: GQA (arXiv 2305.13245), rotary (2104.09864), T5 (1910.10683), RMSNorm (1910.07467), DeepSeekMoE (2401.06066), PR-MoE
(2201.05596).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.sections import Model, Rope, Run
from moe.verify.plain.batches import BEGIN, PADDING, predicted
from moe.verify.plain.batches import ids as ids_of
from moe.verify.plain.layer import Layer, Weights, moe_layer, network, product
from moe.verify.plain.router import Tokens, capped, wide

# B batch, L length, D model, H heads, C channels of a head, T = B*L tokens

Note = Callable[[str, Tensor], None]  # called with (name, output [T, ...]) of each module, in the order of the forward pass
Begins = list[list[bool]]  # [sequence][position]: whether a document or a packed chat begins there


@dataclass
class Rounding:
    """Casts tensors to `dtype`. With unit > 0, multiplies each number by a random factor in 1 +- unit instead, forward and backward."""

    dtype: torch.dtype = torch.float32
    unit: float = 0.0
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.unit:
            return x.to(self.dtype)
        out: Tensor = _Disturb.apply(x.float(), self)
        return out

    def disturbed(self, x: Tensor) -> Tensor:
        return x * (1 + self.unit * (2 * torch.rand(x.shape, generator=self.generator) - 1))


class _Disturb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return rounding.disturbed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding.disturbed(grad), None


@dataclass(frozen=True)
class Passed:
    """Results of a forward pass. loss: summed over tokens. layers: name of an MoE layer -> its results. ahead: loss of multi-token
    prediction, summed over tokens and averaged over depths; None if the model has none."""

    loss: Tensor
    layers: dict[str, Layer]
    ahead: Tensor | None = None


def forward(run: Run, weights: Weights, batch: Tensor, *, step: int, cast: Rounding, note: Note) -> Passed:
    """Run the batch of a step, int64 [B, L + 1], through the model in training. note(name, output): called with each module's output."""
    model = run.model
    inputs, targets = batch[:, :-1], batch[:, 1:]
    length, ids = inputs.shape[1], ids_of(inputs).flatten()
    valid = (inputs != PADDING).flatten().tolist()
    tokens = Tokens(ids.tolist(), torch.arange(inputs.numel()), valid, length, run.train.seed, step)
    separators = ids == (model.document_separator or 0) if model.document_mask else torch.zeros_like(ids, dtype=torch.bool)
    begins = (separators.view(-1, length) | (inputs < -BEGIN)).tolist()
    x = times(cast(cast(weights["embedding"])[ids]), model.scales.embedding, cast)
    note("embedding", x)
    layers: dict[str, Layer] = {}
    for i in range(model.num_layers):
        name = f"layers.{i}"
        seen = cast(norm(x, weights[f"{name}.attention_norm.weight"], model))
        note(f"{name}.attention_norm", seen)
        out = attention(seen, weights, name, run, length, begins, cast)
        note(f"{name}.attention", out)
        x = cast(x + dropped(run, times(out, model.scales.residual, cast), f"{name}.attention", tokens, cast))
        seen = cast(norm(x, weights[f"{name}.ffn_norm.weight"], model))
        note(f"{name}.ffn_norm", seen)
        out = dense_or_experts(seen, weights, i, run, tokens, cast, note, layers)
        x = cast(x + dropped(run, times(out, model.scales.residual, cast), f"{name}.ffn", tokens, cast))
        note(name, x)
    table = weights["embedding" if model.tied_embeddings else "head.weight"]
    ahead = _ahead_loss(x, weights, run, targets, begins, tokens, cast, table) if model.ahead else None
    x = cast(norm(x, weights["norm.weight"], model))
    note("norm", x)
    logits = capped(wide(cast(times(x, 1 / model.scales.head, cast) @ cast(table).t())), model.logit_cap)
    return Passed(F.cross_entropy(logits, predicted(targets).flatten(), reduction="sum", ignore_index=PADDING), layers, ahead)


def dropped(run: Run, x: Tensor, name: str, tokens: Tokens, cast: Rounding) -> Tensor:
    """x [T, D] after the model's dropout. Its random numbers depend on step, `name` and the token's index in the step."""
    p = run.model.dropout
    return cast(x * cast((tokens.draw(f"{name}.dropout", x.shape[1]) >= p).float() / (1 - p))) if p else x


def _ahead_loss(
    x: Tensor, weights: Weights, run: Run, targets: Tensor, begins: Begins, tokens: Tokens, cast: Rounding, table: Tensor
) -> Tensor:
    """Loss of multi-token prediction (Passed.ahead). Depth k (from 0) joins the hidden state of position i with the embedding of token
    i+1+k, and predicts token i+2+k. The hidden state comes from depth k-1; for k = 0 it is x, the last block's output. table: the head's
    matrix."""
    model, length = run.model, targets.shape[1]
    total = wide(x).new_zeros(())
    for k in range(model.ahead):
        name, block, layer = f"ahead.{k}", f"ahead.{k}.block", f"layers.{model.num_layers + k}"
        known = [[row[i + k] if i + k < length else PADDING for i in range(length)] for row in targets.tolist()]
        wanted = [[_after(row[i : i + k + 2], k + 2) for i in range(length)] for row in targets.tolist()]
        ids = ids_of(torch.tensor(known).flatten())
        fresh = times(cast(cast(weights["embedding"])[ids]), model.scales.embedding, cast)
        fresh = cast(norm(fresh, weights[f"{name}.token_norm.weight"], model))
        both = torch.cat((cast(norm(x, weights[f"{name}.hidden_norm.weight"], model)), fresh), 1)
        x = product(both, weights, f"{name}.proj.weight", cast)
        seen = cast(norm(x, weights[f"{block}.attention_norm.weight"], model))
        out = attention(seen, weights, block, run, length, begins, cast)
        x = cast(x + dropped(run, times(out, model.scales.residual, cast), f"{layer}.attention", tokens, cast))
        seen = cast(norm(x, weights[f"{block}.ffn_norm.weight"], model))
        out = network(seen, weights, f"{block}.ffn", ffn=model.ffn, swiglu=model.swiglu, cast=cast)
        x = cast(x + dropped(run, times(out, model.scales.residual, cast), f"{layer}.ffn", tokens, cast))
        read = cast(norm(x, weights[f"{name}.norm.weight"], model))
        logits = capped(wide(cast(times(read, 1 / model.scales.head, cast) @ cast(table).t())), model.logit_cap)
        total = total + F.cross_entropy(logits, predicted(torch.tensor(wanted)).flatten(), reduction="sum", ignore_index=PADDING)
    return total / model.ahead


def _after(row: list[int], count: int) -> int:
    """Return the last target in `row`; PADDING if `row` has fewer than `count` targets, or if a packed chat begins in it."""
    return row[-1] if len(row) == count and min(row) >= -BEGIN else PADDING


def times(x: Tensor, factor: float, cast: Rounding) -> Tensor:
    """x times factor, rounded by `cast` unless the factor is 1."""
    return x if factor == 1 else cast(x * factor)


def dense_or_experts(
    seen: Tensor, weights: Weights, number: int, run: Run, tokens: Tokens, cast: Rounding, note: Note, layers: dict[str, Layer]
) -> Tensor:
    """Return the output [T, D] of block `number`'s MoE layer, or of its dense network if it has no experts. Put an MoE layer's results
    into `layers`."""
    model, experts, name = run.model, run.experts, f"layers.{number}"
    if number not in model.layers_with_experts():
        out = network(seen, weights, f"{name}.ffn", ffn=model.ffn, swiglu=model.swiglu, cast=cast)
        note(f"{name}.ffn", out)
        return out
    count = experts.of_layer(model.layers_with_experts().index(number)) + experts.skip + experts.zero
    layers[name] = layer = moe_layer(seen, weights, name, tokens, run, count, cast)
    note(f"{name}.router", layer.gates)
    out = _with_shared(seen, layer.y, weights, name, run, cast)
    note(f"{name}.moe", out)
    return out


def norm(x: Tensor, gain: Tensor, model: Model, *, kind: str | None = None) -> Tensor:
    """RMSNorm or LayerNorm over the last dim, in fp32 at least. kind: rmsnorm or layernorm; None: the model's setting."""
    x, centered = wide(x), (kind or model.norm) == "layernorm"
    x = x - x.mean(-1, keepdim=True) if centered else x
    return x / (x.square().mean(-1, keepdim=True) + (model.norm_eps or (1e-5 if centered else 1e-6))).sqrt() * wide(gain)


def attention(x: Tensor, weights: Weights, name: str, run: Run, length: int, begins: Begins, cast: Rounding) -> Tensor:
    """Output [T, D] of the self-attention of block `name`, such as layers.3. x [T, D]: sequences of `length` tokens each."""
    model = run.model
    heads, groups = model.num_heads, model.num_kv_heads or model.num_heads
    size = model.head_size or model.d_model // heads
    if model.latent.key_rank is not None:
        return _mixed(*_latent_heads(x, weights, f"{name}.attention", model, length, cast), weights, name, model, begins, cast)

    def projected(matrix: str, count: int) -> Tensor:  # [heads, B, L, C]
        flat = product(x, weights, f"{name}.attention.{matrix}.weight", cast)
        if model.qkv_bias:
            flat = cast(flat + cast(weights[f"{name}.attention.{matrix}_bias.weight"]))
        gain = weights.get(f"{name}.attention.{matrix}_norm.weight")
        if gain is not None:
            rows = flat if model.qk_norm == "whole" else flat.reshape(-1, size)
            flat = cast(norm(rows, gain, model, kind="rmsnorm")).reshape(flat.shape)
        if model.clip_qkv is not None:
            bound = cast(torch.tensor(model.clip_qkv))
            flat = torch.where(flat.abs() <= bound, flat, bound * flat.sign())
        return flat.view(-1, length, count, size).permute(2, 0, 1, 3)

    q, k, v = projected("q", heads), projected("k", groups), projected("v", groups)
    if model.positions != "t5":
        q, k = _partly_rotated(q, model.rope, cast), _partly_rotated(k, model.rope, cast)
    return _mixed(q, k, v, weights, name, model, begins, cast)


def _latent_heads(x: Tensor, weights: Weights, name: str, model: Model, length: int, cast: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [H, B, L, C] of latent attention (arXiv 2405.04434, equations 37 to 47)."""
    content = model.head_size or model.d_model // model.num_heads
    rotary, value = model.latent.rotary_size or content // 2, model.latent.value_size or content

    def by(x: Tensor, matrix: str) -> Tensor:
        return product(x, weights, f"{name}.{matrix}.weight", cast)

    def normed(x: Tensor, gain: str) -> Tensor:
        rows = wide(x)
        return cast(rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide(weights[f"{name}.{gain}.weight"]))

    def rotated(x: Tensor) -> Tensor:
        return _rotated(x.reshape(-1, length, rotary), model.rope, cast)

    queries = by(x, "q") if model.latent.query_rank is None else by(normed(by(x, "q_down"), "q_down_norm"), "q_up")
    down = by(x, "kv_down")
    latent, shared = normed(down[:, : model.latent.key_rank], "kv_down_norm"), rotated(down[:, model.latent.key_rank :])
    up = by(latent, "kv_up")
    m = 1 + 0.1 * model.rope.mscale_all * math.log(model.rope.factor) if model.rope.scaling == "yarn" else 1.0
    q, k, v = [], [], []
    for head in range(model.num_heads):
        mine = queries[:, head * (content + rotary) : (head + 1) * (content + rotary)]
        made = up[:, head * (content + value) : (head + 1) * (content + value)]
        plain = mine[:, :content].reshape(-1, length, content)
        q.append(cast(torch.cat((plain, rotated(mine[:, content:])), -1) * m * m))
        k.append(torch.cat((made[:, :content].reshape(-1, length, content), shared), -1))
        v.append(made[:, content:].reshape(-1, length, value))
    return torch.stack(q), torch.stack(k), torch.stack(v)


def _mixed(q: Tensor, k: Tensor, v: Tensor, weights: Weights, name: str, model: Model, begins: Begins, cast: Rounding) -> Tensor:
    """Attention output [T, D], after the output projection, from q [H, B, L, C] and k, v [key-value heads, B, L, C]."""
    heads, groups, length, size = len(q), len(k), q.shape[2], q.shape[3]
    place = torch.arange(length)
    past = (place.unsqueeze(1) >= place).repeat(q.shape[1], 1, 1)
    for sequence, row in enumerate(begins):
        for first in (at for at, here in enumerate(row) if here):
            past[sequence, first:, :first] = False
    layer = int(name.split(".")[1]) + model.num_layers * name.startswith("ahead.")
    if model.sliding_window and (model.sliding_layers is None or layer in model.sliding_layers):
        for at in range(model.sliding_window, length):
            past[:, at, : at - model.sliding_window + 1] = False
    outs = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = wide(q[head] @ k[group].transpose(1, 2)) * (model.scales.attention or 1 / math.sqrt(size))
        if model.positions == "t5":
            scores = scores + wide(cast(wide(weights[f"{name}.attention.bias.weight"])[buckets(length, length, both_ways=False), head]))
        scores = scores.masked_fill(~past, -math.inf)
        if model.attention_sinks:
            scores = torch.cat((scores, wide(weights[f"{name}.attention.sinks.weight"])[head].expand(*scores.shape[:2], 1)), 2)
        shares = scores.softmax(2)[..., :length]
        outs.append(cast(shares.to(v.dtype) @ v[group]))
    flat = torch.stack(outs, 2).reshape(-1, heads * v.shape[3])
    out = product(flat, weights, f"{name}.attention.out.weight", cast)
    return cast(out + cast(weights[f"{name}.attention.out_bias.weight"])) if model.out_bias else out


def _partly_rotated(x: Tensor, rope: Rope, cast: Rounding) -> Tensor:
    """x [..., L, C] with rotary positions on the first C * rope.fraction channels."""
    first = math.floor(x.shape[-1] * rope.fraction)
    return torch.cat((_rotated(x[..., :first], rope, cast), x[..., first:]), -1)


def _rotated(x: Tensor, rope: Rope, cast: Rounding) -> Tensor:
    """x [..., L, C] with rotary positions: each pair of channels is a complex number and is multiplied by exp(i * position * rate)."""
    half = x.shape[-1] // 2
    rate = torch.tensor([_rate(rope, pair, half, x.shape[-2]) for pair in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[-2], dtype=torch.float64).unsqueeze(1) * rate
    length = 1.0  # absolute value of the complex number by which a pair is multiplied
    if rope.scaling == "yarn":
        length = (0.1 * rope.mscale * math.log(rope.factor) + 1) / (0.1 * rope.mscale_all * math.log(rope.factor) + 1)
    cos, sin = cast(length * angle.cos()), cast(length * angle.sin())
    if rope.pairs == "neighbours":
        a, b = x[..., ::2], x[..., 1::2]
        return cast(torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2))
    a, b = x[..., :half], x[..., half:]
    return cast(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))


def _rate(rope: Rope, pair: int, half: int, length: int) -> float:
    """Angle in radians by which channel pair `pair` of `half` rotates per position: base^(-pair / half), scaled by rope.scaling."""
    rate = math.pow(rope.base, -pair / half)
    if rope.scaling in ("ntk", "dynamic"):  # the rate of pair p is divided by factor^(p / last pair)
        factor = rope.factor
        if rope.scaling == "dynamic":
            assert rope.trained_length is not None
            factor = 1 + rope.factor * max(0.0, length / rope.trained_length - 1)
        return rate * math.pow(factor, -pair / max(half - 1, 1))
    if rope.scaling in ("none", "linear"):
        return rate / rope.factor
    assert rope.trained_length is not None
    most = rope.high or (4 if rope.scaling == "llama3" else 32)
    if rope.scaling == "llama3":
        share = (rope.trained_length * rate / (2 * math.pi) - rope.low) / (most - rope.low)
    else:  # yarn (arXiv 2309.00071): `share`, the weight of the unscaled rate, falls linearly from 1 at channel pair `fast` to 0 at `slow`
        fast, slow = (half * math.log(rope.trained_length / (2 * math.pi * turns), rope.base) for turns in (most, rope.low))
        if rope.whole_pairs:
            fast, slow = math.floor(fast), math.ceil(slow)
        start, end = max(fast, 0), min(slow, 2 * half - 1)
        share = 1 - (pair - start) / ((end - start) or 0.001)
    share = min(max(share, 0.0), 1.0)
    return share * rate + (1 - share) * rate / rope.factor


def buckets(queries: int, keys: int, *, both_ways: bool) -> Tensor:
    """T5's relative-position bucket (0 to 31) of each query and key, int64 [queries, keys]. Short distances have a bucket each; longer ones
    share buckets of logarithmic width. both_ways: True for an encoder, in which 16 of the buckets are for keys after the query.
    """

    def bucket(ahead: int) -> int:
        count, first = (16, 16 if ahead > 0 else 0) if both_ways else (32, 0)
        distance, exact = abs(ahead) if both_ways else max(0, -ahead), count // 2
        if distance < exact:
            return first + distance
        return first + min(count - 1, exact + int(math.log(distance / exact) / math.log(128 / exact) * (count - exact)))

    return torch.tensor([[bucket(key - query) for key in range(keys)] for query in range(queries)])


def _with_shared(x: Tensor, y: Tensor, weights: Weights, name: str, run: Run, cast: Rounding) -> Tensor:
    """Return y, the routed experts' output, plus the shared experts' output. In PR-MoE: the sum of y and the residual network's output,
    weighted by a softmax per token. Shared experts and residual network process every token."""
    how: dict[str, Any] = {"ffn": run.experts.ffn or run.model.ffn, "swiglu": run.model.swiglu, "cast": cast}
    if f"{name}.coefficient.weight" in weights:
        share = cast((wide(x) @ wide(weights[f"{name}.coefficient.weight"]).t()).softmax(1))
        return cast(cast(share[:, :1] * y) + cast(share[:, 1:] * network(x, weights, f"{name}.residual", **how)))
    if f"{name}.shared.w1.weight" not in weights:
        return y
    shared = network(x, weights, f"{name}.shared", **how)
    if f"{name}.shared_gate.weight" in weights:
        shared = cast(cast((wide(x) @ wide(weights[f"{name}.shared_gate.weight"]).t()).sigmoid()) * shared)
    return cast(y + shared)
