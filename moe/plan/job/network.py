"""Inputs of the planner: a Network, the model that is trained, and a Plan, the way in which ranks train it. Values without tensors.

    Network + Plan            -> memory.py        bytes on each rank
    Network + Plan + Cluster  -> cost.py          seconds of one step
    guide.py, mcmc.py, intra_op.py, inter_op.py, annotate.py     return Plans

Both are made from a recipe (moe/plan/job/of_recipe.py), or from a line of a table of measured runs. Ranks are pp x dp x sp x tp; experts
use the dp sp tp ranks of a stage as edp x ep x etp (parallel/mesh/mesh.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

from moe.experts.dispatch.dispatcher import Dispatcher
from moe.plan.job.hashed import KEPT, hashed_once
from moe.plan.job.states import MIXED_FP32_GRADIENTS, Storage
from parallel.data.kinds.catalog import ENGINES, PLAIN
from parallel.data.kinds.kind import EngineKind
from parallel.mesh.grids import Grid, grid
from parallel.sequence import kinds as sequences
from parallel.sequence.kinds import SequenceKind
from parallel.sequence.order import Places

Recomputed = Literal["none", "selective", "full"]


def repeats(index: int, every: int) -> bool:
    """True if layer `index` is recomputed, as every `every`-th layer is. Multi-token prediction's layers are numbered after all others."""
    return index % every == 0


@dataclass(frozen=True)
class Router:
    """Parts of a router in addition to its matrix.

    vectors: further learned numbers of each expert. noise: a second matrix, for the size of the noise. norm: its input is normed. jitter:
    its input is multiplied by noise. capped: its logits are bounded. kept: further bytes for each token that the backward pass needs.
    """

    vectors: int = 0
    noise: bool = False
    norm: bool = False
    jitter: bool = False
    capped: bool = False
    kept: int = 0


@dataclass(frozen=True)
class Experts:
    """Experts of one MoE layer: `count` experts of `hidden` units, of which each token chooses `choices`.

    shared_hidden: hidden units of shared experts, which all tokens pass. rows: rows computed for each choice (below 1 if choices are
    dropped); None: one, but experts may get unequal numbers. slots: capacity for each choice, empty slots included; None: no limit.
    exchange: the dispatcher; None: rows are sent by an all-to-all. gates: number of gates that weigh shared experts. dropout: in the
    experts, so that another tensor of the hidden size is kept. free: number of experts without parameters, which compute nothing.
    products: dtype of the experts' products (device.py); None: the compute dtype. fused: one kernel computes the whole network, so that
    only its input and pre-activations are kept.
    """

    count: int
    choices: int
    hidden: int
    gated: bool = False
    shared_hidden: int = 0
    rows: float | None = None
    slots: float | None = None
    exchange: Dispatcher | None = None
    biases: bool = False
    router: Router = Router()
    gates: int = 0
    dropout: bool = False
    free: int = 0
    products: str | None = None
    fused: bool = True


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). Ranks are sizes of latents: of queries (0: none), of keys and values."""

    query_rank: int
    key_rank: int
    rotary_size: int
    value_size: int


@dataclass(frozen=True)
class Adapters:
    """LoRA (arXiv 2106.09685): two narrow matrices of `rank` are trained for each matrix of `targets`; everything else is frozen."""

    rank: int
    targets: tuple[Literal["attention", "dense", "experts"], ...]


@hashed_once
@dataclass(frozen=True)
class Network:
    """A stack of Transformer layers, with embedding and head: a decoder, or the decoder of an encoder-decoder.

    encoder: the encoder's stack, to whose output the decoder's layers have cross-attention; None: decoder only.
    length: tokens of a sequence. head_size: None: width / heads. activation: of dense networks without a gate.
    sees: attention to past tokens only, or to all. sparse_layers: numbers of the layers with experts instead of a dense network.
    biases: all products and norms have biases. qk_norm: norm of queries and keys, for each head or over all heads.
    buckets: number of distances with a learned bias for each head (T5), in each layer, or once a stack (`shared_buckets`).
    sinks: each head has a learned logit in its softmax. clipped: queries, keys and values are clipped, and kept in both forms.
    logit_cap: tanh bounds the head's logits, and tanh's result is kept for the backward pass.
    ahead: number of further tokens of multi-token prediction; each adds a dense layer, a product that joins its two inputs, and a head.
    core_work: number of (query, key) pairs that attention computes, divided by the number in causal attention: mean over layers.
    windows_in_runs: fraction of layers whose sliding windows are computed in chunks of tokens, which keep keys and values twice.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    length: int
    kv_heads: int | None = None
    head_size: int | None = None
    gated: bool = False
    activation: Literal["gelu", "relu"] = "gelu"
    tied: bool = True
    biases: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    qkv_biases: bool = False
    out_bias: bool = False
    buckets: int = 0
    shared_buckets: bool = False
    sinks: bool = False
    clipped: bool = False
    logit_cap: bool = False
    qk_norm: Literal["none", "heads", "whole"] = "none"
    learned_positions: bool = False
    dropout: bool = False
    experts: Experts | None = None
    sparse_layers: tuple[int, ...] = ()
    latent: Latent | None = None
    adapters: Adapters | None = None
    ahead: int = 0
    core_work: float = 1.0
    windows_in_runs: float = 0.0
    sees: Literal["past", "all"] = "past"
    encoder: Network | None = None

    @property
    def halves(self) -> tuple[Network, ...]:
        """Stacks of layers: the encoder (if any), then the decoder. Layers are numbered through both."""
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
        """Numbers of the layers with experts, among all layers."""
        if self.encoder is None:
            return self.sparse_layers
        return (*self.encoder.sparse_layers, *(self.before + layer for layer in self.sparse_layers))

    def at(self, index: int) -> tuple[Network, int]:
        """Return (stack of layer `index`, number of the layer in this stack)."""
        return (self, index - self.before) if self.encoder is None or index >= self.before else (self.encoder, index)

    def trains(self, target: Literal["attention", "dense", "experts"]) -> bool:
        """True if matrices of this kind, or their adapters, are trained."""
        return self.adapters is None or target in self.adapters.targets

    @property
    def channels(self) -> int:
        """Number of channels of one head."""
        return self.head_size or self.width // self.heads

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads


@hashed_once
@dataclass(frozen=True)
class Plan:
    """Settings of parallel training.

    dp, tp, sp, pp, ep, etp: degrees of parallelism. engine: the data-parallel engine.
    tensor: kind of tensor parallelism: `1d` is Megatron-LM's, `sliced` adds Megatron's sequence parallelism between layers.
    depth: number of grids in the 2.5d kind, each with its own tokens.
    sequence: method of attention over the sp ranks. order: positions of a sequence that each sp rank holds. Under a causal mask, a rank
    that holds only early positions has less work than the others, and waits for them.
    schedule: the pipeline schedule. chunks: stages on each rank. stage_layers: number of layers of each stage (None: an even cut).
    microbatch: number of sequences in a replica's micro-batch. microbatches: number of a replica's micro-batches in a step.
    recompute_every: every n-th layer is recomputed. loss_chunks: number of parts in which the loss is computed, one after another.
    storage: bytes of a parameter and its states. compute_bytes: bytes of an element of activations.
    offload_activations: fraction of the layers' activations on the host; used for tables of other software, not for recipes.
    tiles: number of tiles into which each matrix of a dense network is cut. reshard: FSDP frees gathered weights after the forward pass.
    """

    dp: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    engine: str = PLAIN
    tensor: Literal["1d", "sliced", "2d", "2.5d", "3d", "dtensor", "copied"] = "1d"
    depth: int = 1
    sequence: str = sequences.DEFAULT
    order: Places = "zigzag"
    schedule: str = "1f1b"
    chunks: int = 1
    stage_layers: tuple[int, ...] | None = None
    microbatch: int = 1
    microbatches: int = 1
    recompute: Recomputed = "none"
    recompute_every: int = 1
    loss_chunks: int = 1
    compute_bytes: int = 2
    storage: Storage = MIXED_FP32_GRADIENTS
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    offload_activations: float = 0.0
    tiles: int = 1
    reshard: bool = True

    def but(self, **changes: Any) -> Plan:
        """Return a changed copy, ten times as fast as dataclasses.replace: the planner makes hundreds of thousands of plans."""
        assert changes.keys() <= self.__dict__.keys(), changes
        made = object.__new__(Plan)
        made.__dict__.update(self.__dict__, **changes)
        made.__dict__.pop(KEPT, None)
        return made

    def only(self, names: tuple[str, ...], **changes: Any) -> Plan:
        """Plan with these settings and changes, and defaults otherwise. Equal results are one object, which caches find quickly."""
        return _plan_with(names, _getter(names)(self), tuple(changes.items()))

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.sp * self.pp

    @property
    def stage(self) -> int:
        """ZeRO stage of the engine, 0 to 3."""
        return ENGINES[self.engine].stage

    @property
    def kind(self) -> EngineKind:
        """Row of the engine in the catalog of data-parallel engines."""
        return ENGINES[self.engine]

    @property
    def carrier(self) -> EngineKind:
        """Row of the engine that really runs. With pipeline stages, another engine may replace the plan's."""
        kind = ENGINES[self.engine]
        return ENGINES[kind.with_stages] if self.pp > 1 and kind.with_stages else kind

    @property
    def method(self) -> SequenceKind:
        """Row of the sequence-parallel method in its catalog."""
        return sequences.SEQUENCES[self.sequence]

    @property
    def grid(self) -> Grid:
        """Grid of the tp ranks. The plan must be legal."""
        made = grid(self.tensor, self.tp, self.depth)
        assert made is not None
        return made

    @property
    def copies(self) -> int:
        """Number of ranks with the same part of dense parameters but other tokens: the ranks of the data-parallel engine."""
        return self.dp * self.sp * self.grid.copies

    @property
    def edp(self) -> int:
        """Number of ranks with copies of the same part of the experts."""
        return self.dp * self.sp * self.tp // (self.ep * self.etp)

    @property
    def global_batch(self) -> int:
        """Number of sequences in a step."""
        return self.dp * self.microbatch * self.microbatches


@lru_cache(maxsize=20)
def _getter(names: tuple[str, ...]) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*names)


@lru_cache(maxsize=40_000)
def _plan_with(names: tuple[str, ...], values: tuple[Any, ...], changes: tuple[tuple[str, Any], ...]) -> Plan:
    return Plan(**dict(zip(names, values, strict=True)) | dict(changes))
