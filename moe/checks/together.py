"""`check_run`: all checks of a recipe, and the checks of values that are allowed one by one but not together."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from moe.checks.clash import clash
from moe.checks.frozen import check_freeze, check_lora
from moe.checks.model import check_encoder_decoder, check_model
from moe.checks.optimizer import check_optimizer
from moe.checks.pipeline import check_pipeline
from moe.checks.sequence import check_sequence
from moe.checks.sharding import check_sharding
from moe.checks.tensor import check_tensor, check_tiling
from moe.experts.dispatch import check_dispatch
from moe.kernels import check_widths
from moe.kernels.products import PRODUCTS
from moe.plan.pipeline import continuous
from moe.recipe.idle import check_settings
from moe.recipe.keys import value_of
from moe.recipe.plugin import check_there
from moe.recipe.sections import Data, Run
from moe.router.checks import check_causal, check_read, check_slots, check_spec
from moe.router.methods import method_of
from parallel.data.kinds import PLAIN
from parallel.errors import BadInput, counted, did_you_mean, some
from parallel.fixes import Nproc, Remove, Set, guess
from parallel.mesh.mesh import Degrees, check_world, divisors
from parallel.pipeline.schedules import ADVISED
from parallel.store.files import named_encoding, user_path

ENCODINGS = ("utf-8", "utf-16", "windows-1252", "iso-8859-1", "shift_jis", "gb18030")  # examples that an error names


def check_run(run: Run, world_size: int) -> Run:
    """Return the run with its `auto` degrees resolved for `world_size` processes. Raises BadInput for the first mistake that is found."""
    run = run.resolve(world_size)
    d = run.degrees
    if isinstance(d.dp, int) and d.dp > 0:  # otherwise `check_together` refuses it
        check_world(Degrees(dp=d.dp, pp=d.pp, tp=d.tp, sp=d.sp), world_size)
    check_together(run)
    check_world(run.mesh_degrees(), world_size)
    return run


def check_together(run: Run) -> None:
    """Raise BadInput for the first mistake in a run with resolved degrees."""
    for key, value in run.plugins().items():
        check_there(key, value)
    for key in ("degrees.pp", "degrees.tp", "degrees.sp"):
        if value_of(run, key) > 1 and run.sharding.named.threads:
            needed = f"ddp, {'or zero of stage 1' if key == 'degrees.pp' else 'fsdp or zero'}: dp runs all replicas in one process"
            raise clash(run, "sharding.kind", key, "ddp", needed=needed)
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
    _check_audit(run)
    check_lora(run)
    check_freeze(run)


def _check_experts(run: Run) -> None:
    if not run.model.layers_with_experts():
        for key, degree in (("degrees.ep", 1 if run.degrees.ep == "auto" else run.degrees.ep), ("degrees.etp", run.degrees.etp)):
            if degree != 1:
                raise BadInput(key, got=degree, needed="1 for a dense model", fix=Set(key, 1) | Set("model.moe_every", 2))
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
    if not run.experts.free:
        return
    key = "experts.skip" if run.experts.skip else "experts.zero"
    if not method_of(run.router).tokens_choose:
        raise clash(run, "router.select", key, "top_k", "a token must be able to choose no computation", Set(key, 0))


def _check_networks(run: Run) -> None:
    x, layers = run.experts, run.model.layers_with_experts()
    if isinstance(x.num_experts, tuple) and len(x.num_experts) != len(layers):
        needed = f"one for each of {counted(len(layers), 'layer')} with experts ({some(map(str, layers))}), or one number for all"
        fix = f"list {counted(len(layers), 'number')}, or change model.moe_every"
        raise BadInput("experts.num_experts", got=counted(len(x.num_experts), "number"), needed=needed, fix=fix)
    if x.residual and x.shared:
        got, fix_shared = f"true with experts.shared={x.shared}", Set("experts.shared", 0) | Set("experts.residual", False)
        raise BadInput("experts.residual", got=got, needed="a residual network or shared experts, not both", fix=fix_shared)


def _check_dispatch(run: Run) -> None:
    ep, etp, sparse = run.degrees.ep, run.degrees.etp, run.model.layers_with_experts()
    units = run.experts.d_ff or run.model.d_ff
    if sparse and units % etp:
        needed = f"a divisor of the experts' d_ff={units}: each rank of etp holds an equal part of the hidden units"
        fitting = divisors(math.gcd(units, run.degrees.dp if isinstance(run.degrees.dp, int) else units))
        raise BadInput("degrees.etp", got=etp, needed=needed, fix=Set("degrees.etp", *fitting))
    products = PRODUCTS[run.experts.products]
    for key, shards in (("degrees.etp", etp), ("tiling.ffn", run.tiling.ffn)):
        if products.whole_rows is not None and shards != 1:
            needed = f"1 with {products.name} products of the experts: {products.whole_rows}"
            raise BadInput(key, got=shards, needed=needed, fix=f"set {key} to 1")
    if sparse:
        _check_widths(run, units // etp)
    ranks = ep if sparse and isinstance(ep, int) and ep > 1 else 1
    check_dispatch(run.dispatch, ranks=ranks, held=math.gcd(*(count // ranks for count in run.experts.counts)) if ranks > 1 else 0)


def _check_widths(run: Run, units: int) -> None:
    """Raise BadInput if the experts' kernels do not support the width of tokens or of hidden units. units: number of an expert's hidden
    units on a rank, before tiling.ffn cuts them."""
    tiles, compute = run.tiling.ffn, run.precision.compute
    name = "a tile's d_ff" if tiles > 1 else "a rank's d_ff" if run.degrees.etp > 1 else "d_ff"
    widths = {"d_model": run.model.d_model, name: units // tiles}
    check_widths(run.experts.kernels, widths, dtype=compute, element_bytes=2 if compute in ("bf16", "fp16") else 4)


def _check_precision(run: Run) -> None:
    p, by = run.precision, f"compute {run.precision.compute}"
    if p.master == "bf16" and p.compute != "bf16":
        raise clash(run, "precision.master", by, "fp32", needed="fp32 master weights")
    if p.compute == "fp16" and p.loss_scale == "none":
        raise clash(run, "precision.loss_scale", by, "dynamic", needed="a loss scale: gradients below 6e-8 vanish in fp16")
    if p.compute != "fp16" and p.loss_scale != "none":
        raise clash(run, "precision.loss_scale", by, "none", f"{p.compute} has the range of fp32")
    if isinstance(p.loss_scale, float) and p.loss_scale <= 0:
        raise BadInput("precision.loss_scale", got=p.loss_scale, needed="above 0", fix=Set("precision.loss_scale", "dynamic"))
    if p.casts != "use":
        _check_casts(run)


def _check_casts(run: Run) -> None:
    p, key = run.precision, "precision.casts"
    if p.compute == "fp32" or p.compute == p.master:
        raise clash(run, key, f"compute {p.compute} and master {p.master}", "use", "no weight is cast")
    if p.casts not in run.carrier.casts:
        casts = "the engine already gathers or holds the weights in precision.compute"
        rounded = f"autograd rounds the gradients of replicas' copies to {p.compute}"
        why = rounded if run.sharding.named.threads else casts
        raise clash(run, key, "sharding.kind", "use", why, Set("sharding.kind", PLAIN))
    if continuous(run):
        why = "stages keep older versions of the weights that the model reads"
        raise clash(run, key, "pipeline.schedule", "use", why, Set("pipeline.schedule", ADVISED))


def _check_data(run: Run) -> None:
    d = run.data
    if d.sources and d.path is not None:
        fix = Set("data.sources", [], said="[] to take the path alone") | Set("data.path", None)
        raise BadInput("data.path", got=f"{d.path}, and data.sources as well", needed="one of the two", fix=fix)
    if d.tokenizer_file is not None:
        _check_tokenizer(d, d.tokenizer_file)
    elif d.tokenizer != "ids" and d.vocab_size <= 256:
        needed = "greater than 256: one id for each byte, and one that separates documents"
        raise BadInput("data.vocab_size", got=d.vocab_size, needed=needed, fix=Set("data.vocab_size", 257, said="257 or more"))
    if d.tokenizer == "ids" and run.model.document_mask and run.model.document_separator is None:
        needed = "also model.document_separator, because the files do not say which id separates documents"
        fix = "give model.document_separator" | Set("model.document_mask", False)
        raise BadInput("model.document_mask", got="true with data.tokenizer=ids", needed=needed, fix=fix)
    if (separator := run.model.document_separator) is not None and separator >= run.vocab_size:
        fix = Set("it", run.vocab_size - 1, said=f"at most {run.vocab_size - 1}")
        raise BadInput("model.document_separator", got=separator, needed=f"an id of the vocabulary of {run.vocab_size}", fix=fix)
    if d.is_own or d.source == "chat":
        _check_given(d)
    if d.is_own:
        return
    if d.path is None and not d.sources:
        if d.source != "python_stdlib" or d.tokenizer == "ids":
            wants = f"data.source={d.source}" if d.source != "python_stdlib" else "data.tokenizer=ids"
            raise BadInput(
                "data.path",
                got="null",
                needed=f"a path for {wants}",
                fix=f"add --data.path {'FILE.jsonl' if d.source == 'chat' else 'FILE_OR_FOLDER'}",
            )
        return
    _check_encoding("data.encoding", d.encoding)
    for number, source in enumerate(d.sources):
        _check_path(f"data.sources[{number}].path", source.path)
        _check_encoding(f"data.sources[{number}].encoding", source.encoding or d.encoding)
    if d.path is not None:
        _check_path("data.path", d.path)


def _check_given(d: Data) -> None:
    """Raise BadInput if chats, or samples from a user's program or plugin, are combined with a data.tokenizer or data.objective that needs
    plain text. Samples also exclude data.sources. Samples from a program exclude data.path, which only a plugin may read."""
    if d.tokenizer == "bpe" and d.source != "chat":
        needed, fix = "ids (the samples are token ids) or bytes", Set("it", "ids", said="ids, and data.vocab_size")
        raise BadInput("data.tokenizer", got=f"bpe with data.source={d.source}", needed=needed, fix=fix)
    for key, value in (("path", d.path if d.source == "given" else None), ("sources", d.sources if d.is_own else ())):
        if value:
            raise BadInput(
                f"data.{key}", got=f"data.{key} with data.source={d.source}", needed="only one of the two", fix=Remove(f"data.{key}")
            )
    if d.objective != "next_token":
        got, fix = f"{d.objective} with data.source={d.source}", Set("data.objective", "next_token")
        raise BadInput("data.objective", got=got, needed="next_token", fix=fix)


def _check_tokenizer(d: Data, named: str) -> None:
    """Raise BadInput if data.vocab_size is not the number of ids of the tokenizer.json `named`. A file that is not there is no error: a run
    that resumes reads its checkpoint's copy, and a new run refuses it (moe/checks/begins.py)."""
    if not user_path(named, what="data.tokenizer").is_file():
        return
    from moe.data.tokenizer_file import ids_of

    if (size := ids_of(named)) != d.vocab_size:
        raise BadInput("data.vocab_size", got=d.vocab_size, needed=f"{size}, the ids of {named}", fix=Set("it", size))


