"""Counts the parameters of a Network that a rank holds under a Plan, before data parallelism shards them.

    attention, dense network, vocabulary                    1 / t on each of t tp ranks; q x q grids 1 / q^2, a cube (3d) 1 / q^3
    router, shared experts, latent attention's down-proj.   whole on every tp rank
    norms                                                   whole on every tp rank; grids 1 / q
    experts                                                 1 / (ep etp): ep ranks divide the experts, etp ranks each expert's matrices

The first stage has the embedding, the last stage the head. If they are tied and on the same rank, they are one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from moe.plan.job.hashed import Summed
from moe.plan.job.network import Kind, Network, Plan, attention_shapes
from parallel.mesh.grids import GRIDS


@dataclass(frozen=True)
class Elements(Summed):
    """Numbers of parameters on a rank. dense: parameters outside of experts, each held by Plan.copies data-parallel ranks. expert:
    parameters of experts, each held by Plan.edp ranks. frozen_dense, frozen_expert: the frozen part of `dense` and of `expert`, without
    gradients and optimizer states. blocks: parameters of frozen matrices that are stored in MXFP4 or FP8 blocks; no other field counts
    them."""

    dense: float = 0.0
    expert: float = 0.0
    frozen_dense: float = 0.0
    frozen_expert: float = 0.0
    blocks: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.expert + self.blocks

    @property
    def parameters(self) -> float:
        """Number of parameters outside of MXFP4 or FP8 blocks. Data-parallel engines do not see blocks, so blocks are not cast, stashed or
        offloaded."""
        return self.dense + self.expert

    @property
    def frozen(self) -> Elements:
        return Elements(self.frozen_dense, self.frozen_expert, blocks=self.blocks)

    @property
    def trained(self) -> Elements:
        if not (self.frozen_dense or self.frozen_expert or self.blocks):
            return self
        return Elements(self.dense - self.frozen_dense, self.expert - self.frozen_expert)


DIVIDES = ("tp", "ep", "etp", "tensor", "depth")  # settings of a plan that divide a layer's parameters among ranks


def layer(network: Network, plan: Plan, index: int) -> Elements:
    """Return the numbers of parameters that a rank holds of one layer, LoRA adapters included. index: the layer's index in the stack
    `network`."""
    return _layer(network, plan.only(DIVIDES), network.experts is not None and index in network.sparse_layers)


@lru_cache(maxsize=5_000)
def _layer(network: Network, plan: Plan, sparse: bool) -> Elements:
    whole = _matrices(network, plan, sparse)
    return whole if network.adapters is None else whole + _adapters(network, plan, sparse)


def _adapters(network: Network, plan: Plan, sparse: bool) -> Elements:
    """Parameters of a layer's LoRA adapters on a rank: `lora.rank` x (rows + columns) of its shard of each matrix. If tp cuts a
    matrix along a dim, it also cuts the LoRA matrix, A or B, that has this dim (parallel/tensor/style.py). The experts' networks are
    divided only by ep and etp. sparse: whether the layer has experts."""
    n, a = network, network.adapters
    assert a is not None
    sides, of_experts = 0.0, 0.0
    units = plan.grid.units
    width_shards = units if plan.tensor in GRIDS else 1  # number of shards into which tp cuts a dim of size `n.width`
    if n.trains("attention"):
        *first, last = attention_shapes(n.width, n.heads, max(n.groups, units), n.channels, n.latent)
        # outputs of latent attention's down-projections, which are whole on every tp rank
        of_tokens = n.latent.query_rank + n.latent.key_rank + n.latent.rotary_size if n.latent else 0
        outputs, inputs = sum(rows for rows, _ in first) - of_tokens, sum(columns for _, columns in first)
        of_attention = outputs / units + of_tokens + inputs / width_shards + last[0] / width_shards + last[1] / units
        sides += (2 if n.source else 1) * of_attention
    e = n.experts if sparse else None
    if n.trains("dense") and e is None:
        sides += (3 if n.gated else 2) * (n.width / width_shards + n.hidden / units)
    if n.trains("dense") and e is not None and e.shared_hidden:
        sides += (3 if e.gated else 2) * (n.width + e.shared_hidden)
    if n.trains("experts") and e is not None:
        of_experts = e.count / plan.ep * (3 if e.gated else 2) * (n.width + e.hidden / plan.etp)
    return Elements(a.rank * sides, a.rank * of_experts)


def _matrices(network: Network, plan: Plan, sparse: bool) -> Elements:
    """Parameters of a layer on a rank, without LoRA adapters. sparse: whether the layer has experts."""
    n, e, t = network, network.experts, plan.grid.matrix
    attentions = 2 if n.source else 1  # self-attention and cross-attention, each with a norm
    of_norms = dense(n, (attentions + 1) * norm(n) / plan.grid.columns, "norms")
    of_norms += dense(n, attentions * inner_gains(n, over=plan.grid.units), "attention", "norms")
    of_attention = attentions * attention_matrices(n, t, over=plan.grid.units)
    found = of_norms + _matrix(n, of_attention, "attention") + dense(n, attentions * attention(n, plan) - of_attention, "attention")
    if e is None or not sparse:
        biases = n.width + n.hidden / t if n.biases else 0
        return found + _matrix(n, network_elements(n, n.hidden, gated=n.gated) / t, "dense") + dense(n, biases, "dense")
    of_router = n.width * (e.count + e.free) * (1 + e.router.noise) + (e.count + e.free) * e.router.vectors
    found += dense(n, of_router, "router") + dense(n, n.width * e.router.norm, "router", "norms")
    found += _matrix(n, network_elements(n, e.shared_hidden, gated=e.gated), "dense")  # whole on each tp rank: only tokens are split
    found += dense(n, n.width * e.gates, "dense")
    held = e.count / (plan.ep * plan.etp)
    matrices, of_experts = held * network_elements(n, e.hidden, gated=e.gated), held * e.hidden * (2 if e.gated else 1) * e.biases
    found += dense(n, n.width * e.count * e.biases, "experts")
    if n.blocks("experts"):
        return found + Elements(expert=of_experts, frozen_expert=of_experts, blocks=matrices)
    of_experts += matrices
    return found + Elements(expert=of_experts, frozen_expert=of_experts * n.freezes("experts"))


def _matrix(network: Network, count: float, kind: Kind) -> Elements:
    """Return `count` parameters in matrices outside of experts as Elements."""
    return Elements(blocks=count) if network.blocks(kind) else dense(network, count, kind)


def dense(network: Network, count: float, *parts: str) -> Elements:
    """Return `count` parameters outside of experts as Elements. They are frozen with LoRA, or if train.freeze has one
    of the names `parts` (moe/recipe/frozen.py)."""
    return Elements(count, frozen_dense=count * network.freezes(*parts))


def norm(network: Network) -> int:
    """Number of parameters of one norm: its gain, and its bias if the network has biases."""
    return network.width * (2 if network.norm == "layernorm" and network.biases else 1)


def network_elements(network: Network, hidden: int, *, gated: bool) -> float:
    """Number of parameters in the matrices of a feed-forward network with `hidden` units."""
    return (3 if gated else 2) * network.width * hidden


def attention(network: Network, plan: Plan) -> float:
    """Number of parameters of one layer's attention on a rank, without norms."""
    n, t, over = network, plan.grid.matrix, plan.grid.units
    inputs = (n.heads + 2 * max(n.groups, over)) / over * n.channels if n.biases or n.qkv_biases else 0
    outputs = n.width / plan.grid.columns if n.biases or n.out_bias else 0
    others = n.heads / over * (n.sinks + (0 if n.shared_buckets else n.buckets))
    return attention_matrices(n, t, over=over) + inputs + outputs + others


