"""Seconds of one layer, and of the head, for one micro-batch on one rank: products, attention, what streams, and collectives within it.

    n tokens of the rank, D width, A and K inner widths of queries and keys, F hidden units; t ranks of tensor parallelism

    products forward    n x D x (A + 2K)/t    n x A/t x D    n x D x F/t (twice with a gate)    n x F/t x D
    backward            two for each: of the input's gradient, and of the weights'
    streamed            norms 4 D, sums of residuals 6 D (dropout's mask 1 more), activation 4 F/t (6 with a gate): bytes of 16 bits
    cross attention     the same of the encoder's tokens for keys and values, one norm and one sum of the residual
    scores              where attention writes them: 6 bytes a score forward, 5 more with dropout; about twice that backward
    1d                  2 all-reduces of n D forward, 2 backward; sliced: 2 gathers and 2 reduce-scatters each way

Bytes of grids and of attention over sp are those of tensor.py and attention.py. A device's times are in device.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from moe.plan.job.counts import heads_over
from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import Program
from moe.plan.memory.kept import traffic_of
from moe.plan.time import tensor as tensor_parallel
from moe.plan.time.collective_times import Group, all_reduce, all_to_all, collective, gather, group_of
from parallel.mesh.grids import GRIDS, LINES
from parallel.mesh.traffic import Message
from parallel.sequence.kinds.kind import Attention

KIND = {1: "fp8", 2: "bf16", 4: "fp32"}
BACKWARD_STREAM = 1.5  # what streams backward, against forward: a norm reads its input and a gradient, and writes one
LOGITS_AGAIN_BYTES = 20.0  # beside the backward pass's own: 16 bits to fp32, difference, exponential, less what is read instead
LOGIT_BYTES = (30.0, 16.0)  # forward and backward: 16 bits to fp32, maximum, difference, exponential, sum, quotient; and the gradient

DISPATCH_KERNELS = 45  # of a router and of rows gathered, sorted, brought back, each way: fitted to Qwen3-235B under Megatron-Core


@dataclass(frozen=True)
class Pass:
    """Seconds on the device, and of collectives that nothing hides; kernels that the host launches."""

    compute: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    experts: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.sequence + other.sequence,
            self.experts + other.experts,
            self.kernels + other.kernels,
        )

    def times(self, count: float) -> Pass:
        return Pass(*(count * part for part in (self.compute, self.tensor, self.sequence, self.experts, self.kernels)))

    @property
    def device(self) -> float:
        return self.compute + self.tensor + self.sequence + self.experts


@dataclass(frozen=True)
class Layer:
    """Of `forward`, `core`: attention between q, k and v alone; `second`: norm, network or experts, and sum of the residual, with what they
    send. `weights`: of `backward`, the weights' gradients."""

    forward: Pass
    backward: Pass
    core: Pass
    second: Pass
    weights: float


def layer_time(network: Network, plan: Plan, cluster: Cluster, program: Program, *, sparse: bool, imbalance: float = 1.0) -> Layer:
    """One layer of a network. `sparse`: with experts, of which the busiest rank's get `imbalance` times the mean."""
    return _layer(_only(network, sparse), of_layer(plan), cluster, program, sparse, imbalance)


@lru_cache(maxsize=100)
def _only(network: Network, sparse: bool) -> Network:
    """What a layer depends on, so that networks of several depths share it."""
    encoder = None if network.encoder is None else _only(network.encoder, sparse=False)
    return replace(network, layers=1, vocab=1, sparse_layers=(), experts=network.experts if sparse else None, encoder=encoder)


_OF_LAYER = ("tp", "sp", "ep", "etp", "tensor", "depth", "sequence", "order", "microbatch", "compute_bytes", "loss_chunks")
_of_plan = attrgetter(*_OF_LAYER)


def of_layer(plan: Plan) -> Plan:
    """What of a plan a layer or the head depends on, so that plans which differ elsewhere share it (the same object): of pp and dp the
    world alone."""
    return _of_layer(plan.world, _of_plan(plan))


