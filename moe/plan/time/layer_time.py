"""Predicts the seconds of one layer, and of the head, for one micro-batch on one rank: products, attention, pointwise work, collectives.

    n tokens of the rank, D width, A channels of all query heads together, K channels of all key heads, F hidden units; t tp ranks

    forward products    (rows x inputs x outputs)   n x D x (A + 2K)/t    n x A/t x D    n x D x F/t (twice with a gate)    n x F/t x D
    backward            two products for each of these: gradient of the input, gradient of the weights
    pointwise kernels   bytes per token in 16 bits: norm 4 D, residual addition 6 D (7 D with dropout), activation 4 F/t (6 F/t with a gate)
    cross-attention     keys and values of the encoder's tokens, one norm, one residual addition

Seconds of a kernel come from moe/plan/machine/device.py, seconds of a layer's collectives from layer_messages.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import Program
from moe.plan.time.collective_times import all_reduce, group_of
from moe.plan.time.layer_messages import KIND, Pass, Passes, cross_sums, exchange, over_sequence, over_tensor, tokens_of
from moe.recipe.shapes import Decoding
from parallel.mesh.grids import GRIDS

BACKWARD_STREAM = 1.5  # a pointwise kernel's memory traffic, backward / forward; a norm's backward reads two tensors, writes one
LOGITS_AGAIN_BYTES = 20.0  # bytes read and written to recompute a logit: cast to fp32, difference, exponential
LOGIT_BYTES = (30.0, 16.0)  # bytes per logit that the loss reads and writes (forward, backward)

Product = tuple[float, float, float]  # (m, n, k): a product of m x k by k x n


@dataclass(frozen=True)
class Layer:
    """Times of one layer, collectives included. passes: both passes of the whole layer. core: forward pass of softmax(q k) v. second:
    forward pass of the layer's second half: a norm, the feed-forward network or experts, and a residual addition."""

    passes: Passes
    core: Pass
    second: Pass


def layer_time(network: Network, plan: Plan, cluster: Cluster, program: Program, *, sparse: bool) -> Layer:
    """Predict the times of one layer, with experts if it is `sparse`. They are the times of the ep rank with the most rows, because all
    other ranks wait for it."""
    return _layer(_only(network, sparse), of_layer(plan), cluster, program, sparse)


@lru_cache(maxsize=100)
def _only(network: Network, sparse: bool) -> Network:
    """Return the network with only the fields on which a layer's time depends, so that networks of different depths share cached times."""
    encoder = None if network.encoder is None else _only(network.encoder, sparse=False)
    return replace(network, layers=1, vocab=1, sparse_layers=(), experts=network.experts if sparse else None, encoder=encoder)