def _check_encoding(key: str, name: str) -> None:
    try:
        named_encoding(name)
    except (LookupError, ValueError):
        near = did_you_mean(name, ENCODINGS)
        fix = guess(near) if near else f"one of {', '.join(ENCODINGS)}, or another of Python"
        raise BadInput(key, got=name, needed="a text encoding that Python knows", fix=fix) from None


def _check_path(key: str, given: str) -> None:
    path = user_path(given, what=key)
    if not path.exists():
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir() if os.path.exists(p)] if path.parent.is_dir() else [])
        advice = guess(str(path.parent / near)) if near else "check the spelling and the folder you are in"
        advice = "download it, and name the file" if "://" in given else advice
        if not near and re.fullmatch(r"[\w.-]+/[\w-]+", given) and not path.parent.exists():
            name = given.rpartition("/")[2]
            advice = f"if it is a data set of the Hugging Face hub: hf download {given} --repo-type dataset --local-dir {name}"
        got = f"{given}, a link to {os.readlink(path)}, which is not there" if path.is_symlink() else given
        raise BadInput(key, got=got, needed="a file or folder that exists", fix=advice)
    if not path.is_file() and not path.is_dir():
        raise BadInput(key, got=f"{given}, not a regular file", needed="a file or folder", fix="write the text into a file first")
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        needed, fix = "a file or folder that can be read", f"chmod -R u+rX {given}, or ask its owner"
        raise BadInput(key, got=f"{given}: Permission denied", needed=needed, fix=fix)
    if path.stat().st_size == 0 if path.is_file() else _is_empty(path):
        raise BadInput(key, got=f"{given}, which is empty", needed="text", fix="name a file or folder that holds text")


