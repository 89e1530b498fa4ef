"""Parameters and floating-point operations of a model, from its recipe alone: total and active per token.

    forward per token = 2 * (active matrix parameters) + 4 * (mean attended length) * heads * channels * layers
    training          = 3 * forward                                                    (backward has two products for each)

A causal token attends to (L + 1) / 2 positions on average, with a sliding window to fewer. Numbers of an encoder-decoder are means over all
tokens, the encoder's and the decoder's: a token passes only the layers of its half, and keys and values of cross-attention come from the
encoder's tokens. Capacity is ignored: dropped choices would only lower the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from moe.recipe import sections
from moe.recipe.shapes import GATED, T5_BUCKETS
from moe.router.methods.catalog import method_of


@dataclass(frozen=True)
class Size:
    """Size of a model or a block. total, active: parameters, of which `active` are used by a token. forward, training: FLOPs per token."""

    total: int
    active: int
    forward: float
    training: float


def size(run: sections.Run) -> Size:
    """Return the size of the whole model: its blocks, the embedding table, the last norm and the projection to the vocabulary."""
    model = run.model
    blocks = [block_size(run, layer=layer) for layer in range(model.num_layers)]
    halves = 1 if model.kind == "decoder" else 2  # encoder and decoder each end with a norm
    ends = run.vocab_size * model.d_model * (1 if model.tied_embeddings else 2) + halves * model.d_model
    forward = sum(block.forward for block in blocks) + head_forward(run)
    held, trained = multi_token_size(run)
    total, active = (sum(sizes) + ends + held for sizes in zip(*((b.total, b.active) for b in blocks), strict=True))
    return Size(total, active, forward, 3.0 * (forward + trained))


def multi_token_size(run: sections.Run) -> tuple[int, float]:
    """(parameters, forward FLOPs per token) of multi-token prediction: a block, a product, norms and a head for each further token."""
    model, block = run.model, block_size(run, layer=run.model.num_layers)
    join = 2 * model.d_model**2
    each = block.forward + 2.0 * join + head_forward(run)
    return model.ahead * (block.total + join + 3 * model.d_model), model.ahead * each


def block_size(run: sections.Run, *, layer: int) -> Size:
    """Return the size of one block: attention, and a network or experts. `active` counts only the experts that a token chooses."""
    model, experts, router = run.model, run.experts, run.router
    products = attention_products(model)
    idle = vectors = 0
    if layer in model.layers_with_experts():
        ffn, one_expert = experts.ffn or model.ffn, expert_size(model, experts)
        num_experts = experts.of_layer(model.layers_with_experts().index(layer))
        chosen = min(router.num_choices, num_experts)  # further choices compute nothing
        products += _ffn(model.d_model, (experts.shared_d_ff or experts.d_ff or model.d_ff) * experts.shared, ffn) + (
            model.d_model if experts.shared_gate else 0
        )
        products += one_expert + 2 * model.d_model if experts.residual else 0
        products += model.d_model * (num_experts + experts.free) * (2 if router.noise == "noisy_top_k" else 1)
        products += chosen * one_expert
        products += num_experts * model.d_model if experts.biases else 0  # the biases after w2: a product with the gates
        vectors += chosen * expert_vectors(model, experts)
        vectors += (num_experts + experts.free) * router.vectors
        vectors += model.d_model if router.input_norm == "rmsnorm" else 0
        idle = (num_experts - chosen) * (one_expert + expert_vectors(model, experts))
    else:
        products += _ffn(model.d_model, model.d_ff, model.ffn)
    first = model.kind == "decoder" or layer in (0, model.decoder_begins)  # a half's first layer has the bias that all its layers share
    bias = T5_BUCKETS * model.num_heads if model.positions == "t5" and first else 0
    active = products + vectors + 2 * model.d_model + bias + attention_vectors(model)
    forward = 2.0 * products + core_forward(model, layer=layer)
    if model.kind == "encoder_decoder":
        forward = _half_forward(model, 2.0 * products, layer=layer)
        if layer >= model.decoder_begins:
            active += attention_products(model) + attention_vectors(model) + model.d_model
    return Size(active + idle, active, forward, 3.0 * forward)


def _half_forward(model: sections.Model, own: float, *, layer: int) -> float:
    """Forward FLOPs of one block of an encoder-decoder, as a mean over all tokens of both halves. own: FLOPs of a token that passes it,
    without attention between q, k and v."""
    read, written, groups = model.max_length, model.target_length, model.num_kv_heads or model.num_heads
    head = model.head_size or model.d_model // model.num_heads
    width = 4.0 * model.num_heads * head
    if layer < model.decoder_begins:
        return (own + width * read) * read / model.read_length
    queries, keys = (
        4.0 * model.d_model * head * heads for heads in (model.num_heads, groups)
    )  # products for q and output, and for keys and values
    of_token = own + width * (written + 1) / 2 + queries + width * read
    return (of_token * written + keys * read) / model.read_length


def rows_of_token(router: sections.Router, num_experts: int) -> float:
    """Mean number of rows that experts compute for a token: its choices, but at most one for each expert, and at most the capacity.

    Experts that choose tokens fill their capacity. The capacity's minimum and rounding, which matter in small groups, do not count.
    """
    spec, slots = router, slots_of_token(router)
    return min(min(spec.num_choices, slots) if method_of(spec).tokens_choose else slots, num_experts)


def slots_of_token(router: sections.Router) -> float:
    """Number of rows for which all experts together have capacity, divided by the number of tokens; infinite without a capacity."""
    spec = router
    return inf if spec.capacity_factor is None else spec.capacity_factor * (spec.num_choices if spec.capacity_counts == "choices" else 1)


def attention_products(model: sections.Model) -> int:
    """Number of weights in one block's attention."""
    if model.latent.key_rank is not None:
        size, heads, rank = model.latent_sizes, model.num_heads, model.latent.query_rank
        queries = heads * size.key * model.d_model if rank is None else rank * (model.d_model + heads * size.key)
        keys = model.d_model * (size.rank + size.rotary) + size.rank * heads * (size.content + size.value)
        return queries + keys + heads * size.value * model.d_model
    head = model.head_size or model.d_model // model.num_heads
    return 2 * model.d_model * head * (model.num_heads + (model.num_kv_heads or model.num_heads))


