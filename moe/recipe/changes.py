"""The effect of changing a recipe's key when a run is resumed: one table for every key.

    shape      decides names and shapes of parameters: a checkpoint that does not fit is refused, with the parameter
    function   the same shapes, but another function: a trained model would compute something else than it was trained for
    training   how training continues: its text, batches, optimizer, losses, drops, noise, dtypes
    cost       speed, memory, layout, checkpoints and records: the same losses, to rounding
    name       replaced by other keys, which are compared instead

"Function" is the model's output for a text in evaluation. So a training capacity is training, and an evaluation capacity function.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from moe.recipe.load import flat, known_keys
from moe.recipe.router_spec import RouterSpec
from moe.recipe.sections import Model, Run
from moe.recipe.shapes import NORM_EPS
from parallel.errors import BadInput, did_you_mean

Kind = Literal["shape", "function", "training", "cost", "name"]

# every key of a recipe, once: kind -> section -> keys
KINDS: dict[Kind, dict[str, str]] = {
    "shape": {
        "model": "kind vocab_size num_layers encoder_layers d_model num_kv_heads head_size d_ff moe_every moe_layers tied_embeddings "
        "qk_norm qkv_bias out_bias attention_sinks ahead",
        "model.latent": "key_rank query_rank rotary_size value_size",
        "router": "logits input_norm expert_scale",
        "lora": "rank targets",
        "experts": "num_experts d_ff biases shared shared_d_ff shared_gate residual",
    },
    "function": {
        "model": "num_heads ffn norm norm_eps positions document_mask document_separator sliding_window sliding_layers clip_qkv logit_cap",
        "model.swiglu": "alpha limit offset",
        "model.rope": "base scaling factor trained_length low high whole_pairs mscale mscale_all pairs fraction",
        "model.scales": "embedding residual attention head",
        "experts": "ffn skip zero",
        "router": "num_choices logit_cap score softmax_over select hash_table mixer_margin expert_groups top_groups group_score bias_rate "
        "gates gate_scale gate_on "
        "group eval_capacity_factor min_capacity capacity_counts capacity_rounding capacity_multiple drop queue",
        "data": "tokenizer vocab_size",
        "lora": "alpha",
    },
    "training": {
        "model": "max_length ahead_weight dropout init_scale",
        "experts": "dropout",
        "router": "jitter noise second capacity_factor balance_weight balance_counts balance_scope importance_weight load_weight z_weight "
        "allow_noncausal",
        "pipeline": "schedule drain_every vertical_sync",  # some schedules step with older weights
        "precision": "compute master loss_scale",
        "data": "source path sources text_key validation_share objective",
        "optimizer": "kind lr beta1 beta2 eps weight_decay warmup_steps schedule decay_share min_lr_share clip_norm",
        "optimizer.kfac": "damping ema refresh_every delay experts",
        "optimizer.muon": "momentum nesterov iterations scale lr_factor",
        "optimizer.adafactor": "decay_rate clip step floor eps",
        "optimizer.sgd": "momentum nesterov",
        "train": "steps global_batch seed on_nan max_skips",
    },
    "cost": {
        "experts": "rebalance_every kernels",
        "dispatch": "kind overlap_chunks node_size",
        "degrees": "dp ep etp tp sp pp",
        "sharding": "kind replicas stage engine reshard prefetch allow_slow",
        "sharding.offload": "optimizer parameters path",
        "tensor": "kind depth sequence_parallel overlap_chunks",
        "sequence": "kind order heads keep_attention",
        "pipeline": "microbatches chunks layers pipelines energy_plan",
        "tiling": "ffn head",
        "recompute": "kind every loss_chunks",
        "train": "eval_every eval_sequences save_every keep save_mode grace_s timeout_s audit_every compile deterministic "
        "sample_tokens measure_speed report trackers",
    },
    "name": {"router": "preset"},
}
# keys on which the order of samples depends
ORDER = ("train.global_batch", "train.seed", "model.max_length")
# keys that only a capacity reads; evaluation has one only with router.eval_capacity_factor
_OF_CAPACITY = ("group", "min_capacity", "capacity_counts", "capacity_rounding", "capacity_multiple", "drop", "queue")


def keys_of(kind: Kind) -> list[str]:
    return [f"{section}.{key}" for section, keys in KINDS[kind].items() for key in keys.split()]


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.before)} -> {shown(self.after)}"


def changes(before: Run, after: Run) -> list[Change]:
    """Return every key with a different value. The router's values are its preset's with the recipe's own."""
    old, new = _values(before), _values(after)
    return [Change(key, old[key], new[key]) for key in known_keys() if old[key] != new[key]]


def function_changes(before: Run, after: Run) -> list[Change]:
    """Return every key with a change after which parameters compute something else. Keys that decide shapes are checked by the shapes."""
    old, new = _function(before), _function(after)
    found = [Change(key, old[key], new[key]) for key in keys_of("function") if key in old.keys() & new.keys() and old[key] != new[key]]
    follows = before.experts.ffn is None and after.experts.ffn is None  # then model.ffn decides
    return [c for c in found if not (c.key == "experts.ffn" and follows) and not (c.key == "router.bias_rate" and c.before is None)]


def _values(run: Run) -> dict[str, Any]:
    spec = run.router.spec
    return flat(run) | {f"router.{field.name}": getattr(spec, field.name) for field in fields(RouterSpec)}


