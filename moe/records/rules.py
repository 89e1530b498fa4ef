"""The rules of `moe doctor RUN`: what is wrong with a run's router or loss, since which step, and what to do.

    metrics.jsonl -> windows (moe/records/windows.py) + recipe -> diagnose -> findings -> a line each

A running job, its trackers, the report and `moe doctor RUN` show the same findings. A rule is one object in RULES. It fires if its
condition holds in the last LASTING windows, so that chance is no alarm. Loads count from the end of the warm-up and of the run's first
quarter, because a new router is uneven; with a balance loss, which needs time to work, from the half of the run, and once the rates add up
to enough for a large change of the logits. A rule that finds a cause `hides` the rules of consequences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moe.recipe.sections import Run
from moe.records.course import Found, course
from moe.records.windows import Filling, Window, window_length, windows_of
from moe.router.checks import looks_ahead, only_second_choices_look_ahead
from moe.router.methods.catalog import method_of
from parallel.errors import plain
from parallel.fixes import Fix, Set, Words

LASTING = 3  # windows in a row
QUARTER, MOST_GRACE = 0.25, 1000  # share of the run, and largest number of steps, in which a new router may be uneven
HALF = 0.5  # this share if a loss or a bias is at work that evens out the loads
MOVED = 0.25  # AdamW moves a weight by about the rate: until rates sum to this share of the first weights' size, a router is as drawn
CROWDED, TWICE = 0.75, 2.0  # (busiest load / fair share - 1) over its maximum, E / k - 1, at which every token goes there; and least load
DEAD, MANY_DEAD = 0.02, 0.5  # load / fair share of an expert that learns next to nothing; share of such experts: half of them are wasted
BETTER = 0.9  # an uneven load that has fallen to this share of its first value is getting better by itself
DROPPED = 0.5  # share of dropped choices: more are lost than computed
SATURATED = 100.0  # mean square of logsumexp(logits): logits of 10, where bf16 numbers are 0.06 apart and softmax hardly has a gradient
ECHO, UNEVEN = -0.25, 0.5  # loads swing if a layer's `echo` is at most the first and its `uneven` at least the second (windows.py)
ROUTER_SHARE = 0.9  # share of the squared gradient norm: clipping then follows the router alone
NEAR_CHANCE = 0.9  # first loss / ln(vocabulary) from which the weights know nothing of the text; a model that is tuned further begins lower
NO_INFORMATION = 0.05  # nats a token; texts have 0.5 a byte and more


@dataclass(frozen=True)
class Finding:
    """What a rule has found. fix: a change of the recipe, as data."""

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
    """A rule. find: windows in order, recipe -> Found or None. fix: recipe -> the remedy. reads: fields of metrics.jsonl. hides: names of
    rules whose findings this one explains."""

    name: str
    reads: tuple[str, ...]
    find: Callable[[Sequence[Window], Run], Found | None]
    fix: Callable[[Run], Fix]
    hides: tuple[str, ...] = ()


After = Literal["start", "warm-up", "training"]
Shown = tuple[float, str] | None  # (measured value, sentence) if a window shows the condition


def lasting(
    shown: Callable[[Window, Run], Shown], *, when: Callable[[Run], bool] = lambda run: True, after: After = "training", mends: bool = False
) -> Callable[[Sequence[Window], Run], Found | None]:
    """Return the `find` of a rule whose condition must hold in the last LASTING windows. when: recipes for which it can hold. after: the
    part of the run from which windows count. mends: a balance loss or bias may mend it: no finding if the value falls, nor before a logit
    could have moved from 0 to saturation: AdamW moves it by at most about the rate times d_model in a step."""

    def find(windows: Sequence[Window], run: Run) -> Found | None:
        if not when(run):
            return None
        slowly = mends and _balanced_by(run) and not _is_frozen(run)
        moved, unmoved = np.cumsum([np.nansum(window.lrs) for window in windows]), MOVED * _first_size(run)
        if slowly:  # the loss or bias needs time to work
            unmoved = max(unmoved, math.sqrt(SATURATED) / run.model.d_model)
        early = min((HALF if slowly else QUARTER) * run.train.steps, MOST_GRACE) if after == "training" else 0
        grace = 0 if after == "start" else max(run.optimizer.warmup_steps, early)
        found: list[tuple[int, float, str]] = []
        for window, rates in zip(reversed(windows), reversed(moved), strict=True):
            if window.first <= grace or (after == "training" and rates < unmoved) or (seen := shown(window, run)) is None:
                break
            found.append((window.first, *seen))
        if len(found) < LASTING or (mends and found[0][1] < BETTER * found[-1][1]):
            return None
        return Found(found[-1][0], *found[0][1:])

    return find


def _first_size(run: Run) -> float:
    """Return the standard deviation of the router's first weights."""
    return math.sqrt(run.model.init_scale / run.model.d_model)


