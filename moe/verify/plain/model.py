"""The Transformer around the MoE layers as plain functions of a table of whole tensors, by the names of checkpoints: embedding, norms,
attention, feed-forward networks, shared experts, loss. Uses no module, kernel or autograd function of the model.

    x = embedding[tokens] ; x = x + attention(norm x) ; x = x + ffn-or-experts(norm x) ; ... ; logits = head(norm x) ; loss

It shares with the model the recipe and the hash of keyed random numbers (moe/verify/plain/layer.py). `Rounding` handles every number
that a 16-bit run would round. In fp32 and float64 it does nothing. Otherwise it rounds, or disturbs the number at random by as much, to
measure the effect of rounding (moe/verify/expected.py).
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
from moe.verify.plain.batches import PADDING, predicted
from moe.verify.plain.batches import ids as ids_of
from moe.verify.plain.layer import Kind, Layer, Weights, moe_layer, network
from moe.verify.plain.router import Tokens, wide

# B batch, L length, D model, H heads, C channels of a head, T = B*L tokens

Note = Callable[[str, Tensor], None]  # called with each part's name and output [T, ...], in order of depth


@dataclass
class Rounding:
    """`dtype`: dtype of products. `unit`: with fp32, every number is disturbed at random by up to this share of its value, forward and
    backward, as rounding to a format with this unit roundoff would do; 0: not at all.
    """

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
    """`loss`: cross-entropy summed over the predicted tokens; `layers`: results of MoE layers by name."""

    loss: Tensor
    layers: dict[str, Layer]
    ahead: Tensor | None = None  # multi-token prediction: summed cross-entropy, mean over depths


def forward(run: Run, weights: Weights, batch: Tensor, *, step: int, cast: Rounding, note: Note) -> Passed:
    """Run all sequences of a step (int64 [B, L + 1]) through the model, in training."""
    model = run.model
    inputs, targets = batch[:, :-1], batch[:, 1:]
    valid = inputs != PADDING
    length = inputs.shape[1]
    ids = ids_of(inputs).flatten()
    places = torch.arange(inputs.numel())
    tokens = Tokens(ids.tolist(), places, valid.flatten().tolist(), length, run.train.seed, step)

    def dropped(x: Tensor, name: str) -> Tensor:
        if not model.dropout:
            return x
        return cast(x * cast((tokens.draw(name, x.shape[1]) >= model.dropout).float() / (1 - model.dropout)))

    begins = (ids == (model.document_separator or 0)).view(-1, length).tolist() if model.document_mask else None
    x = times(cast(cast(weights["embedding"])[ids]), model.scales.embedding, cast)
    note("embedding", x)
    layers: dict[str, Layer] = {}
    for i in range(model.num_layers):
        name = f"layers.{i}"
        out = attention(cast(norm(x, weights[f"{name}.attention_norm.weight"], model)), weights, name, run, length, begins, cast)
        note(f"{name}.attention", out)
        x = cast(x + dropped(times(out, model.scales.residual, cast), f"{name}.attention.dropout"))
        seen = cast(norm(x, weights[f"{name}.ffn_norm.weight"], model))
        out = dense_or_experts(seen, weights, i, run, tokens, cast, note, layers)
        x = cast(x + dropped(times(out, model.scales.residual, cast), f"{name}.ffn.dropout"))
        note(name, x)
    table = weights["embedding" if model.tied_embeddings else "head.weight"]
    further = None
    if model.ahead:
        further = _further(x, weights, run, targets, begins, dropped, cast, table)
    x = cast(norm(x, weights["norm.weight"], model))
    note("norm", x)
    x = times(x, 1 / model.scales.head, cast)
    logits = wide(cast(x @ cast(table).t()))
    if model.logit_cap is not None:  # tanh, written with exponentials
        logits = model.logit_cap * (1 - 2 / (torch.exp(2 * logits / model.logit_cap) + 1))
    return Passed(F.cross_entropy(logits, predicted(targets).flatten(), reduction="sum", ignore_index=PADDING), layers, further)


def _further(
    x: Tensor,
    weights: Weights,
    run: Run,
    targets: Tensor,
    begins: list[list[bool]] | None,
    dropped: Callable[[Tensor, str], Tensor],
    cast: Rounding,
    table: Tensor,
) -> Tensor:
    """The loss of multi-token prediction. At depth k, token i gets the embedding of token i+1+k, and predicts the token after it."""
    model, length = run.model, targets.shape[1]
    gating = (model.swiglu.alpha, model.swiglu.limit, model.swiglu.offset)
    total = wide(x).new_zeros(())
    for k in range(model.ahead):
        name, block = f"ahead.{k}", f"ahead.{k}.block"
        known = [[row[i + k] if i + k < length else PADDING for i in range(length)] for row in targets.tolist()]
        wanted = [[row[i + k + 1] if i + k + 1 < length else PADDING for i in range(length)] for row in targets.tolist()]
        ids = ids_of(torch.tensor(known).flatten())
        fresh = cast(norm(cast(cast(weights["embedding"])[ids]), weights[f"{name}.token_norm.weight"], model))
        both = torch.cat((cast(norm(x, weights[f"{name}.hidden_norm.weight"], model)), fresh), 1)
        x = cast(both @ cast(weights[f"{name}.proj.weight"]).t())
        seen = cast(norm(x, weights[f"{block}.attention_norm.weight"], model))
        out = attention(seen, weights, block, run, length, begins, cast)
        number = model.num_layers + k
        x = cast(x + dropped(out, f"layers.{number}.attention.dropout"))
        seen = cast(norm(x, weights[f"{block}.ffn_norm.weight"], model))
        x = cast(x + dropped(dense(seen, weights, f"{block}.ffn", model.ffn, cast, gating), f"layers.{number}.ffn.dropout"))
        read = cast(norm(x, weights[f"{name}.norm.weight"], model))
        logits = wide(cast(read @ cast(table).t()))
        total = total + F.cross_entropy(logits, predicted(torch.tensor(wanted)).flatten(), reduction="sum", ignore_index=PADDING)
    return total / model.ahead


def times(x: Tensor, factor: float, cast: Rounding) -> Tensor:
    """x times factor. A factor of 1 adds no rounding."""
    return x if factor == 1 else cast(x * factor)


def dense_or_experts(
    seen: Tensor, weights: Weights, number: int, run: Run, tokens: Tokens, cast: Rounding, note: Note, layers: dict[str, Layer]
) -> Tensor:
    """The output of block `number`: its dense network, or its experts and shared experts. Adds an MoE layer's results to `layers`."""
    model, experts, name = run.model, run.experts, f"layers.{number}"
    gating = (model.swiglu.alpha, model.swiglu.limit, model.swiglu.offset)
    if number not in model.layers_with_experts():
        out = dense(seen, weights, f"{name}.ffn", model.ffn, cast, gating)
        note(f"{name}.ffn", out)
        return out
    nth = model.layers_with_experts().index(number)
    count = experts.of_layer(nth) + experts.skip + experts.zero
    free = (experts.skip, experts.zero)
    kind = Kind(run.router, count, experts.ffn or model.ffn, experts.dropout, gating, *free, model.norm_eps, experts.products)
    layers[name] = layer = moe_layer(seen, weights, name, tokens, kind, cast)
    note(f"{name}.router", layer.gates)
    out = with_shared(seen, layer.y, weights, name, kind, cast)
    note(f"{name}.moe", out)
    return out


