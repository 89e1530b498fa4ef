"""Functions that carry out the verbs show, recipes and plan of the command `moe`. Instead of a recipe's name, verbs accept `hf:DIR`: the
model that DIR/config.json describes.

moe plan hf:models/qwen --cluster h100-8        reads config.json alone
moe train hf:models/qwen --data.path texts/     also converts the tensors into RUN/base; the run starts from them
"""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.cli.run import call, check_least, refuse, refuse_others, write_rows
from moe.cli.run.train import begin, check_model
from moe.cli.verbs import Plan, Recipes, Show, Train
from moe.convert.huggingface import PREFIX
from moe.launch import exit_codes
from parallel.errors import BadInput
from parallel.store.files import user_path

if TYPE_CHECKING:
    from moe.recipe.sections import Run


def show(flags: Show, overrides: dict[str, str]) -> int:
    from moe.plan.job.flops import size
    from moe.recipe.keys import flat, keys_of_section
    from moe.recipe.load import load, resolved_yaml
    from moe.records.summary import count

    if flags.keys is not None:
        refuse_others(flags, ("recipe", "keys"), got="with --keys", needed="only --keys, or --keys and RECIPE")
        print("\n".join(keys_of_section(flags.keys, load(flags.recipe, overrides)[0] if flags.recipe is not None else None)))
        return exit_codes.DONE
    if flags.recipe is None:
        raise BadInput("moe show", got="no RECIPE", needed="moe show RECIPE", fix="moe show switch_tiny; the names are in: moe recipes")
    run, origins = load(flags.recipe, overrides)
    if flags.plan:
        return _show_plan(flags, run, origins)
    for flag, value in (("--nproc", flags.nproc), ("--rank", flags.rank)):
        if value is not None:
            raise BadInput(flag, got=f"{value} without --plan", needed="--plan, since a recipe is the same on all ranks", fix="add --plan")
    counted = size(run)
    print(f"# {count(counted.total)} parameters, {count(counted.active)} active for a token")
    print(resolved_yaml(run, origins), end="")
    rows = [{"key": key, "value": value, "origin": origins[key]} for key, value in flat(run).items()]
    sizes = {"parameters_total": counted.total, "parameters_active": counted.active}
    write_rows(flags.json, "show", rows, recipe=flags.recipe, **sizes)
    return exit_codes.DONE


