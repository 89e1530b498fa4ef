"""Checks of values that are allowed one by one but not together: each mistake is one line, found before torch is imported."""

from __future__ import annotations

import math
import os

from moe.checks.audit import check_audit
from moe.checks.encoder_decoder import check_encoder_decoder
from moe.checks.lora import check_lora
from moe.checks.model import check_model
from moe.checks.optimizer import check_optimizer
from moe.checks.pipeline import check_pipeline
from moe.checks.sequence import check_sequence
from moe.checks.sharding import check_sharding
from moe.checks.tensor import check_tensor
from moe.checks.tiling import check_tiling
from moe.experts.dispatch.catalog import check_dispatch
from moe.kernels.products import PRODUCTS
from moe.recipe.idle import check_settings
from moe.recipe.plugin import check_there
from moe.recipe.sections import Data, Run
from moe.router.checks import check_causal, check_read, check_slots, check_spec
from moe.router.methods.catalog import method_of
from parallel.errors import BadInput, counted, did_you_mean
from parallel.fixes import Nproc, Remove, Set, guess
from parallel.mesh.mesh import Degrees, check_world, divisors
from parallel.store.files import user_path


def check_run(run: Run, world_size: int) -> Run:
    """Return the run with its `auto` degrees resolved for `world_size` processes. Raises BadInput for the first combination that cannot
    work.
    """
    run = run.resolve(world_size)
    d = run.degrees
    if isinstance(d.dp, int) and min(d.dp, d.pp, d.tp, d.sp) > 0:  # otherwise the check of the wrong degree comes first
        check_world(Degrees(dp=d.dp, pp=d.pp, tp=d.tp, sp=d.sp), world_size)
    check_together(run)
    check_world(run.mesh_degrees(), world_size)
    return run


def check_together(run: Run) -> None:
    """Refuse a resolved run that cannot work. Raises BadInput for the first reason found."""
    for key, value in run.plugins().items():
        check_there(key, value)
    check_model(run)
    check_encoder_decoder(run)
    check_settings(run)
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


def _check_experts(run: Run) -> None:
    if not run.model.layers_with_experts():
        if run.degrees.ep not in ("auto", 1):
            raise BadInput(
                "degrees.ep", got=run.degrees.ep, needed="1 for a dense model", fix=Set("degrees.ep", 1) | Set("model.moe_every", 2)
            )
        if run.degrees.etp != 1:
            raise BadInput(
                "degrees.etp", got=run.degrees.etp, needed="1 for a dense model", fix=Set("degrees.etp", 1) | Set("model.moe_every", 2)
            )
        return
    _check_networks(run)
    counts, ep = run.experts.counts, run.degrees.ep
    got = counts[0] if len(counts) == 1 else list(counts)
    if isinstance(ep, int) and ep > 0 and any(e % ep for e in counts):
        common = math.gcd(*counts)
        fitting = divisors(math.gcd(common, run.degrees.dp)) if isinstance(run.degrees.dp, int) and run.degrees.dp > 0 else divisors(common)
        raise BadInput("experts.num_experts", got=got, needed=f"a multiple of degrees.ep={ep}", fix=Set("degrees.ep", *fitting))
    for count in counts:
        check_spec(run.router, count + run.experts.free)
    _check_free(run)
    check_read(run.router, run.router.own)
    check_causal(run.router, allowed=run.router.allow_noncausal)


def _check_free(run: Run) -> None:
    """Check choices that cost nothing (zero, skip): tokens must choose experts, and experts must stay on their rank."""
    x = run.experts
    key = "skip" if x.skip else "zero"
    reasons: dict[str, tuple[bool, object, object, str]] = {
        "router.select": (not method_of(run.router).tokens_choose, run.router.select, "top_k", "tokens choose to cost nothing"),
        "experts.rebalance_every": (bool(x.rebalance_every), x.rebalance_every, 0, "loads are of what costs something"),
    }
    for what, (refused, got, plain, why) in reasons.items() if x.free else ():
        if refused:
            fix = Set(what, plain) | Set(f"experts.{key}", 0)
            raise BadInput(what, got=f"{got} with experts.{key}={getattr(x, key)}", needed=f"{plain}: {why}", fix=fix)


