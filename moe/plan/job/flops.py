"""Counts parameters and floating-point operations of a model from its recipe alone, in total and per token.

    forward per token = 2 * (active matrix parameters) + 4 * (mean attended length) * heads * channels * layers
    training          = 3 * forward                                                    (backward: two products for each forward one)

With a causal mask, a token attends to (L + 1) / 2 positions on average; with a sliding window to fewer. FLOPs of an encoder-decoder are
means over the tokens of encoder and decoder. A token passes only the layers of its half; the encoder's tokens also pass cross-attention's
matrices of keys and values. A token's choice of an expert counts as computed even if the expert's capacity drops it.

With LoRA, no gradient of a frozen matrix is computed, nor of an activation before the first adapter: see `_adapted_training`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from moe.plan.job.network import Latent, attention_shapes
from moe.recipe import sections
from moe.recipe.shapes import GATED, T5_BUCKETS
from moe.router.methods import method_of


@dataclass(frozen=True)
class Size:
    """Size of a model or a block. total: number of parameters. active: number of parameters that one token uses. forward, training: FLOPs
    per token. by_weights: the part of `forward` in products with weights."""

    total: int
    active: int
    forward: float
    training: float
    by_weights: float


def size(run: sections.Run) -> Size:
    """Return the size of the whole model: its blocks, the embedding table, last norms, the projection to the vocabulary and multi-token
    prediction. `forward` is without multi-token prediction, which runs only in training."""
    model = run.model
    blocks = [block_size(run, layer=layer) for layer in range(model.num_layers)]
    last_norms = 1 if model.kind == "decoder" else 2
    ends = run.vocab_size * model.d_model * (1 if model.tied_embeddings else 2) + last_norms * model.d_model
    forward = sum(block.forward for block in blocks) + head_forward(run)
    ahead, ahead_forward = multi_token_size(run)
    total, active = sum(block.total for block in blocks), sum(block.active for block in blocks)
    by_weights = sum(block.by_weights for block in blocks) + head_forward(run)
    training = _adapted_training(run, blocks) if run.lora.rank else 3.0 * (forward + ahead_forward)
    return Size(total + ends + ahead, active + ends + ahead, forward, training, by_weights)


def _adapted_training(run: sections.Run, blocks: Sequence[Size]) -> float:
    """FLOPs per token of a step with LoRA: of the forward pass, of the gradients of activations from the first adapter on, and of the
    adapters' narrow products, 6 r (inputs + outputs) for each adapted matrix. blocks: size of each layer."""
    after = [bool(_adapter_sides(run, layer)) for layer in range(len(blocks))]
    first = after.index(True) if any(after) else len(blocks)
    total = sum(block.forward for block in blocks[:first]) + 2.0 * end_flops(run)
    for layer, block in enumerate(blocks[first:], first):
        total += 3.0 * block.forward - block.by_weights + 6.0 * run.lora.rank * _adapter_sides(run, layer)
    return total - (_before_adapters(run, first) if first < len(blocks) else 0.0)


def _adapter_sides(run: sections.Run, layer: int) -> float:
    """Sum of (inputs + outputs) over the adapted matrices that a token meets in this layer. In an encoder-decoder it is a mean over the
    tokens of encoder and decoder, because only the tokens of one of them pass the layer."""
    model, experts, targets = run.model, run.experts, run.lora.targets
    sides = sum(map(sum, attention_matrices(model))) if "attention" in targets else 0.0
    width, hidden, sparse = model.d_model, experts.d_ff or model.d_ff, layer in model.layers_with_experts()
    count = 3 if ((experts.ffn or model.ffn) if sparse else model.ffn) in GATED else 2
    if "dense" in targets and not sparse:
        sides += count * (width + model.d_ff)
    if "dense" in targets and sparse and experts.shared:
        sides += count * (width + (experts.shared_d_ff or hidden) * experts.shared)
    if "dense" in targets and sparse and experts.residual:
        sides += count * (width + hidden)
    if "experts" in targets and sparse:
        sides += min(run.router.num_choices, experts.of_layer(model.layers_with_experts().index(layer))) * count * (width + hidden)
    if model.kind == "encoder_decoder":
        decodes = layer >= model.decoder_begins
        sides += sum(map(sum, attention_matrices(model))) * decodes * ("attention" in targets)
        sides *= (model.target_length if decodes else model.max_length) / model.read_length
    return sides


def _before_adapters(run: sections.Run, layer: int) -> float:
    """FLOPs per token that attention's backward pass saves in `layer`, the first layer with an adapter, since nothing before it is trained.
    If attention has adapters, only the gradient of its input is left out. Otherwise the gradients of all its activations are."""
    model = run.model
    if "attention" in run.lora.targets:
        return 2.0 * sum((rows + run.lora.rank) * columns for rows, columns in attention_matrices(model)[:-1] if columns == model.d_model)
    return 2.0 * attention_products(model) + 2.0 * core_forward(model, layer=layer)