@lru_cache(maxsize=20_000)
def _of_layer(world: int, values: tuple[Any, ...]) -> Plan:
    some = dict(zip(_OF_LAYER, values, strict=True))
    return Plan(dp=world // (some["tp"] * some["sp"]), **some)


@lru_cache(maxsize=100_000)
def _layer(network: Network, plan: Plan, cluster: Cluster, program: Program, sparse: bool, imbalance: float) -> Layer:
    core_forward, core_backward = _core(network, plan, cluster, program)
    forward, backward, weights = _projections(network, plan, cluster, program)
    if sparse:
        ffn = _experts(network, plan, cluster, program, imbalance)
    else:
        ffn = _ffn(network, plan, cluster, network.hidden, network.gated, program)
    tensor_forward, tensor_backward = _tensor(network, plan, cluster, program, sparse=sparse)
    if network.encoder is not None:
        cross = _cross(network, network.encoder, plan, cluster, program)
        forward, backward, weights = forward + cross[0], backward + cross[1], weights + cross[2]
    return Layer(
        forward + core_forward + ffn[0] + tensor_forward,
        backward + core_backward + ffn[1] + tensor_backward,
        core_forward,
        ffn[0]
        + tensor_forward.times(_of_second(plan, sparse=sparse))
        + Pass(compute=cluster.device.stream(program.pointwise * _between(network, plan, program) / 2, kernels=3), kernels=6),
        weights + ffn[2],
    )


def tokens_of(network: Network, plan: Plan) -> float:
    """Of one micro-batch on one rank."""
    return plan.microbatch * network.length / plan.sp


def _kind(plan: Plan, program: Program) -> str:
    return KIND[plan.compute_bytes] if program.products == "compute" else program.products


def _casts(program: Program, products: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Bytes of casts to 8 bits, forward and backward: each operand is read for its largest value, read again, and written twice, once
    transposed. Forward the input and the weights, backward the gradient."""
    if program.products == "compute":
        return 0.0, 0.0
    return sum(6 * (m * k + k * n) for m, n, k in products), sum(6 * m * n for m, n, k in products)


def _sides(plan: Plan) -> tuple[float, float]:
    """By how much tensor parallelism divides a rank's tokens, and what its products make of them."""
    if plan.tensor not in GRIDS:
        return 1, plan.tp
    if plan.tensor == "3d":
        side = round(plan.tp ** (1 / 3))
        return side * side, side
    side = round((plan.tp / plan.depth) ** 0.5)
    return side * plan.depth, side


def _three(cluster: Cluster, kind: str, m: float, n: float, k: float, count: float = 1) -> tuple[float, float, float]:
    """Seconds of a product forward, of its input's gradient and of its weights'."""
    device = cluster.device
    return (
        device.product(m, n, k, count=count, kind=kind),
        device.product(m, k, n, count=count, kind=kind),
        device.product(k, n, m, count=count, kind=kind),
    )


def _projections(network: Network, plan: Plan, cluster: Cluster, program: Program) -> tuple[Pass, Pass, float]:
    """Into queries, keys and values and out of them; norms and sums of residuals of the whole layer."""
    kind = _kind(plan, program)
    rows, parts = _sides(plan)
    n = tokens_of(network, plan) / rows
    d, a, k = network.width, network.heads * network.channels, network.groups * network.channels
    t = plan.tp if plan.tensor == "copied" else 1
    parts = 1 if t > 1 else parts
    if network.latent is None:
        products = [(n, (a + 2 * max(k / parts, network.channels) * parts) / parts, d), (n, d, a / parts)]
    else:
        late, h = network.latent, network.heads
        head = network.channels + late.rotary_size
        made = n / plan.tp if plan.tensor == "sliced" else n  # latents of a rank's slice
        query = [(made, late.query_rank, d), (n, h * head / parts, late.query_rank)] if late.query_rank else [(n, h * head / parts, d)]
        products = [
            *query,
            (made, late.key_rank + late.rotary_size, d),
            (n, h * (network.channels + late.value_size) / parts, late.key_rank),
            (n, d, h * late.value_size / parts),
        ]
    times = [_three(cluster, kind, *product) for product in products]
    inside = 2 * _streamed_bytes(plan, program) * (a + 2 * k) / parts * n  # biases, or rotations of queries and keys
    stream = (_between(network, plan, program) + inside) * program.pointwise
    device = cluster.device
    casts = [device.stream(of) for of in _casts(program, products)]
    return (
        Pass(compute=sum(f for f, _, _ in times) + device.stream(stream, kernels=6) + casts[0], kernels=12 + len(times)),
        Pass(
            compute=sum(x + w for _, x, w in times) + device.stream(BACKWARD_STREAM * stream, kernels=8) + casts[1],
            kernels=16 + 2 * len(times),
        ),
        sum(w for _, _, w in times),
    )


def _streamed_bytes(plan: Plan, program: Program) -> int:
    """Bytes of an element as pointwise kernels take their time by."""
    return 4 if program.streams == "elements" else max(2, plan.compute_bytes)


def _between(network: Network, plan: Plan, program: Program) -> float:
    """Bytes of a layer's two norms and two sums of residuals."""
    n = tokens_of(network, plan) / _sides(plan)[0]
    whole = n / plan.tp if plan.tensor == "sliced" else n
    return (2 * 4 + 2 * (6 + (1 if network.dropout else 0))) / 2 * _streamed_bytes(plan, program) * network.width * whole


def _of_second(plan: Plan, *, sparse: bool) -> float:
    """The part of a layer's sums over tp that is behind its network. Experts have their own exchange: of copied tokens a gather is left,
    half as much as a sum."""
    if not sparse or plan.tensor in GRIDS:
        return 0.5
    return 0.0 if plan.tensor == "sliced" else 1 / 3


def _ffn(
    network: Network,
    plan: Plan,
    cluster: Cluster,
    hidden: float,
    gated: bool,
    program: Program,
    *,
    rows: float | None = None,
    count: float = 1,
) -> tuple[Pass, Pass, float]:
    """A dense network of so many hidden units, or `count` of them at once with `rows` tokens each."""
    divided, parts = _sides(plan)
    n = tokens_of(network, plan) / divided if rows is None else rows
    f = hidden / (parts if rows is None else plan.etp)
    kind, d, device = _kind(plan, program), network.width, cluster.device
    one = count if program.experts == "grouped" else 1
    again = 1 if program.experts == "grouped" else count
    up = _three(cluster, kind, n, f * (2 if gated else 1), d, one)
    down = _three(cluster, kind, n, d, f, one)
    item = _streamed_bytes(plan, program)
    stream = (3 if gated else 2) * item * f * n * count * program.pointwise
    casts = [device.stream(count * of) for of in _casts(program, [(n, f * (2 if gated else 1), d), (n, d, f)])]
    return (
        Pass(compute=(up[0] + down[0]) * again + device.stream(stream, kernels=1) + casts[0], kernels=2 * again + 2),
        Pass(
            compute=(up[1] + up[2] + down[1] + down[2]) * again + device.stream(BACKWARD_STREAM * stream, kernels=2) + casts[1],
            kernels=4 * again + 3,
        ),
        (up[2] + down[2]) * again,
    )


def _core(network: Network, plan: Plan, cluster: Cluster, program: Program) -> tuple[Pass, Pass]:
    """Attention between q, k and v, with what it sends over sp."""
    rows, parts = _sides(plan)
    heads = network.heads / (parts if plan.tensor != "copied" else 1)
    batch = plan.microbatch / rows
    value = network.latent.value_size if network.latent else network.channels
    key = network.channels + (network.latent.rotary_size if network.latent else 0)
    scores = batch * heads * network.length**2 / plan.sp
    if program.attention == "fused":
        whole = 2 if network.sees == "all" else 1  # causal: half of the scores
        pairs = scores / 2 * network.core_work * plan.method.uneven(plan.order, plan.sp) * whole
        passes = _fused(pairs, key + value, plan, cluster)
    else:
        passes = _scores(network, plan, cluster, count=batch * heads, keys=network.length)
    return _over_sequence(network, plan, cluster, program, *passes)


def _fused(pairs: float, channels: float, plan: Plan, cluster: Cluster) -> tuple[Pass, Pass]:
    """Attention in one kernel each way; `channels`: of a key and a value."""
    device, kind, flops = cluster.device, KIND[plan.compute_bytes], 2 * channels * pairs
    forward = device.fused_attention(flops, pairs, kind=kind)
    backward = device.fused_attention(2.5 * flops, pairs, backward=True, kind=kind)
    return Pass(compute=forward, kernels=3), Pass(compute=backward, kernels=4)


def _scores(network: Network, plan: Plan, cluster: Cluster, *, count: float, keys: int) -> tuple[Pass, Pass]:
    """Attention of `count` heads that writes its scores."""
    device, kind, length = cluster.device, KIND[plan.compute_bytes], network.length / plan.sp
    product = device.product(length, keys, network.channels, count=count, kind=kind)
    value_time = device.product(length, network.channels, keys, count=count, kind=kind)
    drop, scores = 5 if network.dropout else 0, count * (network.length * keys) / plan.sp
    forward = product + value_time + device.stream((4 + drop) * scores, kernels=2)
    backward = 2 * (product + value_time) + device.stream((6 + drop) * scores, kernels=2)
    return Pass(compute=forward, kernels=8), Pass(compute=backward, kernels=10)


def _cross(network: Network, encoder: Network, plan: Plan, cluster: Cluster, program: Program) -> tuple[Pass, Pass, float]:
    """Attention to what the encoder gave, with its norm and its sum of the residual: keys and values are made of the encoder's tokens."""
    kind, device = _kind(plan, program), cluster.device
    n, read, d = tokens_of(network, plan), tokens_of(encoder, plan), network.width
    t = 1 if plan.tensor == "copied" else plan.tp
    a, k = network.heads * network.channels / t, max(network.groups / t, 1) * network.channels
    products = [(n, a, d), (read, 2 * k, d), (n, d, a)]
    times = [_three(cluster, kind, *product) for product in products]
    inside = 2 * _streamed_bytes(plan, program) * (a * n + 2 * k * read)
    stream = (_between(network, plan, program) / 2 + inside) * program.pointwise
    casts = [device.stream(of) for of in _casts(program, products)]
    count = plan.microbatch * network.heads / t
    if program.attention == "fused":
        core = _fused(count * network.length * encoder.length, 2 * network.channels, plan, cluster)
    else:
        core = _scores(network, plan, cluster, count=count, keys=encoder.length)
    forward = sum(f for f, _, _ in times) + device.stream(stream, kernels=5) + casts[0]
    backward = sum(x + w for _, x, w in times) + device.stream(BACKWARD_STREAM * stream, kernels=7) + casts[1]
    sums = _cross_sums(n, read, d, plan, cluster, program) if t > 1 else (Pass(), Pass())
    return (
        Pass(compute=forward, kernels=9 + len(times)) + core[0] + sums[0],
        Pass(compute=backward, kernels=12 + 2 * len(times)) + core[1] + sums[1],
        sum(w for _, _, w in times),
    )


def _cross_sums(n: float, read: float, width: int, plan: Plan, cluster: Cluster, program: Program) -> tuple[Pass, Pass]:
    """Of 1D: its output's forward; backward the gradients of what the decoder and the encoder gave."""
    group = group_of(plan.tp, 1, cluster.devices_per_node, plan.world)
    own, other = (all_reduce(cluster, group, tokens * width * plan.compute_bytes) for tokens in (n, read))
    left = 1 - program.tensor_beside
    return Pass(tensor=left * own, kernels=0.5), Pass(tensor=left * (own + other), kernels=1)


def _over_sequence(network: Network, plan: Plan, cluster: Cluster, program: Program, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
    """Keys travel while blocks are computed: the first wait is the only one, if links keep up. Exchanges of heads are waited for."""
    if plan.sp == 1:
        return forward, backward
    heads, groups = max(1, network.heads // plan.tp), max(1, network.groups // plan.tp)
    of = Attention(plan.microbatch, network.length, heads, groups, network.channels, plan.compute_bytes)
    cost = plan.method.cost(plan.sp, of)
    group = group_of(plan.sp, plan.tp, cluster.devices_per_node, plan.world)
    out = []
    for one, sent in ((forward, cost.forward / plan.sp), (backward, cost.backward / plan.sp)):
        if plan.method.trades_heads:
            exposed = 4 * all_to_all(cluster, group, sent / 4 * plan.sp / (plan.sp - 1))
        else:
            ring = gather(cluster, group, sent * plan.sp / (plan.sp - 1))
            waits = program.gathers == "waited" or not plan.method.overlaps
            exposed = max(0.0, ring - (0.0 if waits else one.compute)) + ring / plan.sp
        out.append(one + Pass(sequence=exposed, kernels=2 * plan.sp))
    return out[0], out[1]


def _tensor(network: Network, plan: Plan, cluster: Cluster, program: Program, *, sparse: bool) -> tuple[Pass, Pass]:
    if plan.tp == 1 or plan.tensor == "copied":
        return Pass(), Pass()
    n = tokens_of(network, plan)
    group = group_of(plan.tp, 1, cluster.devices_per_node, plan.world)
    left = 1 - program.tensor_beside
    if plan.tensor in (*LINES, "sliced"):
        size = n * network.width * plan.compute_bytes
        entering = n * _entering(network) * plan.compute_bytes
        others = 0.0 if sparse else 1.0  # tokens of a layer with experts are cut already
        if plan.tensor == "sliced":
            forward = backward = gather(cluster, group, entering) + (1 + 2 * others) * gather(cluster, group, size)
            kernels = 1 + others
        else:
            again = gather(cluster, group, size) if sparse else 0.0
            forward = (1 + others) * all_reduce(cluster, group, size) + again
            backward = all_reduce(cluster, group, entering) + others * all_reduce(cluster, group, size) + again
            kernels = (1 + others) / 2
        return Pass(tensor=left * forward, kernels=kernels), Pass(tensor=left * backward, kernels=kernels)
    return _on_grid(network, plan, cluster, group, left)


def _entering(network: Network) -> float:
    """Numbers of a token that all heads of an attention layer read."""
    late = network.latent
    return network.width if late is None else (late.query_rank or network.width) + late.key_rank + late.rotary_size


def _on_grid(network: Network, plan: Plan, cluster: Cluster, group: Group, left: float) -> tuple[Pass, Pass]:
    """2D, 2.5D and 3D: bytes of tensor.py over the slowest link of the grid, with a message a step of each product."""
    of = tensor_parallel.DenseLayer(
        round(tokens_of(network, plan)),
        network.width,
        network.heads,
        network.channels,
        max(network.groups, heads_over(plan)),
        network.hidden,
        network.gated,
        plan.compute_bytes,
    )
    depth = plan.depth if plan.tensor == "2.5d" else 1
    side = round(plan.tp ** (1 / 3)) if plan.tensor == "3d" else round((plan.tp / depth) ** 0.5)
    grid = (side, side, side) if plan.tensor == "3d" else (depth, side, side)
    cost = tensor_parallel.cost(plan.tensor, grid, of)
    messages = len(of.products) * side
    out = []
    for sent, times in ((cost.forward, 2), (cost.backward, 4)):
        alone = gather(cluster, group, 0.0) + messages * times * cluster.inside.latency_us * 1e-6
        moved = gather(cluster, group, sent * group.size / (group.size - 1))
        out.append(Pass(tensor=left * (alone + moved), kernels=times * messages))
    return out[0], out[1]


def _experts(network: Network, plan: Plan, cluster: Cluster, program: Program, imbalance: float) -> tuple[Pass, Pass, float]:
    """Router, rows there and back, and the experts' networks. Tokens that tp holds in copies are cut first."""
    e, device, item = network.experts, cluster.device, max(2, plan.compute_bytes)
    assert e is not None
    n, d = tokens_of(network, plan) / plan.tp, network.width
    factor = imbalance if e.rows is None else e.rows
    choices = n * e.choices
    rows = choices * factor * plan.etp / max(1, plan.etp)
    per_expert = choices * plan.ep * plan.etp / e.count * factor
    local = max(1.0, e.count / plan.ep)
    own = program if e.products is None else replace(program, products=e.products)
    forward, backward, weights = _ffn(network, plan, cluster, e.hidden, e.gated, own, rows=per_expert, count=local)
    router = 3 * device.product(n, e.count, d, kind="tf32")
    moved = 4 * 2 * item * rows * d  # gathered, sorted, brought back in order, summed
    forward += Pass(compute=router / 3 + device.stream(moved, kernels=8), kernels=DISPATCH_KERNELS)
    backward += Pass(compute=2 * router / 3 + device.stream(moved, kernels=10), kernels=DISPATCH_KERNELS)
    if e.shared_hidden:
        beside = _ffn(network, plan, cluster, e.shared_hidden, e.gated, program)
        forward, backward, weights = forward + beside[0], backward + beside[1], weights + beside[2]
    there, back = _exchanged(network, plan, cluster, program, tokens=n, rows=choices * factor)
    return forward + there, backward + back, weights


def _exchanged(network: Network, plan: Plan, cluster: Cluster, program: Program, *, tokens: float, rows: float) -> tuple[Pass, Pass]:
    """Rows to experts and back, forward and backward: over ep by the exchange's messages, and over etp by gathers."""
    e, item, each = network.experts, max(2, plan.compute_bytes), cluster.devices_per_node
    assert e is not None

    def seconds(messages: tuple[Message, ...]) -> float:
        found = 0.0
        for m in messages:
            group = group_of(m.ranks, m.stride * plan.etp, each, plan.world)
            ranks, nodes = (_copies(e.choices, plan.ep), _copies(e.choices, group.nodes)) if program.dispatch == "by_node" else (1.0, 1.0)
            found += collective(cluster, group, m.name, m.handed * ranks, copies=nodes / ranks)
        return found

    traffic = traffic_of(network, plan, tokens, rows, item)
    inner = 2 * gather(cluster, group_of(plan.etp, 1, each, plan.world), rows * network.width * item * plan.etp) if plan.etp > 1 else 0.0
    kernels = 4 if plan.ep * plan.etp > 1 else 0
    forward, backward = (Pass(experts=(seconds(of) + inner) * (1 - program.experts_beside), kernels=kernels) for of in traffic[1:])
    return forward, backward


def _copies(choices: int, places: int) -> float:
    """What is sent when a token goes once to each place that needs it: the places expected among its choices, over its choices."""
    return places * (1 - (1 - 1 / places) ** choices) / choices


@lru_cache(maxsize=20_000)
def head_time(network: Network, plan: Plan, cluster: Cluster, program: Program) -> tuple[Pass, Pass, float]:
    """The last norm, the projection to the vocabulary and the loss; and the seconds of the weights' gradient. With `loss_chunks` the
    backward pass makes each run's logits and their exponentials again."""
    rows, _ = _sides(plan)
    parts = plan.tp / rows
    n, v, device = tokens_of(network, plan) / rows, network.vocab / max(1, parts), cluster.device
    kind = KIND[max(2, plan.compute_bytes)]
    step = 64 if plan.tp > 1 or network.vocab > 1000 else 1
    v = -(-v // step) * step  # as programs pad it
    runs = plan.loss_chunks
    f, x, w = (runs * of for of in _three(cluster, kind, n / runs, v, network.width))
    again = f + device.stream(LOGITS_AGAIN_BYTES * n * v, kernels=4 * runs) if runs > 1 else 0.0
    group = group_of(plan.tp, 1, cluster.devices_per_node, plan.world)
    sums = all_reduce(cluster, group, n * network.width * plan.compute_bytes) if plan.tp > 1 else 0.0
    forward = Pass(compute=f + device.stream(LOGIT_BYTES[0] * n * v, kernels=8 * runs), tensor=sums, kernels=6 + 8 * runs)
    backward = Pass(
        compute=x + w + device.stream(LOGIT_BYTES[1] * n * v, kernels=4 * runs) + again,
        tensor=sums,
        kernels=4 + (8 if runs == 1 else 12) * runs,
    )
    return forward, backward, w


@lru_cache(maxsize=20_000)
def join_time(network: Network, plan: Plan, cluster: Cluster, program: Program) -> tuple[Pass, Pass, float]:
    """Two norms and the product that joins a layer's output with a token's embedding, for a further token; as head_time."""
    n, d, device = tokens_of(network, plan), network.width, cluster.device
    f, x, w = _three(cluster, _kind(plan, program), n, d, 2 * d)
    stream = 3 * 4 * _streamed_bytes(plan, program) / 2 * d * n * program.pointwise  # the norm before the head too, as _between
    forward = Pass(compute=f + device.stream(stream, kernels=4), kernels=10)
    return forward, Pass(compute=x + w + device.stream(BACKWARD_STREAM * stream, kernels=4), kernels=12), w