def norm(x: Tensor, gain: Tensor, model: Model, *, kind: str | None = None) -> Tensor:
    """RMSNorm or LayerNorm of the last dim, in fp32 at least. `kind`: instead of the model's kind."""
    x = wide(x)
    if (kind or model.norm) == "layernorm":
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + (model.norm_eps or 1e-5)).sqrt() * wide(gain)
    return x / (x.square().mean(-1, keepdim=True) + (model.norm_eps or 1e-6)).sqrt() * wide(gain)


def attention(x: Tensor, weights: Weights, name: str, run: Run, length: int, begins: list[list[bool]] | None, cast: Rounding) -> Tensor:
    """Attention of x [T, D], whole sequences, head after head, each with the key-value head of its group. `begins`: where documents
    begin.
    """
    model = run.model
    heads, groups = model.num_heads, model.num_kv_heads or model.num_heads
    size = model.head_size or model.d_model // heads
    if model.latent.key_rank is not None:
        q, k, v = latent_heads(x, weights, f"{name}.attention", model, length, cast)
        return mixed(q, k, v, weights, name, model, begins, cast)

    def projected(matrix: str, count: int) -> Tensor:  # [heads, B, L, C]
        flat = cast(x @ cast(weights[f"{name}.attention.{matrix}.weight"]).t())
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
        q, k = _some_turned(q, model.rope, cast), _some_turned(k, model.rope, cast)
    return mixed(q, k, v, weights, name, model, begins, cast)


