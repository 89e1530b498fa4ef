"""The `moe` command: one frozen dataclass a verb (its words and flags), one function that does it.

    argv -> recipe overrides taken out -> words checked (moe/flags.py) -> tyro -> the verb's dataclass -> its function

Anything wrong is one line on stderr and exit code 2, said before anything heavy is imported: each function imports what it
needs. Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal with the checkpoint saved.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_type_hints

from moe.flags import check_words, take_overrides
from parallel.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from moe.config import Run

BENCHES = Path(__file__).resolve().parent / "bench"
RECIPE_VERBS = ("train", "show")
SHELLS = ("bash", "zsh", "tcsh", "fish")
_RECIPE = "Any value of the recipe can be given as --section.key VALUE, anywhere after it: --degrees.ep 2 --model.d_ff=512 (moe show RECIPE lists them)."


def _word(help: str) -> Any:
    return dataclasses.field(metadata={"help": help})


def _flag(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a recipe; continues from the newest checkpoint in its run folder."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file")
    nproc: int | None = _flag(None, "processes on this machine, 1 by default; with --hostfile: on each host, its slots by default")
    launcher: Literal["deepspeed", "torchrun"] | None = _flag(None, "what starts them; deepspeed by default, and nothing is needed for one process")
    out: Path | None = _flag(None, "run folder; runs/RECIPE by default")
    fresh: bool = _flag(False, "set earlier checkpoints aside and start over")
    hostfile: Path | None = _flag(None, "several machines: one `host slots=N` a line")


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compare every legal layout of a tiny model with one process: losses, gradients, weights; exit code 1 where one differs."""

    nproc: int = _flag(2, "layouts of up to so many processes")
    json: Path | None = _flag(None, "also write the table as JSON")
    only: str | None = _flag(None, "only layouts whose name holds this text")


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    prompt: str | None = _flag(None, "the text to continue")
    tokens: int | None = _flag(None, "how many tokens to add")
    temperature: float | None = _flag(None, "0 takes the likeliest token each time")
    seed: int | None = _flag(None, "of the random choices")


@dataclasses.dataclass(frozen=True)
class Report:
    """Draw a run's curves, expert load, drops and memory: PNG files and one HTML page."""

    run_dir: str = _word("a run's folder, such as runs/switch_tiny")
    json: Path | None = _flag(None, "also list the files as JSON")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Run a measurement."""

    name: str = _word("of the measurement")
    steps: int | None = _flag(None, "training steps, where it trains")
    seeds: int | None = _flag(None, "repetitions with another seed")
    json: Path | None = _flag(None, "also write the table as JSON")


@dataclasses.dataclass(frozen=True)
class Show:
    """Print a recipe merged with its parents, each value with its origin."""

    recipe: str = _word("a name (see: moe recipes) or a YAML file")
    json: Path | None = _flag(None, "also write keys, values and origins as JSON")


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes by name."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check this machine: versions, devices, speed, communication, ports, disk, compilers."""

    json: Path | None = _flag(None, "also write the table as JSON")


def _train(flags: Train, overrides: dict[str, str]) -> int:
    from moe.config import load
    from moe.train import start

    launcher: start.Launcher = flags.launcher or "deepspeed"
    world = start.world_size(flags.nproc, launcher=launcher, hostfile=flags.hostfile)
    run, _ = load(flags.recipe, overrides)
    alone = world == 1 and flags.launcher is None and flags.hostfile is None
    if not (alone and _is_rank(os.environ)):  # a rank of somebody else's launcher checks against that world
        run.check(world)
    if not alone:
        return start.start(
            flags.recipe, overrides, nproc=flags.nproc, launcher=launcher, out=flags.out, fresh=flags.fresh, hostfile=flags.hostfile
        )
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(start.extensions_dir()))
    from moe.train import launch

    words = [flags.recipe, *(f"--{key}={value}" for key, value in overrides.items())]
    words += ["--out", str(flags.out)] if flags.out else []
    return launch.main(words + (["--fresh"] if flags.fresh else []))


def _is_rank(environment: Any) -> bool:
    return "RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment or environment.get("SLURM_NTASKS", "1") != "1"


def _verify(flags: Verify, _: dict[str, str]) -> int:
    if flags.nproc < 1:
        raise BadInput("--nproc", got=flags.nproc, needed="at least 1 process", fix="--nproc 2")
    return _call("moe.verify", nproc=flags.nproc, json=_text(flags.json), only=flags.only)


