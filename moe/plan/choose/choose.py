"""Ranks plans by predicted seconds, and refuses plans that cannot run or do not fit into memory, each with the first reason found.

    candidates -> legal? -> fits? (recompute: none, then selective, then full) -> bounds of the seconds -> seconds where needed -> ranked

Memory is computed before time because it is cheaper. A plan that fits without recompute is not tried with it, because that is slower. The
last kind of recompute needs the least memory, so a plan that does not fit with it is refused without trying the others. Then larger
micro-batches of the same plan are refused too, because they need more memory (except if it is the step's only micro-batch).
The ranking uses branch and bound, best first: the plan with the smallest lower bound gets its next, tighter bound, and finally its
seconds. If the smallest number is a plan's own seconds, that plan is ranked next. So seconds are computed for few plans. Of plans that are
equally fast, the one with less memory comes first, then the one with fewer kinds of parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from typing import NamedTuple

from moe.plan.choose.legal import advice, refusal
from moe.plan.job.network import Network, Plan, Recomputed

ROUNDED = 1 + 1e-9  # tolerance for sums of bytes that differ only in their order


@dataclass(frozen=True)
class Ranked:
    """A plan that can run and fits. seconds: predicted, of a step. held_bytes: of its fullest rank. advice: why it is not recommended."""

    plan: Plan
    seconds: float
    held_bytes: float
    advice: str | None = None


@dataclass(frozen=True)
class Refused:
    """Plans refused for one reason. count: number of plans. example: if they do not fit, the plan with the smallest excess (over_bytes)."""

    reason: str
    count: int
    example: Plan
    over_bytes: float = 0.0


@dataclass(frozen=True)
class Ranking:
    """Result of `choose`. tried: number of plans. fitting: number that can run and fit. ranked: best first. nearest: (the refused plan that
    exceeds the memory limit by least, its excess in bytes); None if no plan was refused for memory."""

    tried: int
    fitting: int
    ranked: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    nearest: tuple[Plan, float] | None = None


@dataclass
class _Reasons:
    found: dict[str, Refused] = field(default_factory=dict)

    def add(self, kind: str, plan: Plan, over: float = 0.0) -> None:
        before = self.found.get(kind)
        nearer = before is None or over < before.over_bytes
        example, over = (plan, over) if nearer or before is None else (before.example, before.over_bytes)
        self.found[kind] = Refused(kind, 1 if before is None else before.count + 1, example, over)


class _Fitting(NamedTuple):
    plan: Plan
    held_bytes: float
    advice: str | None


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
    """Rank the best `top` plans that need at most `limit_bytes` on each rank. Plans that are not recommended come after all others.

    held_bytes: plan -> memory of its fullest rank. seconds: plan -> seconds of a step. least: lower bounds of `seconds`, from the cheapest
    to the tightest. recompute: kinds in order of preference; the last needs the least memory. enough: ranking ends with the first plan for
    which it is True. given: one further plan, which keeps its own recompute.
    """
    kept: dict[bool, list[_Fitting]] = {False: [], True: []}  # False: recommended plans; True: plans with advice against them
    reasons, tried = _Reasons(), 0
    nearest: tuple[Plan, float] | None = None
    nothing_fitted, too_large = False, dict[Plan, tuple[int, float]]()  # plan at micro-batch 1 -> (size that did not fit, excess bytes)
    as_it_is = () if given is None else (given,)
    for plan in chain(as_it_is, plans):
        tried += 1
        reason = refusal(network, plan)
        if reason is not None:
            reasons.add(reason, plan)
            continue
        kinds = (plan.recompute,) if plan is given else recompute
        alike = plan.but(microbatch=1, microbatches=1)
        smaller, too_much = too_large.get(alike, (plan.microbatch + 1, 0.0))
        if plan.microbatches > 1 and smaller <= plan.microbatch:
            reasons.add(f"it does not fit, with recompute {kinds[-1]} too", plan.but(recompute=kinds[-1]), too_much)
            continue
        found, held = _first_that_fits(plan, kinds, held_bytes, limit_bytes, doubtful=nothing_fitted)
        nothing_fitted = found is None
        if found is not None:
            if plan is given or found != given:
                against = advice(network, found, devices_per_node=devices_per_node)
                kept[against is not None].append(_Fitting(found, held, against))
            continue
        last, over = plan.but(recompute=kinds[-1]), held - limit_bytes
        if plan is not given:
            too_large.setdefault(alike, (plan.microbatch, over))
        reasons.add(f"it does not fit, with recompute {kinds[-1]} too", last, over)
        if nearest is None or over < nearest[1]:
            nearest = last, over
    refused = sorted(reasons.found.values(), key=lambda r: -r.count)
    ranked = []
    for one in islice(chain(*(_in_order(of, (*least, seconds)) for of in kept.values())), top):
        ranked.append(one)
        if enough(one):
            break
    return Ranking(tried, sum(map(len, kept.values())), tuple(ranked), tuple(refused), nearest)


def _first_that_fits(
    plan: Plan, recompute: Sequence[Recomputed], held_bytes: Callable[[Plan], float], limit_bytes: float, *, doubtful: bool
) -> tuple[Plan | None, float]:
    """(plan with the first kind of recompute that fits, its bytes), or (None, bytes with the last kind) if none fits.

    doubtful: first try the last kind, which needs the least memory.
    """
    asked: dict[Recomputed, tuple[Plan, float]] = {}

    def held(kind: Recomputed) -> float:
        if kind not in asked:
            way = plan.but(recompute=kind)
            asked[kind] = way, held_bytes(way)
        return asked[kind][1]

    last = recompute[-1]
    if doubtful and held(last) > limit_bytes * ROUNDED:
        return None, held(last)
    for kind in recompute:
        if held(kind) <= limit_bytes:
            return asked[kind]
        if held(last) > limit_bytes * ROUNDED:
            break
    return None, held(last)


def _in_order(kept: Sequence[_Fitting], asked: Sequence[Callable[[Plan], float]]) -> Iterator[Ranked]:
    """Yield plans by ascending seconds. asked: functions of a plan: lower bounds of the seconds, the cheapest first, then the seconds."""
    last = len(asked) - 1
    waiting = [(asked[0](one.plan), last == 0, one.held_bytes, _kinds(one.plan), number, 0) for number, one in enumerate(kept)]
    heapify(waiting)
    while waiting:
        value, known, *_, number, level = waiting[0]
        plan, held, against = kept[number]
        if known:
            heappop(waiting)
            yield Ranked(plan, value, held, against)
        else:
            level += 1
            heapreplace(waiting, (asked[level](plan), level == last, held, _kinds(plan), number, level))


def _kinds(plan: Plan) -> int:
    return sum(n > 1 for n in (plan.tp, plan.sp, plan.pp, plan.ep, plan.etp)) + plan.stage


def described(plan: Plan) -> str:
    """Plan in one line: `dp 4 tp 2 (sliced) pp 4 ep 8, zero1, 1f1b, 16 micro-batches of 2, recompute full`."""
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
