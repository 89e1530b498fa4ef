"""Chooses among plans: refuses what cannot run or does not fit, each with its first reason, and ranks the rest by predicted seconds.

    candidates -> legal? -> fits? (recompute: none, then selective, then full) -> least seconds -> seconds of those in question -> ranked

Memory comes before time because it is cheaper to ask. A plan that fits without recompute is never tried with it: that would only be
slower. The last kind of recompute holds least, so a plan that does not fit with it is refused without asking the others; nor is the same
plan asked with a larger micro-batch, which holds more unless it is the step's only one. With bounds
(`least`), the plan whose bound is smallest is asked for its next bound, and at last for its seconds, until the smallest is a plan's own
seconds: that one is ranked next, and no more are asked than are ranked (branch and bound, best first). Among plans that are equally fast
the one that holds less comes first, then the one with fewer kinds of parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from typing import NamedTuple

from moe.plan.choose.legal import advice, refusal
from moe.plan.job.network import Network, Plan, Recomputed

ROUNDED = 1 + 1e-9  # what sums of bytes may differ by that are the same but for their order


@dataclass(frozen=True)
class Ranked:
    """A plan that runs and fits: predicted seconds of a step, bytes of its fullest rank; `advice`: why it is not recommended, if so."""

    plan: Plan
    seconds: float
    held_bytes: float
    advice: str | None = None


@dataclass(frozen=True)
class Refused:
    """Plans that share a first failing constraint: how many, and one of them. `over_bytes`: how far the nearest is from fitting."""

    reason: str
    count: int
    example: Plan
    over_bytes: float = 0.0


@dataclass(frozen=True)
class Found:
    """`ranked`: best first. `nearest`: of the plans that do not fit the one that misses by least."""

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
) -> Found:
    """The best `top` of the plans under `limit_bytes` a rank, or fewer: up to the one that is `enough`. Not recommended plans come after
    all others.

    `least`: bounds, each cheaper to ask than the next, none above it or above `seconds`, so that most plans are ruled out by the first.
    `recompute`: kinds in the order in which they are preferred; a plan holds least with the last. `given`: a plan that is ranked as it is,
    with its own recompute.
    """
    kept: dict[bool, list[_Fitting]] = {False: [], True: []}  # by whether something is said against them
    reasons, tried = _Reasons(), 0
    nearest: tuple[Plan, float] | None = None
    nothing_fitted, too_large = False, dict[Plan, tuple[int, float]]()  # by plan but for its micro-batch: that, and bytes too much
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
    return Found(tried, sum(map(len, kept.values())), tuple(ranked), tuple(refused), nearest)


def _first_that_fits(
    plan: Plan, recompute: Sequence[Recomputed], held_bytes: Callable[[Plan], float], limit_bytes: float, *, doubtful: bool
) -> tuple[Plan | None, float]:
    """The first of a plan's ways to recompute that fits, and what it holds; None, and what the last holds, where none does. `doubtful`: the
    last is asked before the others."""
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
    """Best first. `asked`: bounds, and at last seconds; of one value a bound comes first, since the seconds may be as few."""
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
    """In one line, as a reader of recipes says it: `dp 4 tp 2 (sliced) pp 4 ep 8, zero1, 1f1b, 16 micro-batches of 2, recompute full`."""
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
