"""The rules of `moe doctor RUN`: what is wrong with a run's router or loss, since which step, and what to do.

    metrics.jsonl -> windows (moe/records/windows.py) + recipe -> diagnose -> findings -> a line each

A running job, its trackers, the report and `moe doctor RUN` show the same findings. A rule is one object in RULES: a condition of
moe/records/conditions.py and a remedy. A rule that finds a cause `hides` the rules of consequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe.recipe.sections import Run
from moe.records.conditions import (
    balanced_by,
    because,
    certain,
    cold_start,
    crowded,
    drifted,
    dropped,
    enough_warmup,
    equal_tokens,
    few_slots,
    first_size,
    fixed_load,
    frozen,
    is_beyond,
    is_frozen,
    lasting,
    leaks,
    one_source,
    rounded_away,
    router_leads,
    saturated,
    slots_each,
    spiking,
    swings,
    too_fast,
)
from moe.records.windows import Filling, Found, Window, window_length, windows_of
from moe.router.checks import looks_ahead, only_second_choices_look_ahead
from moe.router.methods import method_of
from parallel.errors import plain
from parallel.fixes import Fix, Set, Words


@dataclass(frozen=True)
class Finding:
    """A fault that a rule found. rule: the rule's name. since: the fault's first step. value: the measured number. said: a sentence about
    the fault. fix: a change of the recipe, as data."""

    rule: str
    since: int
    value: float
    said: str
    fix: Fix

    @property
    def line(self) -> str:
        """One line: the fault, since which step, and what to do."""
        return plain(f"{self.said}, since step {self.since:,}: {self.fix}")

    def row(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return {"rule": self.rule, "since": self.since, "value": self.value, "line": self.line}


@dataclass(frozen=True)
class Rule:
    """A rule. reads: fields of metrics.jsonl that its condition needs. find: function of (windows of the run in order, recipe) that returns
    what it found, or None. fix: function of the recipe that returns the remedy. hides: names of rules whose findings this one explains."""

    name: str
    reads: tuple[str, ...]
    find: Callable[[Sequence[Window], Run], Found | None]
    fix: Callable[[Run], Fix]
    hides: tuple[str, ...] = ()


# --- the remedies -------------------------------------------------------------------------------------------------------------------------


def slower(run: Run) -> Fix:
    """Return the fix that lowers optimizer.lr: to the std of the router's initial weights if lr is far above it, otherwise to a tenth."""
    return Set("optimizer.lr", float(f"{first_size(run) if is_beyond(run) else run.optimizer.lr / 10:.2g}"))


def steadier(run: Run) -> Fix:
    """Return the fix for a loss that spikes: a smaller optimizer.beta2, so that Adam's second moment follows the gradients faster (arXiv
    2304.13013), or a lower learning rate."""
    follows = Set("optimizer.beta2", 0.95)
    return follows | slower(run) if enough_warmup(run) and run.optimizer.beta2 > 0.95 else slower(run)


def _more_balance(run: Run) -> Fix:
    spec = run.router
    if is_frozen(run):
        return _thawed(run)
    if spec.bias_rate and not spec.asks_balance:
        return Set("router.bias_rate", min(0.01, 10 * spec.bias_rate))
    return Set("router.balance_weight", max(0.01, 10 * spec.balance_weight))


def _thawed(run: Run) -> Fix:
    return Set("train.freeze", [part for part in run.train.freeze if part != "router"])


def _slots(run: Run) -> Fix:
    return Set("router.capacity_factor", 1.25 * (run.router.capacity_factor or 1.0) / min(1.0, slots_each(run)))


def _mixed(run: Run) -> Fix:
    even = [source.model_dump(exclude_none=True) | {"weight": 1.0} for source in run.data.sources]
    return Set("data.sources", even, said="equal weights")


def _causal(run: Run) -> Fix:
    causal = Set("router.allow_noncausal", False)
    if method_of(run.router).looks_ahead is None:
        return Set("router.drop", "position") & causal
    return Set("router.select", "top_k") & Set("router.queue", "tokens_first") & Set("router.balance_weight", 0.01) & causal


# rules about the router. A finding about the text, bf16 weights, warm-up or learning rate hides their findings
_LOADS = (
    "uneven load", "no balance loss", "dropped choices", "capacity", "bias rate", "selection bias", "router saturates", "router's entropy",
)  # fmt: skip

