"""Predicts the seconds of one layer's collectives over tp, sp and ep that computation does not hide, for one micro-batch.

    1d           all-reduces of n x D elements after attention and after the feed-forward network, forward and backward
    sliced       an all-gather before, and a reduce-scatter after, attention and the feed-forward network, forward and backward
    2d, 2.5d, 3d bytes by the formulas below; each matrix product sends one message for each column of the grid
    MoE layers   tokens that tp ranks divide among them (`sharing`); choices in router groups that extend over several ranks (`grouping`)
    sp           bytes of the method (parallel/sequence/kinds.py): keys and values in a ring, or all-to-alls
    ep, etp      the dispatcher's messages over ep, gathers and reduce-scatters over etp

n: tokens of a rank. D: width. Pass and Passes hold the seconds of a part of a layer, and can be added. layer_time.py returns Passes.

With 2D, 2.5D and 3D tensor parallelism, each rank sends for a dense layer

    N tokens, D width, A channels of all query heads, K of all key heads (and of all value heads), F hidden units; grid of side q, depth d
    matrix products (inputs I -> outputs O): D -> A, K, K (queries, keys, values), A -> D, D -> F (twice with a gate), F -> D
    wide: elements that are sent in fp32: sums of weight gradients, statistics of norms

             elements sent forward                     elements sent backward
    2d       (q-1)/q^2 (N I + I O) for each product    (q-1)/q^2 (2 N I + I O), and (q-1)/q^2 I O wide
    2.5d     as 2d with N / d                          as 2d with N / d
    3d       (q-1)/q^3 (N I + I O + N O)               (q-1)/q^3 (N O + I O + 2 N I), and (q-1)/q^3 I O wide

    Queries, keys and values are one product, and so are w1 and w3, so that x is sent once for all of them. In cross attention over the S
    tokens of an encoder, one product gives queries, and another gives keys and values of the S tokens. Norms gather 2 wide numbers per
    token forward and sum 2 backward.

Sources: see the methods' files in parallel/tensor/.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from moe.plan.job.hashed import Summed
from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import Program
from moe.plan.memory.rows import once_each, traffic_of
from moe.plan.time.collective_times import OVERLAP_SLOWDOWN, Group, all_reduce, all_to_all, collective, gather, group_of
from parallel.mesh.grids import GRIDS, LINES, Grid
from parallel.mesh.traffic import Message
from parallel.sequence.kinds import Attention


@dataclass(frozen=True)
class DenseLayer:
    """Sizes of a dense layer: attention with rotary positions, a feed-forward network, LayerNorms. itemsize: bytes of an element. source:
    number of encoder tokens if the layer also has cross attention; 0: no cross attention."""

    tokens: int
    width: int
    heads: int
    head_size: int
    kv_heads: int
    hidden: int
    gated: bool = True
    itemsize: int = 4
    source: int = 0

    @property
    def norms(self) -> int:
        return 3 if self.source else 2

    @property
    def inner(self) -> int:
        """Number of channels of all heads of queries (A at the top of this file)."""
        return self.heads * self.head_size

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each product: q, k, v, out; the same again for cross attention; w1; w3 if there is a gate; w2."""
        keys, into = self.kv_heads * self.head_size, (self.width, self.hidden)
        attention = (self.width, self.inner), (self.width, keys), (self.width, keys), (self.inner, self.width)
        return *attention * (self.norms - 1), *(into,) * (2 if self.gated else 1), (self.hidden, self.width)

    @property
    def fused_products(self) -> tuple[tuple[int, int, int], ...]:
        """(tokens, inputs, outputs) of each product, with products of the same input joined into one."""
        n, d, a, keys = self.tokens, self.width, self.inner, 2 * self.kv_heads * self.head_size
        cross = ((n, d, a), (self.source, d, keys), (n, a, d)) if self.source else ()
        return (n, d, a + keys), (n, a, d), *cross, (n, d, (1 + self.gated) * self.hidden), (n, self.hidden, d)


