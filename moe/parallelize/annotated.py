"""Computes the operators of a dense recipe's operator graph on shards of tensors, with torch's DTensor (parallel/annotations/annotated.py).

    program = gspmd.program(graph_of(run, sequences=n), mesh, annotations)        annotations: shardings, also some that no tensor.kind has
    ranks = Annotated(program, device_mesh(mesh), compute_of(run))
    values = {name: ranks.placed(name, t) for name, t in (values_of(model, program.graph) | inputs_of(run, tokens, targets)).items()}
    ranks(values)["loss"]                                                            loss of each token, [sequences, length]

With multi-token prediction, depth i also has "ahead.i.loss", which training multiplies by `model.ahead_weight / model.ahead`. Weights, loss
and gradients equal the Transformer's in fp32. MoE layers are refused: a graph does not say which tokens an expert gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe.kernels.activation import activate
from moe.nn.core import attend, masked
from moe.nn.rotary import logit_factor, turned, turns_of
from moe.nn.vocabulary import capped
from moe.recipe.sections import Model, Run, Scales
from moe.recipe.shapes import NORM_EPS, PADDING
from parallel.annotations.annotated import Compute, Rank
from parallel.annotations.graph import Graph, Operator
from parallel.errors import BadInput
from parallel.fixes import Fix, Remove, Set


def compute_of(run: Run) -> Compute:
    """Return a function that computes one operator on one rank's shards. Raises BadInput for a model that a graph cannot describe."""
    m, kinds = run.model, "train it with a tensor.kind instead of annotations"
    refused: dict[str, tuple[object, bool, Fix]] = {
        "model.moe_every": ("MoE layers", bool(m.layers_with_experts()), Set("it", 0) | kinds),
        "model.positions": (m.positions, m.positions != "rotary", Set("it", "rotary")),
        "model.scales": ("factors", m.scales != Scales(), Remove("it")),
        "model.document_mask": ("true", m.document_mask, Set("it", False)),
        "model.dropout": (m.dropout, m.dropout > 0, Set("it", 0)),
    }
    for key, (got, wrong, fix) in refused.items():
        if wrong:
            needed = "a model that its graph describes fully: dense, rotary, one document, no factors, no dropout"
            raise BadInput(key, got=got, needed=needed, fix=fix)

    def compute(op: Operator, inputs: Sequence[Tensor], rank: Rank) -> Tensor:
        if op.kind == "product":
            return torch.einsum(op.rule, *inputs)
        if op.kind == "pointwise":
            return _pointwise(op, inputs, m)
        if op.kind == "norm":
            return _norm(op, inputs[0], inputs[1], rank, m)
        if op.kind == "lookup":
            rows, here = _here(inputs[0].clamp_min(0), op.terms[1][0], rank)
            return F.embedding(rows, inputs[1]) * here.unsqueeze(-1)
        if op.kind == "attention":
            return _attention(op, inputs, rank, m)
        assert op.kind == "loss", op.kind
        return _loss(op, capped(inputs[0], m.logit_cap), inputs[1], rank)

    return compute


def inputs_of(run: Run, tokens_BL: Tensor, targets_BL: Tensor) -> dict[str, Tensor]:
    """Return name -> integer input of the graph. Targets of multi-token prediction are the later tokens; at a sequence's end they are
    padding, which has loss 0."""
    found = {"tokens": tokens_BL, "targets": targets_BL}
    for depth in range(run.model.ahead):
        targets_BL = F.pad(targets_BL[:, 1:], (0, 1), value=PADDING)
        found[f"ahead.{depth}.targets"] = targets_BL
    return found


