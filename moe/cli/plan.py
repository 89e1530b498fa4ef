"""`moe plan RECIPE --cluster NAME`: chooses degrees, engine, schedule, micro-batch and recomputation by predicted memory and time.

`moe plan A --compare B --cluster NAME`: predicts time and memory of two recipes, without a search, and compares them part by part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from moe.checks.together import check_run
from moe.cli import verbs
from moe.cli.run import check_least, refuse_others, write_rows
from moe.launch import exit_codes
from moe.plan.choose.choose import Ranked, Ranking, described
from moe.plan.choose.legal import advice
from moe.plan.choose.planned import NUM_DEGREES, Planned, gib, guided, planned
from moe.plan.choose.predicted import held_bytes, settled, stack_on
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster, load_cluster
from moe.plan.memory.memory import memory
from moe.plan.time.cost import range_of, step_time
from moe.plan.time.stage_time import pictured, timeline
from moe.recipe.keys import flat
from moe.recipe.load import RECIPES, load
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted, some
from parallel.fixes import put
from parallel.store.files import check_writable, write_text


def main(flags: verbs.Plan, overrides: dict[str, str]) -> int:
    """Print the ranked plans, and the parts of the best plan's time and memory. Write its recipe to --out. Raises BadInput if none fits."""
    _check(flags)
    assert flags.recipe is not None and flags.cluster is not None
    asked, _ = load(flags.recipe, overrides)
    machines = load_cluster(flags.cluster)
    run = settled(asked, machines)
    if flags.compare is not None:
        other = settled(load(flags.compare, overrides)[0], machines)
        names = f"{flags.recipe}, {_batch(run)}", f"{flags.compare}, {_batch(other)}"
        both = _as_is(run, machines), _as_is(other, machines)
        print(_devices(machines), *table(names, both), sep="\n")
        write_rows(flags.json, "plan", [_row(made, made.found.ranked[0]) for made in both], cluster=flags.cluster)
        return exit_codes.DONE
    print(f"{_devices(machines)}; {_batch(run)}")
    if flags.explain:
        print(*guided(run, machines), "", sep="\n")
    began = time.perf_counter()
    if flags.as_is:
        made = _as_is(run, machines)
        lines = _lines_as_is(made)
    elif flags.search != "enumerate":
        from moe.cli.plan_search import searched

        ranked, chosen, said = searched(run, machines, flags.search)
        made = Planned(network_of(chosen), machines, Ranking(1, 1, (ranked,), ()), (chosen,))
        lines = [said, f"{ranked.seconds:.4g} s a step, {gib(ranked.held_bytes)} GiB: {described(ranked.plan)}"]
    else:
        made = planned(run, machines, checked=check_run, top=flags.top, num_degrees=None if flags.exhaustive else NUM_DEGREES)
        lines = _lines(made, run, time.perf_counter() - began, top=flags.top)
    seconds = time.perf_counter() - began
    print(*lines, sep="\n")
    if flags.order is not None:
        from moe.cli.plan_search import with_order

        made, said = with_order(made, flags.order)
        print(said)
    if (out := flags.out) is not None:
        write_text(out, _recipe(flags.recipe, asked, made, flags.cluster), what="--out")
        print(f"wrote {out}: moe train {out}" + (f" --nproc {machines.world}" if machines.nodes == 1 else ", started on every node"))
    if flags.pictures is not None:
        print(f"wrote {' and '.join(map(str, _draw(made, flags.pictures)))}")
    if flags.json is not None:
        found, rows = made.found, [_row(made, one) for one in made.found.ranked]
        refused = [{"reason": each.reason, "count": each.count, "example": described(each.example)} for each in found.refused]
        about = {"recipe": flags.recipe, "cluster": flags.cluster, "tried": found.tried, "fitting": found.fitting}
        write_rows(flags.json, "plan", [], chosen=rows[0], ranked=rows, refused=refused, **about, seconds_to_plan=seconds)
    return exit_codes.DONE


