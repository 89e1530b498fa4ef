"""Computes the operators of a dense recipe's operator graph on shards of tensors, with torch's DTensor (parallel/annotations/annotated.py).

    program = gspmd.program(graph_of(run, sequences=n), mesh, annotations)        annotations: shardings, also some that no tensor.kind has
    ranks = Annotated(program, device_mesh(mesh), compute_of(run))
    values = {name: ranks.placed(name, t) for name, t in values_of(model, program.graph).items()}
    ranks(values | tokens and targets)["loss"]                                       loss of each token, [sequences, length]

Weights, loss and gradients equal the Transformer's in fp32. MoE layers are refused: a graph does not say which tokens an expert gets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe.kernels.activation import activate
from moe.nn.rotary import rotate
from moe.recipe.sections import Rope, Run, Scales
from moe.recipe.shapes import NORM_EPS
from parallel.annotations.annotated import Compute, Rank
from parallel.annotations.graph import Graph, Operator
from parallel.errors import BadInput
from parallel.fixes import Fix, Remove, Set, written
from parallel.sequence.softmax import repeated

# keys of `model` that a graph cannot describe -> the only value that is accepted
_PLAIN: dict[str, str | float | bool | None] = {"positions": "rotary", "qk_norm": "none", "clip_qkv": None, "logit_cap": None, "ahead": 0}
_PLAIN |= {"qkv_bias": False, "out_bias": False, "attention_sinks": False, "document_mask": False, "dropout": 0}


def compute_of(run: Run) -> Compute:
    """Return a function that computes one operator on one rank's shards. Raises BadInput for a model that a graph cannot describe."""
    m = run.model
    windows = any((m.window_of(i) or m.max_length) < m.max_length for i in range(m.num_layers))
    latent, kinds = m.latent.key_rank, "train it with a tensor.kind instead of annotations"
    refused: dict[str, tuple[object, bool, Fix]] = {
        "model.moe_every": ("MoE layers", bool(m.layers_with_experts()), Set("it", 0) | kinds),
        "model.latent.key_rank": (latent, latent is not None, Set("it", None)),
        "model.scales": ("factors", m.scales != Scales(), Remove("it")),
        "model.sliding_window": (m.sliding_window, windows, Set("it", None)),
    }
    for key, value in _PLAIN.items():
        refused[f"model.{key}"] = (written(getattr(m, key)), getattr(m, key) != value, Set("it", value))
    for key, (got, wrong, fix) in refused.items():
        if wrong:
            raise BadInput(key, got=got, needed="a model that its graph describes fully: dense, rotary, without dropout", fix=fix)

    def compute(op: Operator, inputs: Sequence[Tensor], rank: Rank) -> Tensor:
        if op.kind == "product":
            return torch.einsum(op.rule, *inputs)
        if op.kind == "pointwise" and op.name.endswith(".act"):
            return activate(inputs[0], inputs[1] if len(inputs) > 1 else None, m.ffn, m.gating)
        if op.kind == "pointwise":
            return inputs[0] + inputs[1]
        if op.kind == "norm":
            return _norm(op, inputs[0], inputs[1], rank, kind=m.norm, eps=m.norm_eps or NORM_EPS[m.norm])
        if op.kind == "lookup":
            rows, here = _here(inputs[0], op.terms[1][0], rank)
            return F.embedding(rows, inputs[1]) * here.unsqueeze(-1)
        if op.kind == "attention":
            return _attention(op, inputs[0], inputs[1], inputs[2], rank, rope=m.rope)
        assert op.kind == "loss", op.kind
        return _loss(op, inputs[0], inputs[1], rank)

    return compute


def values_of(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Return name -> parameter, in the shape that the operator graph gives it: weights of products are transposed to [in, out]."""
    found = {}
    for name, parameter in model.named_parameters():
        size = tuple(graph.dims[letter].size for letter in graph.parameters[name])
        turned = parameter.ndim == 2 and any(op.kind == "product" and name in op.inputs and op.name != "head" for op in graph.operators)
        found[name] = (parameter.t() if turned else parameter).detach().reshape(size)
    return found


def _norm(op: Operator, x: Tensor, gain: Tensor, rank: Rank, *, kind: str, eps: float) -> Tensor:
    """Apply RMSNorm or LayerNorm (`kind`) with this gain. If channels are sharded, the statistics are summed over ranks."""
    letter = op.statistics
    width = rank.factors[letter]
    if kind == "layernorm":
        x = x - rank.total(x.sum(-1, keepdim=True), letter, read="in parts") / width
    mean = rank.total(x.square().sum(-1, keepdim=True), letter, read="in parts") / width
    return x * torch.rsqrt(mean + eps) * gain


def _here(rows: Tensor, letter: str, rank: Rank) -> tuple[Tensor, Tensor]:
    """Return row indices relative to this rank's shard (0 for rows of other ranks), and a mask of the rows that this rank holds. letter:
    the letter, in the operator's einsum, of the dim along which rows are sharded."""
    part = rank.region(letter)
    here = (rows >= part.start) & (rows < part.stop)
    return torch.where(here, rows - part.start, 0), here


def _attention(op: Operator, q_BLKGC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, rank: Rank, *, rope: Rope) -> Tensor:
    """Compute causal attention with rotary positions. The queries may be a shard of the sequence."""
    places = rank.region(op.output[1])
    query_L = torch.arange(places.start, places.stop)
    key_S = torch.arange(k_BSKC.shape[1])
    groups = q_BLKGC.shape[3]
    q = rotate(rearrange(q_BLKGC, "b l k g c -> b (k g) l c"), query_L, rope)
    k, v = (rearrange(x, "b s k c -> b k s c") for x in (k_BSKC, v_BSKC))
    k = rotate(k, key_S, rope)
    heads = q.shape[1]
    mixed = F.scaled_dot_product_attention(q, repeated(k, heads), repeated(v, heads), attn_mask=query_L.unsqueeze(1) >= key_S)
    return rearrange(mixed, "b (k g) l c -> b l k g c", g=groups)


def _loss(op: Operator, logits_BLV: Tensor, targets_BL: Tensor, rank: Rank) -> Tensor:
    """Return each token's cross-entropy. Ranks with shards of the vocabulary exchange maximum, sum of exponentials and target logit."""
    letter = op.statistics
    rows, here = _here(targets_BL, letter, rank)
    target = rank.total(logits_BLV.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * here, letter, read="in copies")
    most = rank.largest(logits_BLV.amax(-1), letter)
    return most + rank.total((logits_BLV - most.unsqueeze(-1)).exp().sum(-1), letter, read="in copies").log() - target