def multi_token_size(run: sections.Run) -> tuple[int, float]:
    """Return (number of parameters, forward FLOPs per token) of multi-token prediction. Each depth has a block, a product that merges its
    two inputs, and three norms, and uses the model's head."""
    model, block = run.model, block_size(run, layer=run.model.num_layers)
    join = 2 * model.d_model**2
    each = block.forward + 2.0 * join + head_forward(run)
    return model.ahead * (block.total + join + 3 * model.d_model), model.ahead * each


def block_size(run: sections.Run, *, layer: int) -> Size:
    """Return the size of one block: attention, and a dense network or experts. `active` counts only the experts that a token chooses."""
    model, experts, router = run.model, run.experts, run.router
    products = attention_products(model)
    idle = vectors = 0
    if layer in model.layers_with_experts():
        ffn, one_expert = experts.ffn or model.ffn, expert_size(model, experts)
        num_experts = experts.of_layer(model.layers_with_experts().index(layer))
        chosen = min(router.num_choices, num_experts)  # a token cannot choose more experts than there are
        products += _ffn(model.d_model, (experts.shared_d_ff or experts.d_ff or model.d_ff) * experts.shared, ffn) + (
            model.d_model if experts.shared_gate else 0
        )
        products += one_expert + 2 * model.d_model if experts.residual else 0
        products += model.d_model * (num_experts + experts.free) * (2 if router.noise == "noisy_top_k" else 1)
        products += chosen * one_expert
        products += num_experts * model.d_model if experts.biases else 0  # gates [experts] times biases of w2 [experts, d_model]
        vectors += chosen * expert_vectors(model, experts)
        vectors += (num_experts + experts.free) * router.vectors
        vectors += model.d_model if router.input_norm == "rmsnorm" else 0
        idle = (num_experts - chosen) * (one_expert + expert_vectors(model, experts))
    else:
        products += _ffn(model.d_model, model.d_ff, model.ffn)
    # T5's bias: in a decoder alone each layer has one; in an encoder-decoder the first layer of each half holds it for the whole half
    has_bias = model.kind == "decoder" or layer in (0, model.decoder_begins)
    bias = T5_BUCKETS * model.num_heads if model.positions == "t5" and has_bias else 0
    active = products + vectors + 2 * model.d_model + bias + attention_vectors(model)
    by_weights, forward = 2.0 * products, 2.0 * products + core_forward(model, layer=layer)
    if model.kind == "encoder_decoder":
        by_weights, forward = (_half_forward(model, 2.0 * products, layer=layer, width=w) for w in (0.0, 4.0 * core_width(model)))
        if layer >= model.decoder_begins:
            active += attention_products(model) + attention_vectors(model) + model.d_model
    return Size(active + idle, active, forward, 3.0 * forward, by_weights)


def _half_forward(model: sections.Model, own: float, *, layer: int, width: float) -> float:
    """Forward FLOPs of one block of an encoder-decoder, as a mean over the tokens of encoder and decoder. own: FLOPs of the matrices that a
    token of the block's half (encoder or decoder) passes, cross-attention's not included. width: FLOPs of a (query, key) pair in all
    heads."""
    read, written = model.max_length, model.target_length
    if layer < model.decoder_begins:
        return (own + width * read) * read / model.read_length
    # with latents, `key` is the down-projection and `value` the up-projection of keys and values
    *queries, key, value, out = (2.0 * rows * columns for rows, columns in attention_matrices(model))
    of_token = own + width * (written + 1) / 2 + sum(queries) + out + width * read
    return (of_token * written + (key + value) * read) / model.read_length


def rows_of_token(router: sections.Router, num_experts: int) -> float:
    """Mean number of experts that compute a token: its number of choices, limited by the experts' capacity and by the number of experts. If
    experts choose tokens, all slots are filled. The capacity's minimum and rounding are ignored."""
    slots = slots_of_token(router)
    return min(min(router.num_choices, slots) if method_of(router).tokens_choose else slots, num_experts)


def slots_of_token(router: sections.Router) -> float:
    """Capacity of all experts together, divided by the number of tokens; infinite without a capacity."""
    each = router.num_choices if router.capacity_counts == "choices" else 1
    return inf if router.capacity_factor is None else router.capacity_factor * each


def attention_matrices(model: sections.Model) -> list[tuple[int, int]]:
    """Return (rows, columns) of each matrix of one block's attention."""
    return attention_shapes(model.d_model, model.num_heads, _groups(model), _head_size(model), latent_of(model))


def attention_products(model: sections.Model) -> int:
    """Number of parameters in the matrices of one block's attention."""
    return sum(rows * columns for rows, columns in attention_matrices(model))


def latent_of(model: sections.Model) -> Latent | None:
    """Return the sizes of multi-head latent attention; None if the model has none."""
    if model.latent.key_rank is None:
        return None
    size = model.latent_sizes
    return Latent(model.latent.query_rank or 0, size.rank, size.rotary, size.value)


def _head_size(model: sections.Model) -> int:
    return model.head_size or model.d_model // model.num_heads


def _groups(model: sections.Model) -> int:
    return model.num_kv_heads or model.num_heads