# --- conditions that a window shows -------------------------------------------------------------------------------------------------------


def _crowded(window: Window, run: Run) -> Shown:
    """The busiest expert of the least even layer, and the number of its experts without tokens."""
    worst: tuple[float, str] | None = None
    for layer in window.layers:
        experts, busiest = len(layer.load_E), int(layer.load_E.argmax())
        times, most = float(layer.load_E[busiest]), experts / run.router.num_choices
        dead = int((layer.load_E < DEAD).sum())
        if most <= 1 or not (dead >= MANY_DEAD * experts or times > max(TWICE, 1 + CROWDED * (most - 1))):
            continue
        less = f", and {dead} of {experts} experts get none" if dead else ""
        if worst is None or times > worst[0]:
            worst = times, f"expert {busiest} of layer {layer.layer} gets {times:.1f} times its fair share of the tokens{less}"
    return worst


def _balanced_by(run: Run) -> bool:
    """Return whether a loss or a bias evens out the loads."""
    return run.router.asks_balance or bool(run.router.bias_rate)


def _fixed_load(run: Run) -> bool:
    """Return whether no loss and no bias can change the loads, because of the selection method."""
    return method_of(run.router).is_balanced is not None


def _is_frozen(run: Run) -> bool:
    return "router" in run.train.freeze


def _frozen(windows: Sequence[Window], run: Run) -> Found | None:
    """A frozen router, and a first loss near chance, ln V: the weights are random, or were trained with another vocabulary."""
    if not _is_frozen(run) or run.train.has_own_loss or len(windows) < LASTING or not len(windows[0].losses):
        return None
    first, chance = float(windows[0].losses[0]), math.log(run.vocab_size)
    said = f"the frozen router was not trained for these tokens: the first loss, {first:.2f} nats, is near chance, {chance:.2f}"
    return Found(windows[0].first, first, said) if first > NEAR_CHANCE * chance else None


def _with(cause: str, shown: Callable[[Window, Run], Shown]) -> Callable[[Window, Run], Shown]:
    def seen(window: Window, run: Run) -> Shown:
        return None if (one := shown(window, run)) is None else (one[0], f"{cause}: {one[1]}")

    return seen


def _dropped_share(window: Window) -> float:
    return statistics.fmean(layer.dropped for layer in window.layers) if window.layers else 0.0


def _dropped(window: Window, run: Run) -> Shown:
    share = _dropped_share(window)
    return (share, f"{share:.0%} of the choices are dropped") if share > DROPPED else None


def _slots_each(run: Run) -> float:
    """Return the number of slots for each choice; infinity without a capacity."""
    spec = run.router
    return (
        math.inf if spec.capacity_factor is None else spec.capacity_factor / (spec.num_choices if spec.capacity_counts == "tokens" else 1)
    )


def _few_slots(window: Window, run: Run) -> Shown:
    """Dropped choices with fewer slots than choices: at least half of the arithmetic share, because router.min_capacity adds slots."""
    share = _dropped_share(window)
    said = f"{share:.0%} of the choices are dropped: a capacity factor of {run.router.capacity_factor:g} has fewer slots than choices"
    return (share, said) if share > (1 - _slots_each(run)) / 2 else None


def _swings(window: Window, run: Run) -> Shown:
    worst = max(window.layers, key=lambda layer: layer.uneven, default=None)
    if worst is None or worst.uneven < UNEVEN or worst.echo > ECHO:
        return None
    return (
        worst.uneven,
        f"the selection bias overshoots: loads of layer {worst.layer} swing by {worst.uneven:.0%} of a fair share each step",
    )


def _saturated(window: Window, run: Run) -> Shown:
    worst = max(window.layers, key=lambda layer: layer.z_loss, default=None)
    if worst is None or not worst.z_loss > SATURATED:
        return None
    return worst.z_loss, f"the router of layer {worst.layer} saturates: z loss {worst.z_loss:.3g}, entropy {worst.entropy:.2g} nats"


