"""Sections of a recipe that describe the Transformer, except its experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moe.recipe.section import Section, key
from moe.recipe.shapes import Spans, spans_of

_YARN, _BY_ROTATIONS, _LATENT = "model.rope.scaling=yarn", "model.rope.scaling=llama3|yarn", "model.latent.key_rank"


class Rope(Section, alters="function", of="model.positions=rotary"):
    """Rotary positions (RoPE): angles by which pairs of channels are rotated, and their scaling for sequences longer than in training."""

    base: float = key(10_000.0, "pair i of a head's C / 2 channel pairs is rotated by the angle position / base^(2 i / C)", gt=1)
    scaling: Literal["none", "linear", "ntk", "dynamic", "llama3", "yarn"] = key(
        "none",
        "linear: all frequencies are divided by factor; ntk: a larger base, which mainly lowers the lowest frequencies; dynamic: ntk for "
        "sequences longer than trained_length; llama3, yarn: only frequencies with few rotations in trained_length are divided",
    )
    factor: float = key(1.0, "factor by which sequences are longer than in training", ge=1, of="model.rope.scaling")
    trained_length: int | None = key(None, "model.max_length before the scaling", gt=0, of="model.rope.scaling=dynamic|llama3|yarn")
    low: float = key(1.0, "frequencies with < low rotations in trained_length are divided by factor", gt=0, of=_BY_ROTATIONS)
    high: float | None = key(
        None, "frequencies with > high rotations in trained_length stay; null: 4 (llama3), 32 (yarn)", gt=0, of=_BY_ROTATIONS
    )
    whole_pairs: bool = key(True, "the range of pair indices from low to high is rounded outward to integers; GPT-OSS: false", of=_YARN)
    mscale: float = key(1.0, "factor (0.1 mscale ln(factor) + 1) / (0.1 mscale_all ln(factor) + 1) on cos and sin", ge=0, of=_YARN)
    mscale_all: float = key(0.0, "latent attention multiplies its logits by (0.1 mscale_all ln(factor) + 1)^2 (DeepSeek)", ge=0, of=_YARN)
    pairs: Literal["halves", "neighbours"] = key("halves", "pairs of C rotated channels; halves: i, i + C / 2; neighbours: 2 i, 2 i + 1")
    fraction: float = key(1.0, "C / a head's channels: only its first C channels are rotated (GLM-4.5: 0.5)", gt=0, le=1)

    def turning(self, channels: int) -> int:
        """Return how many of a head's `channels` are rotated: `fraction` of them, rounded down as in transformers."""
        return int(self.fraction * channels)

    @property
    def length(self) -> int:
        """Sequence length before the scaling. Call it only with dynamic, llama3 and yarn: other kinds have none."""
        assert self.trained_length is not None
        return self.trained_length

    def base_of(self, channels: int) -> float:
        """Return the base for a head with this number of rotated channels. It is larger than `base` with scaling ntk."""
        return self.base * self.factor ** (channels / (channels - 2)) if self.scaling == "ntk" and channels > 2 else self.base

    def at(self, length: int) -> Rope:
        """Return the settings for a sequence of `length` tokens: scaling dynamic becomes ntk with a factor for this length."""
        if self.scaling != "dynamic":
            return self
        factor = max(1.0, self.factor * length / self.length - (self.factor - 1))
        return self.model_copy(update={"scaling": "ntk", "factor": factor, "trained_length": None})

    @property
    def most_turns(self) -> float:
        """Frequencies with more rotations than this stay unchanged: `high`, or its default. Call it only with llama3 and yarn."""
        return self.high or {"llama3": 4.0, "yarn": 32.0}[self.scaling]


class Swiglu(Section, alters="function", of="model.ffn=swiglu or experts.ffn=swiglu"):
    """Gating of swiglu networks: (h sigmoid(alpha h)) (g + offset), where h = min(x w1, limit) and g = clamp(x w3, -limit, limit)."""

    alpha: float = key(1.0, "alpha in h sigmoid(alpha h), h = x w1; GPT-OSS: 1.702", gt=0, le=1e3)
    limit: float | None = key(None, "upper bound of h = x w1, and of |x w3|; null: none; GPT-OSS: 7", ge=1e-3)
    offset: float = key(0.0, "added to x w3, the factor of h sigmoid(alpha h); GPT-OSS: 1", ge=-1e3, le=1e3)

    @property
    def bound(self) -> float:
        return self.limit or math.inf