def _generate(flags: Generate, _: dict[str, str]) -> int:
    given = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    for name, low in (("tokens", 1), ("temperature", 0), ("seed", 0)):
        if name in given and given[name] < low:
            raise BadInput(f"--{name}", got=given[name], needed=f"at least {low}", fix=f"--{name} {low}")
    run_dir = _run_dir(given.pop("run_dir"), "checkpoints")
    return _call("moe.train.generate", run_dir, **given)


def _report(flags: Report, _: dict[str, str]) -> int:
    importlib.import_module("moe.report").main(_run_dir(flags.run_dir, "metrics.jsonl"), json=_text(flags.json))
    return 0


def _bench(flags: Bench, _: dict[str, str]) -> int:
    module = BENCHES / f"{flags.name.replace('-', '_')}.py"
    if flags.name not in bench_names():
        near = did_you_mean(flags.name, bench_names())
        names = ", ".join(bench_names()) or "none in this version"
        raise BadInput("NAME", got=flags.name, needed=f"a measurement: {names}", fix=f"did you mean {near}?" if near else "moe bench NAME")
    given = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags) if f.name != "name" and getattr(flags, f.name) is not None}
    takes = _arguments_of_main(module)
    for name, value in given.items():
        if name not in takes:
            flags_there = ", ".join(f"--{t}" for t in takes) or "no flags"
            raise BadInput(f"--{name}", got=f"it for {flags.name}", needed=f"what {flags.name} takes: {flags_there}", fix=f"remove --{name}")
        if isinstance(value, int) and value < 1:
            raise BadInput(f"--{name}", got=value, needed="at least 1", fix=f"--{name} 1")
    return _call(f"moe.bench.{module.stem}", **{name: _text(value) if isinstance(value, Path) else value for name, value in given.items()})


def bench_names() -> list[str]:
    """The measurements there are: modules of moe/bench with a main function."""
    return sorted(p.stem.replace("_", "-") for p in BENCHES.glob("*.py") if not p.stem.startswith("_") and _main_of(p) is not None)


def _main_of(module: Path) -> ast.FunctionDef | None:
    """The main function as source: to import a measurement is to import torch."""
    with contextlib.suppress(OSError, SyntaxError):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                return node
    return None


def _arguments_of_main(module: Path) -> list[str]:
    main_function = _main_of(module)
    return [a.arg for a in (*main_function.args.args, *main_function.args.kwonlyargs)] if main_function else []


def _show(flags: Show, overrides: dict[str, str]) -> int:
    from moe.config import load, resolved_yaml

    run, origins = load(flags.recipe, overrides)
    print(resolved_yaml(run, origins), end="")
    if flags.json is not None:
        from moe.results import write_json

        write_json(flags.json, verb="show", rows=_rows(run, origins), recipe=flags.recipe)
    return 0


def _rows(run: Run, origins: dict[str, str]) -> list[dict[str, Any]]:
    values = run.model_dump(mode="json")
    return [{"key": f"{s}.{k}", "value": v, "origin": origins[f"{s}.{k}"]} for s, fields in values.items() for k, v in fields.items()]


def _recipes(_: Recipes, __: dict[str, str]) -> int:
    from moe.config import recipe_names, recipe_path

    for name in recipe_names():
        first = recipe_path(name).read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:<16} {first.removeprefix('#').strip() if first.startswith('#') else ''}".rstrip())
    return 0


def _doctor(flags: Doctor, _: dict[str, str]) -> int:
    return _call("moe.doctor", json=_text(flags.json))


def _call(module: str, *words: Any, **flags: Any) -> int:
    """module.main(...), whose result is an exit code or nothing."""
    return int(importlib.import_module(module).main(*words, **flags) or 0)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _run_dir(name: str, holds: str) -> str:
    if (Path(name) / holds).exists():
        return name
    runs = sorted(str(p) for p in Path("runs").glob("*") if (p / holds).exists()) if Path("runs").is_dir() else []
    near = did_you_mean(name, runs) or did_you_mean(f"runs/{name}", runs)
    fix = f"did you mean {near}?" if near else f"one of {', '.join(runs)}" if runs else "train first: moe train switch_tiny"
    raise BadInput("RUN_DIR", got=name, needed=f"a run's folder, with {holds} in it", fix=fix)