def _check(flags: verbs.Plan) -> None:
    out, order = flags.out, flags.order
    check_least(flags, top=1)
    if flags.compare is not None:
        refuse_others(
            flags,
            ("recipe", "cluster", "compare", "json"),
            got="with --compare",
            needed="no flags but --cluster and --json: both recipes are predicted as they are written",
        )
    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise BadInput("--out", got=str(out), needed="a recipe, *.yaml", fix=f"--out {out.stem or 'plan'}.yaml")
    # a new recipe `extends` the given one, so under the same name it would extend itself
    if out is not None and out.absolute() in (Path(f"{flags.recipe}").absolute(), out.absolute().parent / f"{flags.recipe}.yaml"):
        raise BadInput("--out", got=f"{out}, the recipe itself", needed="another file", fix=f"--out {out.with_stem(f'{out.stem}_plan')}")
    if order is not None and order.suffix != ".csv":
        raise BadInput("--order", got=str(order), needed="a file of actions, *.csv", fix=f"--order {order.stem or 'order'}.csv")
    for what, path in (("--out", out), ("--order", order)):
        if path is not None:
            check_writable(path, what=what)
    if flags.search != "enumerate" and (flags.as_is or flags.exhaustive):
        flag = "--as-is" if flags.as_is else "--exhaustive"
        raise BadInput(flag, got=f"{flag} with --search {flags.search}", needed="one of the two", fix=f"remove {flag}")


def _as_is(run: Run, cluster: Cluster) -> Planned:
    made = check_run(run, cluster.world)
    network, plan = network_of(made), plan_of(made)
    held, not_recommended = held_bytes(network, plan, cluster), advice(plan, devices_per_node=cluster.devices_per_node)
    ranked = Ranked(plan, step_time(network, plan, cluster).step, held, not_recommended)
    return Planned(network, cluster, Ranking(1, int(held <= cluster.memory_bytes()), (ranked,), ()), (made,))


def _lines_as_is(made: Planned) -> list[str]:
    from moe.report.planned import table

    (ranked,), cluster, speed = made.found.ranked, made.cluster, made.speed(made.found.ranked[0])
    fits = "fits" if made.found.fitting else f"does not fit {cluster.memory_bytes() / 2**30:.4g} GiB"
    fits += ", but tight: it uses the last tenth of the memory" if made.found.fitting and made.tight(ranked) else ""
    share = "" if speed.mfu is None else f" ({speed.mfu:.1%} of the peak)"
    text = [
        f"the recipe's own plan: {described(ranked.plan)}",
        f"{ranked.seconds:.4g} s a step{_range(made, ranked)}, "
        f"{speed.tokens_per_s:,.0f} tokens/s, {speed.tflops:.4g} TFLOP/s a device{share}; "
        f"{gib(ranked.held_bytes)} GiB on the fullest rank: {fits}",
    ]
    text += [f"not recommended: {ranked.advice}"] if ranked.advice else []
    text += [f"time: {shares(made.time(ranked.plan).parts, ranked.seconds)}", *_busiest(made)]
    return [*text, "", table(memory(made.network, ranked.plan, stack_on(cluster)), context=not cluster.cores)]


def _range(made: Planned, one: Ranked) -> str:
    """Return a plan's likely range of seconds as text. It follows from the planner's errors on published runs; "" if the cluster has no
    such runs."""
    known = range_of(made.cluster, one.plan)
    return f" ({known.said(one.seconds)})" if known else ""


def _draw(made: Planned, folder: Path) -> tuple[Path, Path]:
    """Draw the timeline of the best plan's pipeline, and the peak memory of each pipeline rank. Return the paths of both pictures."""
    from moe.report import planned as bars
    from parallel.pipeline.simulator import draw as pipeline

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput("--pictures", got=f"{folder}: {error.strerror}", needed="a folder", fix="choose another path") from None
    best, network, cluster = made.found.ranked[0], made.network, made.cluster
    plan, shown, times = best.plan, pictured(best.plan), folder / "timeline.png"
    title = f"{described(plan)}: {best.seconds:.4g} s a step" + (f"; here {shown} of them" if shown < plan.microbatches else "")
    pipeline.draw({title: timeline(network, plan, cluster, microbatches=shown)}, times, unit="s")
    ranks = memory(network, plan, stack_on(cluster))
    return times, bars.draw(ranks, folder / "memory.png", capacity=cluster.memory_bytes(), context=not cluster.cores)


