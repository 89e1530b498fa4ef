"""`moe plan RECIPE --cluster NAME`: chooses degrees, engine, schedule, micro-batch and recomputation by predicted memory and time.

moe plan glam_8b_64e --cluster h100-8x4 --top 5 --out plan.yaml        then: moe train plan.yaml
moe plan dense_8b --cluster a100-80-8 --explain                        the rules that lead to a strategy, with this recipe's numbers
moe plan published/bloom_176b --cluster jeanzayx48 --as-is             the recipe's own plan (plan_as_is.py)
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml

from moe.checks.together import check_run
from moe.launch import exit_codes
from moe.plan.choose.choose import Ranked, Ranking, described
from moe.plan.choose.planned import WAYS, Planned, gib, guided, planned
from moe.plan.choose.predicted import held_bytes, settled
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster, load_cluster
from moe.plan.time.cost import step_time
from moe.recipe.keys import flat
from moe.recipe.load import RECIPES, load
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted
from parallel.store.files import check_writable, write_text

_SECONDS = "seconds"


def main(
    recipe: str,
    *,
    overrides: dict[str, str] | None = None,
    cluster: str,
    top: int = 10,
    exhaustive: bool = False,
    as_is: bool = False,
    explain: bool = False,
    search: str = "enumerate",
    order: Path | None = None,
    out: Path | None = None,
    pictures: Path | None = None,
    json: Path | None = None,
) -> int:
    """Print the ranking, the parts of the best plan and why it is first; write its recipe. Raises BadInput if no plan fits."""
    if top < 1:
        raise BadInput("--top", got=top, needed="at least 1", fix="--top 10")
    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise BadInput("--out", got=str(out), needed="a recipe, *.yaml", fix=f"--out {out.stem or 'plan'}.yaml")
    if order is not None and order.suffix != ".csv":
        raise BadInput("--order", got=str(order), needed="a file of actions, *.csv", fix=f"--order {order.stem or 'order'}.csv")
    for what, path in (("--out", out), ("--order", order), ("--json", json)):
        if path is not None:
            check_writable(path, what=what)
    if search != "enumerate" and (as_is or exhaustive):
        flag = "--as-is" if as_is else "--exhaustive"
        raise BadInput(flag, got=f"it with --search {search}", needed="one of the two", fix=f"remove {flag}")
    asked, _ = load(recipe, overrides)
    machines = load_cluster(cluster)
    run = settled(asked, machines)
    print(_about(run, machines))
    if explain:
        for rule in guided(run, machines):
            print(rule)
        print()
    began = time.perf_counter()
    if as_is:
        from moe.cli.plan import as_is as plan_as_is

        made = plan_as_is.as_is(run, machines)
        print("\n".join(plan_as_is.lines(made)))
        return _written(made, recipe, asked, cluster, time.perf_counter() - began, order, out, pictures, json)
    if search != "enumerate":
        from moe.cli.plan.search import searched

        ranked, chosen, said = searched(run, machines, search)
        print(f"{said}\n{ranked.seconds:.4g} s a step, {gib(ranked.held_bytes)} GiB: {described(ranked.plan)}")
        made = Planned(network_of(chosen), machines, Ranking(1, 1, (ranked,), ()), (chosen,))
        return _written(made, recipe, asked, cluster, time.perf_counter() - began, order, out, pictures, json)
    made = planned(run, machines, checked=check_run, top=top, ways=None if exhaustive else WAYS)
    seconds = time.perf_counter() - began
    for line in _lines(made, run, seconds):
        print(line)
    return _written(made, recipe, asked, cluster, seconds, order, out, pictures, json)


def _written(
    made: Planned,
    recipe: str,
    run: Run,
    cluster: str,
    seconds: float,
    order: Path | None,
    out: Path | None,
    pictures: Path | None,
    json: Path | None,
) -> int:
    machines = made.cluster
    if order is not None:
        from moe.cli.plan.order import with_order

        made, said = with_order(made, order)
        print(said)
    if out is not None:
        write_text(out, _recipe(recipe, run, made, cluster), what="--out")
        print(f"wrote {out}: moe train {out}" + (f" --nproc {machines.world}" if machines.nodes == 1 else ", started on every node"))
    if pictures is not None:
        from moe.cli.plan.pictures import draw

        print(f"wrote {' and '.join(map(str, draw(made, pictures)))}")
    if json is not None:
        _write(json, recipe, cluster, made, seconds)
    return exit_codes.DONE


def _about(run: Run, cluster: Cluster) -> str:
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.devices_per_node}"
    memory = f"{cluster.device.memory_gib:.0f} GiB " + ("for all" if cluster.cores else "each")
    written = f" read and {run.model.target_length} written" if run.model.target_length else ""
    batch = f"{counted(run.train.global_batch, 'sequence')} of {counted(run.model.max_length, 'token')}{written} a step"
    return f"{cluster.world} x {cluster.device.name}, {memory} ({nodes}); {batch}"


def _lines(made: Planned, run: Run, seconds: float) -> list[str]:
    found = made.found
    lines = [f"{counted(found.tried, 'plan')} tried in {seconds:.1f} s: {found.fitting} run and fit", ""]
    lines.append(f"{'':>3} {'s a step':>9} {'tokens/s':>11} {'TFLOP/s':>8} {'MFU':>6} {'GiB':>6}  plan")
    for place, ranked in enumerate(found.ranked, 1):
        note = "   (the recipe's own)" if ranked.plan == made.own else ""
        note += "   tight: it uses the last tenth of the memory" if made.tight(ranked) else ""
        note += f"   not recommended: {ranked.advice}" if ranked.advice else ""
        speed = made.speed(ranked)
        rates = f"{speed.tokens_per_s:>11,.0f} {speed.tflops:>8.3g} {'' if speed.mfu is None else f'{speed.mfu:.1%}':>6}"
        lines.append(f"{place:>3} {ranked.seconds:>9.4g} {rates} {gib(ranked.held_bytes):>6}  {described(ranked.plan)}{note}")
    best = found.ranked[0]
    lines += ["", f"time of the best: {_parts(made.time(best.plan).parts, best.seconds)}"]
    lines.append(f"memory of its fullest rank: {_bytes(made.memory(best.plan).parts)}")
    lines += _why(made, best)
    lines.append(_own_plan(run, made.cluster))
    lines += ["", "refused plans, counted by their first reason:" if found.refused else "no plan was refused"]
    lines += [f"{one.count:>8}  {one.reason}" for one in found.refused[:8]]
    if len(found.refused) > 8:
        lines.append(f"{sum(one.count for one in found.refused[8:]):>8}  for {len(found.refused) - 8} other reasons (--json lists them)")
    return lines


def _parts(parts: dict[str, float], whole: float) -> str:
    large = sorted(((name, s) for name, s in parts.items() if s >= 0.005 * whole), key=lambda p: -p[1])
    return ", ".join(f"{name} {s / whole:.0%}" for name, s in large)


def _bytes(parts: dict[str, float]) -> str:
    large = sorted(((name, b) for name, b in parts.items() if b >= 0.01 * sum(parts.values())), key=lambda p: -p[1])
    return ", ".join(f"{name} {b / 2**30:.2g} GiB" for name, b in large)


def _why(made: Planned, best: Ranked) -> list[str]:
    """One line that compares the best plan with the next plan of other degrees. Skips plans that are not recommended, although they may
    be faster.
    """
    other = next((r for r in made.found.ranked[1:] if _way(r.plan) != _way(best.plan) and r.advice == best.advice), None)
    if other is None:
        return ["why: all plans listed have the same degrees (--top lists more)"] if len(made.found.ranked) < made.found.fitting else []
    mine, theirs = made.time(best.plan).parts, made.time(other.plan).parts
    more = {name: theirs[name] - mine[name] for name in mine}
    costs = max(more, key=lambda name: more[name])
    slower = other.seconds / best.seconds - 1
    return [
        f"why: the next plan of other degrees, {described(other.plan)}, is {slower:.1%} slower, mostly by {costs} (+{more[costs]:.3g} s)"
    ]


def _way(plan: Plan) -> tuple[Any, ...]:
    return plan.pp, plan.tp, plan.sp, plan.dp, plan.ep, plan.etp


def _own_plan(run: Run, cluster: Cluster) -> str:
    """One line on the recipe's own plan: its time and memory, or why it does not run on this number of devices."""
    try:
        resolved = check_run(run, cluster.world)
    except BadInput as bad:
        return f"the recipe's own plan does not run here: {bad.what} is {bad.got}, needed {bad.needed}"
    network, plan = network_of(resolved), plan_of(resolved)
    held = held_bytes(network, plan, cluster)
    fits = "fits" if held <= cluster.memory_bytes() else "does not fit"
    return f"the recipe's own plan: {step_time(network, plan, cluster).step:.4g} s, {gib(held)} GiB ({fits}): {described(plan)}"


