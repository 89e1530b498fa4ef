"""moe bench: measurements, found by their file names in moe/bench. Their sources are read instead of imported, because importing one
imports torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moe.cli.run.call import call, text
from moe.cli.verbs import Bench
from parallel.errors import BadInput, did_you_mean, some

BENCHES = Path(__file__).resolve().parents[2] / "bench"


def bench(flags: Bench, _: dict[str, str]) -> int:
    if flags.name not in bench_names():
        near = did_you_mean(flags.name, bench_names())
        names = some(bench_names(), rest="moe bench --help") or "none in this version"
        raise BadInput("NAME", got=flags.name, needed=f"a measurement: {names}", fix=f"did you mean {near}?" if near else "moe bench NAME")
    module = bench_file(flags.name)
    said = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags) if f.name != "name"}
    given = {name: value for name, value in said.items() if value is not None and value is not False}  # 0 was given
    takes = arguments_of_main(module)
    for name, value in given.items():
        if name not in takes:
            flags_there = ", ".join(f"--{t}" for t in takes) or "no flags"
            raise BadInput(f"--{name}", got=f"it for {flags.name}", needed=f"a flag of {flags.name}: {flags_there}", fix=f"remove --{name}")
        if isinstance(value, int) and value < 1:
            raise BadInput(f"--{name}", got=value, needed="at least 1", fix=f"--{name} 1")
    return call(
        f"moe.bench.{module.parent.name}.{module.stem}",
        **{name: text(value) if isinstance(value, Path) else value for name, value in given.items()},
    )


def bench_names() -> list[str]:
    """Names of the available measurements: modules in the rooms of moe/bench with a main function.

    Searches the source text, which is faster than importing.
    """
    return sorted(path.stem.replace("_", "-") for path in BENCHES.glob("*/*.py") if "\ndef main(" in path.read_text(encoding="utf-8"))


def arguments_of_main(module: Path) -> dict[str, str]:
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


def about_bench(name: str) -> str:
    """The module docstring of a measurement, read without importing it."""
    import ast

    return ast.get_docstring(ast.parse(bench_file(name).read_text(encoding="utf-8"))) or ""


def bench_file(name: str) -> Path:
    return next(BENCHES.glob(f"*/{name.replace('-', '_')}.py"))
