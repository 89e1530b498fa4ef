"""Checks of a model's keys against each other: sizes, positions, windows, latents, layers with experts, multi-token prediction.

No torch is imported here.
"""

from __future__ import annotations

import math

from moe.recipe.sections import Model, Rope, Run, Scales
from parallel.errors import BadInput
from parallel.fixes import Remove, Set, written
from parallel.mesh.grids import GRIDS
from parallel.mesh.mesh import divisors


def check_model(run: Run) -> None:
    """Refuse sizes that do not divide, layers that do not exist, and keys that this model does not read. Raises BadInput."""
    m = run.model
    heads = m.num_kv_heads or m.num_heads
    if m.head_size is None and m.d_model % m.num_heads:
        raise BadInput("model.num_heads", got=m.num_heads, needed=f"a divisor of d_model={m.d_model}", fix=Set("it", *divisors(m.d_model)))
    if m.num_heads % heads:
        raise BadInput(
            "model.num_kv_heads", got=heads, needed=f"a divisor of num_heads={m.num_heads}", fix=Set("it", *divisors(m.num_heads))
        )
    if m.positions == "rotary" and m.latent.key_rank is None and m.rope.fraction == 1 and (m.head_size or m.d_model // m.num_heads) % 2:
        raise BadInput(
            "model.head_size",
            got=m.head_size or m.d_model // m.num_heads,
            needed="an even size for rotary positions",
            fix="change head_size" | Set("model.positions", "t5"),
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
            fix=Remove("model.moe_every") | Set("model.moe_layers", None),
        )
    if m.moe_every > m.num_layers:
        raise BadInput(
            "model.moe_every",
            got=m.moe_every,
            needed=f"at most num_layers={m.num_layers}",
            fix=Set("it", m.num_layers) | Set("it", 0, said="0 for a dense model"),
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
            fix=Set("it", None, said="null to follow the tokenizer"),
        )


def _check_latent(m: Model) -> None:
    """Refuse sizes that do not fit together, and keys that latent attention excludes or that only it reads."""
    if m.latent.key_rank is None:
        return
    wanted: dict[str, tuple[object, str]] = {
        "kind": ("decoder", ""),
        "positions": ("rotary", ""),
        "num_kv_heads": (None, ": keys and values of all heads are made of the latent"),
        "qk_norm": ("none", ": the latents are normed"),
        "qkv_bias": (False, ""),
        "clip_qkv": (None, ""),
    }
    for key, (value, why) in wanted.items():
        if getattr(m, key) != value and (key, m.num_kv_heads) != ("num_kv_heads", m.num_heads):
            got = f"{written(getattr(m, key))} with model.latent.key_rank={m.latent.key_rank}"
            raise BadInput(f"model.{key}", got=got, needed=f"{written(value)}{why}", fix=Set("it", value))
    size = m.latent_sizes
    if size.rotary % 2 or not size.rotary:
        raise BadInput(
            "model.latent.rotary_size", got=size.rotary, needed="an even number above 0: channels turn in pairs", fix=Set("it", 2)
        )
    if size.value > size.key:
        needed = f"at most the {size.key} channels of a head's keys: head_size={size.content} and rotary_size={size.rotary}"
        raise BadInput("model.latent.value_size", got=size.value, needed=needed, fix=Set("it", size.content))


def _check_windows(m: Model) -> None:
    """Refuse `sliding_layers` that are no layers of the model or repeat. Also refuse settings that an encoder-decoder does not have
    (scales, windows, sinks, caps, output biases), and a scale of attention with latent attention.
    """
    scaled = next((key for key, value in m.scales if value != getattr(Scales(), key)), None)
    if scaled is not None and m.kind == "encoder_decoder":
        got = f"{getattr(m.scales, scaled):g} with model.kind=encoder_decoder"
        raise BadInput(f"model.scales.{scaled}", got=got, needed="a decoder: T5 and Switch have none", fix=Remove(f"model.scales.{scaled}"))
    if m.scales.attention is not None and m.latent.key_rank is not None:
        got = f"{m.scales.attention:g} with model.latent.key_rank={m.latent.key_rank}"
        raise BadInput("model.scales.attention", got=got, needed="null: latent attention has YaRN's factor alone", fix=Set("it", None))
    for key, off in (("sliding_window", None), ("attention_sinks", False), ("out_bias", False), ("clip_qkv", None), ("logit_cap", None)):
        if getattr(m, key) != off and m.kind == "encoder_decoder":
            got = f"{written(getattr(m, key))} with model.kind=encoder_decoder"
            raise BadInput(f"model.{key}", got=got, needed=f"{written(off)}: T5 and Switch have none", fix=Set("it", off))
    if m.sliding_layers is None:
        return
    layers = sorted({i for i in m.sliding_layers if 0 <= i < m.num_layers})
    if not layers or len(layers) < len(m.sliding_layers):
        raise BadInput(
            "model.sliding_layers",
            got=list(m.sliding_layers),
            needed=f"different numbers from 0 to {m.num_layers - 1}",
            fix=Set("it", layers) if layers else Set("model.sliding_window", None) & Set("model.sliding_layers", None),
        )


def _check_rope(m: Model) -> None:
    """Refuse rotary keys that nothing reads, and a stretch without the length that it starts from."""
    r = m.rope
    if r.fraction != 1:
        _check_fraction(m)
    if r.scaling in ("dynamic", "llama3", "yarn") and r.trained_length is None:
        raise BadInput(
            "model.rope.trained_length", got="null", needed=f"the length before the stretch by {r.scaling}", fix=Set("it", m.max_length)
        )
    if r.scaling in ("llama3", "yarn") and r.most_turns <= r.low:
        raise BadInput("model.rope.high", got=f"{r.most_turns:g}", needed=f"more than model.rope.low={r.low:g}", fix=Set("it", None))
    if r.mscale_all and m.latent.key_rank is None:
        got = f"{r.mscale_all:g} with model.latent.key_rank=null"
        raise BadInput("model.rope.mscale_all", got=got, needed="latent attention, whose logits alone grow by it", fix=Set("it", 0))
    if r.scaling == "dynamic" and m.latent.key_rank is not None:
        got, needed = f"dynamic with model.latent.key_rank={m.latent.key_rank}", "yarn, as DeepSeek has it, or ntk"
        raise BadInput("model.rope.scaling", got=got, needed=needed, fix=Set("it", "yarn"))


def _check_fraction(m: Model) -> None:
    """Refuse a share of a head's channels that is no whole number of pairs, and any share with latent attention."""
    share, size = m.rope.fraction, m.head_size or m.d_model // m.num_heads
    if m.latent.key_rank is not None:
        got, fix = f"{share:g} with model.latent.key_rank={m.latent.key_rank}", Remove("it")
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
            fix=Set("it", fitting, said=f"{fitting:g}, which is {even} channels") if fitting else Set("model.head_size", size + size % 2),
        )


