"""Sections of a recipe for parallelism, sharding, tiling, recomputation and dtypes."""

from __future__ import annotations

from typing import Literal

from moe.recipe.section import Section, key
from parallel.data.kinds import ENGINES, Named, engine_named
from parallel.data.kinds.kind import EngineKind
from parallel.sequence import kinds as sequences
from parallel.sequence.kinds import SequenceKind
from parallel.sequence.order import Places


class Parallel(Section, alters="cost"):
    """Degrees of parallelism. The number of processes is dp * tp * sp * pp."""

    dp: int | Literal["auto"] = key("auto", "data parallelism: ranks that share the batch; auto: all processes that are left")
    ep: int | Literal["auto"] = key(
        "auto",
        "expert parallelism: ranks that share the experts; auto: greatest common divisor of the number of experts and dp * sp * tp / etp",
    )
    etp: int = key(1, "expert tensor parallelism: ranks that share each expert's matrices, split by hidden units", ge=1)
    tp: int = key(1, "tensor parallelism: ranks that share each dense layer's matrices, as tensor.kind says", ge=1)
    sp: int = key(1, "sequence parallelism: ranks that each hold a shard of every sequence (section sequence)", ge=1)
    pp: int = key(1, "pipeline parallelism: ranks that each hold one or more stages", ge=1)


class Offload(Section, alters="cost"):
    """Storage of optimizer states and weights under ZeRO, if not on the device."""

    optimizer: Literal["none", "cpu", "nvme"] = key(
        "none", "where optimizer states are stored; none: device; cpu: host memory (zero, fsdp); nvme: disk (ZeRO stage 3)"
    )
    parameters: Literal["none", "cpu", "nvme"] = key(
        "none", "ZeRO stage 3: where a rank's weights are stored; none: device; cpu: host; nvme: disk"
    )
    path: str | None = key(None, "folder on the NVMe disk", of="sharding.offload.optimizer=nvme or sharding.offload.parameters=nvme")


class Sharding(Section, alters="cost"):
    kind: Named = key("ddp", "data-parallel engine; dp: threads of one process; ddp, fsdp: torch's; zero: ZeRO (sharding.stage)")
    replicas: int = key(2, "copies of the model in the process, each on a GPU of its own if there are enough", gt=1, of="sharding.kind=dp")
    stage: Literal[0, 1, 2, 3] = key(
        1, "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too", of="sharding.kind=zero"
    )
    engine: Literal["auto", "deepspeed", "fsdp"] = key(
        "auto",
        "library for ZeRO; auto: DeepSpeed (stage 0: DDP), or FSDP where DeepSpeed cannot run; fsdp: stage 3 alone",
        of="sharding.kind=zero",
    )
    offload: Offload = Offload()
    reshard: bool = key(
        True,
        "free gathered weights after the forward pass, and gather them again for the backward pass; false with pp above 1: gather weights "
        "and sum gradients once a batch",
        of="sharding.kind=fsdp or sharding.engine=fsdp",
    )
    prefetch: int = key(
        1, "number of FSDP units (Transformer blocks) gathered ahead of use", ge=0, of="sharding.kind=fsdp or sharding.engine=fsdp"
    )
    allow_slow: bool = key(
        False, "permit degrees.pp above 1 with zero stages 2 and 3, or fsdp with reshard: gradients are summed after each micro-batch"
    )

    @property
    def named(self) -> EngineKind:
        """The engine that `kind` and `stage` name."""
        return engine_named(self.kind, self.stage)

    def carrier(self, *, pp: int = 1, flat: bool = True) -> EngineKind:
        """Return the engine that runs: the one that sharding.engine names (auto: `named`), or the replacement that its EngineKind names:
        `with_stages` if pp > 1, or `unless_flat` if sharding.engine is auto and `flat` is False. flat: whether the optimizer can update
        flat ranges of fp32 elements."""
        chosen = ENGINES.get(self.engine, self.named)
        other = (chosen.with_stages if pp > 1 else None) or (chosen.unless_flat if not flat and self.engine == "auto" else None)
        return ENGINES[other] if other else chosen


class Tensor(Section, alters="cost"):
    kind: Literal["1d", "2d", "2.5d", "3d", "dtensor", "copied"] = key(
        "1d",
        "1d: heads, hidden units and vocabulary over tp (Megatron-LM); 2d (q x q ranks), 2.5d (depth x q x q), 3d (q x q x q): "
        "each rank has a submatrix of weights and activations; dtensor: 1d by torch's DTensor; copied: every rank of tp has all weights "
        "and reads the same tokens, to test engines",
    )
    depth: int | None = key(None, "number of q x q grids, tp / q^2; null: the smallest above 1", gt=0, of="tensor.kind=2.5d")
    sequence_parallel: bool = key(
        False, "for 1d and dtensor: each tp rank has a shard of every sequence in norms, in dropout and between layers"
    )
    overlap_chunks: int = key(1, "for 1d: number of token chunks in a layer; one is multiplied while another is communicated", gt=0)


