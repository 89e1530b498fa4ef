"""Conditions of the rules of `moe doctor` (moe/records/rules.py), tested on windows of a run: means over a few consecutive steps.

A condition of one window is a function (window, recipe) -> measured value and sentence, or None. `lasting` turns it into a condition of the
run: it must hold in the last LASTING windows, so that chance raises no alarm. Loads count only after the warm-up and the run's first
quarter, because a new router loads experts unevenly. A balance loss needs time to work: with it, loads count after half of the run, and
once the sum of the learning rates allows a large change of the logits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from moe.recipe.sections import Run
from moe.records.windows import Found, Window, course, spikes
from moe.router.checks import looks_ahead
from moe.router.methods import method_of

LASTING = 3  # number of windows, the last ones of the run so far, that must all show a condition
QUARTER, MOST_GRACE = 0.25, 1000  # share of the run, and largest number of steps, in which a new router may be uneven
HALF = 0.5  # instead of QUARTER, if a loss or a bias evens out the loads
MOVED = 0.25  # windows are judged once the sum of learning rates is this share of the initial weights' std: AdamW moves by ~lr a step
CROWDED = 0.75  # a layer (k of E experts a token) is crowded if busiest load / fair share - 1 exceeds this share of its maximum, E / k - 1,
TWICE = 2.0  # and if busiest load / fair share exceeds this number
DEAD, MANY_DEAD = 0.02, 0.5  # an expert hardly learns (is dead) if load / fair share < DEAD; alarm at a share MANY_DEAD of dead experts
BETTER = 0.9  # an uneven load that has fallen to this share of its first value is getting better by itself
DROPPED = 0.5  # alarm above this share of dropped choices: more are lost than computed
SATURATED = 100.0  # mean square of logsumexp(logits): logits of 10, where bf16 numbers are 0.06 apart and softmax hardly has a gradient
CERTAIN = 0.01  # entropy / ln E of a router that is certain of every token: its softmax hardly has a gradient
ECHO, UNEVEN = -0.25, 0.5  # loads swing if deviations from the fair share have correlation <= ECHO with the next step's, and RMS >= UNEVEN
SCORES = 1.0  # softmax and sigmoid scores are between 0 and 1: an expert whose bias is this much below another's is never chosen before it
GROWN = 1.1  # biases drift if their range is above this many times its first value: a converted model may begin with a large range
ROUTER_SHARE = 0.9  # above this share of the squared gradient norm, the router's gradient decides how much all gradients are clipped
NEAR_CHANCE = 0.9  # a first loss above this share of ln(vocabulary), the loss of guessing, shows weights that are not trained for the text
BEYOND = 10.0  # a learning rate above this many times the initial weights' size replaces the weights in every step: no warm-up helps
NO_INFORMATION = 0.05  # a loss below this, in nats a token, is too low for real text, which has at least 0.5 nats a byte

After = Literal["start", "warm-up", "training"]
Shown = tuple[float, str] | None  # (measured value, sentence about it) if a window shows the condition; else None


def lasting(
    shown: Callable[[Window, Run], Shown], *, when: Callable[[Run], bool] = lambda run: True, after: After = "training", mends: bool = False
) -> Callable[[Sequence[Window], Run], Found | None]:
    """Return a rule's function `find`: it returns a finding if the condition `shown` holds in the last LASTING windows, else None. when:
    returns whether the condition can hold for a recipe. after: windows count from the start, after the warm-up, or after the warm-up and
    the first part of training. mends: True if a balance loss or bias may mend the fault. There is then no finding while the value falls.
    If the router is trained with such a loss or bias, the first part of training also lasts longer, at least until logits can have moved
    by 10 (AdamW moves a logit by about lr * d_model in a step)."""

    def find(windows: Sequence[Window], run: Run) -> Found | None:
        if not when(run):
            return None
        balancing = mends and balanced_by(run) and not is_frozen(run)
        moved, unmoved = np.cumsum([np.nansum(window.lrs) for window in windows]), MOVED * first_size(run)
        if balancing:  # a balance loss or bias needs time: until the learning rates allow large logits
            unmoved = max(unmoved, math.sqrt(SATURATED) / run.model.d_model)
        early = min((HALF if balancing else QUARTER) * run.train.steps, MOST_GRACE) if after == "training" else 0
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


def first_size(run: Run) -> float:
    """Return the standard deviation of the router's initial weights."""
    return math.sqrt(run.model.init_scale / run.model.d_model)


# --- conditions that a window shows -------------------------------------------------------------------------------------------------------


