"""The sections of a recipe: small, frozen, one per concern (this file needs no torch).

    Run = model + experts + router + degrees + sharding + ... + train
    check_run(run, world)  refuses valid values that do not fit together (moe/checks/together.py): one line, what, got, needed, fix

`Run` is also the library's entry: `train(Run(...))` never reads argv. moe/recipe/load.py reads YAML and flags into a Run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, create_model, field_validator

from moe.recipe.overrides import whole
from moe.recipe.plugin import GROUPS, Plugin, by_name, is_plugin
from moe.recipe.presets import PRESETS
from moe.recipe.router_spec import RouterSpec
from moe.recipe.spans import Spans, spans_of
from parallel.errors import BadInput, harmless
from parallel.mesh.grids import GRIDS, LINES, grid_of
from parallel.mesh.mesh import Degrees, divisors
from parallel.tensor import linear_2p5d

_LARGEST = 2**40
_OCTAL = re.compile(r"\s*[-+]?0[0-9_]+\s*")  # 010 is 8 to YAML and C, 10 to Python
OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)  # a name alone is a list of one


def choices_of(annotation: Any) -> list[str]:
    """Return the names that a field takes."""
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    return [c for a in get_args(annotation) for c in choices_of(a)]


def takes_number(annotation: Any) -> bool:
    """Return whether a value of this type may be a number."""
    return annotation in (int, float) or any(takes_number(a) for a in get_args(annotation))


def takes_whole(annotation: Any) -> bool:
    """Return whether a number of this type has to be whole."""
    return takes_number(annotation) and annotation is not float and float not in get_args(annotation)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that pydantic would accept: true for a number (`steps: yes` would be 1), and numbers so large that checks would
        not end.
        """
        kind = cls.model_fields[str(info.field_name)].annotation
        if takes_whole(kind):
            value = [whole(each) for each in value] if isinstance(value, list) else whole(value)
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, bool) and kind is not bool:
                raise ValueError("a number or a name, not true or false")
            if isinstance(number, int) and abs(number) > _LARGEST:
                raise ValueError(f"at most {_LARGEST}")
            if isinstance(number, str) and takes_number(kind) and _OCTAL.fullmatch(number):
                raise ValueError("a number without zeros before it, which some read as octal")
            if isinstance(number, str) and not harmless(number):
                raise ValueError("text without control characters")
            if number == "":
                raise ValueError("text, or null: an empty one may come from a shell variable that is not set")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _registered(cls, value: Any, info: ValidationInfo) -> Any:
        """Replace a name that is not built in by the part that an installed package registers under it."""
        key = f"{cls.__name__.lower()}.{info.field_name}"
        if key not in GROUPS or not isinstance(value, str) or is_plugin(value):
            return value
        return value if value in choices_of(cls.model_fields[str(info.field_name)].annotation) else by_name(key, value)

    @field_validator("*", mode="after")
    @classmethod
    def _in_32_bits(cls, value: Any) -> Any:
        if isinstance(value, float) and value and not 2.0**-126 <= abs(value) < 2.0**128:
            raise ValueError("a number that 32 bits hold, as weights do")
        return value

    def changed(self, *keys: str) -> str | None:
        """Return the first of these keys, or of all, that differs from its default; None if none does."""
        fields = type(self).model_fields
        return next((key for key in keys or fields if getattr(self, key) != fields[key].default), None)