RULES = (
    Rule(
        "equal tokens",
        ("loss", "moe.load"),
        lasting(equal_tokens, when=lambda run: not run.train.has_own_loss, after="start"),
        lambda run: Words("look at the text of data.path: it repeats one token"),
        hides=(*_LOADS, "frozen router", "learning rate", "warm-up", "loss spikes"),
    ),
    Rule(
        "looks ahead",
        (),
        lasting(
            leaks,
            when=lambda run: (
                run.model.kind == "decoder" and bool(looks_ahead(run.router)) and not only_second_choices_look_ahead(run.router)
            ),
            after="start",
        ),
        _causal,
    ),
    Rule("one source", (), lasting(one_source, when=lambda run: len(run.data.sources) > 1, after="start"), _mixed),
    Rule(
        "bf16 weights",
        ("lr",),
        lasting(rounded_away, when=lambda run: run.precision.master == "bf16" and run.optimizer.kind == "adamw", after="warm-up"),
        lambda run: Set("precision.master", "fp32"),
        hides=(*_LOADS, "learning rate", "loss spikes"),
    ),
    Rule(
        "warm-up",
        ("loss",),
        cold_start,
        lambda run: Set("optimizer.warmup_steps", enough_warmup(run)) | slower(run),
        hides=(*_LOADS, "loss spikes"),
    ),
    Rule(
        "learning rate",
        ("loss",),
        too_fast,
        slower,
        hides=(*_LOADS, "loss spikes"),
    ),
    Rule("loss spikes", ("loss",), spiking, steadier),
    Rule(
        "frozen router",
        ("loss",),
        frozen,
        _thawed,
        hides=("uneven load", "dropped choices"),
    ),
    Rule(
        "bias rate",
        ("moe.load",),
        lasting(swings, when=lambda run: bool(run.router.bias_rate)),
        lambda run: Set("router.bias_rate", 0.001),
        hides=("uneven load", "dropped choices", "selection bias"),
    ),
    Rule(
        "selection bias",
        ("moe.bias_min", "moe.bias_max"),
        drifted,
        lambda run: Set("router.bias_rate", (run.router.bias_rate or 0.0) / 10),
        hides=("uneven load", "dropped choices"),
    ),
    Rule(
        "no balance loss",
        ("moe.load",),
        lasting(
            because("nothing balances the experts", crowded), when=lambda run: not (fixed_load(run) or balanced_by(run) or is_frozen(run))
        ),
        lambda run: Set("router.balance_weight", 0.01),
        hides=("dropped choices",),
    ),
    Rule(
        "uneven load",
        ("moe.load",),
        lasting(crowded, when=lambda run: not fixed_load(run) and (balanced_by(run) or is_frozen(run)), mends=True),
        _more_balance,
        hides=("dropped choices",),
    ),
    Rule(
        "capacity",
        ("moe.kept", "moe.dropped"),
        lasting(few_slots, when=lambda run: slots_each(run) < 1 and not run.router.random_second),
        _slots,
        hides=("uneven load",),
    ),
    Rule(
        "dropped choices",
        ("moe.kept", "moe.dropped"),
        # not with router.second random, for which dropped choices include the second choices that the router leaves out by chance
        lasting(dropped, when=lambda run: 1 <= slots_each(run) < math.inf and not run.router.random_second, mends=True),
        _slots,
    ),
    Rule(
        "router saturates",
        ("moe.z_loss",),
        lasting(saturated),
        lambda run: slower(run) | Set("router.z_weight", max(0.001, 10 * run.router.z_weight)),
        hides=("no balance loss", "uneven load", "dropped choices", "router's entropy"),
    ),
    Rule(
        "router's entropy",
        ("moe.entropy",),
        lasting(certain),
        lambda run: slower(run) | Set("router.z_weight", max(0.001, 10 * run.router.z_weight)),
        hides=("no balance loss", "uneven load", "dropped choices"),
    ),
    Rule(
        "router's gradient",
        ("grad_norm_parts.router",),
        lasting(router_leads, when=lambda run: run.router.asks_balance or bool(run.router.z_weight)),
        lambda run: Set("router.balance_weight", run.router.balance_weight / 10) | Set("router.z_weight", run.router.z_weight / 10),
    ),
)


def diagnose(lines: Sequence[Mapping[str, Any]], run: Run) -> list[Finding]:
    """Return what the rules find in a run's lines of metrics.jsonl, without findings that another one explains."""
    return _found(windows_of(lines, run.train.steps), run)


def _found(windows: Sequence[Window], run: Run) -> list[Finding]:
    found = {rule: one for rule in RULES if (one := rule.find(windows, run)) is not None}
    hidden = {name for rule in found for name in rule.hides}
    return [Finding(rule.name, *one, rule.fix(run)) for rule, one in found.items() if rule.name not in hidden]


class Live:
    """Diagnosis of a running job. before: lines of metrics.jsonl of a resumed run's earlier steps; findings in these steps are not
    repeated."""

    def __init__(self, run: Run, before: Sequence[Mapping[str, Any]] = ()) -> None:
        self._run, self._windows, self._filling, self._said = run, list[Window](), Filling(), set[str]()
        for line in before:
            if line.get("kind", "train") == "train":
                self.after_step(line)

    def after_step(self, line: Mapping[str, Any]) -> list[Finding]:
        """Add a step's line of metrics.jsonl. At the end of a window, return findings of rules that have not fired before."""
        if not self._add(line):
            return []
        news = [finding for finding in _found(self._windows, self._run) if finding.rule not in self._said]
        self._said |= {finding.rule for finding in news}
        return news

    def _add(self, line: Mapping[str, Any]) -> bool:
        """Add a step's line. Return whether it ends a window."""
        self._filling.add(line)
        if self._filling.count < window_length(self._run.train.steps):
            return False
        self._windows.append(self._filling.window())
        self._filling = Filling()
        return True