def values_of(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Return name -> parameter, in the shape that the operator graph gives it: weights of products are transposed to [in, out]."""
    found = {}
    for name, parameter in model.named_parameters():
        size = tuple(graph.dims[letter].size for letter in graph.parameters[name])
        readers = [op.name.split(".")[-1] for op in graph.operators if op.kind == "product" and name in op.inputs]
        transposed = parameter.ndim == 2 and any(reader != "head" for reader in readers)
        found[name] = (parameter.t() if transposed else parameter).detach().reshape(size)
    return found


def _pointwise(op: Operator, inputs: Sequence[Tensor], m: Model) -> Tensor:
    """Compute an operator without matrix products: an activation, a sum, the channels of the rotary key, or a concatenation."""
    what = op.name.split(".")[-1]
    if what == "act":
        return activate(inputs[0], inputs[1] if len(inputs) > 1 else None, m.ffn, m.gating)
    if what == "rotary":
        return inputs[0][..., m.latent_sizes.rank :]
    return torch.cat(list(inputs), dim=-1) if what == "joined" else inputs[0] + inputs[1]


def _norm(op: Operator, x: Tensor, gain: Tensor, rank: Rank, m: Model) -> Tensor:
    """Apply RMSNorm or LayerNorm over the dims of the gain. If they are sharded, the statistics are summed over ranks."""
    letters, inner = op.terms[1], ".attention." in op.name  # inner: norms of queries, keys or latents
    kind = "rmsnorm" if inner else m.norm
    eps = NORM_EPS[kind] if m.norm_eps is None or "_down_norm" in op.name else m.norm_eps
    x = x[..., : gain.shape[-1]] if op.name.endswith("kv_down_norm") else x  # the other channels are the rotary key
    dims, width = tuple(range(-gain.ndim, 0)), prod(rank.factors[letter] for letter in letters)
    if kind == "layernorm":
        x = x - rank.total(x.sum(dims, keepdim=True), letters, read="in parts") / width
    mean = rank.total(x.square().sum(dims, keepdim=True), letters, read="in parts") / width
    return x * torch.rsqrt(mean + eps) * gain


def _here(rows: Tensor, letter: str, rank: Rank) -> tuple[Tensor, Tensor]:
    """Return row indices relative to this rank's shard (0 for rows of other ranks), and a mask of the rows that this rank holds. letter:
    the letter, in the operator's einsum, of the dim along which rows are sharded."""
    part = rank.region(letter)
    here = (rows >= part.start) & (rows < part.stop)
    return torch.where(here, rows - part.start, 0), here


def _attention(op: Operator, inputs: Sequence[Tensor], rank: Rank, m: Model) -> Tensor:
    """Compute causal attention with rotary positions, of keys and values or of latents. The queries may be a shard of the sequence."""
    places = rank.region(op.output[1])
    queries, keys = range(places.start, places.stop), range(inputs[1].shape[1])
    rope, block = m.rope.at(len(keys)), op.name.split(".")

    def turn(x: Tensor, positions: range) -> Tensor:
        position_L = torch.arange(positions.start, positions.stop, device=x.device)
        return turned(x, turns_of(position_L, rope.turning(x.shape[-1]), rope, dtype=x.dtype))

    if m.latent.key_rank is None:
        q, k, v = (rearrange(x, "b l ... c -> b (...) l c") for x in inputs[:3])
        if m.clip_qkv is not None:
            q, k, v = (x.clamp(-m.clip_qkv, m.clip_qkv) for x in (q, k, v))
        q, k = turn(q, queries), turn(k, keys)
    else:
        size, (q, pairs) = m.latent_sizes, (rearrange(x, "b l k c -> b k l c") for x in inputs[:2])
        content, rotary = q.split([size.content, size.rotary], dim=3)
        k, v = pairs.split([size.content, size.value], dim=3)
        q = torch.cat([content, turn(rotary, queries)], dim=3) * logit_factor(rope)
        k = torch.cat([k, turn(inputs[2].unsqueeze(1), keys).expand(-1, k.shape[1], -1, -1)], dim=3)
    window = m.window_of(int(block[1]) + (m.num_layers if block[0] == "ahead" else 0))
    mask = masked(queries, keys, None, bias=None, window=window, like=q)
    mixed = attend(q, k, v, mask=mask, scale=None, sink_H=inputs[3].flatten() if len(inputs) > 3 else None)
    return rearrange(mixed, "b h l c -> b l h c").reshape(*inputs[0].shape[:-1], -1)


def _loss(op: Operator, logits_BLV: Tensor, targets_BL: Tensor, rank: Rank) -> Tensor:
    """Return each token's cross-entropy, 0 if the target is padding. Ranks with shards of the vocabulary exchange maximum, sum of
    exponentials and target logit."""
    letter = op.statistics
    rows, here = _here(targets_BL, letter, rank)
    target = rank.total(logits_BLV.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * here, letter, read="in copies")
    most = rank.largest(logits_BLV.amax(-1), letter)
    loss = most + rank.total((logits_BLV - most.unsqueeze(-1)).exp().sum(-1), letter, read="in copies").log() - target
    return loss * (targets_BL != PADDING)
