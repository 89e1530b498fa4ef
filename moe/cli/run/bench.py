"""`moe bench`: runs measurements, which are the modules of moe/bench that have a function `main`. Their names,
help texts and flags are read from the source files, because importing these would load torch."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from moe.cli.run import call, check_least
from moe.cli.verbs import Bench
from parallel.errors import BadInput, did_you_mean, some

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
