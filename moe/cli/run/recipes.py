"""Verbs on a recipe: show, recipes, plan, simulate, energy, hash-table, combinations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from moe.cli.run.call import call, text
from moe.cli.verbs import Combinations, Energy, HashTable, Plan, Recipes, Show, Simulate
from moe.launch import exit_codes
from parallel.errors import BadInput

if TYPE_CHECKING:
    from moe.recipe.sections import Run


def show(flags: Show, overrides: dict[str, str]) -> int:
    from moe.plan.job.flops import size
    from moe.recipe.keys import keys_of_section
    from moe.recipe.load import load, resolved_yaml
    from moe.records.summary import count

    if flags.keys is not None:
        for flag, value in (("--plan", flags.plan), ("--nproc", flags.nproc), ("--rank", flags.rank), ("--json", flags.json)):
            if value not in (None, False):
                raise BadInput(flag, got="it with --keys", needed="--keys alone, or with RECIPE", fix=f"remove {flag}")
        print("\n".join(keys_of_section(flags.keys, load(flags.recipe, overrides)[0] if flags.recipe is not None else None)))
        return exit_codes.DONE
    if flags.recipe is None:
        raise BadInput("moe show", got="no RECIPE", needed="moe show RECIPE", fix="moe show switch_tiny; the names are in: moe recipes")
    run, origins = load(flags.recipe, overrides)
    if flags.plan:
        return _show_plan(flags, run, origins)
    for flag, value in (("--nproc", flags.nproc), ("--rank", flags.rank)):
        if value is not None:
            raise BadInput(flag, got=f"{value} without --plan", needed="--plan: the values are the same on all ranks", fix="add --plan")
    counted = size(run)
    print(f"# {count(counted.total)} parameters, {count(counted.active)} active for a token")
    print(resolved_yaml(run, origins), end="")
    if flags.json is not None:
        from moe.records.results import write_json

        sizes = {"parameters_total": counted.total, "parameters_active": counted.active}
        write_json(flags.json, verb="show", rows=_rows(run, origins), recipe=flags.recipe, **sizes)
    return exit_codes.DONE


def _show_plan(flags: Show, run: Run, origins: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user

    world, rank = 1 if flags.nproc is None else flags.nproc, flags.rank or 0
    if world < 1:
        raise BadInput("--nproc", got=world, needed="at least 1", fix="--nproc 1")
    run = check_for_user(run, world, origins)
    if not 0 <= rank < world:
        raise BadInput("--rank", got=rank, needed=f"0 to {world - 1}", fix="--rank 0, or another --nproc")
    return call("moe.parallelize.shown", run, world=world, rank=rank, json=text(flags.json), recipe=flags.recipe)


def _rows(run: Run, origins: dict[str, str]) -> list[dict[str, Any]]:
    from moe.recipe.keys import flat

    return [{"key": key, "value": value, "origin": origins[key]} for key, value in flat(run).items()]


def recipes(_: Recipes, __: dict[str, str]) -> int:
    from moe.plan.job.flops import size
    from moe.recipe.load import load, published_names, recipe_names, recipe_path
    from moe.records.summary import count

    names = [*recipe_names(), *published_names()]
    width = max(map(len, names))
    print(f"{'recipe':<{width}} {'parameters':>10} {'a token':>8}")
    for name in names:
        run, first = load(name)[0], recipe_path(name).read_text(encoding="utf-8").partition("\n")[0]
        counted = size(run)
        about = first.removeprefix("#").strip() if first.startswith("#") else ""
        print(f"{name:<{width}} {count(counted.total):>10} {count(counted.active):>8}  {about}".rstrip())
    return exit_codes.DONE


def plan(flags: Plan, overrides: dict[str, str]) -> int:
    if flags.calibrate:
        return _calibrate(flags, overrides)
    if flags.nproc is not None:
        raise BadInput("--nproc", got="it without --calibrate", needed="--cluster, which gives the number of devices", fix="remove --nproc")
    if flags.recipe is None:
        raise BadInput("moe plan", got="no RECIPE", needed="moe plan RECIPE", fix="name one: moe plan dense_8b --cluster h100-8x4")
    if flags.cluster is None:
        from moe.plan.machine.cluster import some_clusters

        raise BadInput(
            "--cluster",
            got="nothing",
            needed=f"one of {some_clusters()}, or a file",
            fix="--cluster a100-80-8x4",
        )
    given = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags) if f.name not in ("recipe", "calibrate", "nproc")}
    return call("moe.cli.plan.plan", flags.recipe, overrides=overrides, **given)


def _calibrate(flags: Plan, overrides: dict[str, str]) -> int:
    for field in dataclasses.fields(flags):
        if field.name not in ("calibrate", "nproc", "out") and getattr(flags, field.name) != field.default:
            name = "RECIPE" if field.name == "recipe" else f"--{field.name}"
            raise BadInput(name, got="it with --calibrate", needed="no flags but --out and --nproc", fix=f"remove {name}")
    if overrides:
        key = next(iter(overrides))
        raise BadInput(f"--{key}", got="it with --calibrate", needed="no recipe values: calibration reads no recipe", fix="remove it")
    if flags.nproc is not None and flags.nproc < 1:
        raise BadInput("--nproc", got=flags.nproc, needed="at least 1", fix="--nproc 2")
    if flags.out is not None and flags.out.suffix not in (".yaml", ".yml"):
        raise BadInput("--out", got=str(flags.out), needed="a cluster file, *.yaml", fix=f"--out {flags.out.stem or 'machine'}.yaml")
    return call("moe.calibrate.calibrate", out=flags.out, nproc=flags.nproc)


def simulate(flags: Simulate, overrides: dict[str, str]) -> int:
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    return call("moe.cli.simulate.simulate", given.pop("name", None), overrides=overrides, **given)


def energy(flags: Energy, overrides: dict[str, str]) -> int:
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    return call("moe.cli.energy", given.pop("name", None), overrides=overrides, **given)


def hash_table(flags: HashTable, overrides: dict[str, str]) -> int:
    from moe.recipe.load import load

    return call("moe.cli.hash_table", load(flags.recipe, overrides)[0], recipe=flags.recipe, out=flags.out)


def combinations(flags: Combinations, _: dict[str, str]) -> int:
    return call("moe.cli.combinations", out=text(flags.out), json=text(flags.json))
