"""Checks of a model's keys against each other: sizes, positions, windows, latents, layers with experts, multi-token prediction.

No torch is imported here.
"""

from __future__ import annotations

import math

from moe.checks.clash import check_others, clash
from moe.recipe.sections import Model, Rope, Run, Scales
from parallel.errors import BadInput
from parallel.fixes import Fix, Remove, Set
from parallel.mesh.grids import GRIDS
from parallel.mesh.mesh import divisors


def check_model(run: Run) -> None:
    """Refuse sizes that do not divide, layers that do not exist, and keys that this model does not read. Raises BadInput."""
    m = run.model
    heads, size = m.num_kv_heads or m.num_heads, m.head_size or m.d_model // m.num_heads
    if m.head_size is None and m.d_model % m.num_heads:
        raise BadInput("model.num_heads", got=m.num_heads, needed=f"a divisor of d_model={m.d_model}", fix=Set("it", *divisors(m.d_model)))
    if m.num_heads % heads:
        needed = f"a divisor of num_heads={m.num_heads}"
        raise BadInput("model.num_kv_heads", got=heads, needed=needed, fix=Set("it", *divisors(m.num_heads)))
    if m.positions == "rotary" and m.latent.key_rank is None and m.rope.fraction == 1 and size % 2:
        fix = "change head_size" | Set("model.positions", "t5")
        raise BadInput("model.head_size", got=size, needed="an even size for rotary positions", fix=fix)
    _check_rope(run)
    if m.latent.key_rank is not None:
        _check_latent(run)
    if m.kind == "encoder_decoder":
        _check_t5(run)
    _check_windows(m)
    if m.ahead:
        _check_ahead(run)
    if m.moe_every and m.moe_layers is not None:
        got, fix = f"moe_every={m.moe_every} as well", Remove("model.moe_every") | Set("model.moe_layers", None)
        raise BadInput("model.moe_layers", got=got, needed="one of the two", fix=fix)
    if m.moe_every > m.num_layers:
        fix = Set("it", m.num_layers) | Set("it", 0, said="0 for a dense model")
        raise BadInput("model.moe_every", got=m.moe_every, needed=f"at most num_layers={m.num_layers}", fix=fix)
    layers = m.layers_with_experts()
    bad = [i for i in layers if not 0 <= i < m.num_layers]
    if bad or len(set(layers)) < len(layers):
        needed = f"different numbers from 0 to {m.num_layers - 1}"
        raise BadInput("model.moe_layers", got=list(layers), needed=needed, fix=f"remove {bad or 'the repeated ones'}")
    tokenizer = 256 if run.data.tokenizer == "bytes" else run.data.vocab_size
    if run.vocab_size < tokenizer:
        fix = Set("it", None, said="null to follow the tokenizer")
        raise BadInput("model.vocab_size", got=run.vocab_size, needed=f"at least the tokenizer's {tokenizer}", fix=fix)


def _check_latent(run: Run) -> None:
    """Refuse settings that latent attention excludes, and sizes of its latents that do not fit together."""
    m, by = run.model, "model.latent.key_rank"
    works: dict[str, tuple[object, str]] = {
        "model.kind": ("decoder", ""),
        "model.positions": ("rotary", ""),
        "model.num_kv_heads": (None, "keys and values of all heads are made of the latent"),
        "model.qk_norm": ("none", "the latents are normed"),
        "model.qkv_bias": (False, ""),
        "model.clip_qkv": (None, ""),
        "model.scales.attention": (None, "the scale of latent attention is YaRN's alone"),
    }
    if m.num_kv_heads == m.num_heads:
        del works["model.num_kv_heads"]
    check_others(run, by, works)
    if m.rope.fraction != 1:
        raise clash(run, "model.rope.fraction", by, 1, "in latent attention rotary_size sets the channels that are rotated")
    if m.rope.scaling == "dynamic":
        raise clash(run, "model.rope.scaling", by, "yarn", needed="yarn, as DeepSeek has it, or ntk")
    size = m.latent_sizes
    if size.rotary % 2 or not size.rotary:
        needed = "an even number above 0: channels are rotated in pairs"
        raise BadInput("model.latent.rotary_size", got=size.rotary, needed=needed, fix=Set("it", 2))
    if size.value > size.key:
        needed = f"at most the {size.key} channels of a head's keys: head_size={size.content} and rotary_size={size.rotary}"
        raise BadInput("model.latent.value_size", got=size.value, needed=needed, fix=Set("it", size.content))


