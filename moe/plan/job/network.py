"""Inputs of the planner. A Network describes the model that is trained, a Plan how ranks train it. Both are dataclasses of numbers, without
tensors.

    Network + Plan            -> moe/plan/memory/memory.py        bytes on each rank
    Network + Plan + Cluster  -> moe/plan/time/cost.py            seconds of one step

Both are made from a recipe (moe/plan/job/of_recipe.py), or from a row of a table of published runs. There are pp x dp x sp x tp ranks. The
dp x sp x tp ranks of a stage hold the experts as edp x ep x etp ranks (parallel/mesh/mesh.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Literal

from moe.experts.dispatch.dispatcher import Dispatcher
from moe.plan.job.hashed import KEPT, hashed_once
from moe.plan.job.states import MIXED_FP32_GRADIENTS, Storage
from moe.recipe.frozen import PARTS
from moe.recipe.shapes import DECODING
from parallel.data.kinds import ENGINES, PLAIN
from parallel.data.kinds.kind import EngineKind
from parallel.mesh.grids import Grid, grid
from parallel.mesh.traffic import distinct
from parallel.sequence import kinds as sequences
from parallel.sequence.kinds import SequenceKind
from parallel.sequence.order import Places

LARGEST_EP = 8  # by default, the rows of the busiest rank are assumed to grow with ep only up to this ep (docs/use/plan.md)
Recomputed = Literal["none", "selective", "full"]
Kind = Literal["attention", "dense", "experts"]  # kind of a matrix, named as in lora.targets


def repeats(index: int, every: int) -> bool:
    """True if layer `index` is recomputed: layers 0, every, 2 * every and so on are. Layers of multi-token prediction are counted after
    all others."""
    return index % every == 0


@dataclass(frozen=True)
class Router:
    """Properties of a router that need memory or time in addition to its matrix."""

    vectors: int = 0  # number of learned scalars for each expert
    noise: bool = False  # a second matrix gives the scale of the noise
    norm: bool = False  # the input is normalized
    jitter: bool = False  # the input is multiplied by noise
    capped: bool = False  # the logits are bounded
    kept: int = 0  # bytes per token that routing keeps for the backward pass
    group: int | None = None  # number of sequences that are routed together; 0: all of a micro-batch; None: each token is routed alone
    decides: int = 0  # bytes per token that ranks exchange if the tokens of a group are on several ranks, to decide their routing
    counts: int = 0  # bytes per group: each expert's number of choices, which the ranks of the group sum for the balance loss
    gathered_counts: bool = False  # on a GPU, each rank counts the choices that it gets in the exchange `decides`, so `counts` is not sent
    balances: int = 0  # bytes per token that a group's ranks exchange for importance and load losses, in forward and again in backward


@dataclass(frozen=True)
class Experts:
    """Experts of one MoE layer."""

    count: int
    choices: int  # number of experts that each token chooses
    hidden: int  # hidden units of one expert
    gated: bool = False
    shared_hidden: int = 0  # hidden units of the shared experts, which compute all tokens
    rows: float | None = None  # rows that experts compute, as a fraction of all tokens' choices; None: all, because no choice is dropped
    slots: float | None = None  # capacity of all experts, as a multiple of all tokens' choices; None: no capacity
    exchange: Dispatcher | None = None  # how rows are sent over ep; None: by one all-to-all
    biases: bool = False
    router: Router = Router()
    gates: int = 0  # number of gates that weigh shared experts
    dropout: bool = False  # inside the experts, which then keep one more tensor of the hidden size
    free: int = 0  # number of zero-computation experts: the router can choose them, but they have no weights
    products: str | None = None  # dtype of the experts' matrix products (device.py); None: the compute dtype
    fused: bool = True  # one kernel computes an expert's whole network, so that it keeps only its input and pre-activations
    open_groups: tuple[int, int] = (1, 1)  # (number of groups of experts from which a token may choose, number of all groups)
    apart: bool = False  # gates scale the experts' inputs, so each choice of a token is dispatched as a token of its own
    busiest: float | None = None  # rows of the busiest ep rank / mean of ep ranks, before capacity drops any; None: see `excess`
    excess: float = 0.0  # if `busiest` is None, the busiest rank has 1 + excess * (ep - 1) times the mean number of rows

    @property
    def mean_rows(self) -> float:
        """Rows that experts compute, as a fraction of all tokens' choices (mean over ranks)."""
        return 1.0 if self.rows is None else self.rows

    @property
    def dispatched(self) -> tuple[int, int]:
        """Return (tokens that the dispatcher gets for each token of the layer, choices of each of them)."""
        return (self.choices, 1) if self.apart else (1, self.choices)

    def reached(self, targets: int) -> float:
        """Expected number of copies of a dispatched token that are sent to `targets` ranks (or nodes), one to each with chosen experts.
        Choices are spread evenly over the open groups of experts, and are random within a group."""
        rows, (few, groups) = self.dispatched[1] * self.mean_rows, self.open_groups
        if rows <= 1:  # of one choice, which may be dropped
            return rows
        used = min(few, rows)
        return used * distinct(rows / used, targets / groups) if targets >= groups else distinct(used, targets)

    def unlimited(self, ep: int) -> float:
        """Rows of the busiest of `ep` ranks / mean of the ranks, before capacity drops any: the field `busiest`. If it is None, the ratio
        grows with ep by `excess`, up to LARGEST_EP ranks."""
        return 1 + self.excess * (min(ep, LARGEST_EP) - 1) if self.busiest is None else self.busiest

    def share(self, ep: int) -> float:
        """Rows that the busiest of `ep` ranks computes, as a multiple of the ranks' mean: `unlimited`, up to a bound. The bound is the
        capacity of the rank's experts, or, without a capacity, the case that every token chooses all of them."""
        limit = self.count / self.choices if self.slots is None else self.slots / self.mean_rows
        return max(1.0, min(self.unlimited(ep), ep, limit))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int  # size of the queries' latent; 0: queries have no latent
    key_rank: int  # size of the latent of keys and values
    rotary_size: int  # channels of a head for rotary positions
    value_size: int  # channels of a head's values