def crowded(window: Window, run: Run) -> Shown:
    """Condition: in some layer, one expert gets most of the tokens, or at least MANY_DEAD of the experts get hardly any. Of these layers,
    the one with the busiest expert is reported."""
    worst: tuple[float, str] | None = None
    for layer in window.layers:
        experts, busiest = len(layer.load_E), int(layer.load_E.argmax())
        times, most = float(layer.load_E[busiest]), experts / run.router.num_choices
        dead = int((layer.load_E < DEAD).sum())
        if most <= 1 or not (dead >= MANY_DEAD * experts or times > max(TWICE, 1 + CROWDED * (most - 1))):
            continue
        less = f", and {dead} of {experts} experts get hardly any" if dead else ""
        if worst is None or times > worst[0]:
            worst = times, f"expert {busiest} of layer {layer.layer} gets {times:.1f} times its fair share of the tokens{less}"
    return worst


def frozen(windows: Sequence[Window], run: Run) -> Found | None:
    """Condition of the run: the router is frozen, and the first loss is near ln V, the loss of guessing. The weights are then random, or
    were trained for another vocabulary."""
    if not is_frozen(run) or run.train.has_own_loss or len(windows) < LASTING or not len(windows[0].losses):
        return None
    first, chance = float(windows[0].losses[0]), math.log(run.vocab_size)
    said = f"the frozen router was not trained for these tokens: the first loss, {first:.2f} nats, is near chance, {chance:.2f}"
    return Found(windows[0].first, first, said) if first > NEAR_CHANCE * chance else None


def because(cause: str, shown: Callable[[Window, Run], Shown]) -> Callable[[Window, Run], Shown]:
    def seen(window: Window, run: Run) -> Shown:
        return None if (one := shown(window, run)) is None else (one[0], f"{cause}: {one[1]}")

    return seen


def _dropped_share(window: Window) -> float:
    return statistics.fmean(layer.dropped for layer in window.layers) if window.layers else 0.0


def dropped(window: Window, run: Run) -> Shown:
    share = _dropped_share(window)
    return (share, f"{share:.0%} of the choices are dropped") if share > DROPPED else None


def few_slots(window: Window, run: Run) -> Shown:
    """Condition: choices are dropped because there are fewer slots than choices. The expected share of dropped choices is 1 - slots per
    choice. More than half of this share is enough, because router.min_capacity may have added slots."""
    share = _dropped_share(window)
    said = f"{share:.0%} of the choices are dropped: a capacity factor of {run.router.capacity_factor:g} has fewer slots than choices"
    return (share, said) if share > (1 - slots_each(run)) / 2 else None


def swings(window: Window, run: Run) -> Shown:
    worst = max(window.layers, key=lambda layer: layer.uneven, default=None)
    if worst is None or worst.uneven < UNEVEN or worst.echo > ECHO:
        return None
    return (
        worst.uneven,
        f"the selection bias overshoots: loads of layer {worst.layer} swing by {worst.uneven:.0%} of a fair share each step",
    )


def drifted(windows: Sequence[Window], run: Run) -> Found | None:
    """Condition of the run: the selection biases of a layer are further apart than scores can be, and further than at the start. The
    least biased expert is then never chosen before the most biased one, whatever the token."""
    bounded = run.router.score == "sigmoid" or (run.router.score == "softmax" and run.router.softmax_over == "all")
    first = {layer.layer: layer.bias_range for layer in windows[0].layers} if windows else {}

    def shown(window: Window, run: Run) -> Shown:
        apart = [layer for layer in window.layers if layer.bias_range > max(SCORES, GROWN * first.get(layer.layer, 0.0))]
        worst = max(apart, key=lambda layer: layer.bias_range, default=None)
        if worst is None:
            return None
        said = f"the selection biases of layer {worst.layer} are {worst.bias_range:.2g} apart, and scores at most 1: biases choose experts"
        return worst.bias_range, said

    return lasting(shown, when=lambda run: bounded and bool(run.router.bias_rate))(windows, run)


def saturated(window: Window, run: Run) -> Shown:
    worst = max(window.layers, key=lambda layer: layer.z_loss, default=None)
    if worst is None or not worst.z_loss > SATURATED:
        return None
    return worst.z_loss, f"the router of layer {worst.layer} saturates: z loss {worst.z_loss:.3g}, entropy {worst.entropy:.2g} nats"


def certain(window: Window, run: Run) -> Shown:
    sized = [layer for layer in window.layers if len(layer.load_E) > run.router.num_choices]
    worst = min(sized, key=lambda layer: layer.entropy / math.log(len(layer.load_E)), default=None)
    if worst is None or not worst.entropy < CERTAIN * (most := math.log(len(worst.load_E))):
        return None
    return worst.entropy, f"the router of layer {worst.layer} is certain of every token: entropy {worst.entropy:.2g} of {most:.2g} nats"


