"""Checks of values that are allowed one by one but not together: each mistake is one line, found before torch is imported."""

from __future__ import annotations

import math

from moe.checks.audit import check_audit
from moe.checks.encoder_decoder import check_encoder_decoder
from moe.checks.lora import check_lora
from moe.checks.optimizer import check_optimizer
from moe.checks.pipeline import check_pipeline
from moe.checks.sequence import check_sequence
from moe.checks.sharding import check_sharding
from moe.checks.tensor import check_tensor
from moe.checks.tiling import check_tiling
from moe.recipe.plugin import check_there
from moe.recipe.sections import Data, Latent, Model, Rope, Run, Scales
from moe.router.checks import check_causal, check_read, check_spec
from parallel.errors import BadInput, did_you_mean
from parallel.files import user_path
from parallel.mesh import Degrees, check_world, divisors


def check_run(run: Run, world_size: int) -> Run:
    """The run with its `auto` degrees resolved for `world_size` processes. Raises BadInput for the first combination that cannot work."""
    run = run.resolve(world_size)
    d = run.degrees
    if isinstance(d.dp, int) and min(d.dp, d.pp, d.tp, d.sp) > 0:  # else what is wrong with one degree comes first
        check_world(Degrees(dp=d.dp, pp=d.pp, tp=d.tp, sp=d.sp), world_size)
    check_together(run)
    check_world(run.mesh_degrees(), world_size)
    return run


def check_together(run: Run) -> None:
    """Refuse a resolved run that cannot work. Raises BadInput for the first reason found."""
    for key, value in run.plugins().items():
        check_there(key, value)
    _check_model(run)
    check_encoder_decoder(run)
    _check_experts(run)
    _check_dispatch(run)
    _check_precision(run)
    _check_data(run)
    check_pipeline(run)
    _check_batch(run)
    check_tensor(run)
    check_sequence(run)
    check_tiling(run)
    check_sharding(run)
    check_optimizer(run)
    check_audit(run)
    check_lora(run)