def _devices(cluster: Cluster) -> str:
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.devices_per_node}"
    memory = f"{cluster.device.memory_gib:.0f} GiB " + ("for all" if cluster.cores else "each")
    return f"{cluster.world} x {cluster.device.name}, {memory} ({nodes})"


def _batch(run: Run) -> str:
    written = f" read and {run.model.target_length} written" if run.model.target_length else ""
    return f"{counted(run.train.global_batch, 'sequence')} of {counted(run.model.max_length, 'token')}{written} a step"


def _lines(made: Planned, run: Run, seconds: float, *, top: int) -> list[str]:
    found = made.found
    lines = [f"{counted(found.tried, 'plan')} tried in {seconds:.1f} s; of those that may be the fastest, {found.fitting} fit", ""]
    lines.append(f"{'':>3} {'s a step':>9} {'tokens/s':>11} {'TFLOP/s':>8} {'MFU':>6} {'GiB':>6}  plan")
    for place, ranked in enumerate(found.ranked, 1):
        note = "   (the recipe's own)" if ranked.plan == made.own else ""
        note += "   tight: it uses the last tenth of the memory" if made.tight(ranked) else ""
        note += f"   not recommended: {ranked.advice}" if ranked.advice else ""
        speed = made.speed(ranked)
        tflops = f"{speed.tflops:,.0f}" if speed.tflops >= 100 else f"{speed.tflops:.3g}"
        rates = f"{speed.tokens_per_s:>11,.0f} {tflops:>8} {'' if speed.mfu is None else f'{speed.mfu:.1%}':>6}"
        lines.append(f"{place:>3} {ranked.seconds:>9.4g} {rates} {gib(ranked.held_bytes):>6}  {described(ranked.plan)}{note}")
    best = found.ranked[0]
    lines += ["", f"time of the best: {best.seconds:.4g} s{_range(made, best)}: {shares(made.time(best.plan).parts, best.seconds)}"]
    lines += [f"memory of its fullest rank: {_bytes(made.memory(best.plan).parts)}", *_busiest(made)]
    lines += _why(made, best, top=top)
    lines.append(_own_plan(run, made.cluster))
    lines += ["", "refused plans, counted by their first reason:" if found.refused else "no plan was refused"]
    lines += [f"{one.count:>8}  {one.reason}" for one in found.refused[:8]]
    if len(found.refused) > 8:
        lines.append(f"{sum(one.count for one in found.refused[8:]):>8}  for {len(found.refused) - 8} other reasons (--json lists them)")
    return lines


def shares(parts: dict[str, float], whole: float) -> str:
    """Format the parts of a step's time as "compute 80%, bubble 20%". parts: name -> seconds. whole: seconds of the step. Parts below 0.5 %
    are left out."""
    large = sorted(((name, s) for name, s in parts.items() if s >= 0.005 * whole), key=lambda part: -part[1])
    return ", ".join(f"{name} {s / whole:.0%}" for name, s in large)


def _bytes(parts: dict[str, float]) -> str:
    large = sorted(((name, b) for name, b in parts.items() if b >= 0.01 * sum(parts.values())), key=lambda p: -p[1])
    return ", ".join(f"{name} {b / 2**30:.2g} GiB" for name, b in large)