@dataclass(frozen=True)
class Adapters:
    """LoRA (arXiv 2106.09685): two narrow matrices of `rank` are trained for each matrix of `targets`; everything else is frozen. blocks:
    quantized format of the frozen matrices of the kinds `blocks_of`; None: they have the master dtype."""

    rank: int
    targets: tuple[Kind, ...]
    blocks: Literal["mxfp4", "fp8"] | None = None
    blocks_of: tuple[Kind, ...] = ()


def attention_shapes(width: int, heads: int, groups: int, channels: int, latent: Latent | None) -> list[tuple[int, int]]:
    """Return (rows, columns) of each matrix of one attention: q, k, v, out, or the matrices of latents. groups: number of key-value heads.
    channels: size of a head."""
    if latent is None:
        return [(heads * channels, width), (groups * channels, width), (groups * channels, width), (width, heads * channels)]
    down = [(latent.query_rank, width)] if latent.query_rank else []
    queries = (heads * (channels + latent.rotary_size), latent.query_rank or width)
    keys = [(latent.key_rank + latent.rotary_size, width), (heads * (channels + latent.value_size), latent.key_rank)]
    return [*down, queries, *keys, (width, heads * latent.value_size)]


@hashed_once
@dataclass(frozen=True)
class Network:
    """A stack of Transformer layers with embedding and head: a decoder-only model, or the decoder of an encoder-decoder. `encoder` is a
    Network too."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    length: int  # tokens of a sequence
    kv_heads: int | None = None
    head_size: int | None = None  # channels of a head; None: width / heads
    gated: bool = False
    activation: Literal["gelu", "relu"] = "gelu"  # of dense networks without a gate
    tied: bool = True
    biases: bool = False  # all linear layers and norms have biases
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    qkv_biases: bool = False
    out_bias: bool = False
    buckets: int = 0  # number of distances with a learned attention bias (T5)
    shared_buckets: bool = False  # all layers of a stack share one T5 bias
    sinks: bool = False  # each head has a learned logit in its softmax
    clipped: bool = False  # queries, keys and values are clipped
    logit_cap: bool = False  # tanh bounds the logits of the output layer
    qk_norm: Literal["none", "heads", "whole"] = "none"  # queries and keys are normalized, for each head or over all heads
    learned_positions: bool = False
    dropout: bool = False
    experts: Experts | None = None
    sparse_layers: tuple[int, ...] = ()  # indices of the layers with experts instead of a dense network
    latent: Latent | None = None
    adapters: Adapters | None = None
    frozen: tuple[str, ...] = ()  # keys of PARTS (moe/recipe/frozen.py) that are frozen in the whole network
    frozen_layers: tuple[int, ...] = ()  # indices, in the whole model, of layers that are not trained; () in the encoder's Network
    ahead: int = 0  # number of depths of multi-token prediction: further tokens that each token predicts
    core_work: float = 1.0  # (query, key) pairs that attention computes / pairs in causal attention, as a mean over layers
    windows_in_chunks: float = 0.0  # fraction of layers that compute sliding windows in chunks and so keep keys and values twice
    windows_masked: float = 0.0  # fraction of layers whose sliding windows need a mask instead of chunks (flops.py)
    documents: bool = False  # attention has a mask of documents; a GPU's flash attention takes no masks
    sees: Literal["past", "all"] = "past"  # `past`: attention is causal
    encoder: Network | None = None  # stack whose output cross-attention reads; None: decoder-only model

    @property
    def halves(self) -> tuple[Network, ...]:
        """The stacks of the model: the encoder, if it has one, then the decoder."""
        return (self,) if self.encoder is None else (self.encoder, self)

    @property
    def before(self) -> int:
        """Number of layers of the encoder."""
        return 0 if self.encoder is None else self.encoder.layers

    @property
    def depth(self) -> int:
        """Number of layers of all stacks."""
        return self.before + self.layers

    @property
    def source(self) -> int:
        """Tokens of the encoder's sequence, to which the decoder has cross-attention; 0 without an encoder."""
        return 0 if self.encoder is None else self.encoder.length

    @property
    def with_experts(self) -> tuple[int, ...]:
        """Indices of the layers with experts. Indices count the encoder's layers first, then the decoder's."""
        if self.encoder is None:
            return self.sparse_layers
        return (*self.encoder.sparse_layers, *(self.before + layer for layer in self.sparse_layers))

    def at(self, index: int) -> tuple[Network, int]:
        """Return (stack that has layer `index` of the model, the layer's index in that stack). For a frozen layer, the stack is a copy in
        which every part is frozen, so that counts of this layer have no trained parameters."""
        run = self if self.encoder is None or index >= self.before else self.encoder
        return run.all_frozen if index in self.frozen_layers else run, index if run is self.encoder else index - self.before

    @cached_property
    def all_frozen(self) -> Network:
        return replace(self, frozen=tuple(PARTS))

    def trains(self, target: Kind) -> bool:
        """True if matrices of this kind are trained, or if they have LoRA adapters."""
        return target not in self.frozen and (self.adapters is None or target in self.adapters.targets)

    def learning(self, target: Kind) -> dict[str, Any]:
        """Return the training settings of matrices of this kind, as arguments of `_products` in layer_time.py: {"trained": whether their
        gradients are computed, "rank": rank of their LoRA adapters or 0, "decoding": cost of decoding their quantized format, None if
        they are not quantized}."""
        rank, form = self.adapters.rank if self.adapters is not None and self.trains(target) else 0, self.blocks(target)
        decoding = None if form is None else DECODING[form].transposed if target == "experts" else DECODING[form]
        return {"trained": not self.freezes(target), "rank": rank, "decoding": decoding}

    def blocks(self, target: Kind) -> Literal["mxfp4", "fp8"] | None:
        """Return the quantized format in which frozen matrices of this kind are stored; None if they are ordinary parameters."""
        return self.adapters.blocks if self.adapters is not None and target in self.adapters.blocks_of else None

    @cached_property
    def of_ahead(self) -> Network:
        """Network of one depth of multi-token prediction. Its layers are dense, have no LoRA adapters, and are not quantized."""
        return replace(self, experts=None, adapters=None if self.adapters is None else Adapters(self.adapters.rank, ()))

    def adapts(self, index: int) -> bool:
        """Return whether layer `index` of the model has LoRA adapters."""
        stack, number = self.at(index)
        if stack.experts is None or number not in stack.sparse_layers:
            return stack.trains("attention") or stack.trains("dense")
        return stack.trains("attention") or stack.trains("experts") or stack.trains("dense") and stack.experts.shared_hidden > 0

    @cached_property
    def unreached(self) -> int:
        """Number of leading layers that the backward pass does not reach, because they and everything before them are frozen."""
        lora = self.adapters is not None
        begins_trained = not lora and ("embedding" not in self.frozen or self.learned_positions)
        if begins_trained or self.encoder is not None:
            return 0
        trained = self.adapts if lora else lambda index: index not in self.frozen_layers
        return next(filter(trained, range(self.layers)), self.layers)

    @property
    def head(self) -> Literal["embedding", "head"]:
        """Key of PARTS (moe/recipe/frozen.py) for the head's matrix, which is the embedding table if tied."""
        return "embedding" if self.tied else "head"

    def freezes(self, *parts: str) -> bool:
        """Return whether a weight that belongs to all of these parts is frozen. One frozen part is enough: the norms of queries, for
        example, belong to `attention` and to `norms`. With LoRA, all weights are frozen."""
        return self.adapters is not None or not set(parts).isdisjoint(self.frozen)

    @cached_property
    def balanced(self) -> Network:
        """Copy of the network with equally many rows on all ranks of ep."""
        experts = None if self.experts is None else replace(self.experts, busiest=1.0)
        return replace(self, experts=experts, encoder=None if self.encoder is None else self.encoder.balanced)

    @property
    def channels(self) -> int:
        """Number of channels of one head."""
        return self.head_size or self.width // self.heads

    @property
    def groups(self) -> int:
        """Number of key-value heads. Each serves a group of query heads."""
        return self.kv_heads or self.heads


