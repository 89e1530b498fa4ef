"""Sections of a recipe that say how the work is split, what is computed again, and in which dtypes."""

from __future__ import annotations

from typing import Literal

from moe.recipe.section import Section, key
from parallel.data.kinds.catalog import ENGINES, Named, engine_named
from parallel.data.kinds.kind import EngineKind
from parallel.sequence import kinds as sequences
from parallel.sequence.kinds import SequenceKind
from parallel.sequence.order import Places


class Parallel(Section, alters="cost"):
    """Ways to split the work. `auto` dp uses all processes; `auto` ep is the largest divisor of dp * sp * tp / etp and of the experts."""

    dp: int | Literal["auto"] = "auto"
    ep: int | Literal["auto"] = "auto"
    etp: int = key(1, "ranks that share each expert's matrices, split by hidden units")
    tp: int = key(1, "tensor parallelism: ranks that share each dense layer's matrices, as tensor.kind says")
    sp: int = key(1, "sequence parallelism: ranks that each hold a shard of every sequence (section sequence)")
    pp: int = key(1, "pipeline parallelism: ranks that each hold one or more stages")


class Offload(Section, alters="cost"):
    """Where states are stored that do not stay on the device."""

    optimizer: Literal["none", "cpu", "nvme"] = key("none", "of zero: optimizer states (master weights, moments); nvme: stage 3")
    parameters: Literal["none", "cpu", "nvme"] = key("none", "of zero stage 3: a rank's shard of the working weights")
    path: str | None = key(None, "a folder on the disk", of="sharding.offload.optimizer=nvme or sharding.offload.parameters=nvme")


class Sharding(Section, alters="cost"):
    kind: Named = "ddp"
    replicas: int = key(2, "copies of the model in the process, each on a GPU of its own if there are enough", gt=1, of="sharding.kind=dp")
    stage: Literal[0, 1, 2, 3] = key(1, "0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too", of="sharding.kind=zero")
    engine: Literal["auto", "deepspeed", "fsdp"] = key("auto", "engine that carries the stage out", of="sharding.kind=zero")
    offload: Offload = Offload()
    reshard: bool = key(True, "free weights after the forward pass, and gather them again", of="sharding.kind=fsdp or sharding.engine=fsdp")
    prefetch: int = key(1, "number of blocks gathered ahead of the running one", ge=0, of="sharding.kind=fsdp or sharding.engine=fsdp")
    allow_slow: bool = key(False, "of fsdp and zero 2, 3 with degrees.pp above 1: run it, as FSDP without reshard")

    @property
    def named(self) -> EngineKind:
        """The engine that `kind` and `stage` name."""
        return engine_named(self.kind, self.stage)

    def carrier(self, *, pp: int = 1) -> EngineKind:
        """Return the engine that runs: sharding.engine, else `named`; with pipeline stages (pp > 1), the one that replaces it, if any."""
        chosen = ENGINES.get(self.engine, self.named)
        return ENGINES[chosen.with_stages] if pp > 1 and chosen.with_stages else chosen


class Tensor(Section, alters="cost"):
    kind: Literal["1d", "2d", "2.5d", "3d", "dtensor", "copied"] = key(
        "1d",
        "1d: heads, hidden units and vocabulary over tp (Megatron-LM); 2d (q x q ranks), 2.5d (depth x q x q), 3d (q x q x q): "
        "weights and activations in blocks; dtensor: 1d by torch's DTensor; copied: each rank of tp has all weights and "
        "the same tokens, a check of engines",
    )
    depth: int | None = key(None, "number of grids of q x q ranks; null: the smallest above 1", gt=0, of="tensor.kind=2.5d")
    sequence_parallel: bool = key(
        False, "of 1d and dtensor: in norms, dropout and between layers, a rank of tp has a shard of every sequence"
    )
    overlap_chunks: int = key(1, "of 1d: chunks of tokens in a layer's products; one is computed while another is summed or gathered", gt=0)


class Sequence(Section, alters="cost"):
    """Sequence parallelism over degrees.sp ranks: the positions that each rank holds, and how attention is computed."""

    kind: sequences.Named = key("ring", sequences.described())
    order: Places | None = key(None, "positions that a rank holds; null: zigzag for ring, which gives ranks equal work, else contiguous")
    heads: int = key(1, "ranks of sp in a group that exchanges tokens for heads (Ulysses) inside the ring; ulysses: all", gt=0)
    keep_attention: bool = key(False, "of recompute.kind full: keep attention's output, so that keys are not sent a second time")

    def heads_of(self, sp: int) -> int:
        """Return the number of ranks in a group that exchanges tokens for heads, if `sp` ranks share a sequence."""
        return sp if self.named.trades_heads else self.heads if sp > 1 else 1

    @property
    def named(self) -> SequenceKind:
        """The method that `kind` names."""
        return sequences.SEQUENCES[self.kind]

    @property
    def position_order(self) -> Places:
        """The recipe's order of positions, or the first one that the kind can have."""
        return self.order or self.named.orders[0]


class Pipeline(Section, alters="cost"):
    """Layers cut into stages on degrees.pp ranks. Without stages only `microbatches` has an effect."""

    schedule: str = key("1f1b", "a name that moe simulate lists, or a file of actions, *.csv", alters="training")
    microbatches: int = key(1, "micro-batches in each rank's share of the batch; gradients accumulate", gt=0, le=100_000)
    chunks: int | None = key(None, "stages of a rank; null: the schedule's own number, 2 if it can vary", gt=0, le=10_000)
    layers: tuple[int, ...] | None = key(None, "number of layers of each stage; null: cut by FLOPs")
    drain_every: int = key(16, "of pipedream and two_bw: steps after which the pipeline is emptied", gt=0, le=1000, alters="training")
    vertical_sync: bool = key(False, "of pipedream: every stage reads the weights of the step that the first one reads", alters="training")
    pipelines: int | None = key(None, "of chimera: pipelines through the same ranks, half of them in each direction; null: 2", gt=1)
    energy_plan: str | None = key(None, "a file by moe energy --out: its order, and its clocks if NVML may set them")


class Tiling(Section, alters="cost"):
    """Large matrices cut into tiles, each a separate parameter that an engine gathers, updates and frees on its own."""

    ffn: int = key(1, "tiles of feed-forward networks and experts, by hidden units", gt=0)
    head: int = key(1, "tiles of the embedding table and the vocabulary projection, by tokens of the vocabulary", gt=0)


class Recompute(Section, alters="cost"):
    """Activations that are computed again in the backward pass instead of kept."""

    kind: Literal["none", "full", "selective"] = key("none", "full: whole blocks; selective: their feed-forward or MoE part")
    every: int = key(1, "of every n-th block (2: blocks 0, 2, ...)", gt=0, off_without="recompute.kind")
    loss_chunks: int = key(1, "chunks of tokens for logits and cross-entropy, computed again in the backward pass", gt=0)

    def of_layer(self, layer: int) -> Literal["none", "full", "selective"]:
        return self.kind if layer % self.every == 0 else "none"


class Precision(Section, alters="training"):
    """Dtypes: parameters are stored in `master`, matrix products run in `compute`, all sums are fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = key("fp32", "auto: bf16 if every processor has it, else fp32")
    master: Literal["fp32", "bf16"] = "fp32"
    loss_scale: Literal["none", "dynamic"] | float = "none"
