"""The command line of a rank, written by the parent process and parsed by the rank.

Arguments(...).words()  ->  switch_tiny --degrees.ep=2 --out runs/a --fresh  ->  parse(words) == Arguments(...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from moe.recipe.overrides import take_overrides
from parallel.errors import BadInput
from parallel.store.files import user_path

# flag with a value -> (the needed value, in words for an error message; an example)
_VALUES = {
    "--out": ("a folder", "--out runs/NAME"),
    "--from-step": ("the step of a checkpoint", "--from-step 400"),
    "--allow-change": ("a key of the recipe", "--allow-change model.num_heads"),
    "--init-from": ("a run's folder, or a checkpoint's", "--init-from runs/NAME"),
    "--cluster": ("a cluster's name or file", "--cluster a100-80-8"),
    "--elastic": ("the smallest number of processes, at least 1", "--elastic 1"),
}
# flags without a value
_ALONE = ("--fresh", "--force", "--profile", "--debug-collectives")
USAGE = (
    "RECIPE [--section.key VALUE ...] [--out DIR] [--fresh] [--from-step STEP] [--allow-change KEY ...] [--init-from RUN] "
    "[--cluster NAME] [--force] [--profile] [--debug-collectives] [--elastic MIN]"
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a rank: the recipe, values that override the recipe's, and flags of `moe train` (moe/cli/verbs.py explains them)."""

    recipe: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    out: Path | None = None
    fresh: bool = False
    from_step: int | None = None
    allow_changes: tuple[str, ...] = ()
    init_from: Path | None = None
    cluster: str | None = None
    force: bool = False
    profile: bool = False
    debug_collectives: bool = False
    elastic: int | None = None

    def __post_init__(self) -> None:
        if self.from_step is not None and self.from_step < 0:
            _refuse("--from-step", self.from_step)
        if self.fresh and self.from_step is not None:
            needed, fix = "only one of them: start over, or resume from a checkpoint", "leave one of them out"
            raise BadInput("--from_step", got=f"{self.from_step} with --fresh", needed=needed, fix=fix)

    def words(self) -> list[str]:
        """Return the command line that `parse` turns into these arguments again."""
        words = [self.recipe, *(f"--{key}={value}" for key, value in self.overrides.items())]
        words += ["--out", str(self.out)] if self.out else []
        words += [f"--allow-change={key}" for key in self.allow_changes]
        values = {name: getattr(self, name) for name in ("from_step", "init_from", "cluster", "elastic")}
        words += [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
        return words + [flag for flag in _ALONE if getattr(self, flag[2:].replace("-", "_"))]


def parse(argv: Sequence[str]) -> Arguments:
    """Parse the command line of a rank. `--local_rank N`, which DeepSpeed's launcher adds, is ignored. Raises BadInput."""
    words, overrides = take_overrides(argv)
    recipe: str | None = None
    given: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _VALUES:
            value = value if equals else next(rest, "")
            if not value:
                _refuse(name, "nothing")
            given.setdefault(name, []).append(value)
        elif name in _ALONE and not equals:
            given[name] = []
        elif name == "--restarts":
            fix = "moe train --restarts N, torchrun --max-restarts N, or a batch system that queues the job again"
            raise BadInput(name, got="the flag on a rank", needed="the flag on the command that starts the ranks", fix=fix)
        elif name == "--local-rank":
            if not equals:
                next(rest, None)
        elif word.startswith("-") or recipe is not None:
            raise BadInput("argument", got=word, needed=USAGE, fix="remove it; recipe values are --section.key VALUE")
        else:
            recipe = word
    if recipe is None:
        raise BadInput("recipe", got="nothing", needed=USAGE, fix="name a recipe, such as switch_tiny")
    last = {name: values[-1] for name, values in given.items() if values}
    paths = {name: user_path(last[name], what=name) for name in ("--out", "--init-from") if name in last}
    return Arguments(
        recipe,
        overrides,
        out=paths.get("--out"),
        from_step=_whole(last, "--from-step", least=0),
        allow_changes=tuple(key.replace("-", "_") for key in given.get("--allow-change", ())),
        init_from=paths.get("--init-from"),
        cluster=last.get("--cluster"),
        elastic=_whole(last, "--elastic", least=1),
        **{flag[2:].replace("-", "_"): flag in given for flag in _ALONE},  # type: ignore[arg-type]
    )


def _whole(last: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = last.get(name)
    if text is not None and not (text.isascii() and text.isdecimal() and least <= int(text) < 2**31):
        _refuse(name, text)
    return None if text is None else int(text)


def _refuse(name: str, got: object) -> NoReturn:
    needed, fix = _VALUES[name]
    raise BadInput("--" + name[2:].replace("-", "_"), got=got, needed=needed, fix=fix)
