"""Sections of a recipe that describe the Transformer around the experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moe.recipe.section import Section, key
from moe.recipe.shapes import Spans, spans_of


class Rope(Section, alters="function", of="model.positions=rotary"):
    """Rotary positions: the angles by which channels turn, and their scaling for sequences longer than in training."""

    base: float = key(10_000.0, "channel pair i of C / 2 turns by position / base^(2 i / C)", gt=1)
    scaling: Literal["none", "linear", "ntk", "dynamic", "llama3", "yarn"] = key(
        "none",
        "linear: all pairs turn slower by factor; ntk: mainly the slowest, by a larger base; dynamic: ntk beyond "
        "trained_length, by each sequence's length; llama3, yarn: only pairs that turn slowly in trained_length",
    )
    factor: float = key(1.0, "factor by which sequences are longer", ge=1, of="model.rope.scaling")
    trained_length: int | None = key(None, "sequence length before the scaling", gt=0, of="model.rope.scaling=dynamic|llama3|yarn")
    low: float = key(1.0, "a pair with fewer turns in trained_length is slowed by factor", gt=0, of="model.rope.scaling=llama3|yarn")
    high: float | None = key(None, "a pair with more turns stays; null: 4 (llama3), 32 (yarn)", gt=0, of="model.rope.scaling=llama3|yarn")
    whole_pairs: bool = key(True, "both limits are rounded outwards to whole pairs; GPT-OSS: false", of="model.rope.scaling=yarn")
    mscale: float = key(
        1.0, "cos and sin times (0.1 mscale ln(factor) + 1) / (0.1 mscale_all ln(factor) + 1)", ge=0, of="model.rope.scaling=yarn"
    )
    mscale_all: float = key(0.0, "logits times the square of 0.1 mscale_all ln(factor) + 1 (DeepSeek)", ge=0, of="model.rope.scaling=yarn")
    pairs: Literal["halves", "neighbours"] = key("halves", "channels that turn together: i and i + C / 2, or 2 i and 2 i + 1")
    fraction: float = key(1.0, "share of a head's channels that turn, the first ones; C is their number (GLM-4.5: 0.5)", gt=0, le=1)

    def turning(self, channels: int) -> int:
        """Return the number of a head's `channels` that turn, rounded down as in transformers."""
        return int(self.fraction * channels)

    @property
    def length(self) -> int:
        """Sequence length before the scaling. Call it only with dynamic, llama3 and yarn: other kinds have none."""
        assert self.trained_length is not None
        return self.trained_length

    def base_of(self, channels: int) -> float:
        """Return the base for a head with this number of turning channels; ntk makes it larger."""
        return self.base * self.factor ** (channels / (channels - 2)) if self.scaling == "ntk" and channels > 2 else self.base

    def at(self, length: int) -> Rope:
        """Return the settings for sequences of `length` tokens: for dynamic, ntk with the factor of that length; others as they are."""
        if self.scaling != "dynamic":
            return self
        factor = max(1.0, self.factor * length / self.length - (self.factor - 1))
        return self.model_copy(update={"scaling": "ntk", "factor": factor, "trained_length": None})

    @property
    def most_turns(self) -> float:
        return self.high or {"llama3": 4.0, "yarn": 32.0}[self.scaling]


class Swiglu(Section, alters="function", of="model.ffn=swiglu or experts.ffn=swiglu"):
    """Gating of swiglu networks: (h sigmoid(alpha h)) (g + offset), with h = min(x w1, limit), and g = x w3 kept within +-limit."""

    alpha: float = key(1.0, "GPT-OSS: 1.702", gt=0, le=1e3)
    limit: float | None = key(None, "null: none; GPT-OSS: 7", ge=1e-3)
    offset: float = key(0.0, "GPT-OSS: 1", ge=-1e3, le=1e3)

    @property
    def bound(self) -> float:
        return self.limit or math.inf


class Scales(Section, alters="function"):
    """Factors on a model's activations, with which a small model's learning rate also fits a large one (Granite)."""

    embedding: float = key(1.0, "factor on the embedding's output (Granite)", ge=1e-6, le=1e6)
    residual: float = key(1.0, "factor on the outputs of attention, network and experts before they are added", ge=1e-6, le=1e6)
    attention: float | None = key(None, "on attention's logits; null: 1 / sqrt(channels of a head)", ge=1e-6, le=1e6)
    head: float = key(1.0, "divisor of the vocabulary's logits", ge=1e-6, le=1e6)


class Latent(Section, alters="shape"):
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are computed from one small vector for each token."""

    key_rank: int | None = key(None, "channels of the latent vector; null: attention without latents", gt=0)
    query_rank: int | None = key(None, "channels of a latent for queries; null: queries without one", gt=0, of="model.latent.key_rank")
    rotary_size: int | None = key(
        None, "a head's additional channels, which turn; null: half of head_size", gt=0, of="model.latent.key_rank"
    )
    value_size: int | None = key(None, "channels of a head's values; null: head_size", gt=0, of="model.latent.key_rank")


@dataclass(frozen=True)
class LatentSizes:
    """Numbers of channels: of the latent (`rank`), of a head's queries and keys (`content` + `rotary`), and of its values (`value`)."""

    rank: int
    content: int
    rotary: int
    value: int

    @property
    def key(self) -> int:
        return self.content + self.rotary