class Scales(Section, alters="function"):
    """Factors on activations, so that a learning rate found for a small model also works for a large one (Granite)."""

    embedding: float = key(1.0, "factor on the embedding's output (Granite)", ge=1e-6, le=1e6)
    residual: float = key(
        1.0, "factor on the output of each attention, dense feed-forward and MoE layer before it is added to the residual", ge=1e-6, le=1e6
    )
    attention: float | None = key(
        None, "factor on attention's logits; null: 1 / sqrt(channels of a head), encoder_decoder: 1", ge=1e-6, le=1e6
    )
    head: float = key(1.0, "divisor of the vocabulary's logits", ge=1e-6, le=1e6)


class Latent(Section, alters="shape"):
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are computed from one small vector for each token."""

    key_rank: int | None = key(None, "channels of the latent that gives keys and values; null: no latents", gt=0)
    query_rank: int | None = key(None, "channels of a latent vector for queries; null: queries are computed without one", gt=0, of=_LATENT)
    rotary_size: int | None = key(
        None, "rotary channels of a head, in addition to head_size others; null: half of head_size", gt=0, of=_LATENT
    )
    value_size: int | None = key(None, "channels of a head's values; null: head_size", gt=0, of=_LATENT)


@dataclass(frozen=True)
class LatentSizes:
    """Numbers of channels in latent attention. rank: channels of the latent vector. content, rotary: channels of a head's queries and keys
    without and with rotary positions. value: channels of a head's values."""

    rank: int
    content: int
    rotary: int
    value: int

    @property
    def key(self) -> int:
        return self.content + self.rotary


