"""Activation memory: bytes that one micro-batch keeps on a rank from the forward to the backward pass, by layer and part.

moe/plan/memory/stack.py defines the parts for training without parallelism. Under a Plan with t tp ranks, a rank keeps:

    sp                   length / sp tokens of every part
    tp 1d                1 / t of attention and network; norms and masks whole (Korthikanti: s b h (10 + 24 / t + 5 a s / h t))
    tp sliced            1 / t of everything (34 s b h / t); gathered inputs of products stay whole, unless backward gathers them again
    tp 2d, 2.5d, 3d      1 / t of everything
    recompute full       only the layer's input; selective: the fractions in `Stack.selective`
    ep, etp              choices * tokens / t rows of experts on average, at most the experts' capacity; 1 / etp of the hidden units.
                         The rank with the most rows is counted (`Experts.share`)

s length, b sequences of a micro-batch, h width, a heads, as in the paper. I and W are the two parts of a backward pass that some schedules
split: gradients of inputs first, gradients of weights later.
Arguments of several functions: stack: coefficients of activation memory. index: a layer's index in `network`. itemsize: bytes of an element
of activations.

Source: Korthikanti et al. (arXiv 2205.05198), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe.plan.job.counts import attention_matrices, network_elements
from moe.plan.job.network import Network, Plan, Recomputed, attention_shapes, repeats
from moe.plan.memory.rows import experts_kept, most_rows
from moe.plan.memory.stack import PARTS, Part, Stack
from parallel.mesh.grids import GRIDS


@dataclass(frozen=True)
class Tokens:
    """Number of a micro-batch's tokens that a rank has in three kinds of tensors. inside: tensors in attention and feed-forward networks.
    between: residuals, norms and dropout masks. read: kept inputs of the products that follow a norm."""

    inside: float
    between: float
    read: float


def tokens_of(network: Network, plan: Plan, stack: Stack) -> Tokens:
    """Return the Tokens of a rank under this plan."""
    here, t = plan.microbatch * network.length / plan.sp, 1 if plan.tensor == "copied" else plan.tp
    cut = plan.tensor == "sliced" or plan.tensor in GRIDS
    between = here / t if cut else here
    return Tokens(here / t, between, here if plan.tensor == "sliced" and not stack.reads_again else between)


def layer_parts(network: Network, plan: Plan, stack: Stack, index: int) -> dict[Part, float]:
    """Return the bytes that each part of layer `index` keeps for the backward pass if nothing is recomputed."""
    n, c, at = network, plan.compute_bytes, tokens_of(network, plan, stack)
    norms = 2 * norm_kept(n, plan, stack) * n.width
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    parts["norm_inputs"] = at.between * (norms + 2 * stack.statistics * 2)
    first, second = _norm_outputs(n, index)
    parts["norm_outputs"] = c * n.width * (second * at.read + first * (at.read if n.latent is None else at.between))
    parts["attention"] = at.inside * (c * _attention(n, stack, c) + stack.lse * n.heads + _head_norms(n, stack, c))
    parts["attention"] += _latents(n, plan, stack, at)
    if plan.sp > 1:
        parts["attention"] += at.inside * c * stack.over_ranks * n.heads * n.channels
    masks = _masks(n, plan)
    if n.buckets and plan.sp == 1:  # with sp, the backward pass recomputes the bias
        if stack.core == "scores":
            pass  # adding a bias to scores keeps nothing
        elif stack.biased == "scores":
            parts["attention"] = at.inside * ((12 + c) * n.heads * n.channels + 4 * n.heads * n.length + _head_norms(n, stack, c))
        else:
            parts["attention"] += c * bias_elements(n, plan, stack) * masks
        parts["attention"] += n.length**2 * (masks if n.sees == "past" or n.documents else 0)  # mask of visible pairs: 1 byte
    elif stack.keys == "repeated" and plan.sp == 1:  # torch converts a mask to the queries' dtype; documents need one for each sequence
        parts["attention"] += c * (masks if n.documents else n.windows_masked) * n.length**2
    if stack.core == "scores":
        parts["core"] = at.inside * (2 * c + 1) * n.heads * n.length
    if keeps_scores(plan):
        parts["core"] = at.inside * c * n.heads * n.length
    if n.encoder is not None:
        parts["cross"] = _cross(n, n.encoder, plan, stack)
    if stack.masks == "always" or n.dropout:
        parts["masks"] = 2 * _mask(stack, c) * n.width * at.between
    if n.experts is None or index not in n.sparse_layers:
        count = stack.gated if n.gated else 1 if n.activation == "relu" else stack.plain
        count -= not n.trains("dense") and count > 1  # the last product's input, kept only for the gradient of its weight
        of_activation = min(count, stack.activation_of)
        parts["activation"] = c * of_activation * n.hidden * at.inside
        parts["network"] = c * (count - of_activation) * n.hidden * at.inside
    else:
        parts["experts"] = experts_kept(n, plan, stack)
    return parts


def _norm_outputs(n: Network, index: int) -> tuple[bool, bool]:
    """Return for a layer's two norms, before attention and before the feed-forward network or experts, whether the backward pass needs the
    norm's output: if it trains weights that multiply this output, or if a router reads it."""
    return n.trains("attention"), n.trains("dense") or (n.experts is not None and index in n.sparse_layers)


