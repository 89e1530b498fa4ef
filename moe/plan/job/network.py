"""What a planner reasons about: a Network, which is trained, and a Plan, how so many ranks train it. Values without tensors.

    Network + Plan            -> memory.py        bytes on each rank
    Network + Plan + Cluster  -> cost.py          seconds of one step
    guide.py, mcmc.py, intra_op.py, inter_op.py, annotate.py     return Plans

A recipe gives both (moe/plan/job/of_recipe.py), and so does a line of a table of measured runs. Ranks are pp x dp x sp x tp; experts take
the same dp sp tp ranks of a stage as edp x ep x etp (parallel/mesh/mesh.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moe.experts.dispatch.dispatcher import Dispatcher
from moe.plan.job.hashed import KEPT, hashed_once
from moe.plan.job.states import MIXED_FP32_GRADIENTS, Storage
from parallel.data.kinds.catalog import ENGINES, PLAIN
from parallel.data.kinds.kind import EngineKind
from parallel.sequence.kinds import catalog as sequences
from parallel.sequence.kinds.kind import SequenceKind
from parallel.sequence.order import Places

Recomputed = Literal["none", "selective", "full"]


def repeats(index: int, every: int) -> bool:
    """Whether layer `index` is one of those that are computed again: every n-th by number, where further tokens' layers are counted on."""
    return index % every == 0


@dataclass(frozen=True)
class Router:
    """What a router has beside a row for each expert: `vectors` more learned numbers of an expert, another row for the size of its `noise`,
    a `norm` and a `jitter` of what it reads, a bound on logits (`capped`), and `kept` bytes of its own for each token."""

    vectors: int = 0
    noise: bool = False
    norm: bool = False
    jitter: bool = False
    capped: bool = False
    kept: int = 0


@dataclass(frozen=True)
class Experts:
    """One MoE layer's: `hidden` units each; a token chooses `choices` of `count` and also passes `shared_hidden` units beside them.

    `rows`: computed for each choice, below 1 where choices are dropped; None: one, but some experts may have more. `slots`: slots for each
    choice, empty ones too; None: not limited. `exchange`: how rows travel; None: kept rows, by an all-to-all.

    `gates`: outputs of products that weigh shared networks. `products`: kind of the experts' products (device.py); None: the compute
    dtype's. `fused`: kernels compute a whole network, and keep its input and pre-activations alone.
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
    free: int = 0  # choices beside them that cost nothing
    products: str | None = None
    fused: bool = True


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks of its low-rank queries (0: full) and keys and values."""

    query_rank: int
    key_rank: int
    rotary_size: int
    value_size: int


@dataclass(frozen=True)
class Adapters:
    """LoRA (arXiv 2106.09685): of the matrices of `targets` two narrow ones of `rank` are trained, and everything else is frozen."""

    rank: int
    targets: tuple[Literal["attention", "dense", "experts"], ...]


@hashed_once
@dataclass(frozen=True)
class Network:
    """A run of Transformer layers over sequences of one length, with the vocabulary's matrices: a decoder, or of an encoder-decoder
    (`encoder`) its decoder, whose layers also look across to what the encoder's give. Both are runs (`halves`).

    `head_size` None: width / heads; `activation`: without a gate. `sees`: the tokens before each, or all. `sparse_layers`: those
    that have experts instead of a dense network. `biases`: of all products and norms. `qk_norm`: of queries and keys, of each head or
    all. `buckets`: distances that have a bias of their own for each head (T5), in each layer or in one of a run's (`shared_buckets`).
    `sinks`: a logit a head. `clipped`: queries, keys and values are, and kept as they were before. `logit_cap`: the vocabulary's logits
    are bounded, and what tanh gave is kept. `ahead`: further tokens that are predicted in training, each by a dense layer behind the
    last, a product of its two inputs, and the head. `core_work`: pairs of tokens that attention computes, over a causal one's, in the
    mean over layers; `windows_in_runs`: the share of layers with sliding windows that are computed by runs of tokens, which keep keys
    and values twice."""

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
        """The runs of layers, one after another: layers are numbered through all of them."""
        return (self,) if self.encoder is None else (self.encoder, self)

    @property
    def before(self) -> int:
        """Layers of the encoder."""
        return 0 if self.encoder is None else self.encoder.layers

    @property
    def depth(self) -> int:
        """Layers of all runs."""
        return self.before + self.layers

    @property
    def source(self) -> int:
        """Tokens of a sequence that each layer sees across; 0 without an encoder."""
        return 0 if self.encoder is None else self.encoder.length

    @property
    def with_experts(self) -> tuple[int, ...]:
        """Layers with experts, by their numbers among all."""
        if self.encoder is None:
            return self.sparse_layers
        return (*self.encoder.sparse_layers, *(self.before + layer for layer in self.sparse_layers))

    def at(self, index: int) -> tuple[Network, int]:
        """The run of one of all layers, and the layer's number in it."""
        return (self, index - self.before) if self.encoder is None or index >= self.before else (self.encoder, index)

    def trains(self, target: Literal["attention", "dense", "experts"]) -> bool:
        """Whether these matrices, or adapters of them, are trained."""
        return self.adapters is None or target in self.adapters.targets

    @property
    def channels(self) -> int:
        """Of one head."""
        return self.head_size or self.width // self.heads

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads


@hashed_once
@dataclass(frozen=True)
class Plan:
    """How a network is trained. `microbatch`: sequences of one replica at a time; `microbatches`: of a replica in a step.

    tensor `1d` is Megatron-LM's, `sliced` the same with sequence parallelism between layers; sequence names the attention over sp,
    `order` the places that a rank holds (contiguous ones leave early ranks waiting).
    `storage`: bytes of a parameter's states; `compute_bytes`: of an element of activations. `offload_activations`: the share of layers'
    activations that waits on the host, which tables of other software have and no recipe yet.
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
        """`dataclasses.replace` in a tenth of its time: a planner makes hundreds of thousands of plans."""
        assert changes.keys() <= self.__dict__.keys(), changes
        made = object.__new__(Plan)
        made.__dict__.update(self.__dict__, **changes)
        made.__dict__.pop(KEPT, None)
        return made

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.sp * self.pp

    @property
    def stage(self) -> int:
        """The ZeRO stage that the engine's states follow: 0 to 3."""
        return ENGINES[self.engine].stage

    @property
    def kind(self) -> EngineKind:
        """The engine's row in the catalog."""
        return ENGINES[self.engine]

    @property
    def carrier(self) -> EngineKind:
        """The engine that runs: on pipeline stages another one may take the plan's place."""
        kind = ENGINES[self.engine]
        return ENGINES[kind.with_stages] if self.pp > 1 and kind.with_stages else kind

    @property
    def method(self) -> SequenceKind:
        """The facts about attention over sp."""
        return sequences.SEQUENCES[self.sequence]

    @property
    def copies(self) -> int:
        """How many ranks hold the same part of dense parameters and have seen other tokens: those of an engine's axis."""
        return self.dp * self.sp * (self.depth if self.tensor == "2.5d" else 1)

    @property
    def edp(self) -> int:
        """How many ranks hold copies of the same expert's part."""
        return self.dp * self.sp * self.tp // (self.ep * self.etp)

    @property
    def global_batch(self) -> int:
        """Sequences of one step."""
        return self.dp * self.microbatch * self.microbatches