def router_leads(window: Window, run: Run) -> Shown:
    share = window.router_share
    return (
        (share, f"the router has {share:.0%} of the squared gradient norm, which is clipped as a whole") if share > ROUTER_SHARE else None
    )


def equal_tokens(window: Window, run: Run) -> Shown:
    loss = float(window.losses.mean()) if len(window.losses) else math.nan
    k = run.router.num_choices  # if every token of a step goes to the same k of E experts, `uneven` is sqrt(E / k - 1)
    all_to_one = any(layer.uneven > 0.9 * math.sqrt(max(1e-9, len(layer.load_E) / k - 1)) for layer in window.layers)
    if not loss < NO_INFORMATION or not all_to_one:
        return None
    return loss, f"the tokens are all alike: a loss of {loss:.2g} nats, and all tokens go to the same experts"


def rounded_away(window: Window, run: Run) -> Shown:
    """Condition: updates of bf16 weights by AdamW are rounded away. Updates are at most about the learning rate. The distance
    of neighboring bf16 numbers is 2^-7 times the power of two below them; an update of less than half of it changes nothing. The
    distance is taken at the size of the router's initial weights."""
    half, rate = 2.0 ** (math.floor(math.log2(first_size(run))) - 8), float(window.lrs.max()) if len(window.lrs) else math.nan
    if not rate < half:
        return None
    said = f"updates are rounded away: the rate {rate:.2g} is below {half:.2g}, half the distance of bf16 numbers near the first weights"
    return rate, said


def one_source(window: Window, run: Run) -> Shown:
    """Condition: one source gives nearly all sequences. The other sources together give less than one expert's fair share, so no expert
    can specialize in them."""
    weights = [source.weight for source in run.data.sources]
    share, experts = max(weights) / sum(weights), max(run.experts.counts)
    name = run.data.sources[weights.index(max(weights))].path
    return (
        (share, f"{name} gives {share:.1%} of the sequences: the other sources have less than one expert's share")
        if (share > 1 - 1 / experts)
        else None
    )


def leaks(window: Window, run: Run) -> Shown:
    reason = looks_ahead(run.router)
    return 1.0, f"losses are too low, in evaluation too: {reason}, which a decoder does not see when it generates"


# --- the loss -----------------------------------------------------------------------------------------------------------------------------


def spiking(windows: Sequence[Window], run: Run) -> Found | None:
    return spikes(windows, after=max(run.optimizer.warmup_steps, int(QUARTER * run.train.steps)))


def enough_warmup(run: Run) -> int:
    """Return the number of warm-up steps after which AdamW's second moment is an average of enough gradients: 2 / (1 - beta2) (arXiv
    1910.04209). 0 for optimizers without a second moment."""
    o = run.optimizer
    return round(2 / (1 - o.beta2)) if o.kind in ("adamw", "kfac", "muon") else 0


def is_beyond(run: Run) -> bool:
    """Return whether the learning rate is so far above the initial weights' size that each step of AdamW replaces the weights."""
    return bool(enough_warmup(run)) and run.optimizer.lr > BEYOND * first_size(run)


def too_fast(windows: Sequence[Window], run: Run) -> Found | None:
    found = course(windows)
    return None if found is None or _starts_cold(found, run) else found


def cold_start(windows: Sequence[Window], run: Run) -> Found | None:
    found = course(windows)
    if found is None or not _starts_cold(found, run):
        return None
    return found._replace(said=f"{found.said}, after a warm-up of {run.optimizer.warmup_steps} steps")


def _starts_cold(found: Found, run: Run) -> bool:
    """Return whether a longer warm-up may help against the fault `found`: the run's warm-up is shorter than `enough_warmup` steps, and the
    fault began within that number of steps."""
    enough = enough_warmup(run)
    return run.optimizer.warmup_steps < enough and found.since <= enough and not is_beyond(run)


# --- facts of a recipe -------------------------------------------------------------------------------------------------------------------


def balanced_by(run: Run) -> bool:
    """Return whether a loss or a bias evens out the loads."""
    return run.router.asks_balance or bool(run.router.bias_rate)


def fixed_load(run: Run) -> bool:
    """Return whether the selection method itself sets the loads, so that a balance loss has no effect or a harmful one."""
    return method_of(run.router).is_balanced is not None


def is_frozen(run: Run) -> bool:
    return "router" in run.train.freeze


def slots_each(run: Run) -> float:
    """Return the number of slots for each choice; infinity without a capacity."""
    spec = run.router
    return (
        math.inf if spec.capacity_factor is None else spec.capacity_factor / (spec.num_choices if spec.capacity_counts == "tokens" else 1)
    )