def _cross(n: Network, encoder: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that a layer's cross-attention keeps, without the encoder's output, which `between_halves` counts once a stage."""
    c, at, read = plan.compute_bytes, tokens_of(n, plan, stack), tokens_of(encoder, plan, stack)
    inner, keys = n.heads * n.channels, _key_heads(n, stack, c) * n.channels
    of_norm = (norm_kept(n, plan, stack) * n.width + 2 * stack.statistics) * at.between + c * n.width * at.read
    core = (2 * c + 1) * n.heads * encoder.length if stack.core == "scores" else 0
    kept = of_norm + at.inside * (2 * c * inner + stack.lse * n.heads + core + _head_norm(n, stack, c, n.heads))
    if n.documents and plan.sp == 1:  # masks in the queries' dtype; with sp, the backward pass makes them again
        kept += c * _masks(n, plan) * n.length * encoder.length
    kept += read.inside * (2 * c * keys + _head_norm(n, stack, c, n.groups))
    return kept + (_mask(stack, c) * n.width * at.between if stack.masks == "always" or n.dropout else 0.0)


def _masks(n: Network, plan: Plan) -> float:
    """Number of attention masks that a micro-batch needs on a rank: one, or with document masks one for each sequence."""
    return plan.microbatch / plan.grid.sequences if n.documents else 1


def bias_elements(n: Network, plan: Plan, stack: Stack) -> float:
    """Number of elements of T5's attention bias on a rank. All sequences of a micro-batch share this tensor."""
    heads = n.heads * tokens_of(n, plan, stack).inside / (plan.microbatch * n.length)
    return heads * n.length**2


def norm_kept(n: Network, plan: Plan, stack: Stack) -> int:
    """Bytes that a layer's norm keeps for each element of its input: the bytes of `_norm`; with tp 2d, 2.5d or 3d only bytes of the input
    in the compute dtype."""
    return plan.compute_bytes if plan.tensor in GRIDS else _norm(n, stack, plan.compute_bytes)


def _norm(n: Network, stack: Stack, itemsize: int) -> int:
    """Bytes that a norm keeps for each element of its input. RMSNorm with a trained gain adds `Stack.rms`, for x / rms(x)."""
    return max(stack.norm, itemsize) + (stack.rms if n.norm == "rmsnorm" and not n.freezes("norms") else 0)


def _head_norms(n: Network, stack: Stack, itemsize: int) -> float:
    """Bytes that the norms of queries and keys keep for each token: their inputs and statistics."""
    return sum(_head_norm(n, stack, itemsize, heads) for heads in (n.heads, n.groups))


def _head_norm(n: Network, stack: Stack, itemsize: int, heads: int) -> float:
    """Bytes that the norm of queries, or of keys, keeps for each token. heads: number of heads of the queries, or of the keys."""
    if n.qk_norm == "none":
        return 0.0
    of_input = _norm(replace(n, norm="rmsnorm"), stack, itemsize) * heads * n.channels
    return of_input + stack.statistics * (heads if n.qk_norm == "heads" else 1)


def _mask(stack: Stack, itemsize: int) -> int:
    """Bytes of an element of a dropout mask."""
    return 1 if stack.mask == "byte" else itemsize


def _key_heads(n: Network, stack: Stack, itemsize: int) -> float:
    """Number of key heads that the backward pass reads, as a mean over layers. Keys of sliding windows that are computed in chunks are left
    out: `_attention` adds them."""
    repeated = 1.0 if itemsize > 2 or n.buckets or n.documents else n.windows_masked
    return n.groups + (repeated * (n.heads - n.groups) if stack.keys == "repeated" else 0)


def _attention(n: Network, stack: Stack, itemsize: int) -> float:
    """Number of elements that a layer's attention keeps for each token, without log-sum-exp and norms."""
    inner = n.heads * n.channels
    if n.latent is None:
        keys, chunks = _key_heads(n, stack, itemsize) * n.channels, (n.heads if stack.keys == "repeated" else n.groups) * n.channels
        return (
            2 * inner
            + 2 * keys
            + n.windows_in_chunks * (inner + 2 * chunks)
            + ((1 - n.windows_in_chunks) * inner + 4 * n.heads if n.sinks else 0)
            + (inner + 2 * n.groups * n.channels if n.clipped else 0)
        )
    late, key = n.latent, n.heads * (n.channels + n.latent.rotary_size)  # all heads share the rotary key, but a copy is kept for each head
    value = n.heads * late.value_size
    if stack.padded:  # the kernel's values and output are padded to the size of keys
        return 4 * key + 3 * n.windows_in_chunks * key + value
    return 2 * key + 2 * value


def _latents(n: Network, plan: Plan, stack: Stack, at: Tokens) -> float:
    """Bytes kept for the latents of multi-head latent attention: the inputs of their norms, for this tp rank's tokens, and the outputs of
    their norms, for the tokens of all tp ranks. If heads are split over tp, the outputs are in one gathered tensor, which also has the
    rotary key and, if queries have no latent, the layer's input. The whole tensor counts."""
    late, c = n.latent, plan.compute_bytes
    if late is None:
        return 0.0
    low = late.query_rank + late.key_rank
    if stack.padded:
        # a norm that does not cast keeps its input: for keys, a view of kv_down's output, so the rotary key is kept too
        rotary = c * late.rotary_size if stack.norm <= c else 0
        before = _norm(replace(n, norm="rmsnorm"), stack, c) * low + 2 * stack.statistics + rotary
    else:
        before = c * (low + late.rotary_size)
    more = late.rotary_size + (0 if late.query_rank else n.width) if plan.tp > 1 and plan.tensor != "copied" else 0
    return at.between * before + plan.microbatch * n.length / plan.sp * c * (low + more)


def layer_kept(network: Network, plan: Plan, stack: Stack, index: int, recompute: Recomputed) -> float:
    """Bytes that one layer keeps for the backward pass with this kind of recompute."""
    at = tokens_of(network, plan, stack)
    if recompute == "full":
        return plan.compute_bytes * network.width * at.between
    parts = layer_parts(network, plan, stack, index)
    if recompute == "selective":
        shares = dict(stack.selective)
        kept = sum(size * shares.get(part, 1.0) for part, size in parts.items())
        second_half = shares.get("network") == 0.0  # if the second half of the layer is recomputed, its input is kept
        return kept + (plan.compute_bytes * network.width * at.between if second_half else 0.0)
    return sum(parts.values())


def layer_pending(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Bytes that one layer keeps between the gradients of inputs (I) and of weights (W). W computes the gradient of each trained matrix
    from its product's input and from the gradient of its product's output, so both are kept. Products with the same input share it.
    Gradients of LoRA's adapters are computed in I."""
    if network.adapters is not None:
        return 0.0
    n, at, late, e = network, tokens_of(network, plan, stack), network.latent, network.experts
    trains_attention, reads_norm = _norm_outputs(n, index)
    *into, _ = attention_shapes(n.width, n.heads, n.groups, n.channels, late)  # all matrices but the last, as (outputs, inputs)
    inside = sum(outputs for outputs, _ in into)
    inside += n.heads * n.channels if late is None else n.heads * late.value_size + late.query_rank + late.key_rank
    ends = 2 * n.width * at.read  # the first products' input and the gradient of the last product's output
    elements = trains_attention * (ends + at.inside * inside) + reads_norm * ends
    if e is None or index not in n.sparse_layers:
        elements += n.trains("dense") * at.inside * (3 if n.gated else 2) * n.hidden
    else:
        matrices, tokens = 3 if e.gated else 2, plan.microbatch * n.length / plan.sp
        moved = 2 * n.width if plan.ep * plan.etp > 1 or not e.fused else 0
        elements += n.trains("experts") * most_rows(n, plan) * (moved + matrices * e.hidden / plan.etp)
        elements += n.trains("dense") * tokens / plan.tp * matrices * e.shared_hidden
    if n.encoder is not None and trains_attention:  # cross-attention: inputs and output gradients of q and out, output gradients of k and v
        keys = 2 * n.groups * n.channels * tokens_of(n.encoder, plan, stack).inside
        elements += ends + at.inside * 2 * n.heads * n.channels + keys
    return stack.pending * plan.compute_bytes * elements


def head_pending(network: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that a micro-batch keeps outside of layers between the gradients of inputs (I) and of weights (W): the head's input and the
    gradient of the logits, from which W computes the head's gradient. Each depth of multi-token prediction keeps these too. It also keeps
    the inputs and output gradients of its layer's products and of the product that merges its inputs."""
    at, c = tokens_of(network, plan, stack), plan.compute_bytes
    kept = plan.loss_chunks == 1 and not network.freezes(network.head)
    of_head = network.width * at.read + logits(network, plan) if kept else 0.0
    dense = network.of_ahead
    of_layers = sum(layer_pending(dense, plan, stack, network.layers + depth) for depth in range(network.ahead))
    joined = 3 * network.width * at.between
    return stack.pending * c * (of_head * (1 + network.ahead) + joined * network.ahead) + of_layers


def inputs_kept(plan: Plan, stack: Stack, layers: range, *, first: bool, last: bool) -> int:
    """Number of tensors that a micro-batch keeps on a stage for messages to and from other stages, in addition to the layers' tensors.
    first, last: whether the stage is the model's first, and whether it is the last."""
    sent = int(stack.outputs == "kept" and plan.pp > 1)
    wider = stack.norm > plan.compute_bytes and plan.tensor not in GRIDS  # the first norm keeps its input in the norm's dtype
    if layers or last:
        return sent + (wider and not (layers and recompute_of(plan, layers.start) == "full"))
    return sent + (not first)  # an empty stage keeps the tensor that it receives and sends on


def between_halves(network: Network, plan: Plan, stack: Stack, layers: range, *, first: bool, whole: bool) -> float:
    """Bytes that a micro-batch keeps on a stage of an encoder-decoder, in addition to its layers and ends: the encoder's last norm, and, if
    all layers of the stage belong to one half (encoder or decoder), the hidden states of the other half. A stage's input is one tensor with
    the hidden states of both. A layer keeps a view of its half, and so the memory of both. On a stage without layers, the head reads the
    decoder's half. On the first stage, dropout makes a separate tensor of each half. whole: `inputs_kept` already counts a tensor with both
    halves."""
    if network.encoder is None:
        return 0.0
    halves, kept = {index < network.before for index in layers} or {False}, 0.0
    if network.before - 1 in layers:
        kept += _last_norm(network.encoder, plan, stack) * tokens_of(network.encoder, plan, stack).between
    if len(halves) == 1 and not whole and not (first and network.dropout):
        other = network if True in halves else network.encoder
        kept += plan.compute_bytes * network.width * tokens_of(other, plan, stack).between
    return kept


def keeps_scores(plan: Plan) -> bool:
    """True if the sequence-parallel method keeps the softmax of all (query, key) pairs."""
    return plan.sp > 1 and plan.method.keeps_scores


def recompute_of(plan: Plan, index: int) -> Recomputed:
    return plan.recompute if repeats(index, plan.recompute_every) else "none"


def casts_kept(plan: Plan, stack: Stack) -> bool:
    """True if each micro-batch keeps copies of the weights in the compute dtype. With pipeline stages, every micro-batch in flight would
    keep its own copies, so the backward pass casts the weights again instead."""
    return stack.casts and plan.storage.parameters > plan.compute_bytes and plan.stage < 3 and plan.pp == 1


def cast_weights(network: Network, plan: Plan, index: int) -> float:
    """Bytes of the copies in the compute dtype that layer `index` keeps of its weights, except experts, until the backward pass. Parts that
    are recomputed, quantized or merged with LoRA adapters have none."""
    (n, number), e, recompute = network.at(index), network.experts, recompute_of(plan, index)
    if recompute == "full":
        return 0.0
    merges = n.adapters is not None  # the backward pass computes LoRA's W + s B A again, so it is not kept
    elements = 0.0
    if not (n.blocks("attention") or merges and n.trains("attention")):
        elements = (2 if n.source else 1) * attention_matrices(n, plan.grid.matrix, over=plan.grid.units)
    if recompute == "none" and not (n.blocks("dense") or merges and n.trains("dense")):
        sparse = e is not None and number in n.sparse_layers
        dense = network_elements(n, n.hidden, gated=n.gated) / plan.grid.matrix
        elements += network_elements(n, e.shared_hidden, gated=e.gated) if e and sparse else dense
    return plan.compute_bytes * elements


def cast_ahead(network: Network, plan: Plan) -> float:
    """Bytes of one prediction depth's weights (multi-token prediction), as copies in the compute dtype that are kept until the backward
    pass."""
    return cast_weights(network.of_ahead, plan, network.layers) + plan.compute_bytes * 2 * network.width**2


def ends_kept(network: Network, plan: Plan, stack: Stack, *, first: bool, last: bool) -> float:
    """Bytes kept outside of layers: dropout after the embedding, last norm, loss, multi-token prediction."""
    at, c = tokens_of(network, plan, stack), plan.compute_bytes
    total = 0.0
    if first and (stack.masks == "always" or network.dropout):
        total += sum(_mask(stack, c) * network.width * tokens_of(run, plan, stack).between for run in network.halves)
    if last:
        total += _last_norm(network, plan, stack) * at.between
        total += logits(network, plan) * logit_kept(network, stack) if plan.loss_chunks == 1 else 0.0
        total += sum(_ahead(network, plan, stack, network.layers + depth) for depth in range(network.ahead))
    return total


def _last_norm(run: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that the last norm keeps for each token: its input and output, and in encoder-decoders a dropout mask."""
    c = plan.compute_bytes
    masked = run.dropout and (run.encoder is not None or run.sees == "all")
    read = 0 if run.freezes(run.head) else c  # the norm's output is needed for the gradient of the head, unless the head is frozen
    return (norm_kept(run, plan, stack) + read) * run.width + 2 * stack.statistics + (_mask(stack, c) * run.width if masked else 0)


def _ahead(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Bytes that one depth of multi-token prediction keeps: two norms, the product that merges their outputs, a layer, the last norm,
    logits. index: the depth's layer."""
    at, c = tokens_of(network, plan, stack), plan.compute_bytes
    same = c if stack.norm <= c else 0  # two norms share a kept input, unless each keeps an fp32 copy
    joined = (2 * _norm(network, stack, c) - same + 2 * c) * network.width + 4 * stack.statistics
    read = (_norm(network, stack, c) + c) * network.width + 2 * stack.statistics
    of_layer = layer_kept(network.of_ahead, plan, stack, index, recompute_of(plan, index))
    return of_layer + (joined + read) * at.between + (logits(network, plan) * stack.logits_kept if plan.loss_chunks == 1 else 0.0)


def logit_kept(network: Network, stack: Stack) -> float:
    """Bytes that are kept for each logit until the backward pass. `logit_cap` also keeps tanh's result in fp32."""
    return stack.logits_kept + (4 if network.logit_cap else 0)


def logits(network: Network, plan: Plan) -> float:
    """Number of logits that one micro-batch has on a rank."""
    return plan.microbatch * network.length / plan.sp * network.vocab / (1 if plan.tensor == "copied" else plan.tp)