class Model(Section, alters="shape"):
    """The Transformer, except its experts."""

    kind: Literal["decoder", "encoder_decoder"] = key(
        "decoder", "encoder_decoder: T5 and Switch; needs positions t5, data.objective span_corruption"
    )
    vocab_size: int | None = key(None, "number of ids; null: the tokenizer's, plus sentinels for span_corruption", gt=0)
    num_layers: int = key(4, "number of Transformer blocks; encoder_decoder: of encoder and decoder together", gt=0, le=10_000)
    encoder_layers: int | None = key(None, "blocks of the encoder; null: num_layers / 2", gt=0, le=10_000, of="model.kind=encoder_decoder")
    d_model: int = key(256, "width: channels of a token between blocks", gt=0)
    num_heads: int = key(4, "attention heads", gt=0, alters="function")
    num_kv_heads: int | None = key(None, "number of key-value heads (grouped-query attention); null: num_heads", gt=0)
    head_size: int | None = key(None, "channels of an attention head; null: d_model / num_heads", gt=0)
    d_ff: int = key(1024, "hidden width of the feed-forward networks", gt=0)
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] = key(
        "gelu", "activation; geglu, swiglu: gated, with a third matrix", alters="function"
    )
    swiglu: Swiglu = Swiglu()
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", "norms of the model; both kinds have a gain, no bias", alters="function")
    norm_eps: float | None = key(
        None, "epsilon of norms, except latents'; null: 1e-6 (rmsnorm), 1e-5 (layernorm)", gt=0, le=1, alters="function"
    )
    qk_norm: Literal["none", "heads", "whole"] = key(
        "none", "RMSNorm of queries and keys. heads: over each head's channels (Qwen3); whole: over all heads' channels (OLMoE)"
    )
    qkv_bias: bool = key(False, "a bias in the projections to queries, keys and values (Qwen2)")
    clip_qkv: float | None = key(
        None, "bound to which queries, keys and values are clamped (OLMo, DBRX); null: none", ge=1e-3, alters="function"
    )
    out_bias: bool = key(False, "a bias in attention's output projection (GPT-OSS)")
    attention_sinks: bool = key(False, "each head's softmax has one more logit, which is learned and has no value vector (GPT-OSS)")
    sliding_window: int | None = key(None, "tokens that a token attends to, itself included (Mistral); null: all", gt=0, alters="function")
    sliding_layers: tuple[int, ...] | None = key(
        None,
        "indices of layers with sliding_window; blocks of model.ahead have indices from num_layers on; null: all layers",
        alters="function",
        of="model.sliding_window",
    )
    positions: Literal["rotary", "t5"] = key("rotary", "t5: learned bias for each head and 32 buckets of distance", alters="function")
    rope: Rope = Rope()
    latent: Latent = Latent()
    scales: Scales = Scales()
    logit_cap: float | None = key(
        None, "c in c tanh(l / c), applied to the vocabulary's logits l; null: none", ge=1e-3, le=1e6, alters="function"
    )
    document_mask: bool = key(False, "a token attends only to tokens of its document, if a sequence packs several", alters="function")
    document_separator: int | None = key(
        None, "token id that begins each document; null: 0", ge=0, alters="function", of="model.document_mask"
    )
    max_length: int = key(256, "tokens in a sequence; encoder_decoder: tokens that the encoder reads", gt=0, le=2**30, alters="training")
    moe_every: int = key(0, "every n-th layer of encoder and of decoder has experts (2: layers 1, 3, ...); 0: none", ge=0)
    moe_layers: tuple[int, ...] | None = key(None, "indices (from 0) of the layers with experts, instead of moe_every")
    tied_embeddings: bool = key(True, "the vocabulary projection uses the embedding's weights")
    ahead: int = key(0, "multi-token prediction in training: tokens predicted after the next one (DeepSeek-V3: 1)", ge=0, le=16)
    ahead_weight: float = key(
        0.3, "weight of multi-token prediction's mean loss (DeepSeek-V3: 0.3, later 0.1)", ge=0, le=1e6, alters="training", of="model.ahead"
    )
    dropout: float = key(
        0.0,
        "dropout rate of outputs of attention, feed-forward and MoE layers; encoder_decoder: also of embedding, last norms",
        ge=0,
        lt=1,
        alters="training",
    )
    init_scale: float = key(
        1.0,
        "initial matrices except embeddings: truncated normal, sigma sqrt(init_scale / fan_in); Switch: 0.1",
        ge=1e-12,
        le=1e6,
        alters="training",
    )

    def layers_with_experts(self) -> tuple[int, ...]:
        if self.moe_layers is not None:
            return self.moe_layers
        begins = self.decoder_begins
        halves = (range(begins), range(begins, self.num_layers))
        return tuple(layer for half in halves for layer in half[self.moe_every - 1 :: self.moe_every]) if self.moe_every else ()

    def window_of(self, layer: int) -> int | None:
        """Return the number of tokens to which a token attends in this layer, itself included; None: the layer has no window."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    @property
    def gating(self) -> Swiglu | None:
        """Settings of swiglu networks; None for the usual silu(x w1) (x w3), which has faster kernels."""
        return None if self.swiglu == Swiglu() else self.swiglu

    @property
    def logit_scale(self) -> float:
        """Factor on attention's logits, except in latent attention, which computes its own factor."""
        return self.scales.attention or float((self.head_size or self.d_model // self.num_heads) ** -0.5)

    @property
    def ends_read_embedding(self) -> bool:
        """Whether the last pipeline stage also uses the embedding: as the head's weights, or for the input of multi-token prediction."""
        return self.tied_embeddings or self.ahead > 0

    @property
    def latent_sizes(self) -> LatentSizes:
        """Sizes of latent attention. Call it only if model.latent.key_rank is set."""
        assert self.latent.key_rank is not None
        content = self.head_size or self.d_model // self.num_heads
        return LatentSizes(self.latent.key_rank, content, self.latent.rotary_size or content // 2, self.latent.value_size or content)

    @property
    def decoder_begins(self) -> int:
        """Index of the decoder's first layer, which is the number of the encoder's layers."""
        if self.kind == "decoder":
            return 0
        return self.num_layers // 2 if self.encoder_layers is None else self.encoder_layers

    def half_of(self, layer: int) -> range:
        """Return all layers of the encoder or of the decoder, whichever contains `layer`."""
        begins = self.decoder_begins
        return range(begins) if layer < begins else range(begins, self.num_layers)

    @property
    def spans(self) -> Spans:
        """Sizes of span corruption. The text is the longest one that gives the encoder at most max_length tokens."""
        return spans_of(self.max_length)

    @property
    def target_length(self) -> int:
        """Number of tokens that the decoder of an encoder-decoder reads in a sequence; 0 for a decoder alone."""
        return self.spans.targets if self.kind == "encoder_decoder" else 0

    @property
    def source_length(self) -> int:
        """Number of tokens that the encoder reads in a sequence; 0 for a decoder alone."""
        return self.max_length if self.kind == "encoder_decoder" else 0

    @property
    def read_length(self) -> int:
        """Number of tokens that encoder and decoder read in a sequence, together."""
        return self.max_length + self.target_length