def _is_empty(root: Path) -> bool:
    """Return whether all files of a folder and its subfolders have 0 bytes. Return False if this user may not read one of these folders,
    because its files may have text."""
    locked: list[OSError] = []
    for folder, _, files in os.walk(root, onerror=locked.append):
        paths = [os.path.join(folder, name) for name in files]
        if not os.access(folder, os.X_OK) or any(os.path.isfile(path) and os.path.getsize(path) for path in paths):
            return False
    return not locked


def _check_replicas(run: Run, sequences: int) -> None:
    """For sharding.kind dp, whose replicas are threads of one process: raise BadInput for several processes, and if the replicas cannot
    have equal numbers of a micro-batch's sequences."""
    if not run.sharding.named.threads:
        return
    if run.degrees.dp != 1:
        fix = Nproc(1) & Set("sharding.replicas", run.degrees.dp) | Set("sharding.kind", "ddp")
        got = f"dp with {run.degrees.dp} processes"
        raise BadInput("sharding.kind", got=got, needed="one process, which has all replicas", fix=fix)
    group = run.router.group if run.model.layers_with_experts() else 1
    unit = group if isinstance(group, int) else 1
    if sequences % (run.sharding.replicas * unit):
        groups = f" in groups of {unit}" if unit > 1 else ""
        got = f"{run.sharding.replicas} for {counted(sequences, 'sequence')} of a micro-batch{groups}"
        needed = f"a divisor of {sequences // unit}" if sequences % unit == 0 else f"a router.group that divides {sequences}"
        change = "change sharding.replicas, train.global_batch or pipeline.microbatches"
        raise BadInput("sharding.replicas", got=got, needed=needed, fix=change)