class Sequence(Section, alters="cost"):
    """Sequence parallelism over degrees.sp ranks: the positions that each rank holds, and how attention is computed."""

    kind: sequences.Named = key("ring", sequences.described())
    order: Places | None = key(
        None,
        "positions of each rank; contiguous: one chunk; striped: every sp-th; zigzag: two chunks, for equal work; null: zigzag for "
        "ring, else contiguous",
    )
    heads: int = key(1, "number of ranks in each Ulysses group (tokens exchanged for heads) inside the ring; ulysses: all of sp", gt=0)
    keep_attention: bool = key(
        False, "with recompute.kind full: store attention's output, so that keys and values are not sent a second time"
    )

    def heads_of(self, sp: int) -> int:
        """Return the number of ranks in each Ulysses group, which exchanges tokens for heads, if degrees.sp is `sp`."""
        return sp if self.named.trades_heads else self.heads if sp > 1 else 1

    @property
    def named(self) -> SequenceKind:
        """The method that `kind` names."""
        return sequences.SEQUENCES[self.kind]

    @property
    def position_order(self) -> Places:
        """`order`; if it is null, the first order that the method supports."""
        return self.order or self.named.orders[0]


class Pipeline(Section, alters="cost"):
    """The pipeline over degrees.pp ranks: its stages, micro-batches and schedule. With degrees.pp 1 only `microbatches` has an effect."""

    schedule: str = key("1f1b", "a schedule that moe simulate lists, or a file of actions (*.csv)", alters="training")
    microbatches: int = key(
        1, "micro-batches into which each dp rank's share of the batch is split; gradients accumulate", gt=0, le=100_000
    )
    chunks: int | None = key(None, "number of stages on each rank; null: the schedule's number, or 2 if it allows several", gt=0, le=10_000)
    layers: tuple[int, ...] | None = key(None, "number of layers in each stage; null: stages get about equal FLOPs")
    drain_every: int = key(16, "for pipedream and two_bw: steps after which the pipeline is emptied", gt=0, le=1000, alters="training")
    vertical_sync: bool = key(False, "for pipedream: all stages use the first stage's weight version for a micro-batch", alters="training")
    pipelines: int | None = key(None, "for chimera: number of pipelines on the same ranks, half of them in each direction; null: 2", gt=1)
    energy_plan: str | None = key(None, "file from moe energy --out: run its order of actions, at its GPU clocks if NVML may set them")


class Tiling(Section, alters="cost"):
    """Cuts large matrices into tiles. Each tile is a separate parameter, which FSDP and ZeRO-3 gather, update and free separately."""

    ffn: int = key(1, "number of tiles of each feed-forward network and expert, cut along the hidden units", gt=0)
    head: int = key(1, "number of tiles of the embedding table and the vocabulary projection, cut along the vocabulary", gt=0)


class Recompute(Section, alters="cost"):
    """Activations that are recomputed in the backward pass instead of stored."""

    kind: Literal["none", "full", "selective"] = key("none", "full: Transformer blocks; selective: their feed-forward or MoE layers")
    every: int = key(1, "recompute every n-th Transformer block only (2: blocks 0, 2, ...)", gt=0, off_without="recompute.kind")
    loss_chunks: int = key(1, "number of chunks of tokens for logits and cross-entropy, which are recomputed in the backward pass", gt=0)

    def of_layer(self, layer: int) -> Literal["none", "full", "selective"]:
        return self.kind if layer % self.every == 0 else "none"


class Precision(Section, alters="training"):
    """Dtypes: parameters are stored in `master`, matrix products run in `compute`, all sums are fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "fp32", "dtype of matrix products; auto: bf16 if every device supports it, else fp32"
    )
    master: Literal["fp32", "bf16"] = key("fp32", "dtype of parameters, gradients and optimizer states")
    loss_scale: Literal["none", "dynamic"] | float = key("none", "for fp16: factor on the loss, or dynamic (halved at overflows)")
    casts: Literal["use", "step"] = key(
        "use",
        "when weights are cast to precision.compute; use: at each use; step: once a step (DDP), 2 more bytes a parameter",
        alters="cost",
    )
