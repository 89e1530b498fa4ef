"""Checks of the keys of section `model` against each other: sizes, positions, windows, latent attention, MoE layers, multi-token
prediction, and encoder-decoders (model.kind).
"""

from __future__ import annotations

import math

from moe.checks.clash import check_others, clash
from moe.recipe.sections import Model, Rope, Run, Scales
from moe.recipe.shapes import divisible_inputs
from parallel.errors import BadInput, counted
from parallel.fixes import Fix, Remove, Set
from parallel.mesh.grids import GRIDS
from parallel.mesh.mesh import divisors


def check_model(run: Run) -> None:
    """Raise BadInput for sizes that do not divide each other, layers that do not exist, and keys that have no effect in this model."""
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
        got, fix = f"a list, and model.moe_every={m.moe_every} too", Remove("model.moe_every") | Set("model.moe_layers", None)
        raise BadInput("model.moe_layers", got=got, needed="only one of the two keys", fix=fix)
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
    m, by = run.model, "model.latent.key_rank"
    works: dict[str, tuple[object, str]] = {
        "model.kind": ("decoder", "T5 and Switch have no latent attention"),
        "model.positions": ("rotary", "keys of latent attention have rotary channels"),
        "model.num_kv_heads": (None, "keys and values of all heads are made of the latent"),
        "model.qk_norm": ("none", "latent attention has norms of the latents instead"),
        "model.qkv_bias": (False, "latent attention has no biases"),
        "model.clip_qkv": (None, "latent attention does not clip queries, keys and values"),
        "model.scales.attention": (None, "only YaRN scales the logits of latent attention"),
    }
    if m.num_kv_heads == m.num_heads:
        del works["model.num_kv_heads"]
    check_others(run, by, works)
    if m.rope.fraction != 1:
        raise clash(run, "model.rope.fraction", by, 1, "in latent attention rotary_size sets the channels that are rotated")
    if m.rope.scaling == "dynamic":
        raise clash(run, "model.rope.scaling", by, "yarn", needed="yarn, as in DeepSeek, or ntk")
    size = m.latent_sizes
    if size.rotary % 2 or not size.rotary:
        needed = "an even number above 0: channels are rotated in pairs"
        raise BadInput("model.latent.rotary_size", got=size.rotary, needed=needed, fix=Set("it", 2))
    if size.value > size.key:
        needed = f"at most the {size.key} channels of a head's keys: head_size={size.content} and rotary_size={size.rotary}"
        raise BadInput("model.latent.value_size", got=size.value, needed=needed, fix=Set("it", size.content))


def _check_t5(run: Run) -> None:
    """Raise BadInput for keys that T5 and Switch do not have: scales, sliding windows, attention sinks, out_bias, clip_qkv, logit_cap."""
    none = "T5 and Switch have none"
    off: dict[str, object] = {"sliding_window": None, "attention_sinks": False, "out_bias": False, "clip_qkv": None, "logit_cap": None}
    works = {f"scales.{key}": getattr(Scales(), key) for key in Scales.model_fields} | off
    check_others(run, "model.kind", {f"model.{key}": (value, none) for key, value in works.items()})


def _check_windows(m: Model) -> None:
    if m.sliding_layers is None:
        return
    layers = sorted({i for i in m.sliding_layers if 0 <= i < m.num_layers + m.ahead})
    if not layers or len(layers) < len(m.sliding_layers):
        needed = f"different numbers from 0 to {m.num_layers + m.ahead - 1}"
        fix: Fix = Set("it", layers) if layers else Set("model.sliding_window", None) & Set("model.sliding_layers", None)
        raise BadInput("model.sliding_layers", got=list(m.sliding_layers), needed=needed, fix=fix)


def _check_rope(run: Run) -> None:
    m, r = run.model, run.model.rope
    if r.fraction != 1 and m.latent.key_rank is None:
        _check_fraction(m)
    if r.scaling in ("dynamic", "llama3", "yarn") and r.trained_length is None:
        needed = f"max_length of the original training, which {r.scaling} scaling extends"
        raise BadInput("model.rope.trained_length", got="null", needed=needed, fix=Set("it", m.max_length))
    if r.scaling in ("llama3", "yarn") and r.most_turns <= r.low:
        raise BadInput("model.rope.high", got=f"{r.most_turns:g}", needed=f"more than model.rope.low={r.low:g}", fix=Set("it", None))
    if r.mscale_all and m.latent.key_rank is None:
        needed = "latent attention: only its logits are multiplied by mscale_all"
        raise clash(run, "model.rope.mscale_all", "model.latent.key_rank", 0, needed=needed)


