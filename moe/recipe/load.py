"""Builds a Run from a recipe file, its parents (`extends`) and values of the command line, and records the origin of each value.

A value of the command line replaces the file's, the file's replaces its parent's, and the parent's replaces the default. Every mistake is
reported in one line with its fix; for an unknown key, the fix is the most similar known key.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from moe.recipe.idle import COMMAND_LINE, check_read
from moe.recipe.keys import ALL, choices, field_at, field_of, further_values, keys_named, known_keys, section_of
from moe.recipe.other_tools import in_our_words, meant_by
from moe.recipe.plugin import registered
from moe.recipe.router_spec import RouterSpec
from moe.recipe.section import Section, takes_number
from moe.recipe.sections import Run
from parallel import yaml_text
from parallel.errors import BadInput, did_you_mean, some
from parallel.fixes import Fix, Remove, Rename, Set, Words, fix_of, guess
from parallel.store.files import read_text, reason, user_path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PUBLISHED = "published"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_OWN_FOLDERS = ("runs", "recipes", PUBLISHED, "docs", "checkpoints")


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the project."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def published_names() -> list[str]:
    """Return the names of the recipes of well-known training runs, such as published/bloom_176b; each needs a large cluster."""
    return sorted(f"{PUBLISHED}/{p.stem}" for p in (RECIPES / PUBLISHED).glob("*.yaml"))


def run_name(recipe: str) -> str:
    """Return the default name of a run of this recipe: the recipe's name, or for RUN/recipe.yaml the name of the folder RUN."""
    path = Path(recipe)
    return path.resolve().parent.name if path.name == "recipe.yaml" else path.stem


def of_transformers(folder: Path) -> bool:
    """Return whether a folder holds a model that Hugging Face's transformers saved."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def refuse_on_hub(name: str, what: str, *, needed: str = "a folder on this machine", then: str = "hf:") -> None:
    """Raise BadInput if `name` names a model on the Hugging Face hub, such as Qwen/Qwen3-30B-A3B, and no folder on this machine. what: name
    of the argument. needed: its possible values, in words. then: second part of the fix, after the download command; the downloaded
    folder's name is inserted after the first "hf:" in it."""
    hub = name.removeprefix("hf:")
    if _HUB.fullmatch(hub) is None or Path(hub).exists() or ("/" not in hub and hub == name):
        return
    if hub.endswith((".yaml", ".yml", ".csv", ".json")) or Path(hub).parts[0] in _OWN_FOLDERS or ("/" in hub and Path(hub).parent.is_dir()):
        return
    folder = hub.rpartition("/")[2]
    got = f"{name}, which is not here, and may be a model of the Hugging Face hub"
    fix = f"hf download {hub} --local-dir {folder}, then {then.replace('hf:', f'hf:{folder}', 1)}"
    raise BadInput(what, got=got, needed=needed, fix=fix)


def recipe_path(name: str) -> Path:
    """Return the path of a recipe, given a shipped recipe's name or a path. Raises BadInput, with the shipped names, if there is none."""
    given = user_path(name, what="recipe")
    for path in (RECIPES / f"{name}.yaml", given):
        if path.is_file():
            return path
    refuse_on_hub(name, "recipe", needed="a YAML file")
    if name.startswith("hf:") or of_transformers(given):
        raise BadInput(
            "recipe", got=f"{name}, a model of transformers", needed="a YAML file, or hf:DIR", fix=f"hf:{name.removeprefix('hf:')}"
        )
    if (given / "recipe.yaml").is_file():
        raise BadInput("recipe", got=f"{name}, the folder of a run", needed="a YAML file", fix=f"{given / 'recipe.yaml'}")
    if given.exists() and not given.is_dir():
        raise BadInput("recipe", got=f"{name}, which is not a regular file", needed="a YAML file", fix="see: moe recipes")
    # a misspelled name is also compared with published names without "published/": that common prefix makes all of them look similar
    published = {each.removeprefix(f"{PUBLISHED}/"): each for each in published_names()}
    here = {path.stem: str(path) for path in sorted(given.parent.glob("*.y*ml"))}
    near = here.get(given.stem) or did_you_mean(name, [*recipe_names(), *published_names()])
    near = near or published.get(did_you_mean(name, published) or "") or here.get(did_you_mean(given.stem, here) or "")
    needed, fix = f"a YAML file, or one of {some(recipe_names(), rest='moe recipes')}", "list them with: moe recipes"
    raise BadInput("recipe", got=name, needed=needed, fix=f"did you mean {near}?" if near else fix)


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (values of a recipe and its parents, origin of each value): {'model': {'d_ff': 512}} and {'model.d_ff': 'dense_tiny.yaml'}."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    while True:
        if any(path.resolve() == seen.resolve() for seen, _ in chain):
            got = f"{path.name}, which extends itself"
            raise BadInput("extends", got=got, needed="parents that do not lead back to it", fix="remove one `extends:`")
        values = _read_yaml(path)
        parent = values.pop("extends", None)
        chain.append((path, values))
        if parent is None:
            break
        if not isinstance(parent, str):
            raise BadInput("extends", got=parent, needed="the name of one recipe", fix="write for example: extends: dense_tiny")
        beside = user_path(path.parent / f"{parent}.yaml", what="extends")
        path = beside if beside.is_file() else recipe_path(parent)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, values in reversed(chain):
        for section, fields in values.items():
            if not isinstance(fields, dict):
                if section in known_keys():
                    above, _, key = section.partition(".")
                    fix = f"write {above}: {{{key}: {json.dumps(fields, default=str)}}}"
                    raise BadInput(f"{section} in {source.name}", got="a key outside its section", needed=f"a section {above}", fix=fix)
                if section not in Run.model_fields:
                    raise _unknown_key((section,), fields)
                needed, fix = "a section, with key: value pairs", f"write {section}: {{key: value}}"
                raise BadInput(f"{section} in {source.name}", got=fields, needed=needed, fix=fix)
            if section == "router" and "preset" in fields:
                _drop_router(merged, origins)
            _merge(fields, merged.setdefault(section, {}), origins, prefix=section, source=source.name)
    return merged, origins


