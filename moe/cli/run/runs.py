"""Runs `moe verify`, `moe generate`, `moe eval`, `moe report`, `moe convert` and `moe bench`: checks their flags, and calls the code behind
them. Measurements of `moe bench` are the modules of moe/bench that have a function `main`. Their names, help texts and flags are read from
the source files, because importing these would load torch.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

from moe.cli.run import call, check_least, refuse, refuse_others, run_dir
from moe.cli.verbs import Bench, Convert, Eval, Generate, Report, Verify
from moe.convert.huggingface import PREFIX
from moe.launch import exit_codes
from parallel.errors import BadInput, did_you_mean, some

_OF_PEER = ("model", "ep", "tp", "fsdp", "pin_routing")  # flags of `moe verify` that only --peer reads


def verify(flags: Verify, _: dict[str, str]) -> int:
    if flags.compare is not None or flags.many is not None:
        return _compare(flags)
    if flags.timeout_s is not None and not 0 < flags.timeout_s < float("inf"):
        raise BadInput("--timeout_s", got=flags.timeout_s, needed="seconds, more than 0", fix="--timeout_s 600")
    if flags.peer is not None:
        return _peer(flags)
    refuse({name: getattr(flags, name) or None for name in _OF_PEER}, got="without --peer", needed="--peer NAME")
    if flags.nproc is not None and flags.nproc < 1:
        raise BadInput("--nproc", got=flags.nproc, needed="at least 1 process", fix="--nproc 2")
    if flags.recipe is not None and flags.kinds != Verify.kinds:
        needed = "no --kinds: the recipe decides which methods run"
        raise BadInput("--kinds", got=f"{flags.kinds} with --recipe", needed=needed, fix="remove --kinds")
    given = {name: value for name, value in dataclasses.asdict(flags).items() if name not in ("compare", "many", "peer", *_OF_PEER)}
    if flags.device != "cuda":
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed uses the CPU even on a machine with a GPU, in this process and its children
    if given.pop("debug_collectives"):
        from parallel.mesh.debug_collectives import DEBUG

        os.environ[DEBUG] = "20"  # seconds to wait for a missing rank; ranks are forked from this process, so they inherit the variable
    draws, seed, types = given.pop("draws"), given.pop("seed"), given.pop("types")
    if types:
        of_types = ("nproc", "json", "kinds", "only", "recipe", "timeout_s")
        _refuse_others(flags, "types", *of_types, "debug_collectives")
        return call("moe.verify.types", **{name: given[name] for name in of_types})
    if draws is None:
        refuse({"seed": seed}, got="without --draws", needed="--draws: only random recipes have a seed")
        return call("moe.verify.verify", **given)
    check_least(flags, draws=1, nproc=2)
    _refuse_others(flags, "draws", "seed", "nproc", "json", "timeout_s", "debug_collectives")
    return call("moe.verify.random_runs", draws=draws, seed=seed or "0", **{name: given[name] for name in ("nproc", "json", "timeout_s")})


def _refuse_others(flags: Verify, kind: str, *allowed: str) -> None:
    """Raise BadInput for the first flag that cannot be combined with the flag `kind`, such as types."""
    needed = f"no flags but {', '.join(f'--{name}' for name in allowed)}"
    refuse_others(flags, (kind, *allowed), got=f"with --{kind}", needed=needed)


def _compare(flags: Verify) -> int:
    if flags.compare is None:
        from moe.recipe.load import recipe_names

        own = f"to test a recipe: moe verify --recipe {flags.many if flags.many in recipe_names() else 'RECIPE'}"
        needed = "flags alone; a word only as MANY in --compare ONE MANY"
        raise BadInput("moe verify", got=f"the word {flags.many}", needed=needed, fix=f"{own}; to test all layouts: moe verify")
    if flags.many is None:
        fix = f"moe verify --compare {flags.compare} MANY"
        raise BadInput("--compare", got=f"only {flags.compare}", needed="the folders of two records, ONE and MANY", fix=fix)
    refuse_others(flags, ("compare", "many", "json"), got="with --compare", needed="no flags but --json")
    return call("moe.verify.yours.compare", flags.compare, flags.many, json=flags.json)


def _peer(flags: Verify) -> int:
    _refuse_others(flags, "peer", *_OF_PEER, "only", "json", "timeout_s")
    os.environ["DS_ACCELERATOR"] = "cpu"
    degrees = {name: degree for name in ("ep", "tp", "fsdp") if (degree := getattr(flags, name)) is not None}
    given = {"model": flags.model, "degrees": degrees, "only": flags.only, "pin": flags.pin_routing}
    return call("moe.verify.peer", flags.peer, **given, json=flags.json, timeout_s=flags.timeout_s)


def generate(flags: Generate, _: dict[str, str]) -> int:
    check_least(flags, tokens=1, samples=1, temperature=0, top_k=1, seed=0, step=0)
    given = _given(flags)
    return call("moe.train.use.generate", run_dir(given.pop("run_dir"), "checkpoints"), **given)


def evaluate(flags: Eval, overrides: dict[str, str]) -> int:
    check_least(flags, sequences=0, step=0)
    given = _given(flags)
    return call("moe.train.use.evaluate", run_dir(given.pop("run_dir"), "checkpoints"), overrides=overrides, **given)


def _given(flags: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}


def report(flags: Report, _: dict[str, str]) -> int:
    if flags.other is not None:
        refuse({"json": flags.json}, got="with two runs", needed="one run: --json lists the files of its report")
        first, second = (Path(run_dir(folder, "metrics.jsonl")) for folder in (flags.run_dir, flags.other))
        print(f"picture: {importlib.import_module('moe.report.compare').beside(first, second)}")
        return exit_codes.DONE
    json = None if flags.json is None else str(flags.json)
    print(f"report: {importlib.import_module('moe.report').main(run_dir(flags.run_dir, 'metrics.jsonl'), json=json)}")
    return exit_codes.DONE


def convert(flags: Convert, overrides: dict[str, str]) -> int:
    from moe.convert.checks import settings_of
    from moe.recipe.load import of_transformers, recipe_path, refuse_on_hub

    refuse_on_hub(flags.from_run, "FROM_RUN", then=f"moe convert hf: {flags.to_run}")
    if any(word.startswith(PREFIX) for word in (flags.from_run, flags.to_run)):
        return _convert_huggingface(flags, overrides)
    if of_transformers(Path(flags.from_run)):
        got, needed = f"{flags.from_run}, a model of transformers", f"hf:{flags.from_run}"
        raise BadInput("FROM_RUN", got=got, needed=needed, fix=f"moe convert {needed} {flags.to_run}")
    refuse(
        {"dtype": flags.dtype, "adapters": flags.adapters or None, "without_mtp": flags.without_mtp or None},
        got="without hf:",
        needed="hf:PATH; for other paths it has no effect",
    )
    if flags.to is None:
        run_dir(flags.from_run, "checkpoints", also="manifest.json", what="FROM_RUN")
        fix = f"--to RECIPE (moe recipes lists them). For a model of transformers: moe convert {flags.from_run} hf:{flags.to_run}"
        raise BadInput("--to", got="nothing", needed="the recipe of the new model", fix=fix)
    recipe_path(flags.to)
    source = run_dir(flags.from_run, "checkpoints", also="manifest.json", what="FROM_RUN")
    given = {name: getattr(flags, name) for name in ("method", "share", "scale", "weights", "moments") if getattr(flags, name) is not None}
    settings, more = settings_of(given, approximate=flags.approximate), {"load": flags.load, "check": flags.check, "json": flags.json}
    return call("moe.convert.convert", source, flags.to_run, recipe=flags.to, overrides=overrides, settings=settings, **more)


def _convert_huggingface(flags: Convert, overrides: dict[str, str]) -> int:
    into = flags.to_run.startswith(PREFIX)
    if into and flags.from_run.startswith(PREFIX):
        raise BadInput(
            "FROM_RUN", got="hf: on both sides", needed="hf: on one side, and a run on the other", fix="moe convert hf:PATH runs/NAME"
        )
    flags_of = ("adapters",) if into and flags.adapters else ("dtype",) if into else ("without_mtp",)
    needed = f"no flags but --json and --{flags_of[0]}" + ("" if into else ", and recipe keys of training")
    allowed = ("from_run", "to_run", "json", *flags_of)
    refuse_others(flags, allowed, got=f"with {'RUN hf:PATH' if into else 'hf:PATH RUN'}", needed=needed)
    refuse(overrides if into else {}, got="with RUN hf:PATH", needed="no recipe values: the run's own recipe is used")
    source = run_dir(flags.from_run, "checkpoints", also="manifest.json", what="FROM_RUN") if into else flags.from_run
    more = {"dtype": flags.dtype, "without_mtp": flags.without_mtp, "adapters": flags.adapters, "json": flags.json}
    return call("moe.convert.huggingface.convert", source, flags.to_run, overrides=overrides, **more)


BENCHES = Path(__file__).resolve().parents[2] / "bench"
# package in a checkout of moe-parallel -> names of the measurements that were moved to it from moe/bench
MOVED = {
    "tests.campaigns": "faults corruption damage disks elastic hangs hostile kills machines preemption recipes restarts",
    "tests.counted": "comm initial resume tiling",
    "tests.measured": "compiled delay deterministic environment fit hidden kfac kinds long-context losses muon saving small-costs "
    "torchs-pipelines",
    "tests.planner": "planner tables published speed orders best",
}


def bench(flags: Bench, _: dict[str, str]) -> int:
    if flags.name not in bench_names():
        names = some(bench_names(), rest="moe bench --help") or "none in this version"
        raise BadInput("NAME", got=flags.name, needed=f"a measurement: {names}", fix=_instead(flags.name))
    module = bench_file(flags.name)
    asked = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags) if f.name != "name"}
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    takes = arguments_of_main(module)
    for name in given:
        if name not in takes:
            flags_there = ", ".join(f"--{t}" for t in takes) or "no flags"
            raise BadInput(
                f"--{name}", got=f"--{name} for {flags.name}", needed=f"a flag of {flags.name}: {flags_there}", fix=f"remove --{name}"
            )
    check_least(flags, **{name: 1 for name, value in given.items() if isinstance(value, int)})
    return call(f"moe.bench.{module.parent.name}.{module.stem}", **given)


def _instead(name: str) -> str:
    for module, names in MOVED.items():
        if name.replace("_", "-") in names.split():
            part = "" if name in ("faults", "planner") else f" {name.replace('_', '-')}"
            return f"in a checkout of moe-parallel: python -m {module}{part}"
    near = did_you_mean(name, bench_names())
    return f"did you mean {near}?" if near else "see: moe bench --help"


def bench_names() -> list[str]:
    """Return the names of all measurements. Files are searched for the text `def main(`, which is faster than parsing them."""
    return sorted(path.stem.replace("_", "-") for path in BENCHES.glob("*/[!_]*.py") if "\ndef main(" in path.read_text(encoding="utf-8"))


def arguments_of_main(module: Path) -> dict[str, str]:
    """Return name -> default, as text, for each argument of a measurement's main function; "" for None, False and computed defaults."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            pairs = zip((*node.args.args, *node.args.kwonlyargs), (*node.args.defaults, *node.args.kw_defaults), strict=True)
            plain = {a.arg: default.value if isinstance(default, ast.Constant) else None for a, default in pairs}
            return {name: "" if value in (None, False) else str(value) for name, value in plain.items()}
    return {}


def about_bench(name: str) -> str:
    """Return the docstring of a measurement's module."""
    return ast.get_docstring(ast.parse(bench_file(name).read_text(encoding="utf-8"))) or ""


def bench_file(name: str) -> Path:
    return next(BENCHES.glob(f"*/{name.replace('-', '_')}.py"))