def latent_heads(x: Tensor, weights: Weights, name: str, model: Model, length: int, cast: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [H, B, L, C] of latent attention, head after head, as in arXiv 2405.04434 (equations 37 to 47)."""
    content = model.head_size or model.d_model // model.num_heads
    rotary, value = model.latent.rotary_size or content // 2, model.latent.value_size or content

    def times(x: Tensor, matrix: str) -> Tensor:
        return cast(x @ cast(weights[f"{name}.{matrix}.weight"]).t())

    def normed(x: Tensor, gain: str) -> Tensor:
        rows = wide(x)
        return cast(rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide(weights[f"{name}.{gain}.weight"]))

    def at_places(x: Tensor) -> Tensor:
        return _turned(x.reshape(-1, length, rotary), model.rope, cast)

    queries = times(x, "q") if model.latent.query_rank is None else times(normed(times(x, "q_down"), "q_down_norm"), "q_up")
    down = times(x, "kv_down")
    latent, shared = normed(down[:, : model.latent.key_rank], "kv_down_norm"), at_places(down[:, model.latent.key_rank :])
    up = times(latent, "kv_up")
    m = 1 + 0.1 * model.rope.mscale_all * math.log(model.rope.factor) if model.rope.scaling == "yarn" else 1.0
    q, k, v = [], [], []
    for head in range(model.num_heads):
        mine = queries[:, head * (content + rotary) : (head + 1) * (content + rotary)]
        made = up[:, head * (content + value) : (head + 1) * (content + value)]
        plain = mine[:, :content].reshape(-1, length, content)
        q.append(cast(torch.cat((plain, at_places(mine[:, content:])), -1) * m * m))
        k.append(torch.cat((made[:, :content].reshape(-1, length, content), shared), -1))
        v.append(made[:, content:].reshape(-1, length, value))
    return torch.stack(q), torch.stack(k), torch.stack(v)


def mixed(
    q: Tensor, k: Tensor, v: Tensor, weights: Weights, name: str, model: Model, begins: list[list[bool]] | None, cast: Rounding
) -> Tensor:
    """The output [T, D] of attention, from queries [H, B, L, C] and the keys that each may see."""
    heads, groups, length, size = len(q), len(k), q.shape[2], q.shape[3]
    place = torch.arange(length)
    past = (place.unsqueeze(1) >= place).repeat(q.shape[1], 1, 1)
    for sequence, row in enumerate(begins or []):
        for first in (at for at, here in enumerate(row) if here):
            past[sequence, first:, :first] = False
    if model.sliding_window and (model.sliding_layers is None or int(name.split(".")[1]) in model.sliding_layers):
        for at in range(model.sliding_window, length):
            past[:, at, : at - model.sliding_window + 1] = False
    outs = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = wide(q[head] @ k[group].transpose(1, 2)) * (model.scales.attention or 1 / math.sqrt(size))
        if model.positions == "t5":
            scores = scores + wide(cast(wide(weights[f"{name}.attention.bias.weight"])[_buckets(length), head]))
        scores = scores.masked_fill(~past, -math.inf)
        if model.attention_sinks:
            scores = torch.cat((scores, wide(weights[f"{name}.attention.sinks.weight"])[head].expand(*scores.shape[:2], 1)), 2)
        shares = scores.softmax(2)[..., :length]
        outs.append(cast(shares.to(v.dtype) @ v[group]))
    flat = torch.stack(outs, 2).reshape(-1, heads * v.shape[3])
    out = cast(flat @ cast(weights[f"{name}.attention.out.weight"]).t())
    return cast(out + cast(weights[f"{name}.attention.out_bias.weight"])) if model.out_bias else out


def _some_turned(x: Tensor, rope: Rope, cast: Rounding) -> Tensor:
    """Rotary positions for the first channels of a head only, as if they were a head of their own."""
    first = math.floor(x.shape[-1] * rope.fraction)
    return torch.cat((_turned(x[..., :first], rope, cast), x[..., first:]), -1)


def _turned(x: Tensor, rope: Rope, cast: Rounding) -> Tensor:
    """Rotary positions: the pair of channels (i, i + C/2) as a complex number, times exp(i position rate)."""
    half = x.shape[-1] // 2
    rate = torch.tensor([_rate(rope, pair, half, x.shape[-2]) for pair in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[-2], dtype=torch.float64).unsqueeze(1) * rate
    length = 1.0
    if rope.scaling == "yarn":
        length = (0.1 * rope.mscale * math.log(rope.factor) + 1) / (0.1 * rope.mscale_all * math.log(rope.factor) + 1)
    cos, sin = cast(length * angle.cos()), cast(length * angle.sin())
    if rope.pairs == "neighbours":
        a, b = x[..., ::2], x[..., 1::2]
        return cast(torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2))
    a, b = x[..., :half], x[..., half:]
    return cast(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))


def _rate(rope: Rope, pair: int, half: int, length: int) -> float:
    """Radians for each position: 1 / base^(2i/C), that over `factor`, or between the two (Llama 3.1; YaRN, arXiv 2309.00071)."""
    rate = math.pow(rope.base, -pair / half)
    if rope.scaling in ("ntk", "dynamic"):  # the slowest pair is slowed by the factor, the others by a power of it
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
    else:  # a ramp over the pairs' indices, between the pairs that turn fast and slowly
        fast, slow = (half * math.log(rope.trained_length / (2 * math.pi * turns), rope.base) for turns in (most, rope.low))
        if rope.whole_pairs:
            fast, slow = math.floor(fast), math.ceil(slow)
        start, end = max(fast, 0), min(slow, 2 * half - 1)
        share = 1 - (pair - start) / ((end - start) or 0.001)
    share = min(max(share, 0.0), 1.0)
    return share * rate + (1 - share) * rate / rope.factor


def _buckets(length: int) -> Tensor:
    """T5's bucket of each distance, [L, L]: 16 exact buckets, then 16 that grow up to a distance of 128."""

    def bucket(distance: int) -> int:
        if distance < 16:
            return max(0, distance)
        return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))

    return torch.tensor([[bucket(q - k) for k in range(length)] for q in range(length)])


