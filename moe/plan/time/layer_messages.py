"""Predicts the seconds of one layer's collectives that computation does not hide, for one micro-batch: over tp, sp and ep.

    1d           all-reduces of n D for attention and network, forward and backward
    sliced       a gather before and a reduce-scatter after each of the two, forward and backward
    2d, 2.5d, 3d bytes of tensor.py, one message for each step of a product
    sp           bytes of the method (parallel/sequence/kinds.py): blocks of keys sent in a ring, or all-to-alls
    ep, etp      the dispatcher's messages over ep, and gathers over etp

n: tokens of a rank. D: width. Also defines Pass and Passes, the times that layer_time.py adds up.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import Program
from moe.plan.memory.kept import traffic_of
from moe.plan.time import tensor as tensor_parallel
from moe.plan.time.collective_times import Group, all_reduce, all_to_all, collective, gather, group_of
from parallel.mesh.grids import LINES
from parallel.mesh.traffic import Message
from parallel.sequence.kinds import Attention

KIND = {1: "fp8", 2: "bf16", 4: "fp32"}  # bytes of an element -> kind of product


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward or backward pass: computation, and exposed collectives of tp, sp and ep. kernels: number of kernels."""

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
        return Pass(count * self.compute, count * self.tensor, count * self.sequence, count * self.experts, count * self.kernels)

    @property
    def device(self) -> float:
        return self.compute + self.tensor + self.sequence + self.experts


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass of a part of the model. weights: seconds of `backward` that compute gradients of weights."""

    forward: Pass = Pass()
    backward: Pass = Pass()
    weights: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward, self.weights + other.weights)

    def times(self, count: float) -> Passes:
        return Passes(self.forward.times(count), self.backward.times(count), count * self.weights)


def tokens_of(network: Network, plan: Plan) -> float:
    """Number of tokens of one micro-batch on one rank."""
    return plan.microbatch * network.length / plan.sp


def _tp_group(plan: Plan, cluster: Cluster) -> Group:
    return group_of(plan.tp, 1, cluster.devices_per_node, plan.world)


def over_tensor(network: Network, plan: Plan, cluster: Cluster, program: Program, *, sparse: bool) -> Passes:
    """Forward and backward time of a layer's collectives over tp. sparse: the layer has experts."""
    if plan.tp == 1 or plan.tensor == "copied":
        return Passes()
    group, left = _tp_group(plan, cluster), 1 - program.tensor_overlap
    if plan.tensor not in (*LINES, "sliced"):
        return _on_grid(network, plan, cluster, group, left)
    n, late = tokens_of(network, plan), network.latent
    size = n * network.width * plan.compute_bytes
    read = network.width if late is None else (late.query_rank or network.width) + late.key_rank + late.rotary_size
    entering = n * read * plan.compute_bytes  # the tensors that all heads read: x, or the latents
    others = 0.0 if sparse else 1.0  # experts need no second collective: their tokens are already cut over tp
    if plan.tensor == "sliced":
        forward = backward = gather(cluster, group, entering) + (1 + 2 * others) * gather(cluster, group, size)
        kernels = 1 + others
    else:
        again = gather(cluster, group, size) if sparse else 0.0
        forward = (1 + others) * all_reduce(cluster, group, size) + again
        backward = all_reduce(cluster, group, entering) + others * all_reduce(cluster, group, size) + again
        kernels = (1 + others) / 2
    return Passes(Pass(tensor=left * forward, kernels=kernels), Pass(tensor=left * backward, kernels=kernels))


def _on_grid(network: Network, plan: Plan, cluster: Cluster, group: Group, left: float) -> Passes:
    """Collectives of 2D, 2.5D and 3D tensor parallelism. left: fraction of them that products do not hide."""
    of = tensor_parallel.DenseLayer(
        *(round(tokens_of(network, plan)), network.width, network.heads, network.channels),
        *(max(network.groups, plan.grid.units), network.hidden, network.gated, plan.compute_bytes),
    )
    cost = tensor_parallel.cost(plan.grid, of)
    messages = len(of.products) * plan.grid.columns

    def passed(sent: float, times: int) -> Pass:
        latencies = gather(cluster, group, 0.0) + messages * times * cluster.inside.latency_us * 1e-6
        return Pass(tensor=left * (latencies + gather(cluster, group, sent * group.size / (group.size - 1))), kernels=times * messages)

    return Passes(passed(cost.forward, 2), passed(cost.backward, 4))


def cross_sums(network: Network, encoder: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Passes of cross-attention's all-reduces in 1D: of its output forward, of the gradients of both stacks' tokens backward."""
    if plan.grid.units == 1:
        return Passes()
    sizes = (tokens_of(half, plan) * network.width * plan.compute_bytes for half in (network, encoder))
    own, other = (all_reduce(cluster, _tp_group(plan, cluster), size) for size in sizes)
    left = 1 - program.tensor_overlap
    return Passes(Pass(tensor=left * own, kernels=0.5), Pass(tensor=left * (own + other), kernels=1))


def over_sequence(core: Passes, network: Network, plan: Plan, cluster: Cluster, program: Program) -> Passes:
    """Add the collectives over sp to the passes of attention between q, k and v.

    A ring sends keys while blocks are computed: if links are fast enough, only the first message takes additional time. Nothing hides the
    all-to-alls of methods that trade heads for tokens (Ulysses).
    """
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


def exchange(network: Network, plan: Plan, cluster: Cluster, program: Program, *, tokens: float, rows: float) -> Passes:
    """Passes of sending `rows` rows of `tokens` tokens to experts and back: the dispatcher's messages over ep, and gathers over etp."""
    e, item, per_node = network.experts, max(2, plan.compute_bytes), cluster.devices_per_node
    assert e is not None

    def seconds(messages: tuple[Message, ...]) -> float:
        found = 0.0
        for m in messages:
            group = group_of(m.ranks, m.stride * plan.etp, per_node, plan.world)
            ranks, nodes = (_copies(e.choices, plan.ep), _copies(e.choices, group.nodes)) if program.dispatch == "by_node" else (1.0, 1.0)
            found += collective(cluster, group, m.name, m.handed * ranks, copies=nodes / ranks)
        return found

    size = rows * network.width * item * plan.etp
    inner = 2 * gather(cluster, group_of(plan.etp, 1, per_node, plan.world), size) if plan.etp > 1 else 0.0
    kernels = 4 if plan.ep * plan.etp > 1 else 0
    traffic, left = traffic_of(network, plan, tokens, rows, item), 1 - program.experts_overlap
    forward, backward = (Pass(experts=(seconds(of) + inner) * left, kernels=kernels) for of in traffic[1:])
    return Passes(forward, backward)


def _copies(choices: int, places: int) -> float:
    """Expected number of different places (ranks or nodes) that a token's choices are on, divided by the choices.

    It is the number of rows sent for each choice if a token is sent only once to each place.
    """
    return places * (1 - (1 - 1 / places) ** choices) / choices
