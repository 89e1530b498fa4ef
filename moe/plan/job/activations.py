"""Bytes of activations held between forward and backward, for one micro-batch in flight on its stage, from a recipe alone.

Bytes per token of a block; c bytes per element of the compute dtype, D channels, w = heads * channels of a head, F hidden units:

    attention    4 D + c (D + 4 w) + 4 heads + 8      norm's input in fp32, its output, q, k, v, attention output, log-sum-exp
                 norms of q and k: 4 (w + k) + 4 (heads + kv_heads) more, their inputs and statistics
                 with a clip of q, k and v: c (w + 2 k) more, the unclipped tensors
                 with T5's bias 4 D + c (D + w) + 12 w + 4 heads L: the scores themselves
                 with a sliding window of at most L / 2 tokens 3 c w more: chunks of keys and values come twice, and the output
                 with sinks c (w + 4 heads) more, a channel for each head and the output without it
    dense        4 D + c (D + n F) + 8                n: relu 1, gelu 2, gated 4 hidden tensors that the activation and w2 need
    experts      4 D + c (D + k n F) + 8 E + 8        n: 1, gated 2, in each of k rows (rows_of_token); 2 c k D more if exchanged (ep > 1)
                 products that no kernel fuses (moe/kernels/products.py): n as in a dense network, and 2 c k D more
                 router: jitter 8 D more; a norm 4 D + 4 and, like noisy_top_k, 4 D for an fp32 copy in 16 bits without jitter;
                 noisy_top_k 8 E, capped logits 4 E, sparsemixer 5 k E
    recomputed   c D instead of the whole block (full), or instead of everything but attention (selective)
    the head     4 D + c D + 8, and 4 V for logits (capped 8 V) unless loss_chunks cuts them; multi-token prediction adds, for each
                 further token, the same again, a block, and 8 D + 2 c D + 16 of two norms and the product after them

RMSNorm on a CPU keeps x / rms(x), too, because its steps are separate kernels there. CUDA has one kernel for all.

A stage also keeps its input, c D (in fp32 it is the norm's input). For each micro-batch it keeps 9 L^2 for T5's buckets and, without
stages, a copy of the dense weights in the compute dtype if parameters are wider; stages cast them again
(parallel/numerics/weight_gradient.py). tests/moe/plan/job/test_activations.py counts the tensors that autograd really keeps; the experts'
rows are not padded there. Not counted: memory that is in use only while an action runs.
"""

from __future__ import annotations

from typing import Literal

from moe.kernels.products import PRODUCTS
from moe.plan.job.flops import attention_products, expert_size, in_chunks, rows_of_token
from moe.recipe.sections import Run
from moe.recipe.shapes import GATED
from moe.router.methods.catalog import method_of


def compute_bytes(run: Run) -> int:
    """Bytes per element of the compute dtype; `auto` counts as bf16."""
    return 4 if run.precision.compute == "fp32" else 2


Device = Literal["cuda", "cpu"]


def block_bytes(run: Run, layer: int, device: Device = "cuda") -> float:
    """Bytes held per token of one block, without copies of weights."""
    m, c = run.model, compute_bytes(run)
    kind = run.recompute.of_layer(layer)
    if kind == "full":
        return c * m.d_model
    held = (
        _norm(run, device) + _attention(run, layer, device) + _head_norms(run, device) + _clipped(run) + (c * m.d_model if m.dropout else 0)
    )
    if kind == "selective":
        return held + c * m.d_model
    held += _norm(run, device) + c * m.d_model + 8 + (c * m.d_model if m.dropout else 0)
    return held + (_experts(run, layer, device) if layer in m.layers_with_experts() else c * m.d_ff * _hidden(m.ffn))


def head_bytes(run: Run, device: Device = "cuda") -> float:
    """Bytes held per token by the last norm and the loss, and by multi-token prediction."""
    m, c = run.model, compute_bytes(run)
    of_logits = 4 if m.logit_cap is None else 8
    held = _norm(run, device) + c * m.d_model + 8 + (of_logits * run.vocab_size if run.recompute.loss_chunks == 1 else 0)
    joined = 2 * _norm(run, device) + (1 if c == 4 else 2) * c * m.d_model + 16  # in fp32 the first norm's input is the head's, too
    ahead = range(m.num_layers, m.num_layers + m.ahead)
    return held + sum(block_bytes(run, layer, device) + joined + held for layer in ahead)


def input_bytes(run: Run, layer: int | None, *, first: bool, last: bool) -> float:
    """Bytes held per token for a stage's input, if nothing in the stage holds that tensor itself. `layer`: the stage's first, or None.

    `first`, `last`: the model begins or ends in this stage. A stage of the embedding alone keeps no more than tokens.
    """
    if layer is None and first:
        return 0
    in_fp32 = compute_bytes(run) == 4 and (layer is not None or last)  # a norm keeps it
    own = in_fp32 or (layer is not None and run.recompute.of_layer(layer) == "full")
    return 0 if own else compute_bytes(run) * run.model.d_model


