"""Ranks plans by predicted seconds of a step. Refuses plans that cannot run or do not fit into memory, each with its first reason.

    candidates -> legal? -> lower bound of the seconds -> fits? (recompute: none, then selective, then full) -> tighter bounds -> seconds

The ranking is a best-first branch and bound. The plan with the smallest lower bound of its seconds takes its next step: its memory is
computed, then tighter bounds, and at last its exact seconds. It is ranked when these are smaller than the bounds of all other plans. Memory
and exact seconds of those plans need not be computed. Among plans with equal seconds in the printed digits, tight ones (see TIGHT)
come last. Among equally fast plans, the one with less memory comes first, then the one with fewer kinds of parallelism.

A plan that fits without recompute is not tried with recompute, which is slower. `full` recompute needs the least memory: if a plan does not
fit with it, no other kind is tried. If a micro-batch does not fit, larger micro-batches of the same plan with the same recompute do not fit
either. The exception is a plan with one micro-batch a step: it may need less, because it has no gradients of earlier micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import NamedTuple

from moe.plan.choose.legal import advice, refusal
from moe.plan.job.network import Network, Plan, Recomputed

UNKNOWN = -1  # value of _Waiting.level: no bound of the plan's time is computed yet
TIGHT = 0.9  # a plan is called tight if it uses more than this fraction of the memory
ROUNDED = 1 + 1e-9  # tolerance of comparisons, because the order of a sum changes its last digits


@dataclass(frozen=True)
class Ranked:
    """A plan that can run and fits into memory. seconds: predicted time of a step. held_bytes: memory of the rank that needs most. advice:
    reason why the plan is not recommended; None if it is recommended."""

    plan: Plan
    seconds: float
    held_bytes: float
    advice: str | None = None


@dataclass(frozen=True)
class Refused:
    """`count` plans that were refused for the same reason. over_bytes: bytes by which `example` exceeds the memory limit; 0 if the reason
    is not memory. example: the plan that exceeds the memory limit the least; if the reason is not memory, the first of the plans."""

    reason: str
    count: int
    example: Plan
    over_bytes: float = 0.0


@dataclass(frozen=True)
class Ranking:
    """Result of `choose`. tried: number of plans that were tried. ranked: the `top` best that can run and fit, best first. fitting: number
    of plans that were found to fit. refused: plans that cannot run or do not fit. Plans that are certainly slower than `ranked` are
    counted in neither `fitting` nor `refused`, because their memory is not computed."""

    tried: int
    fitting: int
    ranked: tuple[Ranked, ...]
    refused: tuple[Refused, ...]

    @property
    def nearest(self) -> Refused | None:
        """Return the entry of `refused` that exceeds the memory limit the least; None if no plan was refused for its memory."""
        return min((of for of in self.refused if of.over_bytes > 0), key=lambda of: of.over_bytes, default=None)


def too_little_memory(plan: Plan, over_bytes: float) -> Refused:
    """Return the refusal of a plan that needs too much memory even with `plan.recompute`, the last kind of recompute that was tried."""
    return Refused(f"it does not fit, even with recompute {plan.recompute}", 1, plan, over_bytes)


class Refusals(dict[str, Refused]):
    """Maps each reason to one Refused: the number of plans that were refused for this reason, and one of them as an example."""

    def add(self, more: Refused) -> None:
        before = self.get(more.reason, more)
        nearest = min(before, more, key=lambda of: of.over_bytes)
        self[more.reason] = more if before is more else replace(nearest, count=before.count + more.count)

    def sorted(self) -> tuple[Refused, ...]:
        """Return all entries, the most frequent reason first."""
        return tuple(sorted(self.values(), key=lambda of: -of.count))


class _Waiting(NamedTuple):
    """A plan that may be ranked next. These tuples compare in the order of the ranking.

    against: the plan is not recommended. printed: `seconds`, rounded to the printed digits. tight: see TIGHT. seconds: a lower bound or the
    exact time. exact: `seconds` is exact. held_bytes: 0 as long as it is not computed. kinds: number of kinds of parallelism (`_kinds`).
    number: position among the given plans. level: index of the function that returned `seconds`, in the argument `least` of
    `choose`; len(least): the exact function; UNKNOWN: no function was called yet.
    """

    against: bool
    printed: float
    tight: bool
    seconds: float
    exact: bool
    held_bytes: float
    kinds: int
    number: int
    level: int
    plan: Plan


def choose(
    network: Network,
    plans: Iterable[Plan],
    *,
    held_bytes: Callable[[Plan], float],
    limit_bytes: float,
    seconds: Callable[[Plan], float],
    least: Sequence[Callable[[Plan], float]] = (),
    recompute: Sequence[Recomputed] = ("none", "selective", "full"),
    devices_per_node: int | None = None,
    top: int = 10,
    enough: Callable[[Ranked], bool] = lambda ranked: False,
    given: Plan | None = None,
) -> Ranking:
    """Rank the `top` best plans that need at most `limit_bytes` on each rank. Plans that are not recommended come after all others.

    held_bytes: plan -> memory of the rank that needs most. seconds: plan -> seconds of a step. least: functions that return lower bounds of
    `seconds`, from the fastest and loosest to the tightest. recompute: kinds in order of preference; the last needs the least memory.
    devices_per_node: needed to recommend against tensor parallelism over several nodes; None: unknown. enough: the ranking ends with the
    first plan for which it returns True. given: one more plan to rank, with its own kind of recompute.
    """
    bounds, held = (*least, seconds), Held(held_bytes, limit_bytes)

    def entry(number: int, level: int, plan: Plan, size: float = 0.0) -> _Waiting:
        against, value = advice(plan, devices_per_node=devices_per_node) is not None, 0.0 if level < 0 else bounds[level](plan)
        printed, exact = float(f"{value:.4g}"), level == len(least)
        return _Waiting(against, printed, size > TIGHT * limit_bytes, value, exact, size, _kinds(plan), number, level, plan)

    refused, waiting, ranked, tried, fitting = Refusals(), list[_Waiting](), list[Ranked](), 0, 0
    for plan in chain(() if given is None else (given,), plans):
        tried, size, reason = tried + 1, 0.0, refusal(network, plan)
        if reason is None and plan is given and (size := held_bytes(plan)) > limit_bytes:
            refused.add(Refused("the recipe's own plan does not fit", 1, plan, size - limit_bytes))
        elif reason is None:
            fitting += plan is given
            waiting.append(entry(tried, UNKNOWN, plan if plan is given else plan.but(recompute=recompute[0]), size))
        else:
            refused.add(Refused(reason, 1, plan))
    heapify(waiting)
    while waiting and len(ranked) < top:
        one = waiting[0]
        if one.level == UNKNOWN:
            heapreplace(waiting, entry(one.number, 0, one.plan, one.held_bytes))
        elif not one.held_bytes:
            plan, size = held.first_that_fits(one.plan, recompute)
            if size > limit_bytes:
                refused.add(too_little_memory(plan, size - limit_bytes))
            if size > limit_bytes or plan == given:
                heappop(waiting)
            else:
                fitting += 1
                heapreplace(waiting, entry(one.number, 0, plan, size))
        elif not one.exact:
            heapreplace(waiting, entry(one.number, one.level + 1, one.plan, one.held_bytes))
        else:
            heappop(waiting)
            ranked.append(Ranked(one.plan, one.seconds, one.held_bytes, advice(one.plan, devices_per_node=devices_per_node)))
            if enough(ranked[-1]):
                break
    return Ranking(tried, fitting, tuple(ranked), refused.sorted())


class Held:
    """Computes the memory of plans, and remembers plans that did not fit. too_large: (plan with microbatch=1 and microbatches=1, kind of
    recompute) -> (smallest micro-batch with which the plan did not fit, the plan's bytes with it)."""

    def __init__(self, held_bytes: Callable[[Plan], float], limit_bytes: float) -> None:
        self.held_bytes, self.limit_bytes = held_bytes, limit_bytes
        self.too_large: dict[tuple[Plan, Recomputed], tuple[int, float]] = {}
        self.doubtful = False  # True if the previous plan did not fit; then the last kind of recompute is tried first

    def first_that_fits(self, plan: Plan, kinds: Sequence[Recomputed]) -> tuple[Plan, float]:
        """Return (plan with the first of `kinds` of recompute that makes it fit, its bytes). If none does, return (plan with the last kind,
        its bytes). If an earlier call found that a smaller micro-batch does not fit either, the bytes may belong to that micro-batch, a
        lower bound."""
        alike, last, none_fits = plan.but(microbatch=1, microbatches=1), kinds[-1], self.limit_bytes * ROUNDED

        def held(kind: Recomputed) -> float:
            smaller, size = self.too_large.get((alike, kind), (plan.microbatch + 1, 0.0))
            if plan.microbatches > 1 and smaller <= plan.microbatch:
                return size
            size = self.held_bytes(plan.but(recompute=kind))
            if size > self.limit_bytes:
                this = plan.microbatch, size
                self.too_large[alike, kind] = min(this, self.too_large.get((alike, kind), this))
            return size

        if not self.doubtful or held(last) <= none_fits:
            for kind in kinds[:-1]:
                if (size := held(kind)) <= self.limit_bytes:
                    self.doubtful = False
                    return plan.but(recompute=kind), size
                if held(last) > none_fits:
                    break
        size = held(last)
        self.doubtful = size > self.limit_bytes
        return plan.but(recompute=last), size


def _kinds(plan: Plan) -> int:
    """Return the number of kinds of parallelism besides dp that the plan uses, plus its ZeRO stage."""
    return sum(n > 1 for n in (plan.tp, plan.sp, plan.pp, plan.ep, plan.etp)) + plan.stage


def described(plan: Plan) -> str:
    """Return the plan in one line: `dp 4 tp 2 (sliced) pp 4 ep 8, zero1, 1f1b, 16 micro-batches of 2, recompute full`."""
    degrees = [f"dp {plan.dp}"]
    if plan.tp > 1:
        degrees.append(f"tp {plan.tp}" + ("" if plan.tensor == "1d" else f" ({plan.tensor})"))
    if plan.sp > 1:
        degrees.append(f"sp {plan.sp} ({plan.sequence})")
    degrees += [f"{name} {size}" for name, size in (("pp", plan.pp), ("ep", plan.ep), ("etp", plan.etp)) if size > 1]
    parts = [" ".join(degrees), plan.engine]
    if plan.pp > 1:
        parts.append(plan.schedule + (f" of {plan.chunks} chunks" if plan.chunks > 1 else ""))
        ends = plan.stage_layers or (1,)
        parts += [f"a stage for the {what} alone" for what, size in (("embedding", ends[0]), ("head", ends[-1])) if size == 0]
    parts.append(f"{plan.microbatches} micro-batch{'es' if plan.microbatches > 1 else ''} of {plan.microbatch}")
    if plan.recompute != "none":
        parts.append(f"recompute {plan.recompute}")
    if plan.offload_optimizer != "none" or plan.offload_parameters != "none":
        parts.append(f"offload {plan.offload_optimizer}, {plan.offload_parameters}")
    return ", ".join(parts)