def _merge(fields: dict[str, Any], into: dict[str, Any], origins: dict[str, str], *, prefix: str, source: str) -> None:
    """Copy `fields`, a section's values in the file `source`, into `into`, the parent recipe's values, key by key. origins: gets the file
    of each copied value. prefix: name of the section."""
    for key, value in fields.items():
        dotted = f"{prefix}.{key}"
        if isinstance(value, dict) and any(k.startswith(f"{dotted}.") for k in known_keys()):
            _merge(value, _section_in(into, key), origins, prefix=dotted, source=source)
        else:
            into[key] = value
            origins[dotted] = source


def _section_in(values: dict[str, Any], section: str) -> dict[str, Any]:
    """Replace the dict values[section] by a copy, and return the copy. If there is no dict, the copy is empty."""
    held = values.get(section)
    values[section] = dict(held) if isinstance(held, dict) else {}
    return values[section]  # type: ignore[no-any-return]


_PRESET = "router.preset"
_OF_PRESET = ("preset", *RouterSpec.model_fields)
# begins the note about a parent recipe's value that `_drop_router` removed. The key's origin is then shown as
# "mixtral: null; not 2.0, which PARENT has for its own preset"
_DROPPED = "; not "


def _drop_router(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Remove a parent recipe's router preset and its changes to that preset from `values`, because another preset was chosen. origins: key
    -> origin of its value, changed accordingly."""
    held = values.get("router") or {}
    for key in [key for key in held if key in _OF_PRESET]:
        origin, value = origins.pop(f"router.{key}"), held.pop(key)
        if key != "preset" and value != "preset":
            origins[f"router.{key}"] = f"{_DROPPED}{json.dumps(value)}, which {origin} has for its own preset"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml_text.load(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"recipe {path}", got=reason(error), needed="a readable text file", fix="check the file") from None
    except yaml_text.NOT_YAML as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or f"not YAML ({error or 'nested too deeply'})"
        problem = problem.replace("found character that cannot start any token", "a tab or another character that begins no value")
        raise BadInput(f"recipe {path.name}{line}", got=problem, needed="plain YAML", fix="correct that line") from None
    if values is None:
        got, needed = "an empty file", "extends, or sections with keys"
        raise BadInput(f"recipe {path.name}", got=got, needed=needed, fix="write for example: extends: dense_tiny")
    if not isinstance(values, dict):
        needed = "sections, each with key: value pairs"
        raise BadInput(f"recipe {path.name}", got=type(values).__name__, needed=needed, fix="see: moe show switch_tiny")
    return values


def load(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> tuple[Run, dict[str, str]]:
    """Load a recipe, given by name or path. Return (the Run, dotted key -> origin of its value). Raises BadInput.
    overrides: dotted key -> value that replaces the recipe's; text is read as YAML, as on a command line, any other value is used as it is.
    """
    path = recipe_path(str(recipe))
    values, origins = read_recipe(path)
    given = sorted((overrides or {}).items(), key=lambda item: item[0] != _PRESET)  # preset first: it removes the recipe's router values
    for dotted, text in given:
        if dotted not in known_keys():
            raise _unknown_key(tuple(dotted.split(".")), text, typed=True)
        *sections, key = dotted.split(".")
        if dotted == _PRESET:
            _drop_router(values, origins)
        reduce(_section_in, sections, values)[key] = _read_value(text, field_of(dotted).annotation)
        origins[dotted] = COMMAND_LINE
    run = build_run(values)
    for dotted in known_keys():
        origins.setdefault(dotted, "default")
    check_read(run, origins, file=path.name)
    for key in RouterSpec.model_fields:
        if key not in run.router.own:
            shown, before = json.dumps(getattr(run.router, key)), origins[f"router.{key}"]
            note = before if before.startswith(_DROPPED) and not before.startswith(f"{_DROPPED}{shown},") else ""
            origins[f"router.{key}"] = f"{run.router.preset}: {shown}{note}"
    return run, origins


def _read_value(text: Any, annotation: Any) -> Any:
    """Return a value of the command line, read as YAML. If `annotation`, the key's type, accepts text, the value stays as typed (a folder
    may be named 2024)."""
    if not isinstance(text, str):
        return os.fspath(text) if isinstance(text, os.PathLike) else text
    is_text = str in ((annotation,) if get_origin(annotation) is tuple else (annotation, *get_args(annotation)))
    if not text.strip() and is_text:
        return ""  # YAML would read an empty text as null; Section refuses ""
    try:
        value = yaml_text.load(text)
    except yaml_text.NOT_YAML:
        return text
    return text if value is not None and is_text else value


def build_run(values: dict[str, Any]) -> Run:
    """Build a Run from plain values. Raises BadInput for the first mistake in them."""
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
        more = len({".".join(map(str, _place(e["loc"]) or e["loc"])) for e in errors}) - 1
        raise _explain(dict(first), more) from None


def _place(loc: Sequence[Any]) -> list[Any]:
    """Return the part of `loc`, the location of an error from pydantic, that is the path of a key. The rest of `loc` is a location in the
    key's value."""
    return [name for at, name in enumerate(loc) if field_at(loc[: at + 1]) is not None]


