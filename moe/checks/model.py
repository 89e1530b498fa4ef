"""Checks of a model's keys against each other: sizes, positions, windows, latents, layers with experts, multi-token prediction.

No torch is imported here.
"""

from __future__ import annotations

import math

from moe.recipe.sections import Model, Rope, Run, Scales
from parallel.errors import BadInput
from parallel.mesh.grids import GRIDS
from parallel.mesh.mesh import divisors


def check_model(run: Run) -> None:
    """Refuse sizes that do not divide, layers that do not exist, and keys that this model does not read. Raises BadInput."""
    m = run.model
    heads = m.num_kv_heads or m.num_heads
    if m.head_size is None and m.d_model % m.num_heads:
        raise BadInput(
            "model.num_heads", got=m.num_heads, needed=f"a divisor of d_model={m.d_model}", fix=f"set it to one of {divisors(m.d_model)}"
        )
    if m.num_heads % heads:
        raise BadInput(
            "model.num_kv_heads", got=heads, needed=f"a divisor of num_heads={m.num_heads}", fix=f"set it to one of {divisors(m.num_heads)}"
        )
    if m.positions == "rotary" and m.latent.key_rank is None and m.rope.fraction == 1 and (m.head_size or m.d_model // m.num_heads) % 2:
        raise BadInput(
            "model.head_size",
            got=m.head_size or m.d_model // m.num_heads,
            needed="an even size for rotary positions",
            fix="change head_size, or set model.positions to t5",
        )
    _check_rope(m)
    _check_latent(m)
    _check_windows(m)
    _check_ahead(run)
    if m.moe_every and m.moe_layers is not None:
        raise BadInput(
            "model.moe_layers",
            got=f"moe_every={m.moe_every} as well",
            needed="one of the two",
            fix="remove moe_every or set moe_layers to null",
        )
    if m.moe_every > m.num_layers:
        raise BadInput(
            "model.moe_every",
            got=m.moe_every,
            needed=f"at most num_layers={m.num_layers}",
            fix=f"set it to {m.num_layers}, or to 0 for a dense model",
        )
    bad = [i for i in m.layers_with_experts() if not 0 <= i < m.num_layers]
    if bad or len(set(m.layers_with_experts())) < len(m.layers_with_experts()):
        raise BadInput(
            "model.moe_layers",
            got=list(m.layers_with_experts()),
            needed=f"different numbers from 0 to {m.num_layers - 1}",
            fix=f"remove {bad or 'the repeated ones'}",
        )
    tokenizer = 256 if run.data.tokenizer == "bytes" else run.data.vocab_size
    if run.vocab_size < tokenizer:
        raise BadInput(
            "model.vocab_size",
            got=run.vocab_size,
            needed=f"at least the tokenizer's {tokenizer}",
            fix="set model.vocab_size to null to follow the tokenizer",
        )


def _check_latent(m: Model) -> None:
    """Refuse sizes that do not fit together, and keys that latent attention excludes or that only it reads."""
    if m.latent.key_rank is None:
        return
    refused = {
        "kind": ("decoder", m.kind != "decoder"),
        "positions": ("rotary", m.positions != "rotary"),
        "num_kv_heads": ("null: keys and values of all heads are made of the latent", m.num_kv_heads not in (None, m.num_heads)),
        "qk_norm": ("none: the latents are normed", m.qk_norm != "none"),
        "qkv_bias": ("false", m.qkv_bias),
        "clip_qkv": ("null", m.clip_qkv is not None),
    }
    for refusal, (needed, wrong) in refused.items():
        if wrong:
            got = f"{str(getattr(m, refusal)).lower()} with model.latent.key_rank={m.latent.key_rank}"
            raise BadInput(f"model.{refusal}", got=got, needed=needed, fix=f"set it to {needed.partition(':')[0]}")
    size = m.latent_sizes
    if size.rotary % 2 or not size.rotary:
        raise BadInput(
            "model.latent.rotary_size", got=size.rotary, needed="an even number above 0: channels turn in pairs", fix="set it to 2"
        )
    if size.value > size.key:
        needed = f"at most the {size.key} channels of a head's keys: head_size={size.content} and rotary_size={size.rotary}"
        raise BadInput("model.latent.value_size", got=size.value, needed=needed, fix=f"set it to {size.content}")


def _check_windows(m: Model) -> None:
    """Refuse sliding layers that do not exist or have no window, and keys that an encoder-decoder lacks."""
    scaled = next((key for key, value in m.scales if value != getattr(Scales(), key)), None)
    if scaled is not None and m.kind == "encoder_decoder":
        got = f"{getattr(m.scales, scaled):g} with model.kind=encoder_decoder"
        raise BadInput(f"model.scales.{scaled}", got=got, needed="a decoder: T5 and Switch have none", fix=f"remove model.scales.{scaled}")
    if m.scales.attention is not None and m.latent.key_rank is not None:
        got = f"{m.scales.attention:g} with model.latent.key_rank={m.latent.key_rank}"
        raise BadInput("model.scales.attention", got=got, needed="null: latent attention has YaRN's factor alone", fix="set it to null")
    for key, off in (("sliding_window", None), ("attention_sinks", False), ("out_bias", False), ("clip_qkv", None), ("logit_cap", None)):
        if getattr(m, key) != off and m.kind == "encoder_decoder":
            got, word = f"{str(getattr(m, key)).lower()} with model.kind=encoder_decoder", "null" if off is None else "false"
            raise BadInput(f"model.{key}", got=got, needed=f"{word}: T5 and Switch have none", fix=f"set it to {word}")
    if m.sliding_layers is None:
        return
    layers = sorted({i for i in m.sliding_layers if 0 <= i < m.num_layers})
    if not layers or len(layers) < len(m.sliding_layers):
        raise BadInput(
            "model.sliding_layers",
            got=list(m.sliding_layers),
            needed=f"different numbers from 0 to {m.num_layers - 1}",
            fix=f"set it to {layers}" if layers else "set model.sliding_window and model.sliding_layers to null",
        )


def _check_rope(m: Model) -> None:
    """Refuse rotary keys that nothing reads, and a stretch without the length that it starts from."""
    r = m.rope
    if r.fraction != 1:
        _check_fraction(m)
    if r.scaling in ("dynamic", "llama3", "yarn") and r.trained_length is None:
        raise BadInput(
            "model.rope.trained_length", got="null", needed=f"the length before the stretch by {r.scaling}", fix=f"set it to {m.max_length}"
        )
    if r.scaling in ("llama3", "yarn") and r.most_turns <= r.low:
        raise BadInput("model.rope.high", got=f"{r.most_turns:g}", needed=f"more than model.rope.low={r.low:g}", fix="set it to null")
    if r.mscale_all and m.latent.key_rank is None:
        got = f"{r.mscale_all:g} with model.latent.key_rank=null"
        raise BadInput("model.rope.mscale_all", got=got, needed="latent attention, whose logits alone grow by it", fix="set it to 0")
    if r.scaling == "dynamic" and m.latent.key_rank is not None:
        got, needed = f"dynamic with model.latent.key_rank={m.latent.key_rank}", "yarn, as DeepSeek has it, or ntk"
        raise BadInput("model.rope.scaling", got=got, needed=needed, fix="set it to yarn")


def _check_fraction(m: Model) -> None:
    """Refuse a share of a head's channels that is no whole number of pairs, and any share with latent attention."""
    share, size = m.rope.fraction, m.head_size or m.d_model // m.num_heads
    if m.latent.key_rank is not None:
        got, fix = f"{share:g} with model.latent.key_rank={m.latent.key_rank}", "remove it, and set model.latent.rotary_size"
        raise BadInput("model.rope.fraction", got=got, needed="1: latent attention has channels of their own that turn", fix=fix)
    count = m.rope.turning(size)
    if count % 2 or not count:
        even = max(2, 2 * round(share * size / 2))
        tries = ((math.ceil(even / size * 10**digits) + up) / 10**digits for digits in range(1, 9) for up in (0, 1))
        fitting = next((value for value in tries if value <= 1 and Rope(fraction=value).turning(size) == even), None)
        raise BadInput(
            "model.rope.fraction",
            got=f"{share:g} of {size} channels of a head, which is {count}",
            needed="an even number of them, rounded down: channels turn in pairs",
            fix=f"set it to {fitting:g}, which is {even} channels" if fitting else "set model.head_size to an even number",
        )


def _check_ahead(run: Run) -> None:
    """Refuse models and layouts in which multi-token prediction (model.ahead) does not work."""
    m = run.model
    if not m.ahead:
        return
    reasons: dict[str, tuple[bool, object, str]] = {
        "model.kind": (m.kind != "decoder", m.kind, "decoder"),
        "model.scales.residual": (m.scales.residual != 1, m.scales.residual, "1: these blocks are not scaled"),
        "model.scales.embedding": (m.scales.embedding != 1, m.scales.embedding, "1"),
        "model.scales.head": (m.scales.head != 1, m.scales.head, "1"),
        "model.logit_cap": (m.logit_cap is not None, m.logit_cap, "null"),
        "model.sliding_window": (m.sliding_window is not None, m.sliding_window, "null: which of these blocks has a window is not said"),
        "tensor.kind": (run.degrees.tp > 1 and run.tensor.kind in GRIDS, run.tensor.kind, "1d: no grid cuts these blocks"),
        "sharding.offload.parameters": (run.sharding.offload.parameters != "none", run.sharding.offload.parameters, "none"),
    }
    for key, (refused, value, needed) in reasons.items():
        if refused:
            fix = f"set {key} to {needed.partition(':')[0]}, or model.ahead to 0"
            raise BadInput(key, got=f"{value} with model.ahead={m.ahead}", needed=needed, fix=fix)
    if m.ahead >= m.max_length:
        raise BadInput("model.ahead", got=m.ahead, needed=f"less than model.max_length={m.max_length}", fix="set it to 1")
