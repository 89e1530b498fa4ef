"""Counts the parameters of a Network that a rank holds under a Plan, before data parallelism shards them.

    attention, dense network, shared experts, vocabulary    1 / t of their elements; grids 1 / q^2 (2d, 2.5d) or 1 / q^3 (3d)
    norms, router, down-projections of latent attention     whole on every rank of tp
    experts                                                 1 / (ep etp)

    stages_of(network, plan)     layers of each stage: plan.stage_layers, or an even cut; the end stages get fewer if it does not divide

The embedding is on the first stage, the head on the last. They are one matrix if they are tied and on the same rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from moe.plan.job.network import Network, Plan


@dataclass(frozen=True)
class Elements:
    """Numbers of parameters. dense: outside of experts, copied on all ranks of dp and sp. expert: in experts, copied on the edp ranks
    (Plan.edp). frozen_dense, frozen_expert: how many of them are not trained and so have no gradients and optimizer states."""

    dense: float = 0.0
    expert: float = 0.0
    frozen_dense: float = 0.0
    frozen_expert: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.expert

    @property
    def frozen(self) -> Elements:
        return Elements(self.frozen_dense, self.frozen_expert)

    @property
    def trained(self) -> Elements:
        return Elements(self.dense - self.frozen_dense, self.expert - self.frozen_expert)

    def as_frozen(self) -> Elements:
        """Return these parameters, all counted as frozen."""
        return Elements(self.dense, self.expert, self.dense, self.expert)

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.dense + other.dense,
            self.expert + other.expert,
            self.frozen_dense + other.frozen_dense,
            self.frozen_expert + other.frozen_expert,
        )

    def times(self, count: int) -> Elements:
        return Elements(count * self.dense, count * self.expert, count * self.frozen_dense, count * self.frozen_expert)


def layer(network: Network, plan: Plan, index: int) -> Elements:
    """Numbers of parameters that a rank holds of layer `index` of this stack, adapters included."""
    whole = _matrices(network, plan, index)
    return whole if network.adapters is None else whole.as_frozen() + _adapters(network, plan, index)


def _adapters(network: Network, plan: Plan, index: int) -> Elements:
    """Parameters of a layer's adapters: LoRA rank times (rows + columns) of each matrix. Only adapters of experts are cut over ranks."""
    n, a, latent = network, network.adapters, network.latent
    assert a is not None
    sides, of_experts = 0.0, 0.0
    if n.trains("attention"):
        inner, keys = n.heads * n.channels, n.groups * n.channels
        pairs = [(n.width, inner), (n.width, keys), (n.width, keys), (inner, n.width)]
        if latent is not None:
            query, content = n.heads * (n.channels + latent.rotary_size), n.heads * (n.channels + latent.value_size)
            pairs = [(latent.query_rank or n.width, query), (n.width, latent.key_rank + latent.rotary_size), (latent.key_rank, content)]
            pairs += [(n.heads * latent.value_size, n.width), *([(n.width, latent.query_rank)] if latent.query_rank else [])]
        sides += (2 if n.source else 1) * sum(map(sum, pairs))
    e = n.experts if index in n.sparse_layers else None
    if n.trains("dense") and (e is None or e.shared_hidden):
        gated, hidden = (n.gated, n.hidden) if e is None else (e.gated, e.shared_hidden)
        sides += (3 if gated else 2) * (n.width + hidden)
    if n.trains("experts") and e is not None:
        of_experts = e.count / plan.ep * (3 if e.gated else 2) * (n.width + e.hidden / plan.etp)
    return Elements(a.rank * sides, a.rank * of_experts)


def _matrices(network: Network, plan: Plan, index: int) -> Elements:
    n, t = network, plan.grid.matrix
    attentions = 2 if n.source else 1  # self-attention and cross-attention, each with a norm
    dense = attentions * attention(n, t, over=plan.grid.units) + (attentions + 1) * norm(n)
    if n.experts is None or index not in n.sparse_layers:
        return Elements(dense + network_elements(n, n.hidden, gated=n.gated) / t + (n.width + n.hidden / t if n.biases else 0))
    e = n.experts
    others = (
        network_elements(n, e.shared_hidden, gated=e.gated) / t
        + n.width * ((e.count + e.free) * (1 + e.router.noise) + e.count * e.biases + e.router.norm + e.gates)
        + (e.count + e.free) * e.router.vectors
    )
    one = network_elements(n, e.hidden, gated=e.gated) + e.hidden * (2 if e.gated else 1) * e.biases
    return Elements(dense + others, e.count * one / (plan.ep * plan.etp))


def norm(network: Network) -> int:
    """Parameters of a norm: its gain, and its bias if the network has biases."""
    return network.width * (2 if network.norm == "layernorm" and network.biases else 1)