def dense(x: Tensor, weights: Weights, name: str, ffn: str, cast: Rounding, gating: tuple[float, float | None, float]) -> Tensor:
    """A dense network. Its matrices are stored as [out, in]."""
    matrices = [weights.get(f"{name}.{matrix}.weight") for matrix in ("w1", "w2", "w3")]
    return network(x, *(None if w is None else w.t() for w in matrices), ffn=ffn, cast=cast, swiglu=gating)


def with_shared(x: Tensor, y: Tensor, weights: Weights, name: str, kind: Kind, cast: Rounding) -> Tensor:
    """The experts' output plus the networks that every token passes: shared experts, or a residual network (PR-MoE)."""
    if f"{name}.coefficient.weight" in weights:
        share = cast((wide(x) @ wide(weights[f"{name}.coefficient.weight"]).t()).softmax(1))
        return cast(cast(share[:, :1] * y) + cast(share[:, 1:] * dense(x, weights, f"{name}.residual", kind.ffn, cast, kind.swiglu)))
    if f"{name}.shared.w1.weight" not in weights:
        return y
    shared = dense(x, weights, f"{name}.shared", kind.ffn, cast, kind.swiglu)
    if f"{name}.shared_gate.weight" in weights:
        shared = cast(cast((wide(x) @ wide(weights[f"{name}.shared_gate.weight"]).t()).sigmoid()) * shared)
    return cast(y + shared)