def _show_plan(flags: Show, run: Run, origins: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user

    check_least(flags, nproc=1)
    world, rank = flags.nproc or 1, flags.rank or 0
    run = check_for_user(run, world, origins)
    if not 0 <= rank < world:
        raise BadInput("--rank", got=rank, needed=f"0 to {world - 1}", fix="--rank 0, or another --nproc")
    return call("moe.parallelize.shown", run, world=world, rank=rank, json=flags.json, recipe=flags.recipe)


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
    for flag in (name for name in READ if getattr(flags, name) is not None):
        raise BadInput(f"--{flag}", got=f"--{flag} without --calibrate", needed="--calibrate, which reads this folder", fix=_fitted(flag))
    refuse({"nproc": flags.nproc}, got="without --calibrate", needed="--cluster, which gives the number of devices")
    if flags.recipe is None:
        needed = "moe plan RECIPE --cluster CLUSTER"
        raise BadInput("moe plan", got="no RECIPE", needed=needed, fix="name one: moe plan dense_8b --cluster h100-8x4")
    if flags.cluster is None:
        from moe.plan.machine.cluster import some_clusters
        from moe.recipe.load import load

        load(flags.recipe, overrides)  # a misspelled recipe or key is named first
        fix = "add --cluster h100-8; for this machine: moe train RECIPE --dry_run"
        raise BadInput("moe plan", got="no --cluster", needed=f"one of {some_clusters()}, or a file", fix=fix)
    return call("moe.cli.plan", flags, overrides)


READ = {"nccl": "moe.calibrate.nccl_tests", "runs": "moe.calibrate.own_runs"}  # flag that names a folder -> module that reads it


def _fitted(reads: str, cluster: object = None, out: object = None) -> str:
    """Return the command that changes a cluster file by the folder of the flag `reads`."""
    return f"moe plan --calibrate --{reads} FOLDER --cluster {cluster or 'h100-8x4'} --out {out or 'mine.yaml'}"


def _calibrate(flags: Plan, overrides: dict[str, str]) -> int:
    reads = next((name for name in READ if getattr(flags, name) is not None), None)
    if reads is not None:
        refuse_others(flags, ("calibrate", reads, "cluster", "out"), got=f"with --{reads}", needed="no flags but --cluster and --out")
    else:
        refuse_others(flags, ("calibrate", "nproc", "out"), got="with --calibrate", needed="no flags but --out and --nproc")
    refuse(overrides, got="with --calibrate", needed="no recipe values: calibration reads no recipe")
    check_least(flags, nproc=1)
    if flags.out is not None and flags.out.suffix not in (".yaml", ".yml"):
        raise BadInput("--out", got=str(flags.out), needed="a cluster file, *.yaml", fix=f"--out {flags.out.stem or 'machine'}.yaml")
    if reads is None:
        return int(importlib.import_module("moe.calibrate.calibrate").main(out=flags.out, nproc=flags.nproc))
    if flags.cluster is None or flags.out is None:
        missing = " and ".join(f"--{name}" for name in ("cluster", "out") if getattr(flags, name) is None)
        needed = "--cluster, the cluster that is changed, and --out, the file for the result"
        raise BadInput(f"--{reads}", got=f"no {missing}", needed=needed, fix=_fitted(reads, flags.cluster, flags.out))
    return int(importlib.import_module(READ[reads]).main(getattr(flags, reads), flags.cluster, flags.out))


@contextmanager
def with_recipe(flags: Any, overrides: dict[str, str]) -> Iterator[Any]:
    """Yield the flags; a recipe hf:DIR is replaced by the path of a YAML file with the model's recipe. Raises BadInput for a folder that
    cannot be converted, for a name of a model on the Hugging Face hub, and with --init_from."""
    name = getattr(flags, "recipe", None)
    if not isinstance(name, str) or not name.startswith(PREFIX):
        yield flags
        return
    from moe.recipe.load import refuse_on_hub

    refuse_on_hub(name, "recipe")
    source = user_path(name.removeprefix(PREFIX), what="recipe")
    if isinstance(flags, Train) and flags.init_from is not None:
        needed, fix = "one model to start from", "remove --init_from, or give a recipe"
        raise BadInput("--init_from", got=f"{flags.init_from} with {PREFIX}{source}", needed=needed, fix=fix)
    if isinstance(flags, Train) and not flags.dry_run:
        yield _converted(flags, overrides, source)
        return
    begins = {"init_from": Path(f"{PREFIX}{source}")} if isinstance(flags, Train) else {}
    with _described(source) as path:
        yield dataclasses.replace(flags, recipe=str(path), **begins)


@contextmanager
def _described(source: Path) -> Iterator[Path]:
    """Yield a temporary recipe of the model that source/config.json describes."""
    import yaml

    from moe.convert.huggingface.config import recipe_values
    from moe.convert.huggingface.convert import config_in

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{source.resolve().name}.yaml"
        path.write_text(yaml.safe_dump(recipe_values(config_in(source))), encoding="utf-8")
        yield path


def _converted(flags: Train, overrides: dict[str, str], source: Path) -> Train:
    """Return flags for a run that starts from the model in `source`. Convert the model into RUN/base, unless the run has a checkpoint.
    Raises BadInput for a wrong recipe or data file, before tensors are read, and if the run's checkpoint comes from another model."""
    from moe.checks.advice import check_for_user
    from moe.convert.huggingface.convert import into_base
    from moe.launch.start import world_size
    from moe.recipe.load import load

    out = Path("runs") / source.resolve().name if flags.out is None else user_path(flags.out, what="--out")
    base = out / "base"

    def convert(base: Path) -> list[str]:
        with _described(source) as described:
            run, origins = load(str(described), overrides)
        check_for_user(run, world_size(flags.nproc, launcher=flags.launcher or "deepspeed", hostfile=flags.hostfile), origins)
        check_model(source, run)
        return into_base(source, base)

    then = "moe train runs/BASE/recipe.yaml --init_from runs/BASE"
    if not begin(out, convert, fresh=flags.fresh, what="recipe", said=f"{PREFIX}{source}", then=then):
        _check_same(source, base, out)
    return dataclasses.replace(flags, recipe=str(base / "recipe.yaml"), init_from=base, out=out)


def _check_same(source: Path, base: Path, out: Path) -> None:
    """Raise BadInput unless `source` has the config.json with which the run `out` began."""
    from moe.convert.huggingface.convert import config_in
    from moe.train.start.resume import KEPT

    try:
        same = config_in(source) == config_in(base / KEPT)
    except BadInput:
        same = False
    if not same:
        needed = f"the config.json of {base / KEPT}, with which the run in {out} began"
        fix = f"moe train {out / 'recipe.yaml'} --out {out} continues it; or choose another --out"
        raise BadInput("recipe", got=f"{PREFIX}{source}", needed=needed, fix=fix)