WIDE = 4  # bytes of an fp32 element


def sent(grid: Grid, of: DenseLayer) -> tuple[int, int]:
    """Return the bytes that each rank of a grid of kind 2d, 2.5d or 3d sends (forward, backward)."""
    kind, depth, side = grid.kind, grid.depth, grid.columns
    held = Fraction(1, 1 if kind == "3d" else depth)
    part, wide = Fraction(side - 1, side**3 if kind == "3d" else side**2), max(WIDE, of.itemsize)
    row = Fraction(of.norms * of.tokens, depth * side)  # (tokens of one grid row) x (norms of a layer)
    forward, backward = row * 2 * (side - 1) * wide, row * 2 * Fraction(2 * (side - 1), side) * wide
    for tokens, inputs, outputs in of.fused_products:
        x, w, y = held * tokens * inputs, inputs * outputs, held * tokens * outputs if kind == "3d" else 0
        forward += part * (x + w + y) * of.itemsize
        backward += part * ((2 * x + w + y) * of.itemsize + w * wide)
    return int(forward), int(backward)


KIND = {1: "fp8", 2: "bf16", 4: "fp32"}  # bytes of an element -> dtype of a product


@dataclass(frozen=True)
class Pass(Summed):
    """Seconds of a forward or backward pass. compute: computation on the device. kernels: number of kernels that the host launches. tensor,
    sequence, experts: collectives over tp, sp, ep that no computation hides."""

    compute: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    experts: float = 0.0
    kernels: float = 0.0

    @property
    def device(self) -> float:
        return self.compute + self.tensor + self.sequence + self.experts


@dataclass(frozen=True)
class Passes(Summed):
    """Forward and backward pass of a part of the model. weights: seconds of weight gradients, which are included in `backward`."""

    forward: Pass = Pass()
    backward: Pass = Pass()
    weights: float = 0.0


def tokens_of(network: Network, plan: Plan) -> float:
    """Number of tokens of one micro-batch on one rank."""
    return plan.microbatch * network.length / plan.sp


def _tp_group(plan: Plan, cluster: Cluster) -> Group:
    return group_of(plan.tp, 1, cluster.devices_per_node, plan.world)


def sharing(network: Network, plan: Plan) -> tuple[Message, ...]:
    """Return the messages by which the tp ranks divide an MoE layer's tokens among them and collect the results (moe/experts/spread.py).
    The forward and the backward pass have the same messages."""
    if plan.tp == 1 or plan.tensor == "sliced":
        return ()
    tokens, size, q = tokens_of(network, plan) / plan.grid.sequences, network.width * plan.compute_bytes, plan.grid.columns
    if plan.tensor in GRIDS:
        return (Message("tp_col", "all_to_all", 2 * tokens * size / q, q, calls=2),)
    return (Message("tp", "all_gather", math.ceil(tokens / plan.tp) * size, plan.tp),)


# collective in `grouping` -> number of kernels that copy its data (not listed: 1); 0: the router's kernels read gathered choices in place
_AROUND = {"all_gather": 0}