def attention_vectors(model: sections.Model) -> int:
    """Number of parameters in one block's attention outside of its matrices: gains of norms, biases, sinks."""
    heads = {"none": 0, "heads": 2, "whole": model.num_heads + _groups(model)}[model.qk_norm]
    heads += model.num_heads + 2 * _groups(model) if model.qkv_bias else 0
    others = (model.d_model if model.out_bias else 0) + (model.num_heads if model.attention_sinks else 0)
    others += (model.latent.key_rank or 0) + (model.latent.query_rank or 0)
    return heads * _head_size(model) + others


def core_forward(model: sections.Model, *, layer: int) -> float:
    """Forward FLOPs per token of a layer's softmax(q k) v."""
    return 4.0 * attended(model, layer=layer) * core_width(model)


def core_width(model: sections.Model) -> float:
    """Number of channels of all heads together. If keys and values have different sizes, their mean counts."""
    if model.latent.key_rank is not None:
        return model.num_heads * (model.latent_sizes.key + model.latent_sizes.value) / 2
    return model.num_heads * _head_size(model)


def attended(model: sections.Model, *, layer: int) -> float:
    """Mean number of tokens to which a token of a decoder-only model attends in this layer, itself included."""
    length = model.max_length
    window = min(model.window_of(layer) or length, length)
    return window - window * (window - 1) / (2 * length)  # the first window - 1 tokens of a sequence attend to fewer


def core_work(model: sections.Model, *, layer: int) -> float:
    """Number of (query, key) pairs that this layer's kernel computes (moe/nn/core.py), divided by the number in causal attention."""
    length, window = model.max_length, model.window_of(layer) or model.max_length
    if in_chunks(model, layer=layer):
        return (window**2 + 4 * window**2 * (-(-length // window) - 1)) / length**2
    return 2.0 if in_mask(model, layer=layer) else 1.0


def in_chunks(model: sections.Model, *, layer: int) -> bool:
    """Return whether the layer computes sliding-window attention in chunks as long as the window."""
    window = model.window_of(layer)
    return window is not None and 2 * window <= model.max_length and model.positions != "t5" and not model.document_mask


def in_mask(model: sections.Model, *, layer: int) -> bool:
    """Return whether the layer's sliding window hides pairs by a mask, so that all pairs are computed."""
    window = model.window_of(layer)
    return window is not None and window < model.max_length and not in_chunks(model, layer=layer)


def counted_training(run: sections.Run) -> float:
    """Training FLOPs per token by the convention of published speeds (PaLM, arXiv 2204.02311, appendix B).

    6 FLOPs for each active matrix parameter, and 12 w L for each layer's attention (w: channels of all heads, L: sequence length). Masked
    (query, key) pairs count, but not keys outside of a sliding window. Recomputation does not count.
    """
    m = run.model
    counted = size(run).training
    if m.kind == "encoder_decoder":  # add the pairs that `size` leaves out: those masked in the decoder's self-attention
        written = m.target_length
        unseen = 4.0 * (written - 1) / 2 * core_width(m) * written / m.read_length
        return counted + 3 * (m.num_layers - m.decoder_begins) * unseen
    width = core_width(m)
    for layer in range(m.num_layers + m.ahead):
        keys = min(m.window_of(layer) or m.max_length, m.max_length)
        counted += 3 * (4.0 * keys * width - core_forward(m, layer=layer))
    return counted


def expert_size(model: sections.Model, experts: sections.Experts) -> int:
    """Number of parameters in the matrices of one expert."""
    return _ffn(model.d_model, experts.d_ff or model.d_ff, experts.ffn or model.ffn)


def expert_vectors(model: sections.Model, experts: sections.Experts) -> int:
    """Number of biases of one expert's hidden units."""
    return (experts.d_ff or model.d_ff) * (2 if (experts.ffn or model.ffn) in GATED else 1) * experts.biases


def head_forward(run: sections.Run) -> float:
    """Forward FLOPs per token of the projection to the vocabulary, which only a decoder's tokens pass."""
    decoded = 1.0 if run.model.kind == "decoder" else run.model.target_length / run.model.read_length
    return 2.0 * run.vocab_size * run.model.d_model * decoded


def layer_flops(run: sections.Run) -> tuple[float, ...]:
    """Return the forward FLOPs per token of each layer. The last layer's include the head and multi-token prediction."""
    flops = [block_size(run, layer=layer).forward for layer in range(run.model.num_layers)]
    flops[-1] += end_flops(run)
    return tuple(flops)


def stage_flops(run: sections.Run, layers: Sequence[range]) -> tuple[float, ...]:
    """Return the forward FLOPs per token of each pipeline stage. The last stage's include the head and multi-token prediction. layers: the
    layers of each stage."""
    of_stage = [sum(block_size(run, layer=layer).forward for layer in held) for held in layers]
    return (*of_stage[:-1], of_stage[-1] + end_flops(run))


def end_flops(run: sections.Run) -> float:
    """Forward FLOPs per token of the model's head and of multi-token prediction."""
    return head_forward(run) + multi_token_size(run)[1]


def _ffn(d_model: int, d_ff: int, ffn: str) -> int:
    return d_model * d_ff * (3 if ffn in GATED else 2)