def attention_matrices(network: Network, t: int, *, over: int) -> float:
    """Number of parameters in the matrices of one layer's attention on a rank. t: number of ranks among which its matrices are divided.
    over: number of ranks among which its heads are divided (on grids, over < t). If there are fewer key-value heads than `over`, several
    ranks hold the same head."""
    n, inner = network, network.heads * network.channels
    if n.latent is None:
        return n.width * (2 * inner / t + 2 * max(n.groups, over) / t * n.channels)
    late, queries = n.latent, n.heads * (n.channels + n.latent.rotary_size)
    up = (late.query_rank or n.width) * queries + late.key_rank * n.heads * (n.channels + late.value_size)
    return n.width * (late.query_rank + late.key_rank + late.rotary_size) + (up + n.heads * late.value_size * n.width) / t


def inner_gains(network: Network, *, over: int) -> float:
    """Number of parameters in the norms of a layer's queries, keys and latents on a rank. over: number of ranks among which the heads are
    divided."""
    n = network
    latents = n.latent.query_rank + n.latent.key_rank if n.latent else 0
    return {"none": 0, "heads": 2, "whole": (n.heads + max(n.groups, over)) / over}[n.qk_norm] * n.channels + latents


def embedding(network: Network, plan: Plan) -> float:
    """Number of parameters of the embedding table on a rank. The head has the same number."""
    return network.vocab * network.width / plan.grid.matrix