def _router_leads(window: Window, run: Run) -> Shown:
    share = window.router_share
    return (
        (share, f"the router has {share:.0%} of the squared gradient norm, which is clipped as a whole") if share > ROUTER_SHARE else None
    )


def _equal_tokens(window: Window, run: Run) -> Shown:
    loss = float(window.losses.mean()) if len(window.losses) else math.nan
    k = run.router.num_choices  # if every token of a step goes to the same k of E experts, `uneven` is sqrt(E / k - 1)
    all_to_one = any(layer.uneven > 0.9 * math.sqrt(max(1e-9, len(layer.load_E) / k - 1)) for layer in window.layers)
    if not loss < NO_INFORMATION or not all_to_one:
        return None
    return loss, f"the tokens are all alike: a loss of {loss:.2g} nats, and every token goes to one expert"


def _rounded_away(window: Window, run: Run) -> Shown:
    """Updates of AdamW are at most about the learning rate. bf16 numbers of size w are 2^-7 of w's power of two apart; less than half of
    this is rounded away."""
    half, rate = 2.0 ** (math.floor(math.log2(_first_size(run))) - 8), float(window.lrs.max()) if len(window.lrs) else math.nan
    if not rate < half:
        return None
    said = f"updates are rounded away: the rate {rate:.2g} is below {half:.2g}, half the distance of bf16 numbers near the first weights"
    return rate, said


def _one_source(window: Window, run: Run) -> Shown:
    """The other sources together have fewer tokens than one expert's fair share, so no expert can be theirs."""
    weights = [source.weight for source in run.data.sources]
    share, experts = max(weights) / sum(weights), max(run.experts.counts)
    name = run.data.sources[weights.index(max(weights))].path
    return (
        (share, f"{name} gives {share:.1%} of the sequences: the other sources have less than one expert's share")
        if (share > 1 - 1 / experts)
        else None
    )


def _leaks(window: Window, run: Run) -> Shown:
    reason = looks_ahead(run.router)
    return 1.0, f"losses are too low, in evaluation too: {reason}, which a decoder does not see when it generates"


# --- the loss -----------------------------------------------------------------------------------------------------------------------------


def enough_warmup(run: Run) -> int:
    """Return the warm-up after which AdamW's second moment is an average of enough gradients: 2 / (1 - beta2) steps (arXiv 1910.04209).
    0 for optimizers without one."""
    o = run.optimizer
    return round(2 / (1 - o.beta2)) if o.kind in ("adamw", "kfac", "muon") else 0


def _too_fast(windows: Sequence[Window], run: Run) -> Found | None:
    found = course(windows)
    return None if found is None or _starts_cold(found, run) else found


def _cold_start(windows: Sequence[Window], run: Run) -> Found | None:
    found = course(windows)
    if found is None or not _starts_cold(found, run):
        return None
    return found._replace(said=f"{found.said}, after a warm-up of {run.optimizer.warmup_steps} steps")


def _starts_cold(found: Found, run: Run) -> bool:
    """Return whether the trouble began before a warm-up of `enough_warmup` steps would have ended, and the run's own was shorter."""
    enough = enough_warmup(run)
    return run.optimizer.warmup_steps < enough and found.since <= enough


# --- the remedies -------------------------------------------------------------------------------------------------------------------------


def _slower(run: Run) -> Fix:
    return Set("optimizer.lr", float(f"{run.optimizer.lr / 10:.2g}"))


def _more_balance(run: Run) -> Fix:
    spec = run.router
    if _is_frozen(run):
        return _thawed(run)
    if spec.bias_rate and not spec.asks_balance:
        return Set("router.bias_rate", min(0.01, 10 * spec.bias_rate))
    return Set("router.balance_weight", max(0.01, 10 * spec.balance_weight))


def _thawed(run: Run) -> Fix:
    return Set("train.freeze", [part for part in run.train.freeze if part != "router"])


def _slots(run: Run) -> Fix:
    return Set("router.capacity_factor", 1.25 * (run.router.capacity_factor or 1.0) / min(1.0, _slots_each(run)))


def _mixed(run: Run) -> Fix:
    even = [source.model_dump(exclude_none=True) | {"weight": 1.0} for source in run.data.sources]
    return Set("data.sources", even, said="equal weights")


def _causal(run: Run) -> Fix:
    causal = Set("router.allow_noncausal", False)
    if method_of(run.router).looks_ahead is None:
        return Set("router.drop", "position") & causal
    return Set("router.select", "top_k") & Set("router.queue", "tokens_first") & Set("router.balance_weight", 0.01) & causal


