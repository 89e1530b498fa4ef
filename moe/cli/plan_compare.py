"""`moe plan A --compare B --cluster NAME`: predicts time and memory of two recipes, without a search, and compares them part by part."""

from __future__ import annotations

from collections.abc import Mapping

from moe.plan.choose.choose import described
from moe.plan.choose.planned import Planned
from moe.recipe.keys import flat
from parallel.errors import some

_GIB = 2**30


def table(names: tuple[str, str], plans: tuple[Planned, Planned]) -> list[str]:
    """Return lines of text: the keys in which the two recipes A and B differ, then a row with A, B and B / A for each predicted quantity.
    names: the printed names of A and B. plans: the predictions for A and for B, each with one ranked plan."""
    first, second = (flat(made.runs[0]) for made in plans)
    differ = [key for key, value in first.items() if second[key] != value]
    bests = [made.found.ranked[0] for made in plans]
    lines = [f"{letter}: {name}: {described(best.plan)}" for letter, name, best in zip("AB", names, bests, strict=True)]
    lines.append(f"different keys: {some(differ) if differ else 'none'}")
    lines += ["", f"{'':<28} {'A':>12} {'B':>12} {'B / A':>7}"]
    each = list(zip(plans, bests, strict=True))
    times = [made.time(best.plan).parts for made, best in each]
    held = [{name: size / _GIB for name, size in made.memory(best.plan).parts.items()} for made, best in each]
    speeds = [made.speed(best) for made, best in each]
    lines.append(_line("s a step", bests[0].seconds, bests[1].seconds))
    lines += _parts(*times)
    lines.append(_line("tokens/s", speeds[0].tokens_per_s, speeds[1].tokens_per_s))
    lines.append(_line("TFLOP/s of a device", speeds[0].tflops, speeds[1].tflops))
    lines.append(_line("GiB on the fullest rank", bests[0].held_bytes / _GIB, bests[1].held_bytes / _GIB))
    lines += _parts(*held)
    limit = plans[0].cluster.memory_bytes() / _GIB
    lines += [f"{letter} does not fit {limit:.4g} GiB" for letter, made in zip("AB", plans, strict=True) if not made.found.fitting]
    return lines


def _parts(first: Mapping[str, float], second: Mapping[str, float]) -> list[str]:
    """Return a line for each part of the time or memory, except parts below 0.5 % of the larger total in both plans. first, second: name
    of the part -> seconds or GiB."""
    names = dict.fromkeys((*first, *second))
    least = 0.005 * max(sum(first.values()), sum(second.values()))
    both = ((name, first.get(name, 0.0), second.get(name, 0.0)) for name in names)
    return [_line(f"  {name}", one, other) for name, one, other in both if max(one, other) >= least]


def _line(name: str, one: float, other: float) -> str:
    first, second = (f"{size:,.0f}" if size >= 1000 else f"{size:.4g}" for size in (one, other))
    return f"{name:<28} {first:>12} {second:>12} {f'{other / one:.2f}' if one else '':>7}".rstrip()
