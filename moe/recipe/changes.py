"""Compares the recipe of a resumed run with the recipe in its checkpoint. Some changes are refused; a printed line states the effect of the
others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe.recipe.keys import facts, flat, keys_of, known_keys, not_met
from moe.recipe.sections import Run
from moe.recipe.shapes import NORM_EPS
from parallel.errors import BadInput, did_you_mean
from parallel.fixes import typed, written

# the order of samples depends on these keys
ORDER = ("train.global_batch", "train.seed", "model.max_length", "data.packing")
# router keys that matter only under a capacity limit, which evaluation has only if router.eval_capacity_factor is set
_OF_CAPACITY = ("group", "min_capacity", "capacity_counts", "capacity_rounding", "capacity_multiple", "drop", "queue")


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {written(self.before)} -> {written(self.after)}"


def changes(before: Run, after: Run) -> list[Change]:
    """Return every key with different values in the two recipes. For a router key with the value "preset", the value that the preset gives
    is compared."""
    old, new = _values(before), _values(after)
    return [Change(key, old[key], new[key]) for key in known_keys() if old[key] != new[key]]


def function_changes(before: Run, after: Run) -> list[Change]:
    """Return the changed keys that alter what the model computes, but not the parameters' shapes."""
    old, new = _function(before), _function(after)
    found = [Change(key, old[key], new[key]) for key in keys_of("function") if key in old.keys() & new.keys() and old[key] != new[key]]
    by_model = before.experts.ffn is None and after.experts.ffn is None  # experts use model.ffn, and its change is already listed
    return [c for c in found if not (c.key == "experts.ffn" and by_model) and not (c.key == "router.bias_rate" and c.before is None)]


def _values(run: Run) -> dict[str, Any]:
    return flat(run) | {f"router.{key}": value for key, value in run.router}


def _function(run: Run) -> dict[str, Any]:
    """Return key -> value, for the keys that have an effect in this run and can change the function that the model computes. Equivalent
    values become equal: for example, a norm_eps that is the norm's default becomes None."""
    values = _values(run)
    values["router.bias_rate"] = None if run.router.bias_rate is None else "a bias"  # the rate's value affects training alone
    values["router.hash_table"] = None if run.router.hash_table is None else "a table"  # moe/train/start/resume.py compares tables
    values["experts.ffn"] = run.experts.ffn or run.model.ffn
    defaults = {NORM_EPS[kind] for kind in _norms(run)}
    values["model.norm_eps"] = None if defaults == {run.model.norm_eps} else run.model.norm_eps
    usual = (run.model.head_size or run.model.d_model // run.model.num_heads) ** -0.5
    values["model.scales.attention"] = None if run.model.scales.attention == usual else run.model.scales.attention
    unread = [f"router.{key}" for key in _OF_CAPACITY] if run.router.eval_capacity_factor is None else []
    unread += [key for key in keys_of("function") if not_met(run, (*facts(key).of, *facts(key).off_without)) is not None]
    values["model.rope.high"] = None if "model.rope.high" in unread else run.model.rope.most_turns
    return {key: values[key] for key in keys_of("function") if key not in unread}


def _norms(run: Run) -> set[str]:
    routed = run.router.input_norm == "rmsnorm" and run.model.layers_with_experts()
    return {run.model.norm} | ({"rmsnorm"} if routed or run.model.qk_norm != "none" else set())


def check_allowed(allowed: Sequence[str]) -> None:
    """Raise BadInput for `--allow-change KEY` if the key does not exist, needs no permission, or cannot be changed."""
    for key in allowed:
        kind = facts(key).alters if key in known_keys() else None
        if kind is None:
            near = did_you_mean(key, keys_of("function"))
            fix = f"did you mean --allow-change {near}?" if near else "see: docs/use/checkpoints.md"
            raise BadInput(f"--allow-change {key}", got="a key that does not exist", needed="a key of a recipe", fix=fix)
        if kind == "shape":
            fix = "start over with --fresh or another --out; moe convert turns one model into another"
            got, needed = "a key that decides the parameters' shapes", "a key that may change: this one must have the checkpoint's value"
            raise BadInput(f"--allow-change {key}", got=got, needed=needed, fix=fix)
        if kind != "function":
            what = "a key that needs no permission: its change is printed and applied" if kind != "name" else "a preset of other keys"
            fix = "remove it" if kind != "name" else "name the preset's keys instead: run without --allow-change, and the error lists them"
            raise BadInput(f"--allow-change {key}", got=what, needed="a key that changes what the model computes", fix=fix)


def check_function(
    before: Run, after: Run, *, allowed: Sequence[str], where: str, otherwise: str = "start over with --fresh or another --out"
) -> None:
    """Raise BadInput if a changed key alters the function that the model computes, unless the key is in `allowed`.
    where: name of the checkpoint, for the message. otherwise: another fix, in words."""
    refused = [change for change in function_changes(before, after) if change.key not in allowed]
    if refused:
        flags = " ".join(f"--allow-change {change.key}" for change in refused)
        got, old = (", ".join(map(written, values)) for values in ([c.after for c in refused], [c.before for c in refused]))
        fix = typed({change.key: change.before for change in refused}) | otherwise | f"{flags} if it is meant"
        raise BadInput(", ".join(c.key for c in refused), got=got, needed=f"{old}, with which {where} was trained", fix=fix)


_MOMENTS = {"kfac": "adamw"}  # optimizer -> another optimizer with the same states: K-FAC's checkpoints have only AdamW's moments


def check_moments(before: Run, after: Run, *, where: str) -> None:
    """Raise BadInput if the optimizer of `after` cannot read the optimizer states in the checkpoint. where: the checkpoint's name."""
    anew = "start a new run from the checkpoint's weights: --init_from RUN --out ANOTHER"
    if set(before.train.freeze) != set(after.train.freeze):
        got, held = written(list(after.train.freeze)), written(list(before.train.freeze))
        fix = typed({"train.freeze": list(before.train.freeze)}) | anew
        needed = f"{held}, as in {where}, which has optimizer states for all other weights"
        raise BadInput("train.freeze", got=got, needed=needed, fix=fix)
    old, new = before.optimizer.kind, after.optimizer.kind
    if _MOMENTS.get(old, old) != _MOMENTS.get(new, new):
        fix = typed({"optimizer.kind": old}) | anew
        raise BadInput("optimizer.kind", got=new, needed=f"{old}, whose optimizer states {where} has", fix=fix)


def change_lines(before: Run, after: Run, *, begun: bool) -> list[str]:
    """Return lines of text on changed keys, one line for each kind of effect. begun: whether the run has already trained on samples."""
    function = {change.key for change in function_changes(before, after)}
    lines: dict[str, list[Change]] = {}
    for change in changes(before, after):
        order, cost = begun and change.key in ORDER, change.key in keys_of("cost")
        means = ", and the order of samples with it" if order else ", for speed, memory or records only" if cost else ""
        means = ", and with it what the model computes, as allowed" if change.key in function else means
        lines.setdefault(means, []).append(change)
    return [f"changed since the checkpoint{means}: {', '.join(map(str, some))}" for means, some in lines.items()]