def _recipe(name: str, run: Run, made: Planned, cluster: str) -> str:
    """The chosen plan as a recipe that extends the given one. Holds all keys if the given one is not a shipped recipe."""
    best, chosen = made.found.ranked[0], made.runs[0].model_copy(update={"precision": run.precision})
    shipped = (RECIPES / f"{name}.yaml").is_file()
    before, after = flat(load(name)[0]) if shipped else {}, flat(chosen)  # without overrides of the command line
    tree: dict[str, Any] = {"extends": name} if shipped else {}
    for key, value in after.items():
        if not shipped or value != before[key]:
            *sections, last = key.split(".")
            held = tree
            for section in sections:
                held = held.setdefault(section, {})
            held[last] = value
    head = f"# {name} as moe plan --cluster {cluster} chose it: {best.seconds:.4g} s a step and {gib(best.held_bytes)} GiB predicted"
    return f"{head}\n{yaml.safe_dump(tree, sort_keys=False)}"


def _write(path: Path, recipe: str, cluster: str, made: Planned, seconds: float) -> None:
    from moe.records.results import write_json

    ranked = [_row(made, one) for one in made.found.ranked]
    refused = [{"reason": one.reason, "count": one.count, "example": described(one.example)} for one in made.found.refused]
    about = {"recipe": recipe, "cluster": cluster, "tried": made.found.tried, "fitting": made.found.fitting, "seconds_to_plan": seconds}
    write_json(str(path), verb="plan", rows=[], chosen=ranked[0], ranked=ranked, refused=refused, **about)


def _row(made: Planned, one: Ranked) -> dict[str, Any]:
    plan = {name: getattr(one.plan, name) for name in ("dp", "tp", "sp", "pp", "ep", "etp", "engine", "tensor", "depth", "sequence")}
    plan |= {name: getattr(one.plan, name) for name in ("schedule", "chunks", "stage_layers", "microbatch", "microbatches", "recompute")}
    parts = {"time": made.time(one.plan).parts, "memory": made.memory(one.plan).parts}
    about = {
        _SECONDS: one.seconds,
        "held_bytes": one.held_bytes,
        "advice": one.advice,
        "tight": made.tight(one),
        **made.speed(one)._asdict(),
    }
    return {"plan": described(one.plan), **plan, **about, **parts}
