"""Bad recipes, for `python -m tests.campaigns recipes`: shipped recipes with one thing changed, for 1, 2 and 4 processes.

    recipe -> one mutation -> moe train's checks -> one line, exit code 2, under a second -> the line's advice applied -> it starts

Two rows for each kind of mutation. First: the recipe is refused as it should be, or accepted if the kind may leave a good recipe. Second:
each value that the line proposes makes a recipe that the checks accept. Everything runs in this process, and nothing is trained.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from moe.checks.advice import applied, check_for_user, nproc, origins_with
from moe.checks.together import check_run
from moe.cli.main import main as moe
from moe.launch import exit_codes
from moe.recipe.idle import check_read
from moe.recipe.keys import flat, known_keys
from moe.recipe.load import build_run, load, read_recipe, recipe_names, recipe_path
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import put, take
from tests.campaigns.faults import Row

WORLDS = (1, 2, 4)
FEW, MANY = 6, 40  # tries of each kind
LONGEST_S = 1.0
Values = dict[str, Any]
Change = Callable[[random.Random, Values], str]  # changes the values in place and returns a description


@dataclass(frozen=True)
class Kind:
    """A kind of mutation. `bad`: every recipe that it makes must be refused; otherwise some stay good, and only refusals are examined."""

    name: str
    change: Change | None
    text: Callable[[random.Random, str], str] | None = None
    bad: bool = True


def _given(values: Values, prefix: str = "") -> list[str]:
    """Return the dotted keys that the recipe sets."""
    found = []
    for key, value in values.items():
        found += _given(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def _field(key: str) -> Any:
    *sections, last = key.split(".")
    held: Any = Run
    for section in sections:
        held = held.model_fields[section].annotation
    return held.model_fields[last]


def _takes(annotation: Any, kind: type) -> bool:
    if get_origin(annotation) is Literal:
        return any(type(choice) is kind for choice in get_args(annotation))
    return annotation is kind or any(_takes(each, kind) for each in get_args(annotation))


def _misspelled(rng: random.Random, word: str) -> str:
    at = rng.randrange(1, max(2, len(word)))
    one = rng.choice(string.ascii_lowercase)
    return rng.choice([word[:at] + word[at + 1 :], word[:at] + word[at - 1] + word[at:], word[:at] + one + word[at + 1 :]])


def _wrong_type(rng: random.Random, values: Values) -> str:
    key = rng.choice(_given(values))
    kinds = _field(key).annotation
    number = _takes(kinds, int) or _takes(kinds, float)
    wrong: list[Any] = [{"a": 1}, [[1, 2]], {"b": {"c": 3}}]
    if kinds is not bool:
        wrong.append(True)
    if not _takes(kinds, str):
        wrong += ["many", "2024-01-01", "1e"] if number else ["perhaps"]
    if number and not _takes(kinds, float):
        wrong.append(2.5)
    if type(None) not in get_args(kinds):
        wrong.append(None)
    value = rng.choice(wrong)
    put(values, key, value)
    return f"{key}: {value}"


def _out_of_range(rng: random.Random, values: Values) -> str:
    key = rng.choice([k for k in known_keys() if _takes(_field(k).annotation, int) or _takes(_field(k).annotation, float)])
    value = rng.choice([-1, 0, -0.5, 1.5, 2**50, 1e308, 10**9, float("nan"), float("inf"), 1e-300])
    put(values, key, value)
    return f"{key}: {value}"


def _unknown_key(rng: random.Random, values: Values) -> str:
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(3, 9)))
    key = f"{rng.choice(list(Run.model_fields))}.{word}_{rng.randrange(9)}"
    put(values, key, 1)
    return key


def _misspelled_key(rng: random.Random, values: Values) -> str:
    while True:
        key = rng.choice(_given(values))
        section, _, last = key.rpartition(".")
        wrong = f"{section}.{_misspelled(rng, last)}"
        if len(last) > 3 and wrong not in known_keys():
            put(values, wrong, take(values, key))
            return wrong


def _other_section(rng: random.Random, values: Values) -> str:
    while True:
        key = rng.choice(_given(values))
        section, last = rng.choice(list(Run.model_fields)), key.rpartition(".")[2]
        if f"{section}.{last}" not in known_keys():
            put(values, f"{section}.{last}", take(values, key))
            return f"{section}.{last}"


def _misspelled_section(rng: random.Random, values: Values) -> str:
    while True:
        section = rng.choice(list(values))
        wrong = _misspelled(rng, section)
        if wrong not in Run.model_fields:
            values[wrong] = values.pop(section)
            return wrong


def _misspelled_name(rng: random.Random, values: Values) -> str:
    """Misspell a name that is a value of the recipe, set or by default."""
    names = {key: name for key, name in flat(build_run(values)).items() if isinstance(name, str) and len(name) > 3 and name in _names(key)}
    while True:
        key = rng.choice(sorted(names))
        wrong = _misspelled(rng, names[key])
        if wrong not in _names(key) and key != "router.group":
            put(values, key, wrong)
            return f"{key}: {wrong}"


def _names(key: str) -> list[str]:
    def of(annotation: Any) -> list[str]:
        if get_origin(annotation) is Literal:
            return [str(name) for name in get_args(annotation)]
        return [name for each in get_args(annotation) for name in of(each)]

    return of(_field(key).annotation)


def _degree(rng: random.Random, values: Values) -> str:
    key = rng.choice(["dp", "ep", "etp", "tp", "sp", "pp"])
    value = rng.choice([0, -1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
    put(values, f"degrees.{key}", value)
    return f"degrees.{key}: {value}"


_SIZES = {
    "model": "num_layers d_model num_heads num_kv_heads head_size d_ff vocab_size max_length moe_every",
    "experts": "num_experts d_ff",
    "router": "num_choices group expert_groups top_groups",
    "dispatch": "overlap_chunks node_size",
    "tensor": "depth overlap_chunks",
    "sequence": "heads",
    "pipeline": "microbatches chunks",
    "tiling": "ffn head",
    "recompute": "loss_chunks",
    "train": "global_batch eval_sequences",
    "optimizer": "warmup_steps",
    "optimizer.kfac": "delay",
}


def _size(rng: random.Random, values: Values) -> str:
    keys = [f"{section}.{key}" for section, names in _SIZES.items() for key in names.split()]
    key, value = rng.choice(keys), rng.choice([1, 3, 5, 6, 7, 30, 100, 511, 4097])
    put(values, key, value)
    return f"{key}: {value}"


def _choice(rng: random.Random, values: Values) -> str:
    """Set another allowed value of a key, which may not fit the other keys."""
    key = rng.choice([k for k in known_keys() if _names(k) or _field(k).annotation is bool])
    value = rng.choice([yaml.safe_load(name) for name in _names(key)] or [not _field(key).default])
    put(values, key, value)
    return f"{key}: {value}"


def _choices(rng: random.Random, values: Values) -> str:
    return ", ".join((_choice(rng, values), rng.choice([_choice, _degree])(rng, values)))


def _section_gone(rng: random.Random, values: Values) -> str:
    section = rng.choice(list(values))
    made: Any = rng.choice([None, [], 3, "none", ...])
    del values[section]
    if made is not ...:
        values[section] = made
    return f"{section}: {made}"


def _lines(rng: random.Random, text: str) -> str:
    """Remove, repeat or cut a line of the recipe's text, or insert a character that breaks the YAML."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    line = lines[at]
    cut = rng.randrange(len(line) + 1)
    sign = rng.choice("{}[]:,&*!|>%@`\t\"'")
    garbled = [[], [line, line], [line[:cut]], [line[:cut] + sign + line[cut:]], ["\t" + line], [line.replace(":", "")]]
    lines[at : at + 1] = rng.choice(garbled)
    return "\n".join(lines) + "\n"


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text))]