def _function(run: Run) -> dict[str, Any]:
    """Return the values that decide the model's function, without keys that nothing reads."""
    values = _values(run)
    values["router.bias_rate"] = None if run.router.spec.bias_rate is None else "a bias"  # it starts at zero: only losing one matters
    values["router.hash_table"] = (
        None if run.router.spec.hash_table is None else "a table"
    )  # moe/train/start/resume.py compares its contents
    values["experts.ffn"] = run.experts.ffn or run.model.ffn
    defaults = {NORM_EPS[kind] for kind in _norms(run)}
    values["model.norm_eps"] = None if defaults == {run.model.norm_eps} else run.model.norm_eps
    usual = (run.model.head_size or run.model.d_model // run.model.num_heads) ** -0.5
    values["model.scales.attention"] = None if run.model.scales.attention == usual else run.model.scales.attention
    unread = [f"router.{key}" for key in _OF_CAPACITY] if run.router.spec.eval_capacity_factor is None else []
    unread += ["data.vocab_size"] if run.data.tokenizer == "bytes" else []
    unread += _unread_rope(run.model)
    unread += [] if run.lora.rank else ["lora.alpha"]
    networks = {run.model.ffn, values["experts.ffn"] if run.model.layers_with_experts() else run.model.ffn}
    unread += [key for key in values if key.startswith("model.swiglu.") and "swiglu" not in networks]
    values["model.rope.high"] = None if "model.rope.high" in unread else run.model.rope.most_turns
    if not run.model.layers_with_experts():
        unread += [key for key in values if key.startswith(("router.", "experts."))]
    return {key: values[key] for key in keys_of("function") if key not in unread}


def _norms(run: Run) -> set[str]:
    """Return the kinds of norms that read model.norm_eps. Norms of queries, keys and a router's input are always RMSNorms."""
    routed = run.router.spec.input_norm == "rmsnorm" and run.model.layers_with_experts()
    return {run.model.norm} | ({"rmsnorm"} if routed or run.model.qk_norm != "none" else set())


def _unread_rope(model: Model) -> list[str]:
    stretch, parts = ["model.rope.factor"], ["model.rope.trained_length", "model.rope.low", "model.rope.high"]
    if model.positions == "t5":
        return ["model.rope.base", "model.rope.scaling", *stretch, *parts]
    return {"none": [*stretch, *parts], "linear": parts, "ntk": parts, "dynamic": parts[1:]}.get(model.rope.scaling, [])


def check_allowed(allowed: Sequence[str]) -> None:
    """Refuse `--allow-change KEY` for a key that it does not apply to. Raises BadInput."""
    for key in allowed:
        kind = next((kind for kind in KINDS if key in keys_of(kind)), None)
        if kind is None:
            near = did_you_mean(key, keys_of("function"))
            fix = f"did you mean --allow-change {near}?" if near else "see: docs/use/checkpoints.md"
            raise BadInput(f"--allow-change {key}", got="a key that does not exist", needed="a key of a recipe", fix=fix)
        if kind == "shape":
            fix = "start over with --fresh or another --out; moe convert turns one model into another"
            raise BadInput(f"--allow-change {key}", got="a key that decides the parameters' shapes", needed="the checkpoint's", fix=fix)
        if kind != "function":
            what = "a key that needs no permission: its change is printed, and made" if kind != "name" else "a name for other keys"
            fix = "remove it" if kind != "name" else "name the keys themselves: the refusal lists them"
            raise BadInput(f"--allow-change {key}", got=what, needed="a key that changes what the model computes", fix=fix)


def check_function(
    before: Run, after: Run, *, allowed: Sequence[str], where: str, otherwise: str = "start over with --fresh or another --out"
) -> None:
    """Refuse to resume with another function, unless every changed key is `allowed`. `where` names the checkpoint. Raises BadInput."""
    refused = [change for change in function_changes(before, after) if change.key not in allowed]
    if not refused:
        return
    flags = " ".join(f"--allow-change {change.key}" for change in refused)
    back = " ".join(f"--{change.key} {shown(change.before)}" for change in refused)
    raise BadInput(
        ", ".join(change.key for change in refused),
        got=", ".join(shown(change.after) for change in refused),
        needed=f"{', '.join(shown(change.before) for change in refused)}, with which {where} was trained",
        fix=f"{back}, {otherwise}, or {flags} if it is meant",
    )


_MOMENTS = {"kfac": "adamw"}  # optimizer kinds that keep another kind's states


def check_moments(before: Run, after: Run, *, where: str) -> None:
    """Refuse to resume with an optimizer that keeps other states than the checkpoint has. Raises BadInput."""
    old, new = before.optimizer.kind, after.optimizer.kind
    if _MOMENTS.get(old, old) != _MOMENTS.get(new, new):
        fix = f"--optimizer.kind {old}, or begin anew with its weights alone: --init_from RUN --out ANOTHER"
        raise BadInput("optimizer.kind", got=new, needed=f"{old}, whose state {where} has", fix=fix)


def change_lines(before: Run, after: Run, *, begun: bool) -> list[str]:
    """Return one line for each effect of the changes, with its keys; none without changes. `begun`: the run has seen samples."""
    function = {change.key for change in function_changes(before, after)}
    lines: dict[str, list[Change]] = {}
    for change in changes(before, after):
        order, cost = begun and change.key in ORDER, change.key in keys_of("cost")
        means = ", and the order of samples with it" if order else ", for speed, memory or records only" if cost else ""
        means = ", and with it what the model computes, as allowed" if change.key in function else means
        lines.setdefault(means, []).append(change)
    return [f"changed since the checkpoint{means}: {', '.join(map(str, some))}" for means, some in lines.items()]


def shown(value: Any) -> str:
    """Return a value as a recipe writes it."""
    return value if isinstance(value, str) else json.dumps(value)