def network_elements(network: Network, hidden: int, *, gated: bool) -> float:
    """Parameters of a feed-forward network's matrices."""
    return (3 if gated else 2) * network.width * hidden


def attention(network: Network, t: int, *, over: int) -> float:
    """Parameters of one layer's attention on a rank, if `t` ranks share its matrices.

    over: number of ranks over which heads are cut (fewer than t on grids). With fewer key-value heads than that, several ranks hold each.
    """
    n, inner = network, network.heads * network.channels
    keys = max(n.groups, over) / t * n.channels
    biases = (inner / t + 2 * keys + n.width) if n.biases else (inner / t + 2 * keys) if n.qkv_biases else 0
    latents = n.latent.query_rank + n.latent.key_rank if n.latent else 0  # gains of their norms
    others = (n.width if n.out_bias else 0) + n.heads / t * (n.sinks + (0 if n.shared_buckets else n.buckets))
    return attention_matrices(n, t, over=over) + biases + gains(n) + latents + others


def attention_matrices(network: Network, t: int, *, over: int) -> float:
    """Parameters of the matrices of one layer's attention on a rank. t, over: as in `attention`."""
    n, inner = network, network.heads * network.channels
    if n.latent is None:
        return n.width * (2 * inner / t + 2 * max(n.groups, over) / t * n.channels)
    late, queries = n.latent, n.heads * (n.channels + n.latent.rotary_size)
    up = (late.query_rank or n.width) * queries + late.key_rank * n.heads * (n.channels + late.value_size)
    return n.width * (late.query_rank + late.key_rank + late.rotary_size) + (up + n.heads * late.value_size * n.width) / t


def gains(network: Network) -> int:
    """Number of gains in a layer's norms of queries and keys. Every rank of tp holds all of them."""
    n = network
    return {"none": 0, "heads": 2, "whole": n.heads + n.groups}[n.qk_norm] * n.channels


def embedding(network: Network, plan: Plan) -> float:
    """Parameters of the embedding table on a rank. The head has as many."""
    return network.vocab * network.width / plan.grid.matrix


def ends(network: Network, plan: Plan, *, first: bool, last: bool) -> Elements:
    """Parameters of a rank outside of layers: vocabulary, positions, final norms. first, last: it has the model's first, last stage."""
    table = embedding(network, plan)
    tables = (1 if first else 0) + (1 if last else 0) - (1 if first and last and network.tied else 0)
    tables += last and not first and network.ahead > 0 and not network.tied  # on the last stage, multi-token prediction embeds next tokens
    positions = network.length * network.width if network.learned_positions and first else 0
    runs = (run for run in network.halves if (last if run is network else first))
    found = Elements(tables * table + positions + sum(norm(run) + _shared_bias(run, plan) for run in runs))
    found = found + ahead(network, plan).times(network.ahead) if last and network.ahead else found
    return found if network.adapters is None else found.as_frozen()


def _shared_bias(run: Network, plan: Plan) -> float:
    return run.heads / plan.grid.matrix * run.buckets if run.shared_buckets else 0


def ahead(network: Network, plan: Plan) -> Elements:
    """Parameters of multi-token prediction for one further token: a dense layer, the matrix that merges its two inputs, three norms."""
    return Elements(2 * network.width**2 + 3 * norm(network)) + layer(replace(network, experts=None), plan, 0)


def held(network: Network, plan: Plan, stages: Sequence[range], mine: Sequence[int]) -> Elements:
    """Parameters that a rank holds. stages: layers of each stage. mine: numbers of the rank's stages."""
    found = ends(network, plan, first=0 in mine, last=len(stages) - 1 in mine)
    for stage in mine:
        for index in stages[stage]:
            run, number = network.at(index)
            found += layer(run, plan, number)
    return found


def parameters(network: Network) -> float:
    """Number of parameters of the whole model."""
    return held(network, Plan(), (range(network.depth),), (0,)).total


def stages_of(network: Network, plan: Plan, count: int) -> tuple[range, ...]:
    """Layers of each of `count` stages."""
    sizes = sizes_of(network.depth, count, plan.stage_layers)
    return tuple(range(a, b) for a, b in pairwise((0, *accumulate(sizes))))


def sizes_of(layers: int, stages: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Number of layers of each stage: `given` if it has this many stages and layers, otherwise an even cut."""
    fits = given is not None and len(given) == stages and sum(given) == layers
    return given if fits and given is not None else even(layers, stages)


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Number of layers of each stage, as even as possible. If they cannot be equal, the last stage has one layer less, then the first stage
    too, then further stages from the end."""
    size = -(-layers // stages)
    sizes = [size] * stages
    order = [stages - 1, 0, *range(stages - 2, 0, -1)]
    for stage in order[: size * stages - layers]:
        sizes[stage] -= 1
    return tuple(sizes)