def grouping(network: Network, plan: Plan, router: str) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the messages of one MoE layer's (forward, backward) pass by which ranks route together. This is needed if the tokens of one
    group (`router.group`) are on several ranks of sp and tp. These ranks exchange logits, choices or gates (moe/router/slices.py). router:
    `kernels` or `operations` (Program.router). If GPU kernels can count the gathered choices, counts are not sent."""
    e, sequences = network.experts, plan.microbatch // plan.grid.sequences
    if e is None or e.router.group is None:
        return (), ()
    tp = plan.tp // plan.grid.sequences
    apart = plan.tensor != "sliced" and sequences % (tp * (e.router.group or sequences)) == 0
    ranks, axis = (plan.sp, "sp") if apart else (plan.sp * tp, "sp*tp")
    if ranks == 1:
        return (), ()
    tokens, each = math.ceil(tokens_of(network, plan) / plan.grid.sequences / tp), e.router.balances
    groups = sequences / (tp if apart else 1) / e.router.group if e.router.group else 1
    gathered = Message(axis, "all_gather", tokens * (e.router.decides + each), ranks)
    back = Message(axis, "reduce_scatter", tokens * ranks * each, ranks)
    # whether each rank has an equal part of every group: only then can the router's kernel count the gathered choices itself
    aligned = apart or plan.tensor == "sliced" or e.router.group == 0
    sent = 0 if router == "kernels" and e.router.gathered_counts and aligned else groups * e.router.counts
    counts = Message(axis, "all_reduce", sent, ranks)
    return tuple(m for m in (gathered, counts) if m.handed), (back,) if each else ()


def over_tensor(network: Network, plan: Plan, cluster: Cluster, program: Program, *, sparse: bool) -> Passes:
    """Times of a layer's collectives over tp, in both passes. sparse: the layer has experts."""
    if plan.tp == 1 or plan.tensor == "copied":
        return Passes()
    group, left, n, late = _tp_group(plan, cluster), 1 - program.tensor_overlap, tokens_of(network, plan), network.latent
    norms = Pass()
    if network.qk_norm == "whole":  # a norm over the heads of all tp ranks: two fp32 sums for each token, of queries and of keys
        norms = Pass(tensor=2 * left * all_reduce(cluster, group, 4 * n / plan.grid.sequences))
    if plan.tensor not in (*LINES, "sliced"):
        return _on_grid(network, plan, cluster, group, left) + Passes(norms, norms)
    size = n * network.width * plan.compute_bytes
    read = network.width if late is None else (late.query_rank or network.width) + late.key_rank + late.rotary_size
    entering = n * read * plan.compute_bytes  # bytes that all heads read: x, or the latents
    dense = 0.0 if sparse else 1.0  # a dense network adds the same collectives as attention; experts add only those in `sharing`
    if plan.tensor == "sliced":
        forward = backward = gather(cluster, group, entering) + (1 + 2 * dense) * gather(cluster, group, size)
        kernels = 1 + dense
    else:
        again = sum(collective(cluster, group, m.name, m.handed) for m in sharing(network, plan)) if sparse else 0.0
        forward = (1 + dense) * all_reduce(cluster, group, size) + again
        backward = all_reduce(cluster, group, entering) + dense * all_reduce(cluster, group, size) + again
        kernels = (1 + dense) / 2
    return Passes(Pass(tensor=left * forward, kernels=kernels), Pass(tensor=left * backward, kernels=kernels)) + Passes(norms, norms)


def _on_grid(network: Network, plan: Plan, cluster: Cluster, group: Group, left: float) -> Passes:
    """Times of 2D, 2.5D and 3D tensor parallelism's collectives, in both passes. left: fraction of these times that matrix products
    do not hide."""
    of = DenseLayer(
        *(round(tokens_of(network, plan)), network.width, network.heads, network.channels),
        *(max(network.groups, plan.grid.units), network.hidden, network.gated, plan.compute_bytes),
        source=0 if network.encoder is None else round(tokens_of(network.encoder, plan)),
    )
    forward, backward = sent(plan.grid, of)
    messages = len(of.products) * plan.grid.columns

    def passed(size: float, times: int) -> Pass:
        latencies = gather(cluster, group, 0.0) + messages * times * cluster.inside.latency_us * 1e-6
        return Pass(tensor=left * (latencies + gather(cluster, group, size * group.size / (group.size - 1))), kernels=times * messages)

    return Passes(passed(forward, 2), passed(backward, 4))