def _busiest(made: Planned) -> list[str]:
    """Return [line with the rows of the busiest ep rank / mean of the ep ranks, in the best plan]; [] if ep is 1 or the model is dense."""
    experts, ep = made.network.experts, made.found.ranked[0].plan.ep
    if experts is None or ep == 1:
        return []
    share, unlimited = experts.share(ep), experts.unlimited(ep)
    source = "by the router and ep" if made.runs[0].dispatch.busiest is None else "by dispatch.busiest"
    if share < unlimited:
        full = experts.slots is not None and share < ep
        source = f"{unlimited:.3g} {source}, limited by {'capacity' if full else 'the number of tokens'}"
    return [f"rows of the busiest rank of ep {ep}: {share:.3g} times the mean ({source})"]


def _why(made: Planned, best: Ranked, *, top: int) -> list[str]:
    """Return a line that compares the best plan with the next plan that has the same `advice` but other degrees: how much slower that plan
    is, and in which part of the step. Without such a plan, return []. Exception: if `top` plans are ranked and all have the same degrees,
    return a line that says this."""
    degrees = attrgetter("pp", "tp", "sp", "dp", "ep", "etp")
    others = [ranked for ranked in made.found.ranked[1:] if degrees(ranked.plan) != degrees(best.plan)]
    other = next((ranked for ranked in others if ranked.advice == best.advice), None)
    if other is None:
        all_equal = not others and len(made.found.ranked) == top
        return ["why: all plans listed have the same degrees (--top lists more)"] if all_equal else []
    mine, theirs = made.time(best.plan).parts, made.time(other.plan).parts
    more = {name: theirs[name] - mine[name] for name in mine}
    costs = max(more, key=lambda name: more[name])
    slower = other.seconds / best.seconds - 1
    return [
        f"why: the next plan of other degrees, {described(other.plan)}, is {slower:.1%} slower, mostly by {costs} (+{more[costs]:.3g} s)"
    ]


def _own_plan(run: Run, cluster: Cluster) -> str:
    try:
        found = _as_is(run, cluster).found
    except BadInput as bad:
        return f"the recipe's own plan does not run here: {bad.what} is {bad.got}, needed {bad.needed}"
    own, fits = found.ranked[0], "fits" if found.fitting else "does not fit"
    return f"the recipe's own plan: {own.seconds:.4g} s, {gib(own.held_bytes)} GiB ({fits}): {described(own.plan)}"


def _recipe(name: str, run: Run, made: Planned, cluster: str) -> str:
    """Return the best plan as a recipe (YAML text). It extends `name` if that is a shipped recipe; otherwise it has all keys."""
    best, chosen = made.found.ranked[0], made.runs[0].model_copy(update={"precision": run.precision})
    shipped = (RECIPES / f"{name}.yaml").is_file()
    # the shipped recipe is loaded without the command line's overrides: these then count as differences, and get into the new recipe
    before, after = flat(load(name)[0]) if shipped else {}, flat(chosen)
    tree: dict[str, Any] = {"extends": name} if shipped else {}
    for key, value in after.items():
        if not shipped or value != before[key]:
            put(tree, key, value)
    head = f"# {name} as moe plan --cluster {cluster} chose it: {best.seconds:.4g} s a step and {gib(best.held_bytes)} GiB predicted"
    return f"{head}\n{yaml.safe_dump(tree, sort_keys=False)}"


def _row(made: Planned, one: Ranked) -> dict[str, Any]:
    plan = {name: getattr(one.plan, name) for name in ("dp", "tp", "sp", "pp", "ep", "etp", "engine", "tensor", "depth", "sequence")}
    plan |= {name: getattr(one.plan, name) for name in ("schedule", "chunks", "stage_layers", "microbatch", "microbatches", "recompute")}
    known = range_of(made.cluster, one.plan)
    parts = {"time": made.time(one.plan).parts, "memory": made.memory(one.plan).parts}
    plan["busiest"] = made.network.experts and made.network.experts.share(one.plan.ep)  # rows of the busiest ep rank over the mean
    about: dict[str, Any] = {"seconds": one.seconds, "range": known and [known.low * one.seconds, known.high * one.seconds]}
    about |= {"held_bytes": one.held_bytes, "advice": one.advice, "tight": made.tight(one)}
    return {"plan": described(one.plan), **plan, **about, **made.speed(one)._asdict(), **parts}


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