def _unknown_key(path: tuple[Any, ...], value: Any = None, *, typed: bool = False) -> BadInput:
    """Return the error for a key that does not exist. typed: the key is from the command line, so the fix names flags."""
    dotted, last = ".".join(map(str, path)), str(path[-1])
    inner, given = _first_leaf(value)
    named = dotted + inner
    elsewhere = keys_named(named.rpartition(".")[2], given)
    outer = next(path[:n] for n in range(len(path) - 1, -1, -1) if n == 0 or field_at(path[:n]) is not None)
    if field_at(path) is not None:
        example = next(key for key in known_keys() if key.startswith(f"{dotted}."))
        return BadInput(dotted, got="a section without a key", needed=f"{dotted}.KEY", fix=f"for example --{example} VALUE")
    where, section = ".".join(map(str, outer)), section_of(field_at(outer)) if outer else Run
    if section is None:
        return BadInput(dotted, got=f"a key inside a value: {where} is not a section", needed=f"{where}: VALUE", fix=f"set {where} alone")
    inside = any(key.startswith(f"{where}.") for key in elsewhere)
    meant = meant_by(named, given) or (None if inside else meant_by(named.rpartition(".")[2], given))
    if last in section.gone:
        fix: Fix = Words(f"remove it: it is always {json.dumps(section.gone[last])}", Remove("it"))
    elif meant is not None:
        dotted, fix = named, meant.fix(given, typed=typed)
    else:
        near = did_you_mean(str(path[len(outer)]), section.model_fields) if outer or len(path) == 1 else did_you_mean(dotted, known_keys())
        near = f"{where}.{near}" if near and outer else near
        if elsewhere and (len(elsewhere) == 1 or not near) and (outer or not near):
            dotted, near = named, elsewhere[0]
        fix = Rename("it", near) if near else Remove("it") | f"see: moe show --keys {outer[0] if outer else ALL}"
    kind = "key" if outer else "section"
    needed = f"one of {some(section.model_fields, rest=f'moe show --keys {where or ALL}')}"
    return BadInput(dotted, got=f"a {kind} that does not exist", needed=needed, fix=fix)


def _first_leaf(value: Any) -> tuple[str, Any]:
    """Return (path, value) of the first value in nested mappings: (".a.b", 1) for {"a": {"b": 1}}."""
    path = ""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        path += f".{name}"
    return path, value