KINDS = [
    Kind("a value of the wrong type", _wrong_type),
    Kind("a number out of range", _out_of_range, bad=False),
    Kind("a key that does not exist", _unknown_key),
    Kind("a misspelled key", _misspelled_key),
    Kind("a key in another section", _other_section),
    Kind("a misspelled section", _misspelled_section),
    Kind("a misspelled name", _misspelled_name),
    Kind("a degree that does not fit", _degree, bad=False),
    Kind("a size that does not fit", _size, bad=False),
    Kind("a choice that does not fit", _choice, bad=False),
    Kind("two choices that do not fit", _choices, bad=False),
    Kind("a section gone or no section", _section_gone, bad=False),
    Kind("a line gone, doubled or garbled", None, _lines, bad=False),
    Kind("a file cut short", None, _cut, bad=False),
]


def rows(*, full: bool = False, rounds: int | None = None, only: str = "") -> Iterator[Row]:
    """Yield two rows for each kind of mutation: one of bad recipes, one of the fixes that their errors propose."""
    tries = rounds or (MANY if full else FEW)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            if only in kind.name:
                yield from of_kind(kind, tries, Path(folder))


def of_kind(kind: Kind, tries: int, folder: Path) -> tuple[Row, Row]:
    """Return two rows: recipes with this mutation, which must be refused (good ones are not counted), and the fixes they propose."""
    refused, mended = Row(kind.name), Row(f"    the fix that its line proposes ({kind.name})")
    good = [(name, world) for name in recipe_names() for world in WORLDS if _starts(name, world)]
    seconds: list[float] = []
    for number in range(20 * tries):
        if refused.tried == tries:
            break
        rng = random.Random(f"{kind.name} {number}")
        path, what, world = _make(kind, rng, folder, good)
        started = time.process_time()
        bad, problem = _judge(path, world)
        seconds.append(time.process_time() - started)
        if bad is None and not problem and kind.bad:
            problem = "accepted"
        elif bad is not None and not problem:
            problem = _as_command(path, world, bad)
        if bad is None and not problem:
            continue
        if seconds[-1] > LONGEST_S:
            problem = problem or f"{seconds[-1]:.1f} s"
        refused.tried += 1
        refused.problems += [f"{what}, {world} processes: {problem}"] if problem else []
        if bad is not None:
            _mend(mended, path, world, bad, what)
    for row in (refused, mended):
        row.lost = len(row.problems)
        row.held = row.tried - row.lost
    refused.seconds_median = round(sorted(seconds)[len(seconds) // 2], 4)
    mended.seconds_median = refused.seconds_median
    return refused, mended


def _make(kind: Kind, rng: random.Random, folder: Path, good: list[tuple[str, int]]) -> tuple[Path, str, int]:
    """Write a mutated recipe. Return (its file, description of the mutation, number of processes for which the original was good)."""
    name, world = rng.choice(good)
    path = folder / "bad.yaml"
    if kind.text is not None:
        text = kind.text(rng, recipe_path(name).read_text())
        path.write_text(text)
        return path, f"{name}, as {text!r}", world
    assert kind.change is not None
    values = copy.deepcopy(read_recipe(recipe_path(name))[0])
    most = values["train"]["steps"]
    # a warm-up longer than the run would be a second fault
    values["optimizer"]["warmup_steps"] = min(values["optimizer"]["warmup_steps"], most)
    what = kind.change(rng, values)
    path.write_text(yaml.safe_dump(values))
    return path, f"{name} with {what}", world


def _starts(recipe: str | Path, world: int) -> bool:
    try:
        check_run(load(recipe)[0], world)
    except BadInput:
        return False
    return True


def _judge(path: Path, world: int) -> tuple[BadInput | None, str]:
    """Check the recipe for `world` processes. Return (the error, or None if accepted; problem with the error, or "")."""
    try:
        run, origins = load(path)
        check_for_user(run, world, origins)
    except BadInput as bad:
        return bad, "" if len(str(bad).splitlines()) == 1 and str(bad).isprintable() else f"not one plain line: {bad}"
    except Exception as error:  # a user would see a traceback
        return None, f"{type(error).__name__}: {error}"
    return None, ""


def _as_command(path: Path, world: int, bad: BadInput) -> str:
    """Give the recipe to `moe train`. Return "" if it prints only the line of `bad`, with exit code 2; else the problem."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = moe(["train", str(path), "--nproc", str(world)])
    if code == exit_codes.BAD_INPUT and err.getvalue() == f"error: {bad}\n" and not out.getvalue():
        return ""
    return f"exit code {code}, {err.getvalue()!r}"


def _mend(row: Row, path: Path, world: int, bad: BadInput, what: str) -> None:
    """Apply each fix that `bad` proposes, one at a time. Add a problem to `row` if the recipe is still refused or did not change."""
    try:
        values: Values | None
        values, origins = read_recipe(path)
    except BadInput:
        values, origins = _raw(path), {}
    if values is None:
        return
    for way in bad.fix.ways(bad.what):
        row.tried += 1
        mended, processes = applied(way, values), nproc(way, world)
        try:
            made = build_run(mended)
            check_run(made, processes)
            check_read(made, dict.fromkeys(known_keys(), "default") | origins_with(way, origins), file=path.name)
        except BadInput as again:
            row.problems.append(f"{what}, {world} processes: {bad}; with {way}: {again}")
            continue
        if repr(mended) == repr(values) and processes == world:  # repr, because True == 1
            row.problems.append(f"{what}, {world} processes: {bad}; {way} changes nothing")


def _raw(path: Path) -> Values | None:
    """Return the values in the file, without defaults; None if it cannot be read."""
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError):
        return None
    if not isinstance(values, dict) or "extends" in values:
        return None
    return values