def cross_sums(network: Network, encoder: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Times of cross-attention's all-reduces in 1D. Forward: one, of its output. Backward: two, of the gradients of the decoder's and of
    the encoder's tokens. Grids have no such all-reduces."""
    if plan.grid.units == 1 or plan.tensor in GRIDS:
        return Passes()
    sizes = (tokens_of(half, plan) * network.width * plan.compute_bytes for half in (network, encoder))
    own, other = (all_reduce(cluster, _tp_group(plan, cluster), size) for size in sizes)
    left = 1 - program.tensor_overlap
    return Passes(Pass(tensor=left * own, kernels=0.5), Pass(tensor=left * (own + other), kernels=1))


def over_sequence(core: Passes, network: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Return the times of attention (`core`) with the collectives over sp added. A ring sends keys and values while attention computes. If
    links are fast enough, only the first message adds time, except with `program.gathers` "waited". Computation does not hide Ulysses'
    all-to-alls."""
    if plan.sp == 1:
        return core
    heads, groups = max(1, network.heads // plan.tp), max(1, network.groups // plan.tp)
    cost = plan.method.cost(plan.sp, Attention(plan.microbatch, network.length, heads, groups, network.channels, plan.compute_bytes))
    group = group_of(plan.sp, plan.tp, cluster.devices_per_node, plan.world)

    def added(one: Pass, sent: float) -> Pass:
        if plan.method.trades_heads:
            exposed = 4 * all_to_all(cluster, group, sent / 4 * plan.sp / (plan.sp - 1))
        else:
            ring = gather(cluster, group, sent * plan.sp / (plan.sp - 1))
            waits = program.gathers == "waited" or not plan.method.overlaps
            exposed = max(0.0, ring - (0.0 if waits else one.compute)) + ring / plan.sp
        return one + Pass(sequence=exposed, kernels=2 * plan.sp)

    return Passes(added(core.forward, cost.forward / plan.sp), added(core.backward, cost.backward / plan.sp))


def exchange(network: Network, plan: Plan, cluster: Cluster, program: Program, *, tokens: float, shared: Passes) -> Passes:
    """Times of the messages over ep and etp that send the rows of a rank's `tokens` tokens to experts and back. The messages of `grouping`
    are included. shared: times of the shared experts' network, which may run while rows are sent. In the backward pass only its gradients
    of inputs count as overlap, because a schedule may postpone its gradients of weights."""
    e, item, per_node = network.experts, max(2, plan.compute_bytes), cluster.devices_per_node
    assert e is not None

    def seconds(messages: tuple[Message, ...]) -> float:
        found = 0.0
        for m in messages:
            group = group_of(m.ranks, m.stride * plan.etp, per_node, plan.world)
            ranks, nodes = once_each(e, plan.ep, group.nodes) if program.dispatch == "by_node" else (1.0, 1.0)
            found += collective(cluster, group, m.name, m.handed * m.busiest * ranks, copies=nodes / ranks)
        return found

    rows = tokens * e.choices * e.mean_rows
    size = rows * e.share(plan.ep) * network.width * item * plan.etp
    inner = 2 * gather(cluster, group_of(plan.etp, 1, per_node, plan.world), size) if plan.etp > 1 else 0.0
    kernels = program.exchange_kernels if plan.ep * plan.etp > 1 else (0, 0)
    traffic, left = traffic_of(network, plan, tokens, rows, item), 1 - program.experts_overlap

    def together(messages: tuple[Message, ...]) -> float:
        stride = plan.tp if messages and messages[0].axis == "sp" else 1
        return sum(collective(cluster, group_of(m.ranks, stride, per_node, plan.world), m.name, m.handed) for m in messages)

    first = seconds(traffic.meanwhile) if program.shared == "overlapped" else 0.0
    computed = shared.forward.compute, shared.backward.compute - shared.weights
    hidden = [(1 - OVERLAP_SLOWDOWN) * min(first, window) for window in computed]
    forward, backward = (
        Pass(experts=(seconds(of) + inner) * left + together(whole) - saved, kernels=n + sum(_AROUND.get(m.name, 1) for m in whole))
        for of, n, whole, saved in zip(
            (traffic.forward, traffic.backward), kernels, grouping(network, plan, program.router), hidden, strict=True
        )
    )
    return Passes(forward, backward)