class Rope(Section):
    """Rotary positions: the angle by which channels turn, and its stretch to sequences longer than in training."""

    base: float = Field(10_000.0, gt=1, description="channel pair i of C / 2 turns by position / base^(2 i / C)")
    scaling: Literal["none", "linear", "ntk", "dynamic", "llama3", "yarn"] = Field(
        "none",
        description="linear: all pairs turn slower by factor; ntk: mainly the slowest, by a larger base; dynamic: ntk beyond "
        "trained_length, by each sequence's length; llama3, yarn: only pairs that turn slowly in trained_length",
    )
    factor: float = Field(1.0, ge=1, description="of scaling: factor by which sequences are longer")
    trained_length: int | None = Field(None, gt=0, description="of dynamic, llama3 and yarn: sequence length before the stretch")
    low: float = Field(1.0, gt=0, description="of llama3 and yarn: a pair with fewer turns in trained_length is slowed by factor")
    high: float | None = Field(None, gt=0, description="a pair with more turns stays unchanged; null: 4 for llama3, 32 for yarn")
    whole_pairs: bool = Field(True, description="of yarn: both limits are rounded outwards to whole pairs; GPT-OSS: false")
    mscale: float = Field(1.0, ge=0, description="of yarn: cos and sin times (0.1 mscale ln(factor) + 1) / (0.1 mscale_all ln(factor) + 1)")
    mscale_all: float = Field(
        0.0, ge=0, description="of yarn with latents: logits times the square of 0.1 mscale_all ln(factor) + 1 (DeepSeek)"
    )
    pairs: Literal["halves", "neighbours"] = Field("halves", description="channels that turn together: i and i + C / 2, or 2 i and 2 i + 1")
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of a head's channels that turn, the first ones; C is their number (GLM-4.5: 0.5)"
    )

    def turning(self, channels: int) -> int:
        """Number of a head's channels that turn: rounded down, as transformers does."""
        return int(self.fraction * channels)

    @property
    def length(self) -> int:
        """Sequence length before the stretch. Check the recipe first: dynamic, llama3 and yarn have one."""
        assert self.trained_length is not None
        return self.trained_length

    def base_of(self, channels: int) -> float:
        """Base for a head with this number of turning channels: larger with ntk."""
        return self.base * self.factor ** (channels / (channels - 2)) if self.scaling == "ntk" and channels > 2 else self.base

    def at(self, length: int) -> Rope:
        """Return the positions for sequences of `length` tokens: for dynamic, the fixed stretch by ntk that they get."""
        if self.scaling != "dynamic":
            return self
        factor = max(1.0, self.factor * length / self.length - (self.factor - 1))
        return self.model_copy(update={"scaling": "ntk", "factor": factor, "trained_length": None})

    @property
    def most_turns(self) -> float:
        return self.high or {"llama3": 4.0, "yarn": 32.0}[self.scaling]


class Swiglu(Section):
    """Gating of swiglu networks: h = min(x w1, limit), g = x w3 within +-limit, and (h sigmoid(alpha h)) (g + offset)."""

    alpha: float = Field(1.0, gt=0, le=1e3, description="GPT-OSS: 1.702")
    limit: float | None = Field(None, ge=1e-3, description="null: none; GPT-OSS: 7")
    offset: float = Field(0.0, ge=-1e3, le=1e3, description="GPT-OSS: 1")

    @property
    def bound(self) -> float:
        return self.limit or math.inf


class Scales(Section):
    """Factors on a model's activations (Granite), with which a small model's learning rate also fits a large one."""

    embedding: float = Field(1.0, ge=1e-6, le=1e6, description="factor on the embedding's output (Granite)")
    residual: float = Field(
        1.0, ge=1e-6, le=1e6, description="factor on the outputs of attention, network and experts before they are added"
    )
    attention: float | None = Field(None, ge=1e-6, le=1e6, description="on attention's logits; null: 1 / sqrt(channels of a head)")
    head: float = Field(1.0, ge=1e-6, le=1e6, description="divisor of the vocabulary's logits")