def table(network: Network, plan: Plan, part: Literal["embedding", "head"]) -> Elements:
    """Parameters of the embedding or of the head on a rank."""
    return dense(network, embedding(network, plan), part)


def ends(network: Network, plan: Plan, *, first: bool, last: bool) -> Elements:
    """Parameters outside of layers on a rank: embedding, head, positions, final norms, multi-token prediction. first, last: whether the
    rank has the model's first stage, and whether it has the last."""
    return _ends(network, plan.only(DIVIDES), first, last)


@lru_cache(maxsize=5_000)
def _ends(network: Network, plan: Plan, first: bool, last: bool) -> Elements:
    positions = network.length * network.width if network.learned_positions and first else 0
    stacks = [stack for stack in network.halves if (last if stack is network else first)]
    found = dense(network, sum(map(norm, stacks)) / plan.grid.columns, "norms") + dense(network, positions)
    for stack in stacks if network.shared_buckets else ():  # the first layer of a stack holds the stack's T5 bias
        of_first, _ = network.at(network.before if stack is network else 0)
        found += dense(of_first, stack.heads / plan.grid.units * stack.buckets, "attention")
    if first or (last and (network.tied or network.ahead)):  # multi-token prediction needs the embedding on the last stage
        found += table(network, plan, "embedding")
    if last and not network.tied:
        found += table(network, plan, "head")
    return found + ahead(network, plan).times(network.ahead) if last and network.ahead else found


def ahead(network: Network, plan: Plan) -> Elements:
    """Parameters of one depth of multi-token prediction: a dense layer, a matrix that merges its two inputs, three norms."""
    joined = dense(network, 2 * network.width**2) + dense(network, 3 * norm(network), "norms")
    return joined + layer(network.of_ahead, plan, 0)


def held(network: Network, plan: Plan, stages: Sequence[range], mine: Sequence[int]) -> Elements:
    """Parameters that a rank holds. stages: the layers of each stage. mine: the stages of this rank, as indices of `stages`."""
    found = ends(network, plan, first=0 in mine, last=len(stages) - 1 in mine)
    for stage in mine:
        for index in stages[stage]:
            stack, number = network.at(index)
            found += layer(stack, plan, number)
    return found


def parameters(network: Network) -> float:
    """Number of parameters of the whole model."""
    return held(network, Plan(), (range(network.depth),), (0,)).total


def stages_of(network: Network, plan: Plan, count: int) -> tuple[range, ...]:
    """Return the layers of each of `count` pipeline stages, by plan.stage_layers or else by an even cut."""
    sizes = sizes_of(network.depth, count, plan.stage_layers)
    return tuple(range(a, b) for a, b in pairwise((0, *accumulate(sizes))))


def sizes_of(layers: int, stages: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Number of layers of each stage: `given` if it lists `stages` numbers with the sum `layers`, otherwise an even cut."""
    return given if given is not None and (len(given), sum(given)) == (stages, layers) else even(layers, stages)


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Number of layers of each stage. The numbers differ by at most one. If some stages must have one layer less, these are the last stage,
    then the first, then the others from the last to the second."""
    size = -(-layers // stages)
    smaller = [stages - 1, 0, *range(stages - 2, 0, -1)][: size * stages - layers]
    return tuple(size - (stage in smaller) for stage in range(stages))