def _check_networks(run: Run) -> None:
    """Check the number of experts of each layer, and the dense networks next to them."""
    x, layers = run.experts, run.model.layers_with_experts()
    if isinstance(x.num_experts, tuple) and len(x.num_experts) != len(layers):
        raise BadInput(
            "experts.num_experts",
            got=counted(len(x.num_experts), "number"),
            needed=f"one for each of the {len(layers)} layers with experts ({', '.join(map(str, layers))}), or one number for all",
            fix=f"list {counted(len(layers), 'number')}, or change model.moe_every",
        )
    if x.residual and x.shared:
        raise BadInput(
            "experts.residual",
            got=f"true with experts.shared={x.shared}",
            needed="one network that every token passes",
            fix=Set("experts.shared", 0) | Set("experts.residual", False),
        )


def _check_dispatch(run: Run) -> None:
    """Check how rows travel between ranks, and how each expert's matrices are split."""
    ep, etp, sparse = run.degrees.ep, run.degrees.etp, run.model.layers_with_experts()
    units = run.experts.d_ff or run.model.d_ff
    if sparse and etp > 0 and units % etp:
        raise BadInput(
            "degrees.etp",
            got=etp,
            needed=f"a divisor of the experts' d_ff={units}: each of its ranks holds an equal part of the hidden units",
            fix=Set("degrees.etp", *divisors(math.gcd(units, run.degrees.dp if isinstance(run.degrees.dp, int) else units))),
        )
    products = PRODUCTS[run.experts.products]
    for key, shards in (("degrees.etp", etp), ("tiling.ffn", run.tiling.ffn)):
        if products.whole_rows is not None and shards != 1:
            needed = f"1 with {products.name} products of the experts: {products.whole_rows}"
            raise BadInput(key, got=shards, needed=needed, fix=f"set {key} to 1")
    ranks = ep if sparse and isinstance(ep, int) and ep > 1 else 1
    check_dispatch(run.dispatch, ranks=ranks, held=math.gcd(*(count // ranks for count in run.experts.counts)) if ranks > 1 else 0)


def _check_precision(run: Run) -> None:
    p = run.precision
    if p.master == "bf16" and p.compute != "bf16":
        raise BadInput(
            "precision.master", got=f"bf16 with compute {p.compute}", needed="fp32 master weights", fix=Set("precision.master", "fp32")
        )
    if p.compute == "fp16" and p.loss_scale == "none":
        raise BadInput(
            "precision.loss_scale",
            got="none with compute fp16",
            needed="a loss scale: gradients below 6e-8 vanish in fp16",
            fix=Set("precision.loss_scale", "dynamic"),
        )
    if p.compute != "fp16" and p.loss_scale != "none":
        raise BadInput(
            "precision.loss_scale",
            got=f"{p.loss_scale} with compute {p.compute}",
            needed=f"none: {p.compute} has the range of fp32",
            fix=Set("precision.loss_scale", "none"),
        )
    if isinstance(p.loss_scale, float) and p.loss_scale <= 0:
        raise BadInput("precision.loss_scale", got=p.loss_scale, needed="above 0", fix=Set("precision.loss_scale", "dynamic"))


def _check_data(run: Run) -> None:
    d = run.data
    if d.sources and d.path is not None:
        fix = Set("data.sources", [], said="[] to take the path alone") | Set("data.path", None)
        raise BadInput("data.path", got=f"{d.path}, and data.sources as well", needed="one of the two", fix=fix)
    if d.tokenizer != "ids" and d.vocab_size <= 256:
        needed = "greater than 256: each byte has an id, and what separates documents"
        raise BadInput("data.vocab_size", got=d.vocab_size, needed=needed, fix=Set("data.vocab_size", 257, said="257 or more"))
    if d.tokenizer == "ids" and run.model.document_mask and run.model.document_separator is None:
        needed = "model.document_separator with it: ids do not show which one separates documents"
        fix = "give model.document_separator" | Set("model.document_mask", False)
        raise BadInput("model.document_mask", got="true with data.tokenizer=ids", needed=needed, fix=fix)
    if (separator := run.model.document_separator) is not None and separator >= run.vocab_size:
        fix = Set("it", run.vocab_size - 1, said=f"at most {run.vocab_size - 1}")
        raise BadInput("model.document_separator", got=separator, needed=f"an id of the vocabulary of {run.vocab_size}", fix=fix)
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
    """Check keys for samples that a user's program gives: they are token ids, and the only source. A recipe's own part interprets its
    path.
    """
    if d.tokenizer == "bpe":
        needed = "ids, which the samples are, or bytes"
        raise BadInput(
            "data.tokenizer", got=f"bpe with data.source={d.source}", needed=needed, fix=Set("it", "ids", said="ids, and data.vocab_size")
        )
    for key, value in (("path", d.path if d.source == "given" else None), ("sources", d.sources)):
        if value:
            raise BadInput(f"data.{key}", got=f"it with data.source={d.source}", needed="one of the two", fix=Remove(f"data.{key}"))
    if d.objective != "next_token":
        fix = Set("data.objective", "next_token")
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
            fix=guess(str(path.parent / near)) if near else "check the spelling and the folder you are in",
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        needed, fix = "a file or folder that can be read", f"chmod -R u+rX {given}, or ask its owner"
        raise BadInput(key, got=f"{given}: Permission denied", needed=needed, fix=fix)
    empty = path.stat().st_size == 0 if path.is_file() else not any(p.is_file() and p.stat().st_size for p in path.rglob("*"))
    if empty:
        raise BadInput(key, got=f"{given}, which is empty", needed="text", fix="name a file or folder that holds text")


def _check_replicas(run: Run, sequences: int) -> None:
    """Check that the replicas of dp can share one process and each of its micro-batches."""
    if not run.sharding.named.threads:
        return
    if run.degrees.dp != 1:
        raise BadInput(
            "sharding.kind",
            got=f"dp with {run.degrees.dp} processes",
            needed="one process, which has all replicas",
            fix=Nproc(1) & Set("sharding.replicas", run.degrees.dp) | Set("sharding.kind", "ddp"),
        )
    group = run.router.group if run.model.layers_with_experts() else 1
    unit = group if isinstance(group, int) else 1
    if sequences % (run.sharding.replicas * unit):
        held = counted(sequences, "sequence")
        got = f"{run.sharding.replicas} for {held} of a micro-batch" + (f" in groups of {unit}" if unit > 1 else "")
        raise BadInput(
            "sharding.replicas",
            got=got,
            needed=f"a divisor of {sequences // unit}" if sequences % unit == 0 else f"groups that divide {sequences}",
            fix="change sharding.replicas, train.global_batch or pipeline.microbatches",
        )


def _check_batch(run: Run) -> None:
    batch, dp, m = run.train.global_batch, run.degrees.dp, run.pipeline.microbatches
    if not isinstance(dp, int) or dp < 1:
        raise BadInput("degrees.dp", got=dp, needed="a whole number of at least 1", fix=Set("degrees.dp", "auto"))
    if batch % (dp * m):
        raise BadInput(
            "train.global_batch",
            got=batch,
            needed=f"a multiple of degrees.dp * pipeline.microbatches = {dp} * {m}",
            fix=Set("it", max(1, round(batch / (dp * m))) * dp * m),
        )
    _check_replicas(run, batch // (dp * m))
    group, held = run.router.group, batch // (dp * m)
    if run.model.layers_with_experts() and isinstance(group, int) and held % group:
        raise BadInput(
            "router.group",
            got=counted(group, "sequence"),
            needed=f"a divisor of the {held} sequences in one rank's micro-batch",
            fix=Set("router.group", *divisors(held)),
        )
    if run.model.layers_with_experts():
        sequences = group if isinstance(group, int) else held if group == "rank" else 1
        length = min(run.model.max_length, run.model.target_length or run.model.max_length)  # of the shorter half
        check_slots(run.router, group_tokens=sequences * length, num_experts=max(run.experts.counts))
    # if evaluation has a capacity, every rank needs whole groups, or the loss would depend on the layout
    grouped = run.model.layers_with_experts() and run.router.eval_capacity_factor is not None and isinstance(group, int)
    unit = dp * group if grouped and isinstance(group, int) else dp
    if run.train.eval_sequences % unit:
        raise BadInput(
            "train.eval_sequences",
            got=run.train.eval_sequences,
            needed=f"a multiple of degrees.dp * router.group = {dp} * {group}" if grouped else f"a multiple of degrees.dp={dp}",
            fix=Set("it", max(1, round(run.train.eval_sequences / unit)) * unit),
        )