class Latent(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are computed from one small vector a token."""

    key_rank: int | None = Field(None, gt=0, description="channels of the latent vector; null: attention without latents")
    query_rank: int | None = Field(
        None, gt=0, description="channels of a second latent, for queries; null: queries come from the token itself"
    )
    rotary_size: int | None = Field(
        None, gt=0, description="channels of a head that turn, in addition to head_size; null: half of head_size"
    )
    value_size: int | None = Field(None, gt=0, description="channels of a head's values; null: head_size")


@dataclass(frozen=True)
class LatentSizes:
    """Channels of the latent (`rank`), of a head's queries and keys (`content` + `rotary`), and of its values (`value`)."""

    rank: int
    content: int
    rotary: int
    value: int

    @property
    def key(self) -> int:
        return self.content + self.rotary


class Model(Section):
    """The Transformer around the experts."""

    kind: Literal["decoder", "encoder_decoder"] = Field("decoder", description="encoder_decoder: as T5 and Switch, with data.objective")
    vocab_size: int | None = Field(None, gt=0, description="null: the tokenizer's, and the objective's sentinels")
    num_layers: int = Field(4, gt=0, le=10_000, description="of encoder_decoder: layers of both halves, the encoder's first")
    encoder_layers: int | None = Field(
        None, gt=0, le=10_000, description="of encoder_decoder: the encoder's part of num_layers; null: half"
    )
    d_model: int = Field(256, gt=0)
    num_heads: int = Field(4, gt=0)
    num_kv_heads: int | None = Field(None, gt=0, description="grouped-query attention; null: as many as num_heads")
    head_size: int | None = Field(None, gt=0, description="null: d_model / num_heads")
    d_ff: int = Field(1024, gt=0)
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] = "gelu"
    swiglu: Swiglu = Swiglu()
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float | None = Field(None, gt=0, le=1, description="added to the mean square; null: 1e-6 for rmsnorm, 1e-5 for layernorm")
    qk_norm: Literal["none", "heads", "whole"] = Field(
        "none", description="RMSNorm of queries and of keys: of each head (Qwen3), or of all heads' channels together (OLMoE)"
    )
    qkv_bias: bool = Field(False, description="a bias after the products for queries, keys and values (Qwen2)")
    clip_qkv: float | None = Field(
        None, ge=1e-3, description="queries, keys and values are kept within +-this (OLMo, DBRX); null: as they are"
    )
    out_bias: bool = Field(False, description="a bias after attention's last product (GPT-OSS)")
    attention_sinks: bool = Field(
        False, description="a learned logit a head, which takes a share of the softmax and adds no value (GPT-OSS)"
    )
    sliding_window: int | None = Field(
        None, gt=0, description="number of tokens that a token sees, itself the last (Mistral); null: all before it"
    )
    sliding_layers: tuple[int, ...] | None = Field(None, description="layers with sliding_window by number; null: all")
    positions: Literal["rotary", "t5"] = Field("rotary", description="t5: relative position bias, 32 buckets")
    rope: Rope = Rope()
    latent: Latent = Latent()
    scales: Scales = Scales()
    logit_cap: float | None = Field(
        None, ge=1e-3, le=1e6, description="c of c tanh(l / c), which bounds the vocabulary's logits (Gemma 2); null: none"
    )
    document_mask: bool = Field(False, description="attention sees only tokens of the same document, if a sequence packs several")
    document_separator: int | None = Field(
        None, ge=0, description="the id that begins a document for document_mask; null: the project's own, 0"
    )
    max_length: int = Field(256, gt=0, le=2**30, description="tokens in one sequence; of encoder_decoder: tokens that the encoder reads")
    moe_every: int = Field(0, ge=0, description="every n-th layer, of each half, has experts (2: layers 1, 3, ...); 0: dense")
    moe_layers: tuple[int, ...] | None = Field(None, description="layers with experts by number, instead of moe_every")
    tied_embeddings: bool = True
    ahead: int = Field(
        0, ge=0, le=16, description="multi-token prediction in training: tokens predicted after the next one (DeepSeek-V3: 1)"
    )
    ahead_weight: float = Field(0.3, ge=0, le=1e6, description="weight of the multi-token prediction loss; DeepSeek-V3: 0.3, later 0.1")
    dropout: float = Field(0.0, ge=0, lt=1)
    init_scale: float = Field(1.0, ge=1e-12, le=1e6, description="s of sigma = sqrt(s / fan_in), truncated normal; Switch: 0.1")

    def layers_with_experts(self) -> tuple[int, ...]:
        if self.moe_layers is not None:
            return self.moe_layers
        begins = self.decoder_begins
        halves = (range(begins), range(begins, self.num_layers))
        return tuple(layer for half in halves for layer in half[self.moe_every - 1 :: self.moe_every]) if self.moe_every else ()

    def window_of(self, layer: int) -> int | None:
        """Number of tokens that a token of this layer sees, itself the last; None: all before it."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    @property
    def gating(self) -> Swiglu | None:
        """Settings of swiglu networks; None: silu(x w1) (x w3), for which there are faster kernels."""
        return None if self.swiglu == Swiglu() else self.swiglu

    @property
    def logit_scale(self) -> float:
        """Factor on plain attention's logits."""
        return self.scales.attention or float((self.head_size or self.d_model // self.num_heads) ** -0.5)

    @property
    def ends_read_embedding(self) -> bool:
        """Return whether the last stage reads the embedding, too: as its head, or for the input tokens of multi-token prediction."""
        return self.tied_embeddings or self.ahead > 0

    @property
    def latent_sizes(self) -> LatentSizes:
        """Sizes of latent attention. Check the recipe first: model.latent.key_rank is None without it."""
        assert self.latent.key_rank is not None
        content = self.head_size or self.d_model // self.num_heads
        return LatentSizes(self.latent.key_rank, content, self.latent.rotary_size or content // 2, self.latent.value_size or content)

    @property
    def decoder_begins(self) -> int:
        """Number of the decoder's first layer, which is the number of the encoder's layers."""
        if self.kind == "decoder":
            return 0
        return self.num_layers // 2 if self.encoder_layers is None else self.encoder_layers

    @property
    def spans(self) -> Spans:
        """Spans that the objective hides in a text of which the encoder reads max_length tokens."""
        return spans_of(self.max_length)

    @property
    def target_length(self) -> int:
        """Tokens of one sequence that the decoder of an encoder-decoder reads; 0 without an encoder."""
        return self.spans.targets if self.kind == "encoder_decoder" else 0

    @property
    def source_length(self) -> int:
        """Tokens of one sequence that an encoder reads; 0 without one."""
        return self.max_length if self.kind == "encoder_decoder" else 0

    @property
    def read_length(self) -> int:
        """Tokens of one sequence that are read, by the encoder and by the decoder."""
        return self.max_length + self.target_length


class Experts(Section):
    """The feed-forward networks of one MoE layer."""

    num_experts: int | tuple[int, ...] = Field(8, description="a list (pyramid): one number for each layer with experts, in order")
    d_ff: int | None = Field(None, gt=0, description="null: model.d_ff")
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] | None = Field(None, description="null: model.ffn")
    skip: int = Field(0, ge=0, le=100_000, description="choices in addition to the experts that return the token unchanged (LongCat-Flash)")
    zero: int = Field(0, ge=0, le=100_000, description="choices in addition to the experts that add nothing (MoE++)")
    biases: bool = Field(False, description="biases after the products of each expert (GPT-OSS)")
    shared: int = Field(0, ge=0, description="experts that every token passes, as one wider network")
    shared_d_ff: int | None = Field(None, gt=0, description="hidden width of one shared expert; null: of an expert")
    shared_gate: bool = Field(False, description="the shared network times sigmoid(w x), as in Qwen2-MoE")
    residual: bool = Field(False, description="a dense network in each MoE layer, mixed with its experts by a learned softmax (PR-MoE)")
    dropout: float = Field(0.0, ge=0, lt=1, description="inside the experts; Switch fine-tunes with 0.4")
    rebalance_every: int = Field(0, ge=0, description="steps between moves of experts that even out the ranks' load; 0: never")
    kernels: Literal["auto", "reference", "cpu", "triton"] = "auto"

    @field_validator("num_experts")
    @classmethod
    def _some(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if min((value,) if isinstance(value, int) else value, default=0) < 1:
            raise ValueError("a number above 0, or a list of such numbers")
        return value

    def of_layer(self, nth: int) -> int:
        """Number of experts in the nth layer with experts, counted from 0."""
        return self.num_experts if isinstance(self.num_experts, int) else self.num_experts[nth]

    @property
    def free(self) -> int:
        """Number of choices without an expert's work."""
        return self.skip + self.zero

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of experts of the layers; a single one if all layers have the same."""
        return (self.num_experts,) if isinstance(self.num_experts, int) else self.num_experts


class _RouterSection(Section):
    """The router: a published one by name, and this recipe's changes to it."""

    preset: Literal[
        "switch", "switch_mtf", "gshard", "glam", "mixtral", "qwen2_moe", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
        "llama4", "nllb", "deepspeed", "megatron", "expert_choice",
    ] = "switch"  # fmt: skip

    @property
    def own(self) -> dict[str, Any]:
        """The values that this recipe sets itself."""
        return {f.name: value for f in fields(RouterSpec) if (value := getattr(self, f.name)) != "preset"}

    @property
    def unlike_preset(self) -> dict[str, Any]:
        """The recipe's own values that differ from the preset's."""
        return {key: value for key, value in self.own.items() if value != getattr(PRESETS[self.preset], key)}

    @property
    def spec(self) -> RouterSpec:
        """The complete router: the preset with this recipe's own values."""
        return replace(PRESETS[self.preset], **self.own)


def _router_keys() -> dict[str, Any]:
    """The fields of RouterSpec as keys of a recipe. Each may also be "preset", which takes the preset's value."""
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(RouterSpec, include_extras=True).items():
        kind, key = get_args(hint)
        limits = {"gt": key.above, "ge": key.least, "lt": key.below, "le": key.most}
        parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        names = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
        numbers = [Annotated[part, Field(**limits)] if part in (int, float) else part for part in parts if get_origin(part) is not Literal]
        named: Any = Literal.__getitem__(tuple([*names, "preset"] if numbers else ["preset", *names]))
        kinds = (named, *numbers) if names else (*numbers, named)
        keys[name] = (Union.__getitem__(kinds), Field("preset", description=key.description))
    return keys


if TYPE_CHECKING:

    class Router(_RouterSection):
        allow_noncausal: bool = False

        def __getattr__(self, name: str) -> Any: ...

else:
    _NONCAUSAL = Field(False, description="train a router that looks at later tokens when it chooses")
    Router = create_model(
        "Router", __base__=_RouterSection, __doc__=_RouterSection.__doc__, **_router_keys(), allow_noncausal=(bool, _NONCAUSAL)
    )


class Dispatch(Section):
    """How rows are sent to the ranks that hold their experts, and back. All kinds give the same numbers."""

    kind: Literal["auto", "all_to_all", "padded", "all_gather", "hierarchical"] | Plugin = Field(
        "auto", description="auto: all_to_all; if one rank holds every expert, no rows are sent whatever is set"
    )
    overlap_chunks: int = Field(
        1, gt=0, description="of all_to_all: chunks of the held experts; one is computed while the next is exchanged"
    )
    node_size: int | None = Field(None, gt=0, description="of hierarchical: ranks of the ep axis that share a node")


class Parallel(Section):
    """Ways to split the work; `auto` dp fills the processes, `auto` ep is the largest divisor of dp * sp * tp / etp and experts."""

    dp: int | Literal["auto"] = "auto"
    ep: int | Literal["auto"] = "auto"
    etp: int = Field(1, description="ranks that share each expert's matrices, split by hidden units")
    tp: int = Field(1, description="tensor parallelism: ranks that share each dense layer's matrices, as tensor.kind says")
    sp: int = Field(1, description="sequence parallelism: ranks that each hold a shard of every sequence (section sequence)")
    pp: int = Field(1, description="pipeline parallelism: ranks that each hold one or more stages")


class Offload(Section):
    """The place of states that do not stay on the device."""

    optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="of zero: optimizer states, which are master weights and moments; nvme: stage 3"
    )
    parameters: Literal["none", "cpu", "nvme"] = Field("none", description="of zero stage 3: a rank's shard of the working weights")
    path: str | None = Field(None, description="of nvme: a folder on the disk")


class Sharding(Section):
    kind: Literal["dp", "ddp", "fsdp", "zero"] = "ddp"
    replicas: int = Field(
        2, gt=1, description="of dp: copies of the model in the one process, each on a GPU of its own if there are enough"
    )
    stage: Literal[0, 1, 2, 3] = Field(1, description="of zero: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too")
    engine: Literal["auto", "deepspeed", "fsdp"] = Field("auto", description="of zero: engine that carries the stage out")
    offload: Offload = Offload()
    reshard: bool = Field(
        True, description="of fsdp: free gathered weights after the forward pass and gather them again for the backward pass"
    )
    prefetch: int = Field(1, ge=0, description="of fsdp: number of blocks gathered ahead of the running one")
    allow_slow: bool = Field(False, description="of fsdp and zero 2, 3 with degrees.pp above 1: run it, by FSDP without reshard")


class Tensor(Section):
    kind: Literal["1d", "2d", "2.5d", "3d", "dtensor", "copied"] = Field(
        "1d",
        description="1d: heads, hidden units and vocabulary over tp (Megatron-LM); 2d (q x q ranks), 2.5d (depth x q x q), 3d (q x q x q): "
        "weights and activations in blocks; dtensor: 1d by torch's DTensor; copied: each rank of tp has all weights and "
        "the same tokens, a check of engines",
    )
    depth: int | None = Field(None, gt=0, description="of 2.5d: number of grids of q x q ranks; null: the smallest above 1")
    sequence_parallel: bool = Field(
        False,
        description="of 1d and dtensor: between layers, in norms and dropout too, each rank of tp has a shard of every sequence",
    )
    overlap_chunks: int = Field(
        1,
        gt=0,
        description="of 1d: chunks of tokens in a layer's products; one is computed while another is summed or gathered",
    )


class Sequence(Section):
    """Sequence parallelism over degrees.sp ranks: the positions that each rank holds, and the method of attention."""

    kind: Literal["ring", "lightseq", "colossal_ring", "ulysses"] = Field(
        "ring", description="ring: keys go round; lightseq: idle ranks help; colossal_ring: whole scores; ulysses: ranks trade heads"
    )
    order: Literal["contiguous", "striped", "zigzag"] | None = Field(
        None, description="positions that a rank holds; null: zigzag for ring, which gives ranks equal work, else contiguous"
    )
    heads: int = Field(1, gt=0, description="number of neighbours on sp that trade heads for tokens inside the ring; ulysses: all")
    keep_attention: bool = Field(False, description="with recompute full: keep attention's output, so that keys are not sent a second time")

    def heads_of(self, sp: int) -> int:
        """Number of neighbours on the sp axis that trade heads for tokens."""
        return sp if self.kind == "ulysses" else self.heads if sp > 1 else 1

    @property
    def position_order(self) -> Literal["contiguous", "striped", "zigzag"]:
        """The order of positions; chosen by the kind if the recipe gives none."""
        return self.order or ("zigzag" if self.kind == "ring" else "contiguous")


class Pipeline(Section):
    """Layers cut into stages on degrees.pp ranks. Without stages only `microbatches` has an effect."""

    schedule: str = Field("1f1b", description="a name that moe simulate lists, or a file of actions, *.csv")
    microbatches: int = Field(1, gt=0, le=100_000, description="micro-batches in each rank's share of the batch; gradients accumulate")
    chunks: int | None = Field(None, gt=0, le=10_000, description="stages of a rank; null: the schedule's own number, 2 if it can vary")
    layers: tuple[int, ...] | None = Field(None, description="number of layers of each stage; null: cut by FLOPs")
    drain_every: int = Field(16, gt=0, le=1000, description="of pipedream and two_bw: steps between two drains")
    vertical_sync: bool = Field(False, description="of pipedream: every stage reads the version that the first one reads")
    pipelines: int | None = Field(
        None, gt=1, description="of chimera: pipelines through the same ranks, half of them in each direction; null: 2"
    )
    energy_plan: str | None = Field(None, description="a file by moe energy --out: its order, and its clocks if NVML may set them")


class Tiling(Section):
    """Large matrices cut into tiles, each a separate parameter that an engine gathers, steps and frees on its own."""

    ffn: int = Field(1, gt=0, description="tiles of feed-forward networks and experts, by hidden units")
    head: int = Field(1, gt=0, description="tiles of the embedding table and the vocabulary projection, by tokens of the vocabulary")


class Recompute(Section):
    """Activations that are computed again in the backward pass instead of kept."""

    kind: Literal["none", "full", "selective"] = Field("none", description="full: whole blocks; selective: their feed-forward or MoE part")
    every: int = Field(1, gt=0, description="of every n-th block (2: blocks 0, 2, ...)")
    loss_chunks: int = Field(1, gt=0, description="chunks of tokens for logits and cross-entropy, computed again in the backward pass")

    def of_layer(self, layer: int) -> Literal["none", "full", "selective"]:
        return self.kind if layer % self.every == 0 else "none"


class Precision(Section):
    """One policy for dense and sparse: parameters are stored in `master`, matrix products run in `compute`, all sums are fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = Field("fp32", description="auto: bf16 if every processor has it, else fp32")
    master: Literal["fp32", "bf16"] = "fp32"
    loss_scale: Literal["none", "dynamic"] | float = "none"


class Source(Section):
    """One of several sources of text."""

    path: str
    weight: float = Field(gt=0, lt=1e18, description="its share of the sequences is this over the sum of all sources' weights")
    text_key: str | None = Field(None, description="the field or column that holds the text; null: data.text_key")


class Data(Section):
    source: Literal["python_stdlib", "text", "jsonl", "given"] | Plugin = Field(
        "python_stdlib", description="text and jsonl need path; given: from Python, train(run, data=...)"
    )
    path: str | None = Field(None, description="a file or folder of text, JSONL, Parquet or Arrow, also .gz or .zst; of ids: *.bin")
    sources: tuple[Source, ...] = Field((), description="instead of path: several, as {path, weight} or {path, weight, text_key}")
    text_key: str = Field("text", description="the field of a JSONL line, or the column of a table, that holds the text")
    tokenizer: Literal["bytes", "bpe", "ids"] = Field("bytes", description="ids: the data are token ids, not text")
    vocab_size: int = Field(4096, gt=0, description="of bpe, above 256; and of ids")
    validation_share: float = Field(0.05, gt=0, lt=1, description="of the files")
    objective: Literal["next_token", "span_corruption"] = Field(
        "next_token", description="span_corruption: an encoder reads a text with hidden spans, a decoder writes the hidden tokens (T5)"
    )

    @property
    def is_own(self) -> bool:
        """True if a user's program gives the samples."""
        return self.source == "given" or is_plugin(self.source)

    @property
    def name(self) -> str:
        """Name of the text, for reports: its path, its sources' paths, or its source."""
        return self.path or ", ".join(source.path for source in self.sources) or self.source


class Kfac(Section):
    """Settings of K-FAC: how its factors are estimated and damped."""

    damping: float = Field(0.3, gt=0, le=1e6, description="its square root is added to each factor, scaled to mean eigenvalue 1")
    ema: float = Field(0.5, ge=0, lt=1, description="share of the old factors that is kept at a refresh")
    refresh_every: int = Field(5, gt=0, description="steps from one update of factors to the next; inverses are stale between")
    delay: int = Field(0, ge=0, description="steps until new inverses are used, so that pipeline bubbles can compute them")
    experts: bool = Field(True, description="false: experts' matrices take AdamW's steps")


class Muon(Section):
    """Settings of Muon, for matrices; embedding, head, router, gates and norms take AdamW's steps."""

    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    iterations: int = Field(5, gt=0, le=100, description="of Newton-Schulz")
    scale: Literal["rms", "spectral"] = Field("rms", description="rms: steps as large as AdamW's; spectral: sqrt(max(1, out / in))")
    lr_factor: float = Field(1.0, gt=0, le=1e6, description="factor on optimizer.lr for matrices")


class Adafactor(Section):
    """Settings of Adafactor."""

    decay_rate: float = Field(0.8, gt=0, le=1, description="squares are averaged with the weight t^-decay_rate of the newest")
    clip: float | None = Field(1.0, gt=0, description="largest root mean square of a matrix's step; null: none")
    step: Literal["relative", "absolute"] = Field("relative", description="relative: times the root mean square of the weights")
    floor: float = Field(1e-3, gt=0, description="of that root mean square")
    eps: float = Field(1e-30, ge=1e-38, description="added to squares, which may all be 0")


class Sgd(Section):
    """Settings of SGD."""

    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False


class Optimizer(Section):
    """The optimizer, its learning rate and its weight decay. No weight decay on norms, biases and the router."""

    kind: Literal["adamw", "kfac", "muon", "adafactor", "sgd", "given"] | Plugin = Field(
        "adamw",
        description="kfac: K-FAC's direction with AdamW's length; muon: orthogonal steps of matrices; given: from Python",
    )
    lr: float = Field(1e-3, gt=0, le=1e3)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    warmup_steps: int = Field(50, ge=0)
    schedule: Literal["cosine", "wsd", "constant", "linear", "inverse_sqrt"] | Plugin = "cosine"
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: the last share of the steps, where the rate falls")
    min_lr_share: float = Field(0.1, ge=0, le=1)
    clip_norm: float | None = Field(1.0, ge=1e-8)
    kfac: Kfac = Kfac()
    muon: Muon = Muon()
    adafactor: Adafactor = Adafactor()
    sgd: Sgd = Sgd()

    @property
    def is_own(self) -> bool:
        """True if a user's program gives the optimizer."""
        return self.kind == "given" or is_plugin(self.kind)


class Lora(Section):
    """LoRA adapters: two narrow matrices for each frozen one. The frozen weights are loaded from another run (--init_from)."""

    rank: int = Field(0, ge=0, le=100_000, description="W + alpha / rank B A replaces W; 0: no adapters, all weights are trained")
    alpha: float = Field(16.0, gt=0, le=1e6)
    targets: Annotated[tuple[Literal["attention", "experts", "dense"], ...], OneOrMore] = Field(
        ("attention",), description="modules that get adapters; dense: networks that are no experts, shared and residual ones too"
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


class Train(Section):
    steps: int = Field(300, gt=0)
    global_batch: int = Field(32, gt=0, description="sequences in one step, over all ranks and micro-batches")
    eval_every: int = Field(100, ge=0, description="steps; 0: only at the end")
    eval_sequences: int = Field(64, gt=0)
    save_every: int = Field(100, ge=0, description="steps; 0: only at the end")
    keep: int = Field(2, gt=0, description="newest checkpoints kept")
    save_mode: Literal["sync", "async"] = Field("sync", description="async: steps continue while a copy in host memory is written")
    grace_s: float = Field(600.0, ge=1, le=86_400, description="seconds that ranks have after a signal to end their step and save")
    timeout_s: float | None = Field(
        None, ge=1, le=86_400, description="seconds that a rank waits for others before the run ends on all ranks; null: gloo 120, NCCL 600"
    )
    seed: int = Field(0, ge=0)
    audit_every: int = Field(
        0, ge=0, description="steps between audits, which compute a step twice and compare copies, to find silent corruption; 0: never"
    )
    compile: bool = Field(False, description="torch's compiler makes kernels for norms, activations and the loss in the first step")
    deterministic: bool = Field(False, description="the same run twice gives the same bits, or says what cannot")
    on_nan: Literal["skip", "stop"] = Field("skip", description="reaction to a gradient that is not finite")
    max_skips: int = Field(20, gt=0, description="skipped steps in a row before the run stops (dynamic loss scale: at its floor)")
    sample_tokens: int = Field(160, ge=0, le=10_000, description="tokens of a text that the model writes after the last step; 0: none")
    measure_speed: bool = Field(
        True, description="after the last step: time plain matrix products, to report the run's share of their speed"
    )
    report: bool = Field(True, description="after the last step: pictures and page; false: moe report makes them")
    trackers: Annotated[tuple[Literal["wandb", "trackio", "mlflow"], ...], OneOrMore] = Field((), description="in addition to TensorBoard")


class Run(Section):
    """A whole recipe."""

    model: Model = Model()
    experts: Experts = Experts()
    router: Router = Router()
    dispatch: Dispatch = Dispatch()
    degrees: Parallel = Parallel()
    sharding: Sharding = Sharding()
    tensor: Tensor = Tensor()
    sequence: Sequence = Sequence()
    pipeline: Pipeline = Pipeline()
    tiling: Tiling = Tiling()
    recompute: Recompute = Recompute()
    precision: Precision = Precision()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    train: Train = Train()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size or self.least_vocab_size

    @property
    def least_vocab_size(self) -> int:
        """Number of the tokenizer's ids and of the objective's sentinels after them."""
        return (256 if self.data.tokenizer == "bytes" else self.data.vocab_size) + self.num_sentinels

    @property
    def num_sentinels(self) -> int:
        """Number of ids at the end of the vocabulary that mark hidden spans."""
        return self.model.spans.num_spans if self.data.objective == "span_corruption" else 0

    def plugins(self) -> dict[str, str]:
        """Return the user's own parts that the recipe names, by key."""
        values = {
            "optimizer.kind": self.optimizer.kind,
            "optimizer.schedule": self.optimizer.schedule,
            "data.source": self.data.source,
            "dispatch.kind": self.dispatch.kind,
        }
        if self.model.layers_with_experts():
            values |= {"router.score": self.router.spec.score, "router.select": self.router.spec.select}
        return {key: value for key, value in values.items() if is_plugin(value)}

    def resolve(self, world_size: int) -> Run:
        """Return the run with `auto` degrees replaced by numbers for `world_size` processes."""
        tp, sp = max(1, self.degrees.tp), max(1, self.degrees.sp)
        dp = max(1, world_size // max(1, self.degrees.pp * tp * sp)) if self.degrees.dp == "auto" else self.degrees.dp
        ep = self.degrees.ep
        if ep == "auto":
            ep = math.gcd(max(1, dp * tp * sp // max(1, self.degrees.etp)), *self.experts.counts) if self.model.layers_with_experts() else 1
        return self.model_copy(update={"degrees": self.degrees.model_copy(update={"dp": dp, "ep": ep})})

    def tp_grid(self) -> tuple[int, int, int]:
        """Return the ranks of tp as (depth, rows, columns). Raises BadInput if they make no grid of tensor.kind."""
        tp, tensor = self.degrees.tp, self.tensor
        if tp > 1 and tensor.kind in GRIDS:
            heads = self.model.num_kv_heads or self.model.num_heads
            sides = [side for side in divisors(self.model.num_heads)[1:] if heads % side == 0 or side % heads == 0]
            return linear_2p5d.grid_of(tp, tensor.depth, sides=sides) if tensor.kind == "2.5d" else grid_of(tensor.kind, tp, sides=sides)
        return 1, tp, 1

    def sequence_parts(self) -> int:
        """Number of shards into which tp cuts the sequences that a data-parallel rank reads: 1, or the rows of all grids."""
        depth, rows, _ = self.tp_grid()
        return depth * rows if self.tensor.kind in GRIDS else 1

    def dense_parts(self) -> int:
        """Number of shards into which tp cuts heads, hidden units and the vocabulary."""
        return 1 if self.tensor.kind == "copied" else self.degrees.tp if self.tensor.kind in LINES else self.tp_grid()[2]

    def head_copies(self) -> int:
        """Number of ranks that hold the same key-value head, among the ranks that share heads: 1 unless heads are fewer than ranks."""
        heads, ways = self.model.num_kv_heads or self.model.num_heads, self.dense_parts()
        return ways // heads if self.tensor.kind != "dtensor" and ways > heads and ways % heads == 0 else 1

    def mesh_degrees(self) -> Degrees:
        """Return the resolved degrees. Call `resolve` first: raises BadInput if one is still `auto`."""
        d = self.degrees
        if d.dp == "auto" or d.ep == "auto":
            raise BadInput("degrees", got="auto", needed="numbers", fix="call run.resolve(world_size) first")
        inner = self.dispatch.node_size if self.dispatch.kind == "hierarchical" and self.dispatch.node_size else 1
        inner, heads = inner if d.ep > 1 else 1, self.sequence.heads_of(d.sp)
        (depth, _, columns), copies = self.tp_grid(), self.head_copies()
        along = {"tp_col_copies" if self.tensor.kind in ("2d", "2.5d") else "tp_row_copies": copies}
        return Degrees(
            dp=d.dp, pp=d.pp, tp=d.tp, sp=d.sp, ep=d.ep, etp=d.etp, ep_inner=inner, tp_col=columns, tp_depth=depth, sp_heads=heads, **along
        )