def _check_batch(run: Run) -> None:
    batch, dp, m = run.train.global_batch, run.degrees.dp, run.pipeline.microbatches
    if not isinstance(dp, int) or dp < 1:
        raise BadInput("degrees.dp", got=dp, needed="a whole number of at least 1", fix=Set("degrees.dp", "auto"))
    if batch % (dp * m):
        needed, fix = f"a multiple of degrees.dp * pipeline.microbatches = {dp} * {m}", Set("it", max(1, round(batch / (dp * m))) * dp * m)
        raise BadInput("train.global_batch", got=batch, needed=needed, fix=fix)
    group, held, sparse = run.router.group, batch // (dp * m), bool(run.model.layers_with_experts())
    _check_replicas(run, held)
    if sparse and isinstance(group, int) and held % group:
        needed, fix = f"a divisor of {held}, the sequences in one rank's micro-batch", Set("router.group", *divisors(held))
        raise BadInput("router.group", got=counted(group, "sequence"), needed=needed, fix=fix)
    if sparse:
        sequences = group if isinstance(group, int) else held if group == "rank" else 1
        length = min(run.model.max_length, run.model.target_length or run.model.max_length)  # the shorter of encoder and decoder
        check_slots(run.router, group_tokens=sequences * length, num_experts=max(run.experts.counts))
    unit, words = dp, f"degrees.dp={dp}"
    if sparse and run.router.eval_capacity_factor is not None and isinstance(group, int):
        # no rank may evaluate a part of a group of router.group sequences: capacity and loss would then depend on degrees.dp
        unit, words = dp * group, f"degrees.dp * router.group = {dp} * {group}"
    if (sequences := run.train.eval_sequences) % unit:
        fix = Set("it", max(1, round(sequences / unit)) * unit)
        raise BadInput("train.eval_sequences", got=sequences, needed=f"a multiple of {words}", fix=fix)


def _check_audit(run: Run) -> None:
    offload = run.sharding.offload
    reasons = {
        "pipeline.schedule": (continuous(run), "all gradients of a step before its update, so that they can be computed twice"),
        "states on nvme": ("nvme" in (offload.optimizer, offload.parameters), "states in memory, which can be compared"),
    }
    for other, (refused, needed) in reasons.items() if run.train.audit_every else ():
        if refused:
            raise clash(run, "train.audit_every", other, 0, needed=needed)
