"""Reads the command line of a verb (such as train in `moe train`) into its dataclass, and reports every mistake in one line.

    moe train switch_tiny --nproc 2 --model.d-ff=512
              word        flag      override: a dotted key of the recipe, in any position

A dataclass's fields made by `_word` are positional words; the others are flags.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import types
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moe.cli.verbs import NOT_SIMULATED, RECIPE_VERBS
from moe.recipe.overrides import whole
from parallel.errors import BadInput, did_you_mean, some
from parallel.fixes import Fix

# type of a flag's value -> (words for the accepted values, an example)
_KINDS = {int: ("a whole number", "2"), float: ("a number", "0.8"), Path: ("a path", "PATH"), str: ("text", "TEXT")}
_EXAMPLES = {("show", "--keys"): ("a section of a recipe, or all", "all")}  # (verb, flag) -> the same, of one flag
_GRAVE = ("--fresh", "--force")  # never proposed as a fix: --fresh sets checkpoints aside, --force overrules a refusal
_REPLACED = {("verify", "--mutations"): "in a checkout of moe-parallel: python -m tests.mutations"} | {
    ("plan", f"--{name}"): "name the devices in --cluster: h100-8x4 has 4 nodes of 8, and h100-2 two devices of one node"
    for name in ("gpu", "gpus", "num_gpus", "nodes", "num_nodes", "nnodes", "devices", "world_size")
}  # (verb, flag that it does not have) -> fix


def read_words(verb: str, kind: type, words: Sequence[str]) -> Any:
    """Return an instance of the verb's dataclass `kind` with the values in `words`, the command line after `verb`.
    Raises BadInput for a flag that is unknown, repeated, without a value or of the wrong type, and for too few or too many words without a
    flag."""
    hints = get_type_hints(kind)
    types_of = {field.name: _plain(hints[field.name]) for field in dataclasses.fields(kind)}
    flags = {f"--{f.name}": types_of[f.name] for f in dataclasses.fields(kind) if not f.metadata["word"]}
    wanted = [name for name in types_of if f"--{name}" not in flags]
    needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    given: list[str] = []
    values: dict[str, Any] = {}
    rest = iter(enumerate(words))
    for at, word in rest:
        if not word.startswith("-") or word == "-":
            given.append(word)
            continue
        name, equals, value = word.partition("=")
        name = "--" + name[2:].replace("-", "_") if "--" + name[2:].replace("-", "_") in flags else name
        following = words[at + 1] if at + 1 < len(words) else "--"
        if name not in flags:
            _refuse_flag(verb, name, value if equals else None if following.startswith("--") else following, flags)
        field, several = name[2:], hints[name[2:]] == tuple[str, ...]
        if field in values and not several:
            raise BadInput(name, got="two values", needed="one value", fix="remove one of the two")
        if flags[name] is bool:
            if equals:
                raise BadInput(name, got=word, needed=f"{name} without a value", fix=f"write {name}, or leave it out")
            values[field] = True
            continue
        if not equals:
            if following.startswith("-") and not re.match(r"-\.?\d", following):
                needed_value, example = _EXAMPLES.get((verb, name)) or _described(flags[name])
                raise BadInput(name, got="no value", needed=needed_value, fix=f"{name}={example}")
            value = next(rest)[1]
        found = _value(name, flags[name], value)
        values[field] = (*values.get(field, ()), found) if several else found
    if len(given) < len(needed):
        missing = needed[len(given)]
        needed_words = " ".join(["moe", verb, *(word.upper() if word in needed else f"[{word.upper()}]" for word in wanted)])
        raise BadInput(f"moe {verb}", got=f"no {missing.upper()}", needed=needed_words, fix=_hint(missing, verb))
    several = [name for name in wanted if hints[name] == tuple[str, ...]]  # the last positional field may take several words
    if len(given) > len(wanted) and not several:
        extra, needed_words = given[len(wanted)], " ".join(map(str.upper, wanted)) or "flags only"
        fix = f"remove it; a value needs its flag before it, see: moe {verb} --help"
        if "." in extra and "=" in extra:
            fix = f"did you mean --{extra}?"
        raise BadInput(f"moe {verb}", got=f"{extra!r} as one word too many", needed=needed_words, fix=fix)
    one = [name for name in wanted if name not in several]
    values |= dict.fromkeys(several, tuple(given[len(one) :]))
    return kind(**{name: types_of[name](word) for name, word in zip(one, given, strict=False)}, **values)


def _plain(hint: Any) -> Any:
    """Return the type of one value for a type hint: int for `int`, `int | None` and `tuple[int, ...]`."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint


def _refuse_flag(verb: str, name: str, value: str | None, flags: dict[str, Any]) -> None:
    """Raise BadInput for the unknown flag `name`. value: its value, or None. flags: name of each flag of the verb -> its type."""
    if (verb, name) in _REPLACED:
        fix: Fix | str = _REPLACED[verb, name]
    elif "." in name:
        fix = f"recipe values go with {', '.join(f'moe {v}' for v in RECIPE_VERBS)}"
    elif (named := _by_name(verb, name, value, flags)) is not None:
        fix = named
    elif near := did_you_mean(name, [flag for flag in flags if flag not in _GRAVE]):
        fix = f"did you mean {near}?"
    else:
        fix = f"remove it, or see: moe {verb} --help"
    rest = ", or any --section.key of a recipe" if verb in RECIPE_VERBS else ""
    needed = (f"one of {some(flags, rest=f'moe {verb} --help')}" if flags else "no flag") + rest
    raise BadInput(name, got=f"a flag that moe {verb} does not have", needed=needed, fix=fix)


def _by_name(verb: str, name: str, value: str | None, flags: dict[str, Any]) -> Fix | str | None:
    """Return what to type instead of the unknown flag `name`, if it is another tool's flag, or a recipe's key without its section (`--lr`);
    else None."""
    from moe.recipe.keys import choices, field_of, keys_named, known_keys
    from moe.recipe.other_tools import Meant, in_our_words, meant_by
    from moe.recipe.sections import Run

    word = name.lstrip("-").replace("-", "_")
    meant = meant_by(word, value, flags=list(flags))
    if meant is not None and meant.flag in flags:
        given = "" if value is None or flags[meant.flag] is bool else f" {shlex.quote(value)}"
        return f"did you mean {meant.flag}{given}?"
    takes = {key: _reads(verb, key) for key in known_keys()}
    if meant is not None and meant.flag is None and all(takes[key] for key in meant.named):
        return meant.fix(value, typed=True)
    if verb not in RECIPE_VERBS:
        return None
    if word in Run.model_fields:
        of_kind = value is not None and in_our_words(f"{word}.kind", value) in choices(f"{word}.kind")
        return Meant({f"{word}.kind": in_our_words(f"{word}.kind", value)} if of_kind else {f"{word}.KEY": None}).fix(value, typed=True)
    found = next((key for key in keys_named(word, value) if takes[key]), None)
    if found is None:
        return None
    alone = value is None and field_of(found).annotation is bool
    return Meant({found: "true" if alone else value}).fix(value, typed=True)


def _reads(verb: str, key: str) -> bool:
    """Return whether a recipe's key has an effect on the verb."""
    if verb in ("simulate", "energy"):
        return key not in {f"degrees.{axis}" for axis in NOT_SIMULATED}
    return verb in RECIPE_VERBS and (verb != "eval" or key.startswith("data."))


def _value(name: str, kind: Any, text: str) -> Any:
    from moe.recipe.other_tools import in_our_words

    needed, example = _described(kind)
    fix = f"{name} {example}"
    if get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
        near = did_you_mean(str(in_our_words("precision.compute", text)), get_args(kind))
        fix = f"did you mean {name} {near}?" if near else fix
    elif kind is str or (kind is Path and text):
        return kind(text)
    elif kind in (int, float):
        with suppress(ValueError, OverflowError):
            value = kind(whole(text) if kind is int else text)
            if math.isfinite(value):
                return value
    raise BadInput(name, got=text or "nothing", needed=needed, fix=fix)


def _described(kind: Any) -> tuple[str, str]:
    """Return (words for the values that a flag of this type accepts, an example)."""
    return (" or ".join(get_args(kind)), str(get_args(kind)[0])) if get_origin(kind) is Literal else _KINDS[kind]


def _hint(missing: str, verb: str) -> str:
    return {
        "recipe": f"moe {verb} switch_tiny; the names are in: moe recipes",
        "run_dir": f"moe {verb} runs/switch_tiny",
        "from_run": f"moe {verb} runs/dense_tiny runs/upcycled --to glam_tiny",
        "to_run": f"moe {verb} runs/dense_tiny runs/upcycled --to glam_tiny",
    }.get(missing, f"see: moe {verb} --help")