def _of_each(field: Any) -> type[Section] | None:
    """Return the class of the sections that a key holds as a list (data.sources); None for any other key."""
    held = [] if field is None or get_origin(field.annotation) is not tuple else get_args(field.annotation)
    return next((kind for kind in held if isinstance(kind, type) and issubclass(kind, Section)), None)


_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def _explain(error: dict[str, Any], more: int) -> BadInput:
    """Return the BadInput for an error of pydantic. more: number of further errors, which the fix mentions."""
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, BadInput):
        return raised
    loc = error["loc"]
    place = _place(loc)
    if (each := _of_each(field_at(place))) is not None:
        keys = ", ".join(name for name, field in each.model_fields.items() if field.is_required())
        inside = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc[len(place) :])
        example = ", ".join(f"{{path: {name}, weight: {weight}}}" for name, weight in (("a.txt", 2), ("b.txt", 1)))
        dotted, needed = ".".join(map(str, place)), f"a list of {{{keys}}}, each with a weight above 0"
        return BadInput(f"{dotted}{inside}", got=_shown(error["input"]), needed=needed, fix=f"write {dotted}: [{example}]")
    if error["type"] == "extra_forbidden":
        return _unknown_key(loc, error["input"])
    dotted, field = ".".join(map(str, place or loc)), field_at(place) if len(place) > 1 else None
    if field is not None and section_of(field) is not None:
        inner = some(section_of(field).model_fields, rest=f"moe show --keys {dotted}")  # type: ignore[union-attr]
        return BadInput(
            dotted, got=_shown(error["input"]), needed=f"a section with some of the keys {inner}", fix=f"write {dotted}: {{key: value}}"
        )
    if error["type"] == "tuple_type":
        example = "[1,2]" if field is None or takes_number(field.annotation) else "[NAME]"
        both = f"write {dotted}: {example} in a file, --{dotted} {example} on the command line"
        return BadInput(dotted, got=_shown(error["input"]), needed="a list", fix=both)
    names = choices(dotted) if field else []
    needed = re.split(r", (?:unable to|got a number) ", error["msg"].removeprefix("Input should be ").removeprefix("Value error, "))[0]
    fix = fix_of(f"write {dotted}: {{key: value}}")
    if field is not None:
        fix = Set(dotted, field.default, said=f"a value like {_shown(field.default)}")
        if "ge" in error.get("ctx", {}) and field.default in (None, error["ctx"]["ge"]):
            fix = Set(dotted, error["ctx"]["ge"])
    if names and error["type"] not in _RANGES:
        ours = in_our_words(dotted, error["input"])
        near = ours if ours in names else did_you_mean(str(error["input"]), names)
        numbers = " or a number" if field is not None and takes_number(field.annotation) else ""
        numbers += "".join(f" or {words}" for words in further_values(field))
        listed = some(sorted(names, key=lambda name: name not in registered(dotted)), rest=f"moe show --keys {dotted.rpartition('.')[0]}")
        needed = f"{listed}{numbers}" if len(names) > 1 or numbers else f"{names[0]} (the only choice this version has)"
        wanted = near if near and near != str(error["input"]) else None
        fix = guess(yaml_text.load(wanted)) if wanted else Set(dotted, yaml_text.load(names[0]))
    if more > 0:
        fix = Words(f"{fix} ({more} more wrong {'value' if more == 1 else 'values'} after this one)", fix)
    return BadInput(dotted, got=_shown(error["input"]), needed=needed, fix=fix)


def _shown(value: Any) -> str:
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    value = list(value) if isinstance(value, tuple) else value  # shown as a list, as in YAML
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else short.repr(value)


def resolved_yaml(run: Run, origins: dict[str, str]) -> str:
    """Return the whole recipe as YAML that `load` reads, with each value's origin as a comment."""
    lines: list[str] = []

    def write(fields: dict[str, Any], prefix: str, depth: int) -> None:
        flat = {key: value for key, value in fields.items() if section_of(field_at([*prefix.split("."), key])) is None}
        width = max(len(key) + len(json.dumps(value)) for key, value in flat.items())
        for key, value in fields.items():
            dotted, indent = f"{prefix}.{key}", "  " * depth
            if key in flat:
                text = f"{key}: {json.dumps(value)}"
                lines.append(f"{indent}{text:<{width + 2}}  # {origins.get(dotted, 'default')}")
            else:
                lines.append(f"{indent}{key}:")
                write(value, dotted, depth + 1)

    for section, fields in run.model_dump(mode="json").items():
        lines.append(f"{section}:")
        write(fields, section, 1)
    return "\n".join(lines) + "\n"