class Model(Section, alters="shape"):
    """The Transformer around the experts."""

    kind: Literal["decoder", "encoder_decoder"] = key("decoder", "encoder_decoder: as T5 and Switch, with data.objective")
    vocab_size: int | None = key(None, "null: the tokenizer's, and the objective's sentinels", gt=0)
    num_layers: int = key(4, "of encoder_decoder: layers of both halves, the encoder's first", gt=0, le=10_000)
    encoder_layers: int | None = key(None, "the encoder's part of num_layers; null: half", gt=0, le=10_000, of="model.kind=encoder_decoder")
    d_model: int = key(256, gt=0)
    num_heads: int = key(4, gt=0, alters="function")
    num_kv_heads: int | None = key(None, "grouped-query attention; null: as many as num_heads", gt=0)
    head_size: int | None = key(None, "null: d_model / num_heads", gt=0)
    d_ff: int = key(1024, gt=0)
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] = key("gelu", alters="function")
    swiglu: Swiglu = Swiglu()
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", alters="function")
    norm_eps: float | None = key(None, "added to the mean square; null: 1e-6 (rmsnorm), 1e-5 (layernorm)", gt=0, le=1, alters="function")
    qk_norm: Literal["none", "heads", "whole"] = key(
        "none", "RMSNorm of queries and of keys: of each head (Qwen3), or of all heads' channels together (OLMoE)"
    )
    qkv_bias: bool = key(False, "a bias after the products for queries, keys and values (Qwen2)")
    clip_qkv: float | None = key(None, "limit of queries, keys and values, +-this (OLMo, DBRX); null: none", ge=1e-3, alters="function")
    out_bias: bool = key(False, "a bias after attention's last product (GPT-OSS)")
    attention_sinks: bool = key(False, "a learned logit a head, which takes a share of the softmax and adds no value (GPT-OSS)")
    sliding_window: int | None = key(None, "tokens that a token sees, with itself (Mistral); null: all before it", gt=0, alters="function")
    sliding_layers: tuple[int, ...] | None = key(None, "its layers by number; null: all", alters="function", of="model.sliding_window")
    positions: Literal["rotary", "t5"] = key("rotary", "t5: relative position bias, 32 buckets", alters="function")
    rope: Rope = Rope()
    latent: Latent = Latent()
    scales: Scales = Scales()
    logit_cap: float | None = key(
        None, "c of c tanh(l / c), of the vocabulary's logits (Gemma 2); null: none", ge=1e-3, le=1e6, alters="function"
    )
    document_mask: bool = key(False, "attention sees only tokens of the same document, if a sequence packs several", alters="function")
    document_separator: int | None = key(None, "the id before each document; null: 0", ge=0, alters="function", of="model.document_mask")
    max_length: int = key(256, "tokens in a sequence; of encoder_decoder: tokens that the encoder reads", gt=0, le=2**30, alters="training")
    moe_every: int = key(0, "every n-th layer, of each half, has experts (2: layers 1, 3, ...); 0: dense", ge=0)
    moe_layers: tuple[int, ...] | None = key(None, "layers with experts by number, instead of moe_every")
    tied_embeddings: bool = True
    ahead: int = key(0, "multi-token prediction in training: tokens predicted after the next one (DeepSeek-V3: 1)", ge=0, le=16)
    ahead_weight: float = key(0.3, "weight of its loss; DeepSeek-V3: 0.3, later 0.1", ge=0, le=1e6, alters="training", of="model.ahead")
    dropout: float = key(0.0, ge=0, lt=1, alters="training")
    init_scale: float = key(1.0, "s of sigma = sqrt(s / fan_in), truncated normal; Switch: 0.1", ge=1e-12, le=1e6, alters="training")

    def layers_with_experts(self) -> tuple[int, ...]:
        if self.moe_layers is not None:
            return self.moe_layers
        begins = self.decoder_begins
        halves = (range(begins), range(begins, self.num_layers))
        return tuple(layer for half in halves for layer in half[self.moe_every - 1 :: self.moe_every]) if self.moe_every else ()

    def window_of(self, layer: int) -> int | None:
        """Return the number of tokens that a token of this layer sees, itself included; None: all earlier ones."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    @property
    def gating(self) -> Swiglu | None:
        """Settings of swiglu networks; None if they give silu(x w1) (x w3), for which there are faster kernels."""
        return None if self.swiglu == Swiglu() else self.swiglu

    @property
    def logit_scale(self) -> float:
        """Factor on the logits of attention without latents."""
        return self.scales.attention or float((self.head_size or self.d_model // self.num_heads) ** -0.5)

    @property
    def ends_read_embedding(self) -> bool:
        """Whether the last pipeline stage reads the embedding, too: as its head, or for the input tokens of multi-token prediction."""
        return self.tied_embeddings or self.ahead > 0

    @property
    def latent_sizes(self) -> LatentSizes:
        """Sizes of latent attention. Call it only with model.latent.key_rank."""
        assert self.latent.key_rank is not None
        content = self.head_size or self.d_model // self.num_heads
        return LatentSizes(self.latent.key_rank, content, self.latent.rotary_size or content // 2, self.latent.value_size or content)

    @property
    def decoder_begins(self) -> int:
        """Index of the decoder's first layer, which is the number of the encoder's layers."""
        if self.kind == "decoder":
            return 0
        return self.num_layers // 2 if self.encoder_layers is None else self.encoder_layers

    @property
    def spans(self) -> Spans:
        """The spans that span corruption hides in one sequence, of which the encoder reads at most max_length tokens."""
        return spans_of(self.max_length)

    @property
    def target_length(self) -> int:
        """Number of tokens of a sequence that the decoder of an encoder-decoder reads; 0 without an encoder."""
        return self.spans.targets if self.kind == "encoder_decoder" else 0

    @property
    def source_length(self) -> int:
        """Number of tokens of a sequence that the encoder reads; 0 without an encoder."""
        return self.max_length if self.kind == "encoder_decoder" else 0

    @property
    def read_length(self) -> int:
        """Number of tokens of a sequence that the encoder and the decoder read."""
        return self.max_length + self.target_length