VERBS: dict[str, tuple[type, Callable[[Any, dict[str, str]], int]]] = {
    "train": (Train, _train),
    "verify": (Verify, _verify),
    "generate": (Generate, _generate),
    "report": (Report, _report),
    "bench": (Bench, _bench),
    "show": (Show, _show),
    "recipes": (Recipes, _recipes),
    "doctor": (Doctor, _doctor),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except BadInput as bad:
        print(f"error: {bad}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `moe show switch_tiny | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        return _help([])
    if words[0].replace("_", "-") in ("--tyro-print-completion", "--tyro-write-completion"):
        return _completion(words)
    verb, *rest = words
    if verb not in VERBS:
        _refuse_verb(verb)
    if "-h" in rest or "--help" in rest:
        return _help([verb])
    kind, function = VERBS[verb]
    overrides: dict[str, str] = {}
    if verb in RECIPE_VERBS:
        rest, overrides = take_overrides(rest)
    return function(_parse(verb, kind, check_words(verb, kind, rest)), overrides)


def _refuse_verb(verb: str) -> None:
    near = did_you_mean(verb, VERBS)
    fix = f"did you mean moe {near}?" if near else "see: moe --help"
    if near is None and not verb.startswith("-"):
        from moe.config import recipe_names

        recipe = verb if verb in recipe_names() else did_you_mean(verb, recipe_names())
        fix = f"did you mean moe train {recipe}?" if recipe else fix
    raise BadInput("verb", got=verb, needed=f"one of {', '.join(VERBS)}", fix=fix)


# --- tyro: values, help and completion from the dataclasses ----------------------------------------------------------


def _tyro(verbs: dict[str, type], words: list[str], *, sections: bool = False, full: bool = True) -> Any:
    """tyro.cli over the verbs, with any value of a recipe as a flag of its own where `sections` says so."""
    import tyro

    arms = [
        Annotated[_for_tyro(verb, kind, sections), tyro.conf.subcommand(verb, description=_description(verb, kind, full))]
        for verb, kind in verbs.items()
    ]
    config = (tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    description = "Dense and Mixture-of-Experts Transformers, trained in parallel from one recipe. More on a verb: moe VERB --help"
    return tyro.cli(Union[tuple(arms)], prog="moe", description=description, args=words, config=config, use_underscores=True)  # type: ignore[call-overload]  # noqa: UP007


def _for_tyro(verb: str, kind: type, sections: bool) -> type:
    """The verb's dataclass as tyro wants it: help, names of words and defaults as annotations."""
    from tyro.conf import arg

    hints = get_type_hints(kind)
    fields: list[Any] = []
    for f in dataclasses.fields(kind):
        about: dict[str, Any] = {"help": f.metadata["help"]}
        if f.default is dataclasses.MISSING:
            about |= {"metavar": f.name.upper()}
        if f.default in (None, False):
            about |= {"help_behavior_hint": ""}
        fields.append((f.name, Annotated[hints[f.name], arg(**about)], dataclasses.field(default=f.default)))
    if sections and verb in RECIPE_VERBS:
        from moe.config import Run, recipe_names

        fields[0] = ("recipe", Literal[tuple(recipe_names())], dataclasses.field())
        fields += [(name, f.annotation, dataclasses.field(default=f.default)) for name, f in Run.model_fields.items()]
    return dataclasses.make_dataclass(kind.__name__, fields, frozen=True, namespace={"__doc__": kind.__doc__})


def _parse(verb: str, kind: type, words: list[str]) -> Any:
    """The verb's dataclass. Should tyro refuse what `check_words` let pass, its complaint becomes one line too."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = _tyro({name: k for name, (k, _) in VERBS.items()}, [verb, *words])
    except SystemExit:
        said = "".join(c for c in complaint.getvalue() if c.isascii())
        raise BadInput(f"moe {verb}", got=said, needed=f"the flags of moe {verb}", fix=f"see: moe {verb} --help") from None
    return kind(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(kind)})


def _help(words: list[str]) -> int:
    with contextlib.suppress(SystemExit):
        _tyro({name: kind for name, (kind, _) in VERBS.items()}, [*words, "--help"], full=bool(words))
    return 0


def _completion(words: list[str]) -> int:
    """Shell completion of verbs, flags, recipe names, and every dotted key with its choices."""
    if len(words) < 2 or words[1] not in SHELLS:
        raise BadInput(words[0], got=words[1] if len(words) > 1 else "no shell", needed=" or ".join(SHELLS), fix=f"{words[0]} bash")
    with contextlib.suppress(SystemExit):
        _tyro({name: kind for name, (kind, _) in VERBS.items()}, words, sections=True)
    return 0


def _description(verb: str, kind: type, full: bool) -> str:
    text = kind.__doc__ or ""
    if verb == "bench":
        text += f" There are: {', '.join(bench_names()) or 'none in this version'}."
    return f"{text}\n\n{_RECIPE}" if full and verb in RECIPE_VERBS else text


if __name__ == "__main__":
    sys.exit(main())
