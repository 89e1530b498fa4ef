"""Chooses among plans: refuses what cannot run or does not fit, each with its first reason, and ranks the rest by predicted seconds.

    candidates -> legal? -> fits? (recompute: none, then selective, then full) -> least seconds -> seconds of those in question -> ranked

Memory comes before time because it is cheaper to ask. A plan that fits without recompute is never tried with it: that would only be
slower. The last kind of recompute holds least, so a plan that does not fit with it is refused without asking the others. With a bound
(`least`), plans are asked for their seconds in its order, until the next bound is above the last that is ranked: branch and bound, which
ranks what asking all would rank. Among plans that are equally fast the one that holds less comes first, then the one with fewer kinds
of parallelism.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from parallel.plan.job import Network, Plan, Recomputed
from parallel.plan.legal import advice, refusal

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


def choose(
    network: Network,
    plans: Iterable[Plan],
    *,
    held_bytes: Callable[[Plan], float],
    limit_bytes: float,
    seconds: Callable[[Plan], float],
    least: Callable[[Plan], float] | None = None,
    recompute: Sequence[Recomputed] = ("none", "selective", "full"),
    devices_per_node: int | None = None,
    top: int = 10,
) -> Found:
    """The best `top` of the plans under `limit_bytes` a rank; not recommended plans come after all others.

    `least`: never more than `seconds` and cheaper to ask, so that most plans are ruled out by it. None: all are asked. `recompute`: kinds
    in the order in which they are preferred; a plan holds least with the last.
    """
    kept: dict[bool, list[Ranked]] = {False: [], True: []}  # by whether something is said against them
    reasons, tried = _Reasons(), 0
    nearest: tuple[Plan, float] | None = None
    nothing_fitted = False
    for plan in plans:
        tried += 1
        reason = refusal(network, plan)
        if reason is not None:
            reasons.add(reason, plan)
            continue
        ways = [plan.but(recompute=kind) for kind in recompute]
        found, held = _first_that_fits(ways, held_bytes, limit_bytes, doubtful=nothing_fitted)
        nothing_fitted = found is None
        if found is not None:
            against = advice(network, found, devices_per_node=devices_per_node)
            bound = math.nan if least is None or against is not None else least(found)  # here the plan's schedule is still at hand
            kept[against is not None].append(Ranked(found, bound, held, against))
            continue
        over = held - limit_bytes
        reasons.add(f"it does not fit, with recompute {recompute[-1]} too", ways[-1], over)
        if nearest is None or over < nearest[1]:
            nearest = ways[-1], over
    refused = sorted(reasons.found.values(), key=lambda r: -r.count)
    ranked = _best(kept[False], seconds, least, top)
    ranked += _best(kept[True], seconds, least, top - len(ranked))
    return Found(tried, sum(map(len, kept.values())), tuple(ranked), tuple(refused), nearest)


def _first_that_fits(
    ways: Sequence[Plan], held_bytes: Callable[[Plan], float], limit_bytes: float, *, doubtful: bool
) -> tuple[Plan | None, float]:
    """The first of a plan's ways to recompute that fits, and what it holds; None, and what the last holds, where none does. `doubtful`: the
    last is asked before the others."""
    asked: dict[int, float] = {}

    def held(at: int) -> float:
        if at not in asked:
            asked[at] = held_bytes(ways[at])
        return asked[at]

    last = len(ways) - 1
    if doubtful and held(last) > limit_bytes * ROUNDED:
        return None, held(last)
    for at, way in enumerate(ways):
        if held(at) <= limit_bytes:
            return way, held(at)
        if held(last) > limit_bytes * ROUNDED:
            break
    return None, held(last)


def _best(kept: list[Ranked], seconds: Callable[[Plan], float], least: Callable[[Plan], float] | None, top: int) -> list[Ranked]:
    """The best `top`, timed."""
    if top <= 0:
        return []
    bounded = [replace(one, seconds=(least or seconds)(one.plan)) if math.isnan(one.seconds) else one for one in kept]
    if least is None:
        return sorted(bounded, key=_place)[:top]
    found: list[tuple[tuple[float, float, int], int, Ranked]] = []
    for number, one in sorted(enumerate(bounded), key=lambda pair: pair[1].seconds):
        if len(found) == top and one.seconds > found[-1][2].seconds:
            break
        made = replace(one, seconds=seconds(one.plan))
        insort(found, (_place(made), number, made))
        del found[top:]
    return [made for _, _, made in found]


def _place(one: Ranked) -> tuple[float, float, int]:
    return one.seconds, one.held_bytes, _kinds(one.plan)


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
