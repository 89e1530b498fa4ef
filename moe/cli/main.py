"""Entry point of the `moe` command, and one function for each verb.

    argv -> recipe overrides taken out -> flags checked (flags.py) -> tyro -> the verb's dataclass (verbs.py) -> its function

Every wrong input is reported as one line on stderr with exit code 2. It is reported before torch is imported, because each function
imports what it needs. The exit codes are listed in moe/launch/exit_codes.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.cli import verbs
from moe.cli.flags import check_words
from moe.cli.verbs import (
    Bench,
    Combinations,
    Convert,
    Doctor,
    Energy,
    Eval,
    Generate,
    HashTable,
    Plan,
    Recipes,
    Rehearse,
    Report,
    Show,
    Simulate,
    Train,
    Verify,
)
from moe.launch import exit_codes
from moe.launch.environment import set_before_torch
from moe.recipe.overrides import take_overrides
from parallel.errors import BadInput, did_you_mean, harmless, some
from parallel.store.files import check_writable, user_path

if TYPE_CHECKING:
    from moe.recipe.sections import Run

BENCHES = Path(__file__).resolve().parents[1] / "bench"


def _train(flags: Train, overrides: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user
    from moe.checks.begins import check_begins
    from moe.checks.sharding import check_installed
    from moe.launch import start
    from moe.recipe.changes import check_allowed
    from moe.recipe.load import load
    from moe.records.tracker import check_trackers

    launcher: start.Launcher = flags.launcher or "deepspeed"
    world = start.world_size(flags.nproc, launcher=launcher, hostfile=flags.hostfile)
    run, origins = load(flags.recipe, overrides)
    if flags.dry_run:
        counted = flags.nproc is not None or flags.hostfile is not None
        return _call("moe.cli.dry_run", run, world=world if counted else None, cluster=flags.cluster, force=flags.force)
    if flags.cluster is not None:
        from moe.plan.machine.cluster import load_cluster

        load_cluster(flags.cluster)  # raises BadInput now for an unknown cluster; the ranks load it again
    source = _begins_with(flags, overrides)
    out = None if flags.out is None else user_path(flags.out, what="--out")
    allowed = [key.replace("-", "_") for key in flags.allow_change]
    check_allowed(allowed)
    _check_restarts(flags)
    smaller: list[int] = []
    if flags.elastic is not None and not _is_rank(os.environ):
        run, smaller, dp = _elastic(flags, run, world, origins)
        overrides = overrides | {"degrees.dp": str(dp)}
    alone = world == 1 and flags.launcher is None and flags.hostfile is None and not flags.restarts
    if not (alone and _is_rank(os.environ)):  # a rank that another launcher started checks against that launcher's world size
        check_for_user(run, world, origins)
        check_installed(run)
        check_begins(run, _out(flags), fresh=flags.fresh, source=source)
        if flags.hostfile is None:
            check_trackers(run.train.trackers)
    if not alone:
        return start.start(
            flags.recipe,
            overrides,
            nproc=flags.nproc,
            launcher=launcher,
            out=out,
            fresh=flags.fresh,
            from_step=flags.from_step,
            allow_changes=allowed,
            hostfile=flags.hostfile,
            debug_collectives=flags.debug_collectives,
            cluster=flags.cluster,
            init_from=source,
            force=flags.force,
            profile=flags.profile,
            grace_s=run.train.grace_s,
            restarts=flags.restarts or 0,
            elastic=flags.elastic,
            smaller=smaller,
        )
    from moe.launch import launch
    from moe.launch.arguments import Arguments

    given = Arguments(
        flags.recipe,
        overrides,
        out=out,
        fresh=flags.fresh,
        from_step=flags.from_step,
        allow_changes=tuple(allowed),
        init_from=source,
        cluster=flags.cluster,
        force=flags.force,
        profile=flags.profile,
        debug_collectives=flags.debug_collectives,
        elastic=flags.elastic,
    )
    return launch.main(given.words())


def _begins_with(flags: Train, overrides: dict[str, str]) -> Path | None:
    """The folder of weights that --init_from names, or None.

    For hf:PATH this is RUN/base, a run that is converted from PATH here. It is not converted again if the run already has a checkpoint.
    """
    from moe.checks.begins import has_checkpoint
    from moe.recipe.load import ON_HUB, download_of, of_transformers

    if flags.init_from is None:
        return None
    said = str(flags.init_from)
    if (hub := download_of(said)) is not None:
        fix = f"{hub[0]}, then --init_from {hub[1]}"
        raise BadInput("--init_from", got=f"{said}{ON_HUB}", needed="a folder of this machine", fix=fix)
    if not said.startswith("hf:"):
        source = user_path(flags.init_from, what="--init_from")
        if not source.is_dir():
            needed, fix = "the folder of a run, of one of its checkpoints, or hf:PATH", "--init_from runs/NAME"
            raise BadInput("--init_from", got=flags.init_from, needed=needed, fix=fix)
        if of_transformers(source):
            raise BadInput("--init_from", got=f"{said}, a model of transformers", needed=f"hf:{said}", fix=f"--init_from hf:{said}")
        return source
    out = _out(flags)
    base = out / "base"
    if not flags.fresh and has_checkpoint(out):
        return base
    if _is_rank(os.environ):
        needed = "a run, because all ranks of a launcher read it at the same time"
        raise BadInput("--init_from", got=said, needed=needed, fix=f"moe convert {said} runs/BASE, then --init_from runs/BASE")
    from moe.convert.huggingface.convert import begin_from
    from parallel.store.lock import alone_in

    source = user_path(said.removeprefix("hf:"), what="--init_from")
    with alone_in(out):
        print("\n".join(begin_from(source, base, recipe=flags.recipe, overrides=overrides)))
    return base


def _out(flags: Train) -> Path:
    from moe.recipe.load import run_name

    return Path("runs") / run_name(flags.recipe) if flags.out is None else user_path(flags.out, what="--out")


def _check_restarts(flags: Train) -> None:
    """Raise BadInput for --restarts if another launcher started this rank, or if ranks run on other machines and cannot be killed from
    here.
    """
    if not flags.restarts:
        return
    if flags.restarts < 0:
        raise BadInput("--restarts", got=flags.restarts, needed="at least 0", fix="--restarts 3")
    if _is_rank(os.environ):
        got = "it on a rank of another launcher; only that launcher can restart its ranks"
        fix = "torchrun --max-restarts N, or #SBATCH --requeue: a rank that is started again resumes"
        raise BadInput("--restarts", got=got, needed="moe train as the parent of its ranks", fix=fix)
    if flags.hostfile is not None:
        needed = "ranks on this machine only: ranks of other machines cannot be killed reliably from here"
        fix = "torchrun --max-restarts N on every host, or let the batch system queue the job again"
        raise BadInput("--restarts", got="it with --hostfile", needed=needed, fix=fix)


def _elastic(flags: Train, run: Run, world: int, origins: dict[str, str]) -> tuple[Run, list[int], object]:
    """The recipe for the number of processes available now, the smaller numbers it can fall back to, and dp of the whole recipe.

    Raises BadInput if --elastic is below 1, comes without --restarts, or leaves no legal layout.
    """
    from moe.checks.advice import check_for_user
    from moe.launch import elastic

    assert flags.elastic is not None
    if flags.elastic < 1:
        raise BadInput("--elastic", got=flags.elastic, needed="the minimum number of processes, at least 1", fix="--elastic 1")
    if not flags.restarts:
        needed = "--restarts N too: the run continues with fewer processes after N restarts without a new checkpoint"
        raise BadInput("--elastic", got="it without --restarts", needed=needed, fix=f"--restarts 3 --elastic {flags.elastic}")
    whole = elastic.whole(run, world)
    check_for_user(run, world if run.degrees.dp == "auto" else elastic.size(whole), origins)
    find = elastic.check_smaller if world == elastic.size(whole) else elastic.smaller
    smaller = find(whole, below=world, least=flags.elastic)
    left = elastic.for_world(whole, world, least=flags.elastic)
    print(
        f"--elastic {flags.elastic}: if restarts do not help, the run continues with {elastic.listed(smaller)} of {world} processes",
        flush=True,
    )
    return left, smaller, whole.degrees.dp


def _is_rank(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment or environment.get("SLURM_NTASKS", "1") != "1"


def _verify(flags: Verify, _: dict[str, str]) -> int:
    if flags.nproc < 1:
        raise BadInput("--nproc", got=flags.nproc, needed="at least 1 process", fix="--nproc 2")
    if flags.timeout_s is not None and not 0 < flags.timeout_s < float("inf"):
        raise BadInput("--timeout_s", got=flags.timeout_s, needed="seconds, more than 0", fix="--timeout_s 600")
    if flags.debug_collectives:
        from parallel.mesh.debug_collectives import DEBUG

        os.environ[DEBUG] = "20"  # seconds; ranks are forked from this process, so they inherit it
    if flags.recipe is not None and flags.kinds != Verify.kinds:
        raise BadInput(
            "--kinds", got=f"{flags.kinds} with --recipe", needed="no --kinds: the recipe decides which methods run", fix="remove --kinds"
        )
    return _call(
        "moe.verify.verify",
        nproc=flags.nproc,
        json=_text(flags.json),
        only=flags.only,
        kinds=flags.kinds,
        timeout_s=flags.timeout_s,
        go_on=flags.go_on,
        recipe=flags.recipe,
    )


def _generate(flags: Generate, _: dict[str, str]) -> int:
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    given |= {name: str(given[name]) for name in ("prompt_file", "json") if name in given}
    for name, low in (("tokens", 1), ("samples", 1), ("temperature", 0), ("top_k", 1), ("seed", 0), ("step", 0)):
        if name in given and given[name] < low:
            raise BadInput(f"--{name}", got=given[name], needed=f"at least {low}", fix=f"--{name} {low}")
    run_dir = _run_dir(given.pop("run_dir"), "checkpoints")
    return _call("moe.train.use.generate", run_dir, **given)


def _eval(flags: Eval, overrides: dict[str, str]) -> int:
    given = {name: value for name in ("sequences", "step") if (value := getattr(flags, name)) is not None}
    for name, value in given.items():
        if value < 0:
            raise BadInput(f"--{name}", got=value, needed="at least 0", fix=f"--{name} 0")
    return _call("moe.train.use.evaluate", _run_dir(flags.run_dir, "checkpoints"), overrides=overrides, json=_text(flags.json), **given)


def _report(flags: Report, _: dict[str, str]) -> int:
    if flags.other is not None:
        if flags.json is not None:
            raise BadInput("--json", got="it with two runs", needed="one run: --json lists the files of its report", fix="remove --json")
        first, second = (Path(_run_dir(folder, "metrics.jsonl")) for folder in (flags.run_dir, flags.other))
        print(f"picture: {importlib.import_module('moe.report.beside').beside(first, second)}")
        return exit_codes.DONE
    page = importlib.import_module("moe.report").main(_run_dir(flags.run_dir, "metrics.jsonl"), json=_text(flags.json))
    print(f"report: {page}")
    return exit_codes.DONE


def _bench(flags: Bench, _: dict[str, str]) -> int:
    if flags.name not in bench_names():
        near = did_you_mean(flags.name, bench_names())
        names = some(bench_names(), rest="moe bench --help") or "none in this version"
        raise BadInput("NAME", got=flags.name, needed=f"a measurement: {names}", fix=f"did you mean {near}?" if near else "moe bench NAME")
    module = _bench_file(flags.name)
    said = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags) if f.name != "name"}
    given = {name: value for name, value in said.items() if value is not None and value is not False}  # 0 was given
    takes = _arguments_of_main(module)
    for name, value in given.items():
        if name not in takes:
            flags_there = ", ".join(f"--{t}" for t in takes) or "no flags"
            raise BadInput(f"--{name}", got=f"it for {flags.name}", needed=f"a flag of {flags.name}: {flags_there}", fix=f"remove --{name}")
        if isinstance(value, int) and value < 1:
            raise BadInput(f"--{name}", got=value, needed="at least 1", fix=f"--{name} 1")
    return _call(
        f"moe.bench.{module.parent.name}.{module.stem}",
        **{name: _text(value) if isinstance(value, Path) else value for name, value in given.items()},
    )


def bench_names() -> list[str]:
    """Names of the available measurements: modules in the rooms of moe/bench with a main function.

    Searches the source text, which is faster than importing.
    """
    return sorted(path.stem.replace("_", "-") for path in BENCHES.glob("*/*.py") if "\ndef main(" in path.read_text(encoding="utf-8"))


def _arguments_of_main(module: Path) -> dict[str, str]:
    """The arguments of a module's main function, each with its default if that is a plain number or string, else "".

    Read from the source, because importing a measurement would import torch.
    """
    import ast

    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            pairs = zip((*node.args.args, *node.args.kwonlyargs), (*node.args.defaults, *node.args.kw_defaults), strict=True)
            plain = {a.arg: default.value if isinstance(default, ast.Constant) else None for a, default in pairs}
            return {name: "" if value in (None, False) else str(value) for name, value in plain.items()}
    return {}


def _plan(flags: Plan, overrides: dict[str, str]) -> int:
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
    return _call("moe.cli.plan.plan", flags.recipe, overrides=overrides, **given)


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
    return _call("moe.calibrate.calibrate", out=flags.out, nproc=flags.nproc)


def _simulate(flags: Simulate, overrides: dict[str, str]) -> int:
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    return _call("moe.cli.simulate.simulate", given.pop("name", None), overrides=overrides, **given)


def _energy(flags: Energy, overrides: dict[str, str]) -> int:
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    return _call("moe.cli.energy", given.pop("name", None), overrides=overrides, **given)


def _convert(flags: Convert, overrides: dict[str, str]) -> int:
    from moe.convert.checks import settings_of
    from moe.recipe.load import ON_HUB, download_of, of_transformers, recipe_names, recipe_path

    if (hub := download_of(flags.from_run)) is not None:
        fix = f"{hub[0]}, then moe convert {hub[1]} {flags.to_run}"
        raise BadInput("FROM_RUN", got=f"{flags.from_run}{ON_HUB}", needed="a folder of this machine", fix=fix)
    if any(word.startswith("hf:") for word in (flags.from_run, flags.to_run)):
        return _convert_huggingface(flags, overrides)
    if of_transformers(Path(flags.from_run)):
        word = f"hf:{flags.from_run}"
        got, fix = f"{flags.from_run}, a model of transformers", f"moe convert {word} {flags.to_run}"
        raise BadInput("FROM_RUN", got=got, needed=word, fix=fix)
    if flags.dtype is not None:
        raise BadInput("--dtype", got=flags.dtype, needed="--dtype with RUN hf:PATH only", fix="remove --dtype")
    if flags.to is None:
        raise BadInput("--to", got="nothing", needed="the recipe of the new model", fix=f"--to {recipe_names()[-1]}")
    recipe_path(flags.to)
    source = _run_dir(flags.from_run, "checkpoints", also="manifest.json", what="FROM_RUN")
    given = {name: getattr(flags, name) for name in ("method", "share", "scale", "weights", "moments") if getattr(flags, name) is not None}
    settings = settings_of(given, approximate=flags.approximate)
    return _call(
        "moe.convert.convert",
        source,
        flags.to_run,
        recipe=flags.to,
        overrides=overrides,
        settings=settings,
        load=_text(flags.load),
        check=flags.check,
        json=_text(flags.json),
    )


def _convert_huggingface(flags: Convert, overrides: dict[str, str]) -> int:
    """Convert a folder of transformers into a run (hf:PATH RUN), or a run into such a folder (RUN hf:PATH)."""
    into = flags.to_run.startswith("hf:")
    if into and flags.from_run.startswith("hf:"):
        raise BadInput("FROM_RUN", got="hf: on both sides", needed="a run on one", fix="moe convert hf:PATH runs/NAME")
    for field in dataclasses.fields(flags):
        if field.name not in ("from_run", "to_run", "json", *(("dtype",) if into else ())) and getattr(flags, field.name) != field.default:
            needed = "no flags but --json and --dtype" if into else "no flags but --json, and recipe keys of training"
            raise BadInput(
                f"--{field.name}", got=f"it with {'RUN hf:PATH' if into else 'hf:PATH RUN'}", needed=needed, fix=f"remove --{field.name}"
            )
    if into and overrides:
        key = next(iter(overrides))
        raise BadInput(
            f"--{key}", got="it with RUN hf:PATH", needed="no recipe values: the run's own recipe is used", fix=f"remove --{key}"
        )
    source = _run_dir(flags.from_run, "checkpoints", also="manifest.json", what="FROM_RUN") if into else flags.from_run
    return _call("moe.convert.huggingface.convert", source, flags.to_run, overrides=overrides, dtype=flags.dtype, json=_text(flags.json))


def _hash_table(flags: HashTable, overrides: dict[str, str]) -> int:
    from moe.recipe.load import load

    return _call("moe.cli.hash_table", load(flags.recipe, overrides)[0], recipe=flags.recipe, out=flags.out)


def _show(flags: Show, overrides: dict[str, str]) -> int:
    from moe.plan.job.flops import size
    from moe.recipe.described import keys_of_section
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
    counted = size(run.model, run.experts, run.router, vocab_size=run.vocab_size)
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
    return _call("moe.parallelize.shown", run, world=world, rank=rank, json=_text(flags.json), recipe=flags.recipe)


def _rehearse(flags: Rehearse, overrides: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user
    from moe.recipe.load import load

    run, origins = load(flags.recipe, overrides)
    if flags.world is None or flags.world < 1:
        raise BadInput(
            "--world",
            got="nothing" if flags.world is None else flags.world,
            needed="the number of ranks that the run would have",
            fix="--world 8",
        )
    try:
        check_for_user(run, flags.world, origins)
    except BadInput as bad:
        raise BadInput(bad.what, got=bad.got, needed=bad.needed, fix=str(bad.fix).replace("--nproc", "--world")) from None
    given: dict[str, Any] = {name: value for name in ("rank", "device") if (value := getattr(flags, name)) is not None}
    return _call("moe.rehearse.rehearse", run, recipe=flags.recipe, world=flags.world, json=_text(flags.json), **given)


def _rows(run: Run, origins: dict[str, str]) -> list[dict[str, Any]]:
    from moe.recipe.keys import flat

    return [{"key": key, "value": value, "origin": origins[key]} for key, value in flat(run).items()]


def _combinations(flags: Combinations, _: dict[str, str]) -> int:
    return _call("moe.cli.combinations", out=_text(flags.out), json=_text(flags.json))


def _recipes(_: Recipes, __: dict[str, str]) -> int:
    from moe.plan.job.flops import size
    from moe.recipe.load import load, published_names, recipe_names, recipe_path
    from moe.records.summary import count

    names = [*recipe_names(), *published_names()]
    width = max(map(len, names))
    print(f"{'recipe':<{width}} {'parameters':>10} {'a token':>8}")
    for name in names:
        run, first = load(name)[0], recipe_path(name).read_text(encoding="utf-8").partition("\n")[0]
        counted = size(run.model, run.experts, run.router, vocab_size=run.vocab_size)
        about = first.removeprefix("#").strip() if first.startswith("#") else ""
        print(f"{name:<{width}} {count(counted.total):>10} {count(counted.active):>8}  {about}".rstrip())
    return exit_codes.DONE


def _doctor(flags: Doctor, _: dict[str, str]) -> int:
    if flags.trace is not None:
        return _call("moe.cli.trace", str(flags.trace), json=_text(flags.json))
    return _call("moe.cli.doctor", json=_text(flags.json))


def _call(module: str, *words: Any, **flags: Any) -> int:
    """Call module.main(...) and return its exit code. None counts as 0."""
    return int(importlib.import_module(module).main(*words, **flags) or 0)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _run_dir(name: str, holds: str, *, also: str | None = None, what: str = "RUN_DIR") -> str:
    from moe.recipe.load import ON_HUB, download_of, of_transformers

    user_path(Path(name) / holds, what=what)
    if (hub := download_of(name)) is not None:
        fix = f"{hub[0]}, then moe convert {hub[1]} runs/NAME, then runs/NAME"
        raise BadInput(what, got=f"{name}{ON_HUB}", needed=f"a run's folder, with {holds} in it", fix=fix)
    if name.startswith("hf:") or of_transformers(Path(name)):
        fix = f"moe convert hf:{name.removeprefix('hf:')} runs/NAME, then runs/NAME"
        raise BadInput(what, got=f"{name}, a model of transformers", needed=f"a run's folder, with {holds} in it", fix=fix)
    if (Path(name) / holds).exists() or (also and (Path(name) / also).exists()):
        return name
    runs = sorted(str(p) for p in Path("runs").glob("*") if (p / holds).exists()) if Path("runs").is_dir() else []
    near = did_you_mean(name, runs) or did_you_mean(f"runs/{name}", runs)
    fix = f"did you mean {near}?" if near else f"one of {some(runs, rest='ls runs')}" if runs else "train first: moe train switch_tiny"
    raise BadInput(what, got=name, needed=f"a run's folder, with {holds} in it", fix=fix)


FUNCTIONS: dict[str, Callable[[Any, dict[str, str]], int]] = {
    "train": _train,
    "verify": _verify,
    "generate": _generate,
    "eval": _eval,
    "report": _report,
    "bench": _bench,
    "plan": _plan,
    "simulate": _simulate,
    "energy": _energy,
    "convert": _convert,
    "hash-table": _hash_table,
    "show": _show,
    "combinations": _combinations,
    "rehearse": _rehearse,
    "recipes": _recipes,
    "doctor": _doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # print each row immediately, also into a pipe or a file
    try:
        return _run(words)
    except BadInput as bad:
        print(f"error: {bad}", file=sys.stderr, flush=True)
        return exit_codes.BAD_INPUT
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # `moe show switch_tiny | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return exit_codes.DONE


def _run(words: list[str]) -> int:
    _check_printable(words)
    if not words or words[0] in ("-h", "--help"):
        verbs.print_verbs(benches=bench_names())
        return exit_codes.DONE
    if words[0] in ("-V", "--version"):
        from moe import __version__

        print(f"moe-parallel {__version__}")
        return exit_codes.DONE
    if words[0] in ("--tyro-print-completion", "--tyro-write-completion"):
        verbs.print_completion(words, benches=bench_names())
        return exit_codes.DONE
    verb, *rest = words
    if verb not in FUNCTIONS:
        _refuse_verb(verb)
    if "-h" in rest or "--help" in rest:
        _help(verb, rest)
        return exit_codes.DONE
    overrides: dict[str, str] = {}
    if verb in verbs.RECIPE_VERBS:
        rest, overrides = take_overrides(rest)
    set_before_torch(os.environ)  # verify forks its ranks from this process; generate and bench compute in it
    rest = check_words(verb, verbs.VERBS[verb], rest)
    flags = verbs.parse(verb, rest, benches=bench_names())
    if (results := getattr(flags, "json", None)) is not None:
        check_writable(user_path(results, what="--json"), what="--json")
    return FUNCTIONS[verb](flags, overrides)


def _help(verb: str, rest: list[str]) -> None:
    """Print the words and flags of a verb. For `bench` also print the list of measurements; for `bench NAME` print that measurement."""
    names = bench_names()
    named = [word for word in rest if word in names] if verb == "bench" else []
    if named:
        verbs.print_bench(named[0], _about_bench(named[0]), _arguments_of_main(_bench_file(named[0])))
        return
    verbs.print_help(verb, benches=names)
    if verb == "bench":
        verbs.print_list({name: _about_bench(name).partition("\n")[0] for name in names})


def _about_bench(name: str) -> str:
    """The module docstring of a measurement, read without importing it."""
    import ast

    return ast.get_docstring(ast.parse(_bench_file(name).read_text(encoding="utf-8"))) or ""


def _bench_file(name: str) -> Path:
    return next(BENCHES.glob(f"*/{name.replace('-', '_')}.py"))


def _check_printable(words: list[str]) -> None:
    """Raise BadInput for words with control characters or invalid UTF-8. Only a prompt may contain control characters."""
    for before, word in zip(["", *words], words, strict=False):
        fits = word.encode(errors="replace").decode() == word if _is_prompt(before, word) else harmless(word)
        if not fits:
            needed, fix = "words without control characters, in UTF-8", "rename the file, or leave these characters out"
            raise BadInput("the command line", got=repr(word), needed=needed, fix=fix)


def _is_prompt(before: str, word: str) -> bool:
    return before == "--prompt" or word.startswith("--prompt=")


def _refuse_verb(verb: str) -> None:
    near = did_you_mean(verb, FUNCTIONS)
    fix = f"did you mean moe {near}?" if near else "see: moe --help"
    if near is None and not verb.startswith("-"):
        from moe.recipe.load import recipe_names

        recipe = did_you_mean(verb, recipe_names())
        fix = f"did you mean moe train {recipe}?" if recipe else fix
    raise BadInput("verb", got=verb, needed=f"one of {some(FUNCTIONS, rest='moe --help')}", fix=fix)


if __name__ == "__main__":
    sys.exit(main())