def _check_model(run: Run) -> None:
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
    if m.positions == "rotary" and m.latent.key_rank is None and (m.head_size or m.d_model // m.num_heads) % 2:
        raise BadInput(
            "model.head_size",
            got=m.head_size or m.d_model // m.num_heads,
            needed="an even size for rotary positions",
            fix="change head_size, or set model.positions to t5",
        )
    _check_rope(m)
    _check_swiglu(run)
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
    """Sizes that go together, and nothing that has no place beside latents."""
    if m.latent.key_rank is None:
        idle = [key for key in Latent.model_fields if getattr(m.latent, key) is not None]
        if idle:
            fix = "set model.latent.key_rank, or remove it"
            raise BadInput(f"model.latent.{idle[0]}", got="it with model.latent.key_rank=null", needed="latent attention", fix=fix)
        return
    refused = {
        "kind": ("decoder", m.kind != "decoder"),
        "positions": ("rotary", m.positions != "rotary"),
        "num_kv_heads": ("null: keys and values of all heads are made of the latent", m.num_kv_heads not in (None, m.num_heads)),
        "qk_norm": ("none: the latents are normed", m.qk_norm != "none"),
        "qkv_bias": ("false", m.qkv_bias),
    }
    for key, (needed, wrong) in refused.items():
        if wrong:
            got = f"{str(getattr(m, key)).lower()} with model.latent.key_rank={m.latent.key_rank}"
            raise BadInput(f"model.{key}", got=got, needed=needed, fix=f"set it to {needed.partition(':')[0]}")
    size = m.latent_sizes
    if size.rotary % 2 or not size.rotary:
        raise BadInput(
            "model.latent.rotary_size", got=size.rotary, needed="an even number above 0: channels turn in pairs", fix="set it to 2"
        )
    if size.value > size.key:
        needed = f"at most the {size.key} channels of a head's keys: head_size={size.content} and rotary_size={size.rotary}"
        raise BadInput("model.latent.value_size", got=size.value, needed=needed, fix=f"set it to {size.content}")


def _check_windows(m: Model) -> None:
    """Layers that exist, of a window that does; and nothing that an encoder-decoder has not."""
    key = next((key for key in Scales.model_fields if getattr(m.scales, key) != getattr(Scales(), key)), None)
    if key is not None and m.kind == "encoder_decoder":
        got = f"{getattr(m.scales, key):g} with model.kind=encoder_decoder"
        raise BadInput(f"model.scales.{key}", got=got, needed="a decoder: T5 and Switch have none", fix=f"remove model.scales.{key}")
    if m.scales.attention is not None and m.latent.key_rank is not None:
        got = f"{m.scales.attention:g} with model.latent.key_rank={m.latent.key_rank}"
        raise BadInput("model.scales.attention", got=got, needed="null: latent attention has YaRN's factor alone", fix="set it to null")
    for key, off in (("sliding_window", None), ("attention_sinks", False), ("out_bias", False)):
        if getattr(m, key) != off and m.kind == "encoder_decoder":
            got, word = f"{str(getattr(m, key)).lower()} with model.kind=encoder_decoder", "null" if off is None else "false"
            raise BadInput(f"model.{key}", got=got, needed=f"{word}: T5 and Switch have none", fix=f"set it to {word}")
    if m.sliding_layers is None:
        return
    if m.sliding_window is None:
        fix = "set model.sliding_window to a number of tokens, or model.sliding_layers to null"
        raise BadInput("model.sliding_layers", got="it with model.sliding_window=null", needed="a window that these layers have", fix=fix)
    layers = sorted({i for i in m.sliding_layers if 0 <= i < m.num_layers})
    if not layers or len(layers) < len(m.sliding_layers):
        raise BadInput(
            "model.sliding_layers",
            got=list(m.sliding_layers),
            needed=f"different numbers from 0 to {m.num_layers - 1}",
            fix=f"set it to {layers}" if layers else "set model.sliding_window and model.sliding_layers to null",
        )


def _check_rope(m: Model) -> None:
    """Values that no positions would read, or that leave what to stretch unsaid."""
    r = m.rope
    if r != Rope() and m.positions == "t5":
        key = next(key for key in Rope.model_fields if getattr(r, key) != getattr(Rope(), key))
        raise BadInput(f"model.rope.{key}", got="it with model.positions=t5", needed="rotary positions", fix=f"remove model.rope.{key}")
    if r.scaling in ("llama3", "yarn") and r.trained_length is None:
        raise BadInput(
            "model.rope.trained_length", got="null", needed=f"the length before the stretch by {r.scaling}", fix=f"set it to {m.max_length}"
        )
    if r.scaling in ("llama3", "yarn") and r.most_turns <= r.low:
        raise BadInput("model.rope.high", got=f"{r.most_turns:g}", needed=f"more than model.rope.low={r.low:g}", fix="set it to null")
    if r.scaling == "none" and r.factor != 1:
        raise BadInput(
            "model.rope.factor",
            got=f"{r.factor:g} with scaling none",
            needed="a scaling that reads it",
            fix="set model.rope.scaling to linear",
        )
    for key in ("whole_pairs", "mscale", "mscale_all") if r.scaling != "yarn" else ():
        if getattr(r, key) != getattr(Rope(), key):
            got = f"{str(getattr(r, key)).lower()} with scaling {r.scaling}"
            raise BadInput(f"model.rope.{key}", got=got, needed="yarn, which alone reads it", fix=f"remove model.rope.{key}")
    if r.mscale_all and m.latent.key_rank is None:
        got = f"{r.mscale_all:g} with model.latent.key_rank=null"
        raise BadInput("model.rope.mscale_all", got=got, needed="latent attention, whose logits alone grow by it", fix="set it to 0")
    for key in ("trained_length", "low", "high") if r.scaling in ("none", "linear") else ():
        if getattr(r, key) != getattr(Rope(), key):
            got = f"{getattr(r, key):g} with scaling {r.scaling}"
            raise BadInput(f"model.rope.{key}", got=got, needed="llama3 or yarn, which alone read it", fix=f"remove model.rope.{key}")


def _check_swiglu(run: Run) -> None:
    """Bounds of an activation that no network has."""
    m, s = run.model, run.model.swiglu
    networks = {m.ffn, (run.experts.ffn or m.ffn) if m.layers_with_experts() else m.ffn}
    key = next((key for key in type(s).model_fields if getattr(s, key) != getattr(type(s)(), key)), None)
    if key is not None and "swiglu" not in networks:
        raise BadInput(
            f"model.swiglu.{key}",
            got=f"{getattr(s, key):g} with model.ffn={m.ffn}",
            needed="networks of swiglu, which alone read it",
            fix=f"set model.ffn to swiglu, or remove model.swiglu.{key}",
        )


def _check_ahead(run: Run) -> None:
    """Where further tokens cannot be predicted: their embeddings, blocks and head stand on one rank, after the whole sequence."""
    m = run.model
    if not m.ahead:
        if m.ahead_weight != type(m).model_fields["ahead_weight"].default:
            got = f"{m.ahead_weight:g} with model.ahead=0"
            raise BadInput("model.ahead_weight", got=got, needed="tokens ahead, which alone read it", fix="set model.ahead to 1")
        return
    reasons: dict[str, tuple[bool, object, str]] = {
        "model.kind": (m.kind != "decoder", m.kind, "decoder"),
        "model.scales.residual": (m.scales.residual != 1, m.scales.residual, "1: these blocks are not scaled"),
        "model.scales.embedding": (m.scales.embedding != 1, m.scales.embedding, "1"),
        "model.scales.head": (m.scales.head != 1, m.scales.head, "1"),
        "model.sliding_window": (m.sliding_window is not None, m.sliding_window, "null: which of these blocks has a window is not said"),
        "degrees.pp": (run.degrees.pp > 1, run.degrees.pp, "1: embedding and head are on the rank of every layer"),
        "degrees.sp": (run.degrees.sp > 1, run.degrees.sp, "1: a token's next ones are on its rank"),
        "degrees.tp": (run.degrees.tp > 1, run.degrees.tp, "1: these blocks are not cut"),
        "sharding.offload.parameters": (run.sharding.offload.parameters != "none", run.sharding.offload.parameters, "none"),
    }
    for key, (refused, value, needed) in reasons.items():
        if refused:
            fix = f"set {key} to {needed.partition(':')[0]}, or model.ahead to 0"
            raise BadInput(key, got=f"{value} with model.ahead={m.ahead}", needed=needed, fix=fix)
    if m.ahead >= m.max_length:
        raise BadInput("model.ahead", got=m.ahead, needed=f"less than model.max_length={m.max_length}", fix="set it to 1")


def _check_experts(run: Run) -> None:
    if not run.model.layers_with_experts():
        if run.degrees.ep not in ("auto", 1):
            raise BadInput(
                "degrees.ep", got=run.degrees.ep, needed="1 for a dense model", fix="set degrees.ep to 1, or model.moe_every to 2"
            )
        if run.degrees.etp != 1:
            raise BadInput(
                "degrees.etp", got=run.degrees.etp, needed="1 for a dense model", fix="set degrees.etp to 1, or model.moe_every to 2"
            )
        return
    _check_networks(run)
    counts, ep = run.experts.counts, run.degrees.ep
    got = counts[0] if len(counts) == 1 else list(counts)
    if isinstance(ep, int) and ep > 0 and any(e % ep for e in counts):
        common = math.gcd(*counts)
        fitting = divisors(math.gcd(common, run.degrees.dp)) if isinstance(run.degrees.dp, int) and run.degrees.dp > 0 else divisors(common)
        raise BadInput("experts.num_experts", got=got, needed=f"a multiple of degrees.ep={ep}", fix=f"set degrees.ep to one of {fitting}")
    for count in counts:
        check_spec(run.router.spec, count + run.experts.free)
    _check_free(run)
    check_read(run.router.spec, run.router.own)
    check_causal(run.router.spec, allowed=run.router.allow_noncausal)


def _check_free(run: Run) -> None:
    """Choices that cost nothing are for tokens that choose, and stay where they are."""
    x = run.experts
    key = "skip" if x.skip else "zero"
    reasons: dict[str, tuple[bool, object, str]] = {
        "router.select": (run.router.spec.select == "expert_choice", "expert_choice", "top_k: tokens choose to cost nothing"),
        "experts.rebalance_every": (bool(x.rebalance_every), x.rebalance_every, "0: loads are of what costs something"),
    }
    for what, (refused, got, needed) in reasons.items() if x.free else ():
        if refused:
            fix = f"set {what} to {needed.partition(':')[0]}, or experts.{key} to 0"
            raise BadInput(what, got=f"{got} with experts.{key}={getattr(x, key)}", needed=needed, fix=fix)


def _check_networks(run: Run) -> None:
    """Check the number of experts of each layer, and the dense networks beside them."""
    x, layers = run.experts, run.model.layers_with_experts()
    if isinstance(x.num_experts, tuple) and len(x.num_experts) != len(layers):
        raise BadInput(
            "experts.num_experts",
            got=f"{len(x.num_experts)} numbers",
            needed=f"one for each of the {len(layers)} layers with experts ({', '.join(map(str, layers))}), or one number for all",
            fix=f"list {len(layers)} numbers, or change model.moe_every",
        )
    for key, value in (("shared_gate", x.shared_gate), ("shared_d_ff", x.shared_d_ff)):
        if value and not x.shared:
            raise BadInput(
                f"experts.{key}",
                got=f"{str(value).lower()} without shared experts",
                needed="experts.shared above 0",
                fix="set experts.shared to 1",
            )
    if x.residual and x.shared:
        raise BadInput(
            "experts.residual",
            got=f"true with experts.shared={x.shared}",
            needed="one network that every token passes",
            fix="set experts.shared to 0, or experts.residual to false",
        )


def _check_dispatch(run: Run) -> None:
    """Check how rows travel between ranks, and how each expert's matrices are split."""
    d, ep, etp = run.dispatch, run.degrees.ep, run.degrees.etp
    units = run.experts.d_ff or run.model.d_ff
    if run.model.layers_with_experts() and etp > 0 and units % etp:
        raise BadInput(
            "degrees.etp",
            got=etp,
            needed=f"a divisor of the experts' d_ff={units}: each of its ranks holds an equal part of the hidden units",
            fix=f"set degrees.etp to one of {divisors(math.gcd(units, run.degrees.dp if isinstance(run.degrees.dp, int) else units))}",
        )
    if d.overlap_chunks > 1 and d.kind not in ("auto", "all_to_all"):
        reason = "its one sum needs every expert's part" if d.kind == "all_gather" else "its blocks or steps are one exchange"
        raise BadInput(
            "dispatch.overlap_chunks",
            got=f"{d.overlap_chunks} with dispatch.kind={d.kind}",
            needed=f"1: only all_to_all can be cut ({reason})",
            fix="set dispatch.kind to all_to_all, or dispatch.overlap_chunks to 1",
        )
    if d.kind == "hierarchical" and d.node_size is None:
        raise BadInput(
            "dispatch.node_size",
            got="null with dispatch.kind=hierarchical",
            needed="how many ranks of the ep axis share a node",
            fix=f"set it to one of {divisors(ep) if isinstance(ep, int) and ep > 0 else [2, 4, 8]}, or dispatch.kind to all_to_all",
        )
    if d.kind != "hierarchical" and d.node_size is not None:
        raise BadInput(
            "dispatch.node_size",
            got=f"{d.node_size} with dispatch.kind={d.kind}",
            needed="null: only hierarchical knows nodes",
            fix="set dispatch.node_size to null, or dispatch.kind to hierarchical",
        )
    if not run.model.layers_with_experts() or not isinstance(ep, int) or ep <= 1:
        return
    if d.node_size is not None and ep % d.node_size:
        raise BadInput(
            "dispatch.node_size", got=d.node_size, needed=f"a divisor of degrees.ep={ep}", fix=f"set it to one of {divisors(ep)}"
        )
    held = math.gcd(*(count // ep for count in run.experts.counts))
    if held % d.overlap_chunks:
        raise BadInput(
            "dispatch.overlap_chunks",
            got=d.overlap_chunks,
            needed=f"a divisor of the {held} experts that a rank holds (num_experts / ep)",
            fix=f"set it to one of {divisors(held)}, or lower degrees.ep",
        )


def _check_precision(run: Run) -> None:
    p = run.precision
    if p.master == "bf16" and p.compute != "bf16":
        raise BadInput(
            "precision.master", got=f"bf16 with compute {p.compute}", needed="fp32 master weights", fix="set precision.master to fp32"
        )
    if p.compute == "fp16" and p.loss_scale == "none":
        raise BadInput(
            "precision.loss_scale",
            got="none with compute fp16",
            needed="a loss scale: gradients below 6e-8 vanish in fp16",
            fix="set precision.loss_scale to dynamic",
        )
    if p.compute != "fp16" and p.loss_scale != "none":
        raise BadInput(
            "precision.loss_scale",
            got=f"{p.loss_scale} with compute {p.compute}",
            needed=f"none: {p.compute} has the range of fp32",
            fix="set precision.loss_scale to none",
        )
    if isinstance(p.loss_scale, float) and p.loss_scale <= 0:
        raise BadInput("precision.loss_scale", got=p.loss_scale, needed="above 0", fix="set precision.loss_scale to dynamic")


def _check_data(run: Run) -> None:
    d = run.data
    if d.sources and d.path is not None:
        fix = "add --data.sources [] to take the path alone, or set data.path to null"
        raise BadInput("data.path", got=f"{d.path}, and data.sources as well", needed="one of the two", fix=fix)
    if d.tokenizer != "ids" and d.vocab_size <= 256:
        needed = "greater than 256: each byte has an id, and what separates documents"
        raise BadInput("data.vocab_size", got=d.vocab_size, needed=needed, fix="set data.vocab_size to 257 or more")
    if d.tokenizer == "ids" and run.model.document_mask and run.model.document_separator is None:
        needed = "model.document_separator with it: of ids nobody knows which one is between documents"
        fix = "set model.document_separator to that id, or model.document_mask to false"
        raise BadInput("model.document_mask", got="true with data.tokenizer=ids", needed=needed, fix=fix)
    if (separator := run.model.document_separator) is not None and separator >= run.vocab_size:
        fix = f"set it to at most {run.vocab_size - 1}"
        raise BadInput("model.document_separator", got=separator, needed=f"an id of the vocabulary of {run.vocab_size}", fix=fix)
    if run.model.document_separator is not None and not run.model.document_mask:
        got = f"{run.model.document_separator} with model.document_mask=false"
        fix = "set model.document_mask to true, or leave model.document_separator out"
        raise BadInput("model.document_separator", got=got, needed="the mask that it is for", fix=fix)
    if d.is_own:
        _check_given(d)
        return
    if d.path is None and not d.sources:
        if d.source != "python_stdlib" or d.tokenizer == "ids":
            wants = f"data.source={d.source}" if d.source != "python_stdlib" else "data.tokenizer=ids"
            raise BadInput("data.path", got="null", needed=f"a path for {wants}", fix="add --data.path FILE_OR_FOLDER")
        return
    for number, source in enumerate(d.sources):
        _check_path(f"data.sources[{number}].path", source.path)
    if d.path is not None:
        _check_path("data.path", d.path)


def _check_given(d: Data) -> None:
    """Samples of a user's program are ids already, and all that is read. What a path means is for a part that a recipe names to say."""
    if d.tokenizer == "bpe":
        needed = "ids, which the samples are, or bytes"
        raise BadInput(
            "data.tokenizer", got=f"bpe with data.source={d.source}", needed=needed, fix="set data.tokenizer to ids, and data.vocab_size"
        )
    for key, value in (("path", d.path if d.source == "given" else None), ("sources", d.sources)):
        if value:
            raise BadInput(f"data.{key}", got=f"it with data.source={d.source}", needed="one of the two", fix=f"remove data.{key}")
    if d.objective != "next_token":
        fix = "set data.objective to next_token"
        raise BadInput("data.objective", got=f"{d.objective} with data.source={d.source}", needed="next_token", fix=fix)


def _check_path(key: str, given: str) -> None:
    path = user_path(given, what=key)
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise BadInput(
            key,
            got=given,
            needed="a file or folder that exists",
            fix=f"did you mean {path.parent / near}?" if near else "check the spelling and the folder you are in",
        )
    empty = path.stat().st_size == 0 if path.is_file() else not any(p.is_file() and p.stat().st_size for p in path.rglob("*"))
    if empty:
        raise BadInput(key, got=f"{given}, which is empty", needed="text", fix="name a file or folder that holds text")


def _check_replicas(run: Run, sequences: int) -> None:
    """Check that the replicas of dp can share one process and each of its micro-batches."""
    if run.sharding.kind != "dp":
        return
    if run.degrees.dp != 1:
        raise BadInput(
            "sharding.kind",
            got=f"dp with {run.degrees.dp} processes",
            needed="one process, which has all replicas",
            fix="add --nproc 1 and set sharding.replicas, or set sharding.kind to ddp",
        )
    group = run.router.spec.group if run.model.layers_with_experts() else 1
    unit = group if isinstance(group, int) else 1
    if sequences % (run.sharding.replicas * unit):
        got = f"{run.sharding.replicas} for {sequences} sequences of a micro-batch" + (f" in groups of {unit}" if unit > 1 else "")
        raise BadInput(
            "sharding.replicas",
            got=got,
            needed=f"a divisor of {sequences // unit}" if sequences % unit == 0 else f"groups that divide {sequences}",
            fix="change sharding.replicas, train.global_batch or pipeline.microbatches",
        )


def _check_batch(run: Run) -> None:
    batch, dp, m = run.train.global_batch, run.degrees.dp, run.pipeline.microbatches
    if not isinstance(dp, int) or dp < 1:
        raise BadInput("degrees.dp", got=dp, needed="a whole number of at least 1", fix="set degrees.dp to auto")
    if batch % (dp * m):
        raise BadInput(
            "train.global_batch",
            got=batch,
            needed=f"a multiple of degrees.dp * pipeline.microbatches = {dp} * {m}",
            fix=f"set it to {max(1, round(batch / (dp * m))) * dp * m}",
        )
    _check_replicas(run, batch // (dp * m))
    group, held = run.router.spec.group, batch // (dp * m)
    if run.model.layers_with_experts() and isinstance(group, int) and held % group:
        raise BadInput(
            "router.group",
            got=f"{group} sequences",
            needed=f"a divisor of the {held} sequences in one rank's micro-batch",
            fix=f"set router.group to one of {divisors(held)}",
        )
    # where evaluation has a capacity, every rank needs whole groups, or the loss would depend on the layout
    grouped = run.model.layers_with_experts() and run.router.spec.eval_capacity_factor is not None and isinstance(group, int)
    unit = dp * group if grouped and isinstance(group, int) else dp
    if run.train.eval_sequences % unit:
        raise BadInput(
            "train.eval_sequences",
            got=run.train.eval_sequences,
            needed=f"a multiple of degrees.dp * router.group = {dp} * {group}" if grouped else f"a multiple of degrees.dp={dp}",
            fix=f"set it to {max(1, round(run.train.eval_sequences / unit)) * unit}",
        )