@hashed_once
@dataclass(frozen=True)
class Plan:
    """Settings of parallel training. dp, tp, sp, pp, ep, etp: degrees of parallelism."""

    dp: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    engine: str = PLAIN  # data-parallel engine
    # kind of tensor parallelism. `1d`: Megatron-LM's; `sliced`: `1d` with its sequence parallelism; `copied`: no tensor is cut
    tensor: Literal["1d", "sliced", "2d", "2.5d", "3d", "dtensor", "copied"] = "1d"
    depth: int = 1  # depth of the 2.5D grid: it has `depth` 2D grids
    sequence: str = sequences.DEFAULT  # method of attention over the sp ranks
    order: Places = "zigzag"  # which positions of a sequence each sp rank holds; ranks with early positions have less causal attention
    schedule: str = "1f1b"
    chunks: int = 1  # number of pipeline stages on each rank
    stage_layers: tuple[int, ...] | None = None  # number of layers of each stage; None: an even cut
    microbatch: int = 1  # sequences in a micro-batch of one replica
    microbatches: int = 1  # number of micro-batches of one replica in a step
    recompute: Recomputed = "none"
    recompute_every: int = 1  # every n-th layer is recomputed
    loss_chunks: int = 1  # number of chunks of tokens for which the loss is computed, one after another
    compute_bytes: int = 2  # bytes of an element of activations
    storage: Storage = MIXED_FP32_GRADIENTS  # bytes of a parameter, its gradient and optimizer states
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    offload_activations: float = 0.0  # fraction of the layers' activations that is offloaded; set only for published runs of other software
    tiles: int = 1  # number of tiles of each matrix of a dense network
    reshard: bool = True  # FSDP frees gathered weights after the forward pass

    def but(self, **changes: Any) -> Plan:
        """Return a changed copy. Ten times as fast as dataclasses.replace: the planner makes hundreds of thousands of plans."""
        assert changes.keys() <= self.__dict__.keys(), changes
        made = object.__new__(Plan)
        made.__dict__.update(self.__dict__, **changes)
        made.__dict__.pop(KEPT, None)
        return made

    def only(self, names: tuple[str, ...], **changes: Any) -> Plan:
        """Return a plan with this plan's values of the settings `names`, with `changes`, and with defaults for all other settings. Equal
        calls return the same cached object."""
        return _plan_with(names, _getter(names)(self), tuple(changes.items()))

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.sp * self.pp

    @property
    def stage(self) -> int:
        """ZeRO stage of the engine, 0 to 3."""
        return self.kind.stage

    @property
    def kind(self) -> EngineKind:
        """The engine's entry in the catalog of data-parallel engines."""
        return ENGINES[self.engine]

    @property
    def carrier(self) -> EngineKind:
        """Catalog entry of the engine that is really used. With pipeline stages, another engine may replace the plan's."""
        kind = self.kind
        return ENGINES[kind.with_stages] if self.pp > 1 and kind.with_stages else kind

    @property
    def carried(self) -> Plan:
        """This plan with the name of the engine that is really used (`carrier`)."""
        return self if self.carrier is self.kind else self.but(engine=self.carrier.name)

    @property
    def method(self) -> SequenceKind:
        """Catalog entry of the sequence-parallel method."""
        return sequences.SEQUENCES[self.sequence]

    @property
    def grid(self) -> Grid:
        """Grid of the tp ranks, which must be able to form a grid of this kind."""
        made = grid(self.tensor, self.tp, self.depth)
        assert made is not None
        return made

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same dense parameters and compute different tokens: the size of the data-parallel group."""
        return self.dp * self.sp * self.grid.copies

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same experts' parameters: the size of the experts' data-parallel group."""
        return self.dp * self.sp * self.tp // (self.ep * self.etp)

    @property
    def global_batch(self) -> int:
        """Number of sequences of all replicas in a step."""
        return self.dp * self.microbatch * self.microbatches


@lru_cache(maxsize=20)
def _getter(names: tuple[str, ...]) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*names)


@lru_cache(maxsize=40_000)
def _plan_with(names: tuple[str, ...], values: tuple[Any, ...], changes: tuple[tuple[str, Any], ...]) -> Plan:
    return Plan(**dict(zip(names, values, strict=True)) | dict(changes))