def _check_fraction(m: Model) -> None:
    """Raise BadInput for a model.rope.fraction that rotates an odd number of a head's channels, or no channel. The fix is a nearby
    fraction that rotates an even number."""
    share, size = m.rope.fraction, m.head_size or m.d_model // m.num_heads
    count = m.rope.turning(size)
    if count % 2 or not count:
        even = max(2, 2 * round(share * size / 2))
        tries = ((math.ceil(even / size * 10**digits) + up) / 10**digits for digits in range(1, 9) for up in (0, 1))
        fitting = next((value for value in tries if value <= 1 and Rope(fraction=value).turning(size) == even), None)
        got = f"{share:g} of {counted(size, 'channel')} of a head, which is {count}"
        said = Set("it", fitting, said=f"{fitting:g}, which is {even} channels") if fitting else Set("model.head_size", size + size % 2)
        raise BadInput("model.rope.fraction", got=got, needed="an even number of channels: they are rotated in pairs", fix=said)


def _check_ahead(run: Run) -> None:
    m, off = run.model, Set("model.ahead", 0)
    works: dict[str, tuple[object, str]] = {
        "model.kind": ("decoder", "T5 and Switch have no multi-token prediction"),
        "train.loss": ("cross_entropy", "the blocks of multi-token prediction are trained with this loss"),
    }
    check_others(run, "model.ahead", works, off)
    if run.degrees.tp > 1 and run.tensor.kind in GRIDS:
        raise clash(run, "tensor.kind", "model.ahead", "1d", "no grid cuts the blocks of multi-token prediction", off)
    if m.ahead >= m.max_length:
        raise BadInput("model.ahead", got=m.ahead, needed=f"less than model.max_length={m.max_length}", fix=Set("it", 1))


def _check_shards_of_halves(run: Run) -> None:
    """Raise BadInput unless the ranks among which sequences are sharded (sp, and tp with tensor.sequence_parallel) divide the lengths of
    encoder and decoder."""
    m, sp, tp = run.model, run.degrees.sp, run.degrees.tp if run.tensor.sequence_parallel else 1
    read = max(1, sp) * max(1, tp)
    written = math.lcm(read, 2 * sp) if sp > 1 and run.sequence.position_order == "zigzag" else read
    if m.source_length % read or m.target_length % written:
        got = f"{m.max_length}, with {counted(m.target_length, 'token')} for the decoder"
        keys = " and ".join(key for key, size in (("degrees.sp", sp), ("tensor.sequence_parallel", tp)) if size > 1)
        needed = f"a multiple of {read}, and of {written} for the decoder: {keys} cut both lengths"
        near = divisible_inputs(m.max_length, read=read, written=written)
        fix: Fix | str = Set("it", *near) if near else f"use fewer ranks: span corruption has no length divisible by {read} and {written}"
        raise BadInput("model.max_length", got=got, needed=needed, fix=fix)


def check_encoder_decoder(run: Run) -> None:
    """Raise BadInput for an encoder-decoder without span corruption or T5's positions, or with a layout that it does not support, and for a
    decoder with span corruption."""
    has_encoder, spans = run.model.kind == "encoder_decoder", run.data.objective == "span_corruption"
    if spans and not has_encoder:
        fix = Set("model.kind", "encoder_decoder") | Set("data.objective", "next_token")
        raise BadInput("data.objective", got="span_corruption with model.kind=decoder", needed="an encoder, which reads the text", fix=fix)
    if not has_encoder:
        return
    if not spans:
        raise clash(
            run,
            "data.objective",
            "model.kind",
            "span_corruption",
            needed="span_corruption, which gives the encoder other tokens than the decoder",
        )
    m = run.model
    if m.positions != "t5":
        raise clash(
            run, "model.positions", "model.kind", "t5", "all layers of the encoder, and all of the decoder, share one position bias"
        )
    if not 0 < m.decoder_begins < m.num_layers:
        what = "model.num_layers" if m.encoder_layers is None else "model.encoder_layers"
        got, fix = (m.num_layers, Set("it", 2, said="2 or more")) if m.encoder_layers is None else (m.encoder_layers, Set("it", None))
        needed = "at least 2" if m.encoder_layers is None else f"below model.num_layers={m.num_layers}: the other layers are the decoder's"
        raise BadInput(what, got=got, needed=needed, fix=fix)
    if m.spans.inputs != m.max_length:
        needed = f"at least {m.spans.inputs}, for one hidden span"
        raise BadInput("model.max_length", got=m.max_length, needed=needed, fix=Set("it", m.spans.inputs))
    if run.vocab_size < run.least_vocab_size:
        sentinels = f"{run.num_sentinels} sentinel{'s' * (run.num_sentinels != 1)}"
        needed = f"at least {run.least_vocab_size}: the tokenizer's ids, and {sentinels} after them"
        raise BadInput("model.vocab_size", got=run.vocab_size, needed=needed, fix=Set("model.vocab_size", None))
    _check_shards_of_halves(run)
