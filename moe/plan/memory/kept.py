"""Activation memory: bytes that one micro-batch keeps on a rank from the forward to the backward pass, by layer and part.

The parts and their coefficients are defined in moe/plan/memory/stack.py. A Plan cuts them:

    sp                   every part has length / sp tokens
    tp 1d                1 / t inside attention and network; norms and masks whole (Korthikanti: s b h (10 + 24 / t + 5 a s / h t))
    tp sliced            everything 1 / t (34 s b h / t), except gathered inputs if the software keeps them
    tp 2d, 2.5d, 3d      everything 1 / tp (moe/plan/time/tensor.py)
    recompute full       only the layer's input; selective: the fractions in the software's `selective`
    ep, etp              rows of experts: choices * tokens / tp on average, or as many as capacities allow; hidden units 1 / etp

Source: Korthikanti et al. (arXiv 2205.05198), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe.plan.job.counts import attention_matrices, network_elements
from moe.plan.job.network import Network, Plan, Recomputed, repeats
from moe.plan.memory.stack import PARTS, Part, Stack
from parallel.mesh.grids import GRIDS
from parallel.mesh.traffic import Load, Message, Traffic

FP32_BYTES = 4


@dataclass(frozen=True)
class Tokens:
    """Numbers of tokens in a micro-batch's tensors on a rank. inside: in attention and networks. between: in norms and masks around these.
    read: in the kept inputs of the products after norms."""

    inside: float
    between: float
    read: float


def tokens_of(network: Network, plan: Plan, stack: Stack) -> Tokens:
    here, t = plan.microbatch * network.length / plan.sp, 1 if plan.tensor == "copied" else plan.tp
    cut = plan.tensor == "sliced" or plan.tensor in GRIDS
    between = here / t if cut else here
    return Tokens(here / t, between, here if plan.tensor == "sliced" and not stack.reads_again else between)


def layer_parts(network: Network, plan: Plan, stack: Stack, index: int) -> dict[Part, float]:
    """Bytes that each part of layer `index` keeps for the backward pass when nothing is recomputed."""
    n, c, at = network, plan.compute_bytes, tokens_of(network, plan, stack)
    norms = 2 * norm_kept(n, plan, stack) * n.width
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    parts["norm_inputs"] = at.between * (norms + 2 * stack.statistics * 2)
    first, second = _norm_outputs(n, index)
    parts["norm_outputs"] = c * n.width * (second * at.read + first * (at.read if n.latent is None else at.between))
    parts["attention"] = at.inside * (c * _attention(n, stack) + stack.lse * n.heads + _head_norms(n, stack, c))
    parts["attention"] += _latents(n, plan, stack, at)
    if plan.sp > 1:
        parts["attention"] += at.inside * c * stack.over_ranks * n.heads * n.channels
    if n.buckets and plan.sp == 1:  # with sp, the backward pass computes the bias again instead of keeping it
        if stack.biased == "scores":
            parts["attention"] = at.inside * ((12 + c) * n.heads * n.channels + 4 * n.heads * n.length + _head_norms(n, stack, c))
        else:
            parts["attention"] += c * bias_elements(n, plan, stack)
        parts["attention"] += (9 if n.sees == "past" else 8) * n.length**2  # int64 buckets, and a causal mask of 1 byte
    elif stack.core == "scores":
        parts["core"] = at.inside * (2 * c + 1) * n.heads * n.length
    if keeps_scores(plan):
        parts["core"] = at.inside * c * n.heads * n.length
    if n.encoder is not None:
        parts["cross"] = _cross(n, n.encoder, plan, stack)
    if stack.masks == "always" or n.dropout:
        parts["masks"] = 2 * _mask(stack, c) * n.width * at.between
    if n.experts is None or index not in n.sparse_layers:
        count = stack.gated if n.gated else 1 if n.activation == "relu" else stack.plain
        count -= not n.trains("dense") and count > 1  # a frozen product does not keep its input
        came_out = min(count, stack.activation_of)
        parts["activation"] = c * came_out * n.hidden * at.inside
        parts["network"] = c * (count - came_out) * n.hidden * at.inside
    else:
        parts["experts"] = _experts(n, plan, stack)
    return parts


def _norm_outputs(n: Network, index: int) -> tuple[bool, bool]:
    """Return whether the backward pass needs (attention's normed input, the normed input of the network or experts).

    An input is not kept if all weights that multiply it are frozen. A router always keeps its input.
    """
    return n.trains("attention"), n.trains("dense") or (n.experts is not None and index in n.sparse_layers)


def _cross(n: Network, encoder: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that a layer's cross-attention keeps. The encoder's output, which all layers read, is counted once, in `ends_kept`."""
    c, at, read = plan.compute_bytes, tokens_of(n, plan, stack), tokens_of(encoder, plan, stack)
    inner, keys = n.heads * n.channels, (n.heads if stack.keys == "repeated" else n.groups) * n.channels
    of_norm = (_norm(n, stack, c) * n.width + 2 * stack.statistics) * at.between + c * n.width * at.read
    core = (2 * c + 1) * n.heads * encoder.length if stack.core == "scores" else 0
    kept = of_norm + at.inside * (2 * c * inner + stack.lse * n.heads + core + _head_norm(n, stack, c, n.heads))
    kept += read.inside * (2 * c * keys + _head_norm(n, stack, c, n.groups))
    return kept + (_mask(stack, c) * n.width * at.between if stack.masks == "always" or n.dropout else 0.0)


def bias_elements(n: Network, plan: Plan, stack: Stack) -> float:
    """Number of elements of T5's bias of the attention logits, which is one tensor for all sequences of a micro-batch."""
    heads = n.heads * tokens_of(n, plan, stack).inside / (plan.microbatch * n.length)
    return heads * n.length**2


def norm_kept(n: Network, plan: Plan, stack: Stack) -> int:
    """Bytes that a norm between layers keeps for each element of its input. On tensor grids it keeps only the input itself."""
    return plan.compute_bytes if plan.tensor in GRIDS else _norm(n, stack, plan.compute_bytes)


def _norm(n: Network, stack: Stack, itemsize: int) -> int:
    """Bytes that a norm keeps for each element of its input; RMSNorm in separate kernels (`Stack.rms`) more, for its gain's gradient."""
    return max(stack.norm, itemsize) + (stack.rms if n.norm == "rmsnorm" and n.adapters is None else 0)


def _head_norms(n: Network, stack: Stack, itemsize: int) -> float:
    """Bytes that norms of queries and keys keep for each token: their inputs, and a statistic for each head or one for all heads."""
    if n.qk_norm == "none":
        return 0.0
    return sum(_head_norm(n, stack, itemsize, heads) for heads in (n.heads, n.groups))


def _head_norm(n: Network, stack: Stack, itemsize: int, heads: int) -> float:
    """Bytes that the norm of queries, or of keys, keeps for each token. heads: number of heads of the queries, or of the keys."""
    if n.qk_norm == "none":
        return 0.0
    of_input = _norm(replace(n, norm="rmsnorm"), stack, itemsize) * heads * n.channels
    return of_input + stack.statistics * (heads if n.qk_norm == "heads" else 1)


def _mask(stack: Stack, itemsize: int) -> int:
    return 1 if stack.mask == "byte" else itemsize


def _attention(n: Network, stack: Stack) -> float:
    inner = n.heads * n.channels
    if n.latent is None:
        keys = inner if stack.keys == "repeated" else n.groups * n.channels
        return (
            2 * inner
            + 2 * keys
            + n.windows_in_runs * (inner + 2 * keys)
            + ((1 - n.windows_in_runs) * inner + 4 * n.heads if n.sinks else 0)
            + (inner + 2 * n.groups * n.channels if n.clipped else 0)
        )
    late, key = n.latent, n.heads * (n.channels + n.latent.rotary_size)  # each head's key has its own copy of the rotary channels
    value = n.heads * late.value_size
    if stack.keys == "repeated":  # for the core, values are padded to the size of keys, and its output is cut again
        return 4 * key + 3 * n.windows_in_runs * key + value
    return 2 * key + 2 * value


def _latents(n: Network, plan: Plan, stack: Stack, at: Tokens) -> float:
    """Bytes that the latents of multi-head latent attention keep: before their norms for a rank's own tokens, after them for all tokens.

    If tp cuts the heads, the tensor after the norms also holds the rotary key, and x if queries have no latent.
    """
    late, c = n.latent, plan.compute_bytes
    if late is None:
        return 0.0
    low = late.query_rank + late.key_rank
    if stack.keys == "repeated":  # in fp32, norms keep the whole product, rotary key included
        before = _norm(replace(n, norm="rmsnorm"), stack, c) * low + 2 * stack.statistics + (c * late.rotary_size if c == 4 else 0)
    else:
        before = c * (low + late.rotary_size)
    beside = late.rotary_size + (0 if late.query_rank else n.width) if plan.tp > 1 and plan.tensor != "copied" else 0
    return at.between * before + plan.microbatch * n.length / plan.sp * c * (low + beside)


def rows_of(network: Network, plan: Plan) -> float:
    """Number of rows that a rank's experts compute for one micro-batch with a balanced router. All etp ranks compute the same rows."""
    e = network.experts
    if e is None:
        return 0.0
    each = 1.0 if e.rows is None else e.rows
    return plan.microbatch * network.length / plan.sp / plan.tp * e.choices * each * plan.etp


def traffic_of(network: Network, plan: Plan, tokens: float, rows: float, number_bytes: int) -> Traffic:
    """Messages over ep of one MoE layer, if the choices of `tokens` tokens make `rows` rows. number_bytes: bytes of an element."""
    e = network.experts
    assert e is not None
    slots = None if e.slots is None else tokens * e.choices * e.slots
    load = Load(tokens, e.choices, rows, slots, network.width, network.width * number_bytes, e.count, plan.ep)
    if e.exchange is not None:
        return e.exchange.traffic(load)
    return Traffic.there_and_back(rows=(Message("ep", "all_to_all", rows * load.row_bytes, plan.ep),))


def buffers_of(network: Network, plan: Plan) -> float:
    """Bytes of the buffers for the largest message that one MoE layer sends over ep; 0 if one rank holds all experts."""
    if network.experts is None or plan.ep == 1:
        return 0.0
    tokens = plan.microbatch * network.length / plan.sp / plan.tp * plan.etp
    return max(message.held for message in traffic_of(network, plan, tokens, rows_of(network, plan), plan.compute_bytes).forward)


def _experts(n: Network, plan: Plan, stack: Stack) -> float:
    e, c, rows = n.experts, plan.compute_bytes, rows_of(n, plan)
    assert e is not None
    count = stack.gated if e.gated else 1 if n.activation == "relu" else stack.plain
    tensors = (stack.expert_gated if e.gated else stack.expert_plain) + e.dropout if e.fused else count + 2 * e.dropout
    hidden = tensors * e.hidden / plan.etp
    of_weights = FP32_BYTES * expert_elements(n, plan) if n.adapters is not None and n.trains("experts") else 0.0  # merged W + s B A
    moved = stack.expert_rows if plan.ep * plan.etp > 1 or stack.expert_rows == 1 or not e.fused else 0
    here = plan.microbatch * n.length / plan.sp
    shared = c * count * e.shared_hidden * here / plan.tp
    of_token = stack.maps * e.choices + c * e.gates * n.width + router_kept(n, stack, c)
    return rows * c * (moved * n.width + hidden) + here / plan.tp * of_token + shared + of_weights


def expert_elements(n: Network, plan: Plan) -> float:
    """Elements of all expert matrices of one layer on a rank."""
    e = n.experts
    return 0.0 if e is None else e.count / plan.ep * network_elements(n, e.hidden, gated=e.gated) / plan.etp


def router_kept(n: Network, stack: Stack, itemsize: int) -> float:
    """Bytes that the router and its losses keep for each token, in fp32: jitter and its product, inputs of the norm and of the noise's
    matrix, probabilities of experts. itemsize: bytes of an element of activations."""
    e = n.experts
    assert e is not None
    r, held = e.router, 0.0
    if r.jitter:
        held += 8 * n.width
    elif (r.norm or r.noise) and itemsize < 4:
        held += 4 * n.width
    if r.norm:
        held += (4 + stack.rms) * n.width + stack.statistics
    return held + r.kept + (e.count + e.free) * (8 + 8 * r.noise + 4 * r.capped)


def layer_kept(network: Network, plan: Plan, stack: Stack, index: int, recompute: Recomputed) -> float:
    """Bytes that one layer keeps with this kind of recompute."""
    at = tokens_of(network, plan, stack)
    if recompute == "full":
        return plan.compute_bytes * network.width * at.between
    parts = layer_parts(network, plan, stack, index)
    if recompute == "selective":
        shares = dict(stack.selective)
        kept = sum(size * shares.get(part, 1.0) for part, size in parts.items())
        whole = shares.get("network") == 0.0  # the layer's second half is recomputed from its input, which is kept
        return kept + (plan.compute_bytes * network.width * at.between if whole else 0.0)
    return sum(parts.values())


def stage_kept(network: Network, plan: Plan, stack: Stack, layers: range, *, first: bool, last: bool) -> float:
    """Bytes that a micro-batch keeps on a decoder's stage with these layers. first, last: True for the model's first, last stage."""
    casts, input_bytes = casts_kept(plan, stack), plan.compute_bytes * network.width * tokens_of(network, plan, stack).between
    kept = ends_kept(network, plan, stack, first=first, last=last)
    kept += inputs_kept(plan, stack, layers, first=first, last=last) * input_bytes
    if casts and last and network.ahead:
        kept += network.ahead * cast_ahead(network, plan)
    for index in layers:
        kept += layer_kept(network, plan, stack, index, recompute_of(plan, index)) + (cast_weights(network, plan, index) if casts else 0.0)
    return kept


def inputs_kept(plan: Plan, stack: Stack, layers: range, *, first: bool, last: bool) -> int:
    """Number of received or sent tensors that a micro-batch keeps on a stage, in addition to the tensors of layers and of the last norm."""
    sent = int(stack.outputs == "kept" and plan.pp > 1)
    wider = stack.norm > plan.compute_bytes and plan.tensor not in GRIDS  # the norm keeps a wider copy, and the received tensor is kept too
    if layers or last:
        return sent + (wider and not (layers and recompute_of(plan, layers.start) == "full"))
    return sent + (not first)  # a stage without layers, embedding and head keeps the tensor that it passes on


def keeps_scores(plan: Plan) -> bool:
    """True if the sequence-parallel method keeps the softmax of all pairs."""
    return plan.sp > 1 and plan.method.keeps_scores


def recompute_of(plan: Plan, index: int) -> Recomputed:
    """Kind of recompute of one layer. Every `recompute_every`-th layer is recomputed."""
    return plan.recompute if repeats(index, plan.recompute_every) else "none"


def casts_kept(plan: Plan, stack: Stack) -> bool:
    """True if each micro-batch keeps weights cast to the compute dtype. With pipeline stages, the backward pass casts them again instead,
    because every micro-batch in flight would keep its own casts."""
    return stack.casts and plan.storage.parameters > plan.compute_bytes and plan.stage < 3 and plan.pp == 1


def cast_weights(network: Network, plan: Plan, index: int) -> float:
    """Bytes of one layer's dense weights, cast to the compute dtype, that are kept for the backward pass (not if it recomputes them).

    index: number among the layers of all stacks.
    """
    (n, number), e, recompute = network.at(index), network.experts, recompute_of(plan, index)
    if recompute == "full":
        return 0.0
    made_again = n.adapters is not None  # the backward pass merges W + s B A again, so nothing is kept
    elements = 0.0
    if not (made_again and n.trains("attention")):
        elements = (2 if n.source else 1) * attention_matrices(n, plan.grid.matrix, over=plan.grid.units)
    if recompute == "none" and not (made_again and n.trains("dense")):
        sparse = e is not None and number in n.sparse_layers
        second = network_elements(n, e.shared_hidden, gated=e.gated) if e and sparse else network_elements(n, n.hidden, gated=n.gated)
        elements += second / plan.grid.matrix
    return plan.compute_bytes * elements


def cast_ahead(network: Network, plan: Plan) -> float:
    """Bytes of kept weight casts of one multi-token-prediction layer and of the matrix that merges its two inputs."""
    return cast_weights(replace(network, experts=None), plan, network.layers) + plan.compute_bytes * 2 * network.width**2


def ends_kept(network: Network, plan: Plan, stack: Stack, *, first: bool, last: bool) -> float:
    """Bytes kept outside of layers: the embedding's dropout, the last norm, the loss, and an encoder's last norm and output."""
    at, c = tokens_of(network, plan, stack), plan.compute_bytes
    total = 0.0
    if first and (stack.masks == "always" or network.dropout):
        total += sum(_mask(stack, c) * network.width * tokens_of(run, plan, stack).between for run in network.halves)
    if first and network.encoder is not None:
        total += _last_norm(network.encoder, plan, stack) * tokens_of(network.encoder, plan, stack).between
    if last:
        total += _last_norm(network, plan, stack) * at.between
        total += logits(network, plan) * logit_kept(network, stack) if plan.loss_chunks == 1 else 0.0
        total += sum(_ahead(network, plan, stack, network.layers + depth) for depth in range(network.ahead))
    return total


def _last_norm(run: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that the last norm keeps for each token: input, output, which the head reads, and in encoder-decoders a dropout mask."""
    c = plan.compute_bytes
    masked = run.dropout and (run.encoder is not None or run.sees == "all")
    read = c if run.adapters is None else 0  # the head needs its input for the gradient of its weights
    return (norm_kept(run, plan, stack) + read) * run.width + 2 * stack.statistics + (_mask(stack, c) * run.width if masked else 0)


def _ahead(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Bytes that multi-token prediction keeps for one further token: inputs of two norms and of the product, a layer, a norm, logits."""
    at, c = tokens_of(network, plan, stack), plan.compute_bytes
    same = c if stack.norm <= c else 0  # in fp32, two norms keep one tensor in common
    joined = (2 * _norm(network, stack, c) - same + 2 * c) * network.width + 4 * stack.statistics
    read = (_norm(network, stack, c) + c) * network.width + 2 * stack.statistics
    of_layer = layer_kept(replace(network, experts=None), plan, stack, index, recompute_of(plan, index))
    return of_layer + (joined + read) * at.between + (logits(network, plan) * stack.logits_kept if plan.loss_chunks == 1 else 0.0)


def logit_kept(network: Network, stack: Stack) -> float:
    """Bytes kept for each logit until the backward pass; with `logit_cap` also the result of tanh, in fp32."""
    return stack.logits_kept + (4 if network.logit_cap else 0)


def logits(network: Network, plan: Plan) -> float:
    """Number of logits of one micro-batch on a rank."""
    return plan.microbatch * network.length / plan.sp * network.vocab / (1 if plan.tensor == "copied" else plan.tp)