def _check_ahead(run: Run) -> None:
    """Refuse models and layouts in which multi-token prediction (model.ahead) does not work."""
    m = run.model
    if not m.ahead:
        return
    wanted: dict[str, tuple[object, object, str]] = {
        "model.kind": (m.kind, "decoder", ""),
        "model.scales.residual": (m.scales.residual, 1, ": these blocks are not scaled"),
        "model.scales.embedding": (m.scales.embedding, 1, ""),
        "model.scales.head": (m.scales.head, 1, ""),
        "model.logit_cap": (m.logit_cap, None, ""),
        "model.sliding_window": (m.sliding_window, None, ": which of these blocks has a window is not said"),
        "tensor.kind": (run.tensor.kind if run.degrees.tp > 1 and run.tensor.kind in GRIDS else "1d", "1d", ": no grid cuts these blocks"),
        "sharding.offload.parameters": (run.sharding.offload.parameters, "none", ""),
    }
    for key, (value, needed, why) in wanted.items():
        if value != needed:
            fix = Set(key, needed) | Set("model.ahead", 0)
            raise BadInput(key, got=f"{value} with model.ahead={m.ahead}", needed=f"{written(needed)}{why}", fix=fix)
    if m.ahead >= m.max_length:
        raise BadInput("model.ahead", got=m.ahead, needed=f"less than model.max_length={m.max_length}", fix=Set("it", 1))