def _check_t5(run: Run) -> None:
    """Refuse settings of decoders that an encoder-decoder does not have: scales, windows, sinks, caps, output biases."""
    none = "T5 and Switch have none"
    off: dict[str, object] = {"sliding_window": None, "attention_sinks": False, "out_bias": False, "clip_qkv": None, "logit_cap": None}
    works = {f"scales.{key}": getattr(Scales(), key) for key in Scales.model_fields} | off
    check_others(run, "model.kind", {f"model.{key}": (value, none) for key, value in works.items()})


def _check_windows(m: Model) -> None:
    """Refuse numbers in `sliding_layers` that are not layers of the model or that occur twice."""
    if m.sliding_layers is None:
        return
    layers = sorted({i for i in m.sliding_layers if 0 <= i < m.num_layers})
    if not layers or len(layers) < len(m.sliding_layers):
        needed = f"different numbers from 0 to {m.num_layers - 1}"
        fix: Fix = Set("it", layers) if layers else Set("model.sliding_window", None) & Set("model.sliding_layers", None)
        raise BadInput("model.sliding_layers", got=list(m.sliding_layers), needed=needed, fix=fix)


def _check_rope(run: Run) -> None:
    """Refuse rotary settings that nothing reads or that contradict each other."""
    m, r = run.model, run.model.rope
    if r.fraction != 1 and m.latent.key_rank is None:
        _check_fraction(m)
    if r.scaling in ("dynamic", "llama3", "yarn") and r.trained_length is None:
        needed = f"the length of the training that {r.scaling} extends"
        raise BadInput("model.rope.trained_length", got="null", needed=needed, fix=Set("it", m.max_length))
    if r.scaling in ("llama3", "yarn") and r.most_turns <= r.low:
        raise BadInput("model.rope.high", got=f"{r.most_turns:g}", needed=f"more than model.rope.low={r.low:g}", fix=Set("it", None))
    if r.mscale_all and m.latent.key_rank is None:
        needed = "latent attention: only its logits are multiplied by mscale_all"
        raise clash(run, "model.rope.mscale_all", "model.latent.key_rank", 0, needed=needed)


def _check_fraction(m: Model) -> None:
    """Refuse a rotated share of a head's channels that is no whole number of pairs; the fix is the nearest share that is one."""
    share, size = m.rope.fraction, m.head_size or m.d_model // m.num_heads
    count = m.rope.turning(size)
    if count % 2 or not count:
        even = max(2, 2 * round(share * size / 2))
        tries = ((math.ceil(even / size * 10**digits) + up) / 10**digits for digits in range(1, 9) for up in (0, 1))
        fitting = next((value for value in tries if value <= 1 and Rope(fraction=value).turning(size) == even), None)
        got = f"{share:g} of {size} channels of a head, which is {count}"
        said = Set("it", fitting, said=f"{fitting:g}, which is {even} channels") if fitting else Set("model.head_size", size + size % 2)
        raise BadInput("model.rope.fraction", got=got, needed="an even number of them, rounded down: channels turn in pairs", fix=said)


def _check_ahead(run: Run) -> None:
    """Refuse models and layouts in which multi-token prediction (model.ahead) does not work."""
    m, off = run.model, Set("model.ahead", 0)
    works: dict[str, tuple[object, str]] = {
        "model.kind": ("decoder", ""),
        "model.scales.residual": (1, "blocks of multi-token prediction are not scaled"),
        "model.scales.embedding": (1, ""),
        "model.scales.head": (1, ""),
        "model.logit_cap": (None, ""),
        "model.sliding_window": (None, "no key says which blocks of multi-token prediction have a window"),
        "sharding.offload.parameters": ("none", ""),
    }
    check_others(run, "model.ahead", works, off)
    if run.degrees.tp > 1 and run.tensor.kind in GRIDS:
        raise clash(run, "tensor.kind", "model.ahead", "1d", "no grid cuts the blocks of multi-token prediction", off)
    if m.ahead >= m.max_length:
        raise BadInput("model.ahead", got=m.ahead, needed=f"less than model.max_length={m.max_length}", fix=Set("it", 1))