def attention_vectors(model: sections.Model) -> int:
    """Number of parameters in one block's attention outside of its matrices: gains of norms, biases, sinks."""
    groups = model.num_kv_heads or model.num_heads
    heads = {"none": 0, "heads": 2, "whole": model.num_heads + groups}[model.qk_norm]
    heads += model.num_heads + 2 * groups if model.qkv_bias else 0
    beside = (model.d_model if model.out_bias else 0) + (model.num_heads if model.attention_sinks else 0)
    beside += (model.latent.key_rank or 0) + (model.latent.query_rank or 0)
    return heads * (model.head_size or model.d_model // model.num_heads) + beside


def core_forward(model: sections.Model, *, layer: int) -> float:
    """Forward FLOPs per token of a layer's attention between q, k and v."""
    return 4.0 * attended(model, layer=layer) * core_width(model)


def core_width(model: sections.Model) -> float:
    """Number of channels of all heads together. If keys and values have different sizes, it is the mean of both."""
    if model.latent.key_rank is not None:
        return model.num_heads * (model.latent_sizes.key + model.latent_sizes.value) / 2
    return model.num_heads * (model.head_size or model.d_model // model.num_heads)


def attended(model: sections.Model, *, layer: int) -> float:
    """Number of tokens that a token of a decoder's layer sees, itself included: the mean over a sequence's positions."""
    length = model.max_length
    window = min(model.window_of(layer) or length, length)
    return window - window * (window - 1) / (2 * length)  # the first window - 1 tokens see fewer


def core_work(model: sections.Model, *, layer: int) -> float:
    """Number of (query, key) pairs that a layer's attention computes (moe/nn/core.py), divided by the number in causal attention."""
    length, window = model.max_length, model.window_of(layer)
    if window is None or window >= length:
        return 1.0
    return (window**2 + 4 * window**2 * (-(-length // window) - 1)) / length**2 if in_chunks(model, layer=layer) else 2.0


def in_chunks(model: sections.Model, *, layer: int) -> bool:
    """Return whether a layer's sliding window is computed in chunks of its length."""
    window = model.window_of(layer)
    return window is not None and 2 * window <= model.max_length and model.positions != "t5" and not model.document_mask


def counted_training(run: sections.Run) -> float:
    """Training FLOPs per token as speeds are published: 6 for each active matrix weight, and 12 w L for each layer's attention.

    w: channels of all heads. L: sequence length. Masked (query, key) pairs count (PaLM, arXiv 2204.02311, appendix B), but no keys outside
    of a sliding window. Recomputation does not count. For an encoder-decoder, the result is the mean over all tokens of both halves.
    """
    m = run.model
    counted = size(run).training
    if m.kind == "encoder_decoder":  # only in the decoder's self-attention does `size` leave out half of the pairs
        written = m.target_length
        unseen = 4.0 * (written - 1) / 2 * core_width(m) * written / m.read_length
        return counted + 3 * (m.num_layers - m.decoder_begins) * unseen
    width = core_width(m)
    for layer in range(m.num_layers + m.ahead):
        keys = min(m.window_of(layer) or m.max_length, m.max_length)
        counted += 3 * (4.0 * keys * width - core_forward(m, layer=layer))
    return counted


def expert_size(model: sections.Model, experts: sections.Experts) -> int:
    """Number of weights in one expert's products."""
    return _ffn(model.d_model, experts.d_ff or model.d_ff, experts.ffn or model.ffn)


def expert_vectors(model: sections.Model, experts: sections.Experts) -> int:
    """Number of biases that one expert adds to its hidden units."""
    return (experts.d_ff or model.d_ff) * (2 if (experts.ffn or model.ffn) in GATED else 1) * experts.biases


def head_forward(run: sections.Run) -> float:
    """Forward FLOPs per token of the projection to the vocabulary, which only a decoder's tokens pass."""
    decoded = 1.0 if run.model.kind == "decoder" else run.model.target_length / run.model.read_length
    return 2.0 * run.vocab_size * run.model.d_model * decoded


def layer_flops(run: sections.Run) -> tuple[float, ...]:
    """Forward FLOPs per token of each layer. The last includes the head and multi-token prediction."""
    flops = [block_size(run, layer=layer).forward for layer in range(run.model.num_layers)]
    flops[-1] += end_flops(run)
    return tuple(flops)


def stage_flops(run: sections.Run, layers: Sequence[range]) -> tuple[float, ...]:
    """Forward FLOPs per token of each stage, with head and multi-token prediction in the last. layers: the layers of each stage."""
    end, of_layer = end_flops(run), layer_flops(run)
    of_stage = [sum(of_layer[layer] - (end if layer == run.model.num_layers - 1 else 0.0) for layer in held) for held in layers]
    return (*of_stage[:-1], of_stage[-1] + end)


def end_flops(run: sections.Run) -> float:
    """Forward FLOPs per token of the projection to the vocabulary and of multi-token prediction."""
    return head_forward(run) + multi_token_size(run)[1]


def _ffn(d_model: int, d_ff: int, ffn: str) -> int:
    return d_model * d_ff * (3 if ffn in GATED else 2)