_LOADS = ("uneven load", "no balance loss", "dropped choices", "capacity", "bias rate", "router saturates")

RULES = (
    Rule(
        "equal tokens",
        ("loss", "moe.load"),
        lasting(_equal_tokens, when=lambda run: not run.train.has_own_loss, after="start"),
        lambda run: Words("look at the text of data.path: it repeats one token"),
        hides=(*_LOADS, "frozen router", "learning rate", "warm-up"),
    ),
    Rule(
        "looks ahead",
        (),
        lasting(
            _leaks,
            when=lambda run: (
                run.model.kind == "decoder" and bool(looks_ahead(run.router)) and not only_second_choices_look_ahead(run.router)
            ),
            after="start",
        ),
        _causal,
    ),
    Rule("one source", (), lasting(_one_source, when=lambda run: len(run.data.sources) > 1, after="start"), _mixed),
    Rule(
        "bf16 weights",
        ("lr",),
        lasting(_rounded_away, when=lambda run: run.precision.master == "bf16" and run.optimizer.kind == "adamw", after="warm-up"),
        lambda run: Set("precision.master", "fp32"),
        hides=(*_LOADS, "learning rate"),
    ),
    Rule(
        "warm-up",
        ("loss",),
        _cold_start,
        lambda run: Set("optimizer.warmup_steps", enough_warmup(run)) | _slower(run),
        hides=_LOADS,
    ),
    Rule(
        "learning rate",
        ("loss",),
        _too_fast,
        _slower,
        hides=_LOADS,
    ),
    Rule(
        "frozen router",
        ("loss",),
        _frozen,
        _thawed,
        hides=("uneven load", "dropped choices"),
    ),
    Rule(
        "bias rate",
        ("moe.load",),
        lasting(_swings, when=lambda run: bool(run.router.bias_rate)),
        lambda run: Set("router.bias_rate", 0.001),
        hides=("uneven load", "dropped choices"),
    ),
    Rule(
        "no balance loss",
        ("moe.load",),
        lasting(
            _with("nothing balances the experts", _crowded), when=lambda run: not (_fixed_load(run) or _balanced_by(run) or _is_frozen(run))
        ),
        lambda run: Set("router.balance_weight", 0.01),
        hides=("dropped choices",),
    ),
    Rule(
        "uneven load",
        ("moe.load",),
        lasting(_crowded, when=lambda run: not _fixed_load(run) and (_balanced_by(run) or _is_frozen(run)), mends=True),
        _more_balance,
        hides=("dropped choices",),
    ),
    Rule(
        "capacity",
        ("moe.kept", "moe.dropped"),
        lasting(_few_slots, when=lambda run: _slots_each(run) < 1 and not run.router.random_second),
        _slots,
        hides=("uneven load",),
    ),
    Rule(
        "dropped choices",
        ("moe.kept", "moe.dropped"),
        # second choices that router.second random leaves out are counted as dropped
        lasting(_dropped, when=lambda run: 1 <= _slots_each(run) < math.inf and not run.router.random_second, mends=True),
        _slots,
    ),
    Rule(
        "router saturates",
        ("moe.z_loss",),
        lasting(_saturated),
        lambda run: _slower(run) | Set("router.z_weight", max(0.001, 10 * run.router.z_weight)),
        hides=("no balance loss", "uneven load", "dropped choices"),
    ),
    Rule(
        "router's gradient",
        ("grad_norm_parts.router",),
        lasting(_router_leads, when=lambda run: run.router.asks_balance or bool(run.router.z_weight)),
        lambda run: Set("router.balance_weight", run.router.balance_weight / 10) | Set("router.z_weight", run.router.z_weight / 10),
    ),
)


def diagnose(lines: Sequence[Mapping[str, Any]], run: Run) -> list[Finding]:
    """Return what the rules find in a run's lines of metrics.jsonl, each cause once."""
    return _found(windows_of(lines, run.train.steps), run)


def _found(windows: Sequence[Window], run: Run) -> list[Finding]:
    found = {rule: one for rule in RULES if (one := rule.find(windows, run)) is not None}
    hidden = {name for rule in found for name in rule.hides}
    return [Finding(rule.name, *one, rule.fix(run)) for rule, one in found.items() if rule.name not in hidden]


class Live:
    """Diagnosis of a running job. before: lines of metrics.jsonl of a resumed run's earlier steps; what was said then is not repeated."""

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