def fixed_bytes(run: Run, layer: int, casts: Literal["kept", "again"] = "kept") -> float:
    """Bytes held per micro-batch, independent of its tokens: dense weights in the compute dtype if parameters are wider, and T5's buckets.

    `casts`: the copies are kept, or made again in the backward pass, as with stages.
    """
    m, kind = run.model, run.recompute.of_layer(layer)
    if kind == "full":
        return 0
    buckets = 9 * m.max_length**2 if m.positions == "t5" else 0  # int64 buckets, and the causal mask
    if casts == "again" or compute_bytes(run) == (4 if run.precision.master == "fp32" else 2):
        return buckets
    weights: float = attention_products(m)
    if kind == "none":
        weights += _dense_weights(run, layer)
    return buckets + compute_bytes(run) * weights


def _norm(run: Run, device: Device) -> float:
    """Bytes per token that a norm keeps of its input, in fp32."""
    return (8 if device == "cpu" and run.model.norm == "rmsnorm" else 4) * run.model.d_model


def _attention(run: Run, layer: int, device: Device) -> float:
    """Bytes per token that attention keeps, without its norm."""
    m, c = run.model, compute_bytes(run)
    if m.latent.key_rank is not None:
        return _latent(run, layer, device)
    width = m.num_heads * (m.head_size or m.d_model // m.num_heads)
    if m.positions == "t5":
        return c * m.d_model + (12 + c) * width + 4 * m.num_heads * m.max_length + 8
    if m.attention_sinks:  # one more channel in queries, keys and values, and the output without it
        return c * m.d_model + (7 if in_chunks(m, layer=layer) else 5) * c * width + 4 * c * m.num_heads + 4 * m.num_heads + 8
    return c * m.d_model + (7 if in_chunks(m, layer=layer) else 4) * c * width + 4 * m.num_heads + 8


def _latent(run: Run, layer: int, device: Device) -> float:
    """Bytes per token of latents before and after their norms, queries, keys, padded values, and outputs with and without padding."""
    m, c, size = run.model, compute_bytes(run), run.model.latent_sizes
    low = size.rank + (m.latent.query_rank or 0)
    of_norms = (8 if device == "cpu" else 4) * low + 8 + (c * size.rotary if c == 4 else 0)  # in fp32 it is the product's output
    of_core = (7 if in_chunks(m, layer=layer) else 4) * m.num_heads * size.key
    return c * (m.d_model + of_core + m.num_heads * size.value + low) + of_norms + 4 * m.num_heads + 8


def _head_norms(run: Run, device: Device) -> float:
    """Bytes per token that norms of queries and keys keep: inputs in fp32, and a statistic for each head or one for all."""
    m = run.model
    heads, groups = m.num_heads, m.num_kv_heads or m.num_heads
    if m.qk_norm == "none":
        return 0
    channels = (heads + groups) * (m.head_size or m.d_model // heads)
    return (8 if device == "cpu" else 4) * channels + 4 * (heads + groups if m.qk_norm == "heads" else 2)


def _clipped(run: Run) -> float:
    """Bytes per token of queries, keys and values before they are clipped."""
    m = run.model
    heads = m.num_heads + 2 * (m.num_kv_heads or m.num_heads)
    return 0 if m.clip_qkv is None else compute_bytes(run) * heads * (m.head_size or m.d_model // m.num_heads)


def _experts(run: Run, layer: int, device: Device) -> float:
    m, e, c = run.model, run.experts, compute_bytes(run)
    ffn, d_ff, count = e.ffn or m.ffn, e.d_ff or m.d_ff, e.of_layer(m.layers_with_experts().index(layer))
    fused = PRODUCTS[e.products].fused
    hidden = (2 if ffn in GATED else 1) if fused else _hidden(ffn)
    of_row = d_ff * (hidden + (0 if not e.dropout else 1 if fused else 2))
    of_row += m.d_model * (2 if run.degrees.ep not in ("auto", 1) or not fused else 0)
    rows = rows_of_token(run.router, count) * of_row
    beside = (e.shared_d_ff or d_ff) * e.shared * _hidden(ffn) + (m.d_model if e.shared_gate else 0)
    beside += d_ff * _hidden(ffn) + 2 * m.d_model if e.residual else 0
    return c * (rows + beside) + router_bytes(run, count, device)


def router_bytes(run: Run, num_experts: int, device: Device = "cuda") -> float:
    """Bytes held per token by a router and its losses, in fp32. Its input is the layer's own, unless jitter or norm change it."""
    spec, d, count = run.router, run.model.d_model, num_experts + run.experts.free
    normed, noisy = spec.input_norm == "rmsnorm", spec.noise == "noisy_top_k"
    held = 8 * d if spec.jitter else 4 * d if (normed or noisy) and compute_bytes(run) < 4 else 0
    if normed:
        held += (8 if device == "cpu" else 4) * d + 4
    held += method_of(spec).kept_bytes(num_choices=min(spec.num_choices, num_experts), num_experts=count)
    return held + count * (8 + (8 if noisy else 0) + (4 if spec.logit_cap else 0))


def _dense_weights(run: Run, layer: int) -> float:
    m, e = run.model, run.experts
    if layer not in m.layers_with_experts():
        return m.d_model * m.d_ff * (3 if m.ffn in GATED else 2)
    of_experts = e.shared * (e.shared_d_ff or e.d_ff or m.d_ff) / (e.d_ff or m.d_ff) + e.residual
    return of_experts * expert_size(m, e)


def _hidden(ffn: str) -> int:
    """Hidden tensors that one network keeps: 1 for relu (its output gives its derivative), 2 for gelu (input and output), 4 if gated."""
    return 4 if ffn in GATED else 1 if ffn == "relu" else 2