def of_layer(plan: Plan) -> Plan:
    """Return the plan with only the settings on which the time of a layer or the head depends, so that plans share cached times. pp becomes
    1 and dp becomes dp * pp, so that the number of ranks stays the same."""
    return plan.only(_OF_LAYER, dp=plan.world // (plan.tp * plan.sp))


_OF_LAYER = ("tp", "sp", "ep", "etp", "tensor", "depth", "sequence", "order", "microbatch", "compute_bytes", "loss_chunks")


@lru_cache(maxsize=100_000)
def _layer(network: Network, plan: Plan, cluster: Cluster, program: Program, sparse: bool) -> Layer:
    core = _core(network, plan, cluster, program)
    passes = _projections(network, plan, cluster, program)
    of = (network, plan, cluster, program)
    second = _experts(*of) if sparse else _ffn(*of, network.hidden, network.gated)
    tensor = over_tensor(network, plan, cluster, program, sparse=sparse)
    if network.encoder is not None:
        passes += _cross(network, network.encoder, plan, cluster, program)
    around = cluster.device.stream(program.pointwise * _around(network, plan, program) / 2, kernels=3)
    half = second.forward + tensor.forward.times(_of_second(plan, sparse=sparse)) + Pass(compute=around, kernels=6)
    return Layer(passes + core + second + tensor, core.forward, half)


def _kind(plan: Plan, program: Program) -> str:
    return KIND[plan.compute_bytes] if program.products == "compute" else program.products


def _products(
    products: list[Product],
    moved: float,
    plan: Plan,
    cluster: Cluster,
    program: Program,
    *,
    streams: tuple[int, int],
    kernels: tuple[int, int],
    count: float = 1,
    cast: bool = True,
    by_product: bool = True,
    trained: bool = True,
    rank: int = 0,
    decoding: Decoding | None = None,
    matrices: int = 0,
) -> Passes:
    """Times of matrix products and of pointwise kernels that read and write `moved` bytes in the forward pass. count: number of experts
    that compute each product. trained: whether the gradients of the matrices are computed. rank: rank of LoRA's adapters; 0: none. The
    adapters' products belong to the forward pass and to the gradients of inputs. decoding: cost of decoding a frozen matrix that is stored
    in blocks (mxfp4, fp8); None: no blocks. matrices: number of matrices that each pass decodes, for each expert.

    streams, kernels: pointwise kernels in the (forward, backward) pass. `streams`: their number if they were fused, for the device's time;
    each takes at least the device's launch_us. `kernels`: the number that the host launches, for the host's time. cast: if the program
    computes products in a narrower dtype (fp8), add the time to cast their operands. by_product: the order in which the backward
    times are summed. True: the two of a product are added to each other first. The order changes only the last digits; both exist so that
    predictions stay equal to the tables in docs/benchmarks.
    """
    device, kind = cluster.device, _kind(plan, program)
    together, times = (count, 1) if program.experts == "grouped" else (1, count)
    forward = inputs = weights = casts_forward = casts_backward = 0.0
    for m, n, k in products:
        forward += device.product(m, n, k, count=together, kind=kind)
        gradient = device.product(k, n, m, count=together, kind=kind, of_weights=True) if trained else 0.0
        of_input = device.product(m, k, n, count=together, kind=kind)
        inputs = inputs + (of_input + gradient) if by_product else inputs + of_input + gradient
        weights += gradient
        if rank:
            narrow = device.product(m, rank, k, count=together, kind=kind) + device.product(m, n, rank, count=together, kind=kind)
            forward, inputs = forward + narrow, inputs + 2 * narrow
        # a cast reads an operand twice (once for its maximum) and writes it twice (once transposed)
        if cast and program.products != "compute":
            casts_forward, casts_backward = casts_forward + 6 * (m * k + k * n), casts_backward + 6 * m * n
    decoded = count * matrices * decoding.kernels if decoding else 0.0
    seconds = device.stream(count * decoding.moved * sum(n * k for _, n, k in products), kernels=decoded) if decoding else 0.0
    casts = [device.stream(count * of) if cast else 0.0 for of in (casts_forward, casts_backward)]
    launched, more = len(products) * times, 2 * bool(rank)
    in_forward, in_backward = kernels[0] + (1 + more) * launched, kernels[1] + (1 + trained + 2 * more) * launched
    return Passes(
        Pass(forward * times + device.stream(moved, kernels=streams[0]) + casts[0] + seconds, kernels=in_forward + decoded),
        Pass(
            inputs * times + device.stream(BACKWARD_STREAM * moved, kernels=streams[1]) + casts[1] + seconds, kernels=in_backward + decoded
        ),
        weights * times,
    )


def _projections(network: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Times of attention's projections, and of the layer's norms and residual additions."""
    parts, n = plan.grid.units, tokens_of(network, plan) / plan.grid.sequences
    d, a, k = network.width, network.heads * network.channels, network.groups * network.channels
    if network.latent is None:
        products = [(n, (a + 2 * max(k / parts, network.channels) * parts) / parts, d), (n, d, a / parts)]
    else:
        late, h = network.latent, network.heads
        head = network.channels + late.rotary_size
        own = n / plan.tp if plan.tensor == "sliced" else n  # with `sliced`, a rank computes only the latents of its own tokens
        query = [(own, late.query_rank, d), (n, h * head / parts, late.query_rank)] if late.query_rank else [(n, h * head / parts, d)]
        products = [
            *query,
            (own, late.key_rank + late.rotary_size, d),
            (n, h * (network.channels + late.value_size) / parts, late.key_rank),
            (n, d, h * late.value_size / parts),
        ]
    inside = 2 * _pointwise_bytes(plan, program) * (a + 2 * k) / parts * n  # bytes of adding biases, or of rotating queries and keys
    moved = (_around(network, plan, program) + inside) * program.pointwise
    how = network.learning("attention")
    return _products(
        products,
        moved,
        plan,
        cluster,
        program,
        streams=(6, 8),
        kernels=(12, 16),
        matrices=4 if network.latent is None else len(products),
        **how,
    )


def _pointwise_bytes(plan: Plan, program: Program) -> int:
    """Bytes of an element that a pointwise kernel reads or writes."""
    return 4 if program.streams == "elements" else max(2, plan.compute_bytes)


def _around(network: Network, plan: Plan, program: Program) -> float:
    """Bytes that a layer's two norms and two residual additions read and write in the forward pass."""
    n = tokens_of(network, plan) / plan.grid.sequences
    own = n / plan.tp if plan.tensor == "sliced" else n
    return (2 * 4 + 2 * (6 + (1 if network.dropout else 0))) / 2 * _pointwise_bytes(plan, program) * network.width * own


def _of_second(plan: Plan, *, sparse: bool) -> float:
    """Return the fraction of the time of a layer's tp collectives that belongs to its second half, the dense network or the experts.
    Experts need only an all-gather of their tokens, which takes half the time of attention's all-reduce (if `sliced`, not even that).
    `exchange` counts their other messages. sparse: the layer has experts."""
    if not sparse or plan.tensor in GRIDS:
        return 0.5
    return 0.0 if plan.tensor == "sliced" else 1 / 3


def _ffn(network: Network, plan: Plan, cluster: Cluster, program: Program, hidden: float, gated: bool) -> Passes:
    """Times of a dense feed-forward network on the rank's tokens."""
    rows = tokens_of(network, plan) / plan.grid.sequences
    return _ffns(network, plan, cluster, program, hidden / plan.grid.units, gated, rows=rows, part="dense")


def _ffns(
    network: Network,
    plan: Plan,
    cluster: Cluster,
    program: Program,
    f: float,
    gated: bool,
    *,
    rows: float,
    part: Literal["dense", "experts"],
    count: float = 1,
) -> Passes:
    """Times of `count` feed-forward networks with `f` hidden units on this rank, each on `rows` tokens. part: the networks' kind."""
    n, d = rows, network.width
    moved = (3 if gated else 2) * _pointwise_bytes(plan, program) * f * n * count * program.pointwise
    products, how = [(n, f * (2 if gated else 1), d), (n, d, f)], network.learning(part) | {"matrices": 3 if gated else 2}
    return _products(products, moved, plan, cluster, program, streams=(1, 2), kernels=(2, 3), count=count, by_product=False, **how)


def _core(network: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Times of softmax(q k) v, with its collectives over sp."""
    heads, batch = network.heads / plan.grid.units, plan.microbatch / plan.grid.sequences
    value = network.latent.value_size if network.latent else network.channels
    key = network.channels + (network.latent.rotary_size if network.latent else 0)
    if program.attention == "fused":
        # without a causal mask, twice as many pairs are computed, and all ranks compute equally many
        work = 2.0 if network.sees == "all" else plan.method.uneven(plan.order, plan.sp)
        pairs = batch * heads * network.length**2 / plan.sp / 2 * network.core_work * work
        passes = _fused(pairs, key + value, plan, cluster)
    else:
        passes = _scores(network, plan, cluster, count=batch * heads, keys=network.length)
    return over_sequence(passes, network, plan, cluster, program)


def _fused(pairs: float, channels: float, plan: Plan, cluster: Cluster) -> Passes:
    """Times of fused attention for `pairs` (query, key) pairs. channels: size of a key plus size of a value."""
    device, kind, flops = cluster.device, KIND[plan.compute_bytes], 2 * channels * pairs
    forward = device.fused_attention(flops, pairs, kind=kind)
    backward = device.fused_attention(2.5 * flops, pairs, backward=True, kind=kind)
    return Passes(Pass(forward, kernels=3), Pass(backward, kernels=4))


def _scores(network: Network, plan: Plan, cluster: Cluster, *, count: float, keys: int) -> Passes:
    """Times of attention that writes its scores to memory. count: heads x sequences. keys: length of the sequence with the keys."""
    device, kind, length = cluster.device, KIND[plan.compute_bytes], network.length / plan.sp
    product = device.product(length, keys, network.channels, count=count, kind=kind)
    value_time = device.product(length, network.channels, keys, count=count, kind=kind)
    drop, scores = 5 if network.dropout else 0, count * (network.length * keys) / plan.sp
    forward = product + value_time + device.stream((4 + drop) * scores, kernels=2)
    backward = 2 * (product + value_time) + device.stream((6 + drop) * scores, kernels=2)
    return Passes(Pass(forward, kernels=8), Pass(backward, kernels=10))


def _cross(network: Network, encoder: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Times of cross-attention, with its norm, residual addition and all-reduces."""
    n, read = (tokens_of(half, plan) / plan.grid.sequences for half in (network, encoder))
    d, t = network.width, plan.grid.units
    a, k = network.heads * network.channels / t, max(network.groups / t, 1) * network.channels
    inside = 2 * _pointwise_bytes(plan, program) * (a * n + 2 * k * read)
    moved = (_around(network, plan, program) / 2 + inside) * program.pointwise
    products, how = [(n, a, d), (read, 2 * k, d), (n, d, a)], network.learning("attention")
    passes = _products(products, moved, plan, cluster, program, streams=(5, 7), kernels=(9, 12), matrices=4, **how)
    count = plan.microbatch / plan.grid.sequences * network.heads / t
    if program.attention == "fused":
        core = _fused(count * network.length / plan.sp * encoder.length, 2 * network.channels, plan, cluster)
    else:
        core = _scores(network, plan, cluster, count=count, keys=encoder.length)
    core = over_sequence(core, encoder, plan, cluster, program)  # sp ranks send the encoder's keys and values
    return passes + core + cross_sums(network, encoder, plan, cluster, program)


def _experts(network: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Times of router, dispatch and experts on the busiest rank. Each tp rank routes its own chunk of the tokens."""
    e, device, item = network.experts, cluster.device, max(2, plan.compute_bytes)
    assert e is not None
    n, d = tokens_of(network, plan) / plan.tp, network.width
    factor, choices = e.mean_rows * e.share(plan.ep), n * e.choices
    per_expert = choices * plan.ep * plan.etp / e.count * factor
    own = program if e.products is None else replace(program, products=e.products)
    count = max(1.0, e.count / plan.ep)
    passes = _ffns(network, plan, cluster, own, e.hidden / plan.etp, e.gated, rows=per_expert, part="experts", count=count)
    router = 3 * device.product(n, e.count, d, kind="tf32")
    moved = 4 * 2 * item * choices * factor * d  # each row is gathered, sorted, sorted back, and summed
    unneeded = program.capacity_kernels if e.slots is None else 0
    passes += Passes(
        Pass(router / 3 + device.stream(moved, kernels=8), kernels=program.dispatch_kernels[0] - unneeded),
        Pass(2 * router / 3 + device.stream(moved, kernels=10), kernels=program.dispatch_kernels[1]),
    )
    shared = _ffns(network, plan, cluster, program, e.shared_hidden, e.gated, rows=n, part="dense") if e.shared_hidden else Passes()
    return passes + shared + exchange(network, plan, cluster, program, tokens=n, shared=shared)


@lru_cache(maxsize=20_000)
def head_time(network: Network, plan: Plan, cluster: Cluster) -> Passes:
    """Times of the last norm, the projection to the vocabulary and the loss. With `loss_chunks`, the backward pass computes the logits and
    their exponentials again."""
    rows, chunks, device = plan.grid.sequences, plan.loss_chunks, cluster.device
    n, step = tokens_of(network, plan) / rows, 64 if plan.tp > 1 or network.vocab > 1000 else 1
    v = -(-network.vocab / max(1, plan.tp / rows) // step) * step  # programs pad the vocabulary to a multiple of 64
    kind, d = KIND[max(2, plan.compute_bytes)], network.width
    f, x = (chunks * device.product(*of, kind=kind) for of in ((n / chunks, v, d), (n / chunks, d, v)))
    w = 0.0 if network.freezes(network.head) else chunks * device.product(d, v, n / chunks, kind=kind, of_weights=True)
    again = f + device.stream(LOGITS_AGAIN_BYTES * n * v, kernels=4 * chunks) if chunks > 1 else 0.0
    group = group_of(plan.tp, 1, cluster.devices_per_node, plan.world)
    sums = all_reduce(cluster, group, n * d * plan.compute_bytes) if plan.tp > 1 else 0.0
    forward = f + device.stream(LOGIT_BYTES[0] * n * v, kernels=8 * chunks)
    backward = x + w + device.stream(LOGIT_BYTES[1] * n * v, kernels=4 * chunks) + again
    launched = 4 + (8 if chunks == 1 else 12) * chunks
    return Passes(Pass(forward, tensor=sums, kernels=6 + 8 * chunks), Pass(backward, tensor=sums, kernels=launched), w)


@lru_cache(maxsize=20_000)
def join_time(network: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Times of one depth of multi-token prediction outside of its layer and head: three norms, and the product that merges its two
    inputs."""
    n, d = tokens_of(network, plan), network.width
    moved = 3 * 4 * _pointwise_bytes(plan, program) / 2 * d * n * program.pointwise
    return _products([(n, d, 2 * d)], moved, plan, cluster, program, streams=(4, 4), kernels=(9, 10), cast=False)
