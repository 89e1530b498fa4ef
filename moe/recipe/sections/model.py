"""Sections of a recipe that describe the Transformer around the experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from moe.recipe.section import Section
from moe.recipe.spans import Spans, spans_of


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
