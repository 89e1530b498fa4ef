"""A recipe file, its parents and flags made a Run, each value with its origin.

    YAML file --extends--> parent        command line > file > parent > default
         \\______ merge ______/          `load` returns the Run and where each value came from

Every mistake in them is one line with the fix: unknown keys get the nearest known one.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError

from moe.config import Run, Section
from parallel.errors import BadInput, did_you_mean

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def recipe_names() -> list[str]:
    """The recipes that ship with the project."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def run_name(recipe: str) -> str:
    """What a run of this recipe is called, by itself: the recipe's name; a run folder's own recipe.yaml is that run's."""
    path = Path(recipe)
    return path.resolve().parent.name if path.name == "recipe.yaml" else path.stem


def recipe_path(name: str) -> Path:
    """A recipe by the name of a shipped one or by its path. Raises BadInput with the names there are."""
    for path in (RECIPES / f"{name}.yaml", Path(name).expanduser()):
        if path.is_file():
            return path
    near = did_you_mean(name, recipe_names())
    raise BadInput(
        "recipe",
        got=name,
        needed=f"a YAML file, or one of {', '.join(recipe_names())}",
        fix=f"did you mean {near}?" if near else "list them with: moe recipes",
    )


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A recipe merged with its parents, and each value's origin: {'model': {'d_ff': 512}}, {'model.d_ff': 'dense_tiny.yaml'}."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    while True:
        if any(path.resolve() == seen.resolve() for seen, _ in chain):
            raise BadInput(
                "extends", got=f"{path.name}, which extends itself", needed="one parent, without a circle", fix="remove one `extends:`"
            )
        values = _read_yaml(path)
        parent = values.pop("extends", None)
        chain.append((path, values))
        if parent is None:
            break
        if not isinstance(parent, str):
            raise BadInput("extends", got=parent, needed="the name of one recipe", fix="write for example: extends: dense_tiny")
        beside = path.parent / f"{parent}.yaml"
        path = beside if beside.is_file() else recipe_path(parent)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, values in reversed(chain):
        for section, fields in values.items():
            if not isinstance(fields, dict):
                _refuse_key((section,)) if section not in Run.model_fields else None
                raise BadInput(
                    f"{section} in {source.name}", got=fields, needed="a section: key: value pairs", fix=f"write {section}: {{key: value}}"
                )
            for key, value in fields.items():
                merged.setdefault(section, {})[key] = value
                origins[f"{section}.{key}"] = source.name
    return merged, origins


_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # the last two: dates such as 2024-13-45, and deep nesting


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which would keep the last of two equal keys and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for at, (key, _) in enumerate(node.value):
            if key.value in keys[:at]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"recipe {path}", got=error, needed="a readable text file", fix="check the file") from None
    except _NOT_YAML as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or f"not YAML ({error or 'nested too deeply'})"
        raise BadInput(f"recipe {path.name}{line}", got=problem, needed="plain YAML", fix="mend that line") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise BadInput(
            f"recipe {path.name}", got=type(values).__name__, needed="sections, each with key: value pairs", fix="see: moe show switch_tiny"
        )
    return values


def load(recipe: str, overrides: dict[str, str] | None = None) -> tuple[Run, dict[str, str]]:
    """A recipe by name or path with dotted overrides (text, read as YAML): the Run and each value's origin. Raises BadInput."""
    values, origins = read_recipe(recipe_path(recipe))
    for dotted, text in (overrides or {}).items():
        if dotted not in known_keys():
            _refuse_key(tuple(dotted.split(".")))
        section, _, key = dotted.partition(".")
        values.setdefault(section, {})[key] = _read_value(text, _section(Run.model_fields[section]).model_fields[key].annotation)
        origins[dotted] = "command line"
    run = build(values)
    for section, fields in run.model_dump().items():
        for key in fields:
            origins.setdefault(f"{section}.{key}", "default")
    for key, value in run.router:
        if value == "preset":
            origins[f"router.{key}"] = f"{run.router.preset}: {json.dumps(getattr(run.router.spec, key))}"
    return run, origins


def _read_value(text: str, annotation: Any) -> Any:
    """A value from the command line, read as YAML; where text is wanted, as it stands (a folder may be called 2024 or no)."""
    try:
        value = yaml.safe_load(text)
    except _NOT_YAML:
        return text
    return text if value is not None and str in (annotation, *get_args(annotation)) else value


def build(values: dict[str, Any]) -> Run:
    """A Run from plain values, or BadInput for the first thing that is wrong in them."""
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
        more = len({".".join(map(str, e["loc"][:2])) for e in errors}) - 1
        raise _explain(dict(first), more) from None


def known_keys() -> list[str]:
    """Every dotted key of a recipe."""
    return [f"{section}.{key}" for section, field in Run.model_fields.items() for key in _section(field).model_fields]


def _section(field: Any) -> type[Section]:
    kind: type[Section] = field.annotation
    return kind


def _refuse_key(path: tuple[Any, ...]) -> None:
    dotted = ".".join(map(str, path))
    sections = list(Run.model_fields)
    if path[0] not in sections:
        near = did_you_mean(dotted, known_keys() if len(path) > 1 else sections)
        owners = [k for k in known_keys() if k.split(".")[1] == path[-1]]
        fix = f"did you mean {near}?" if near else f"did you mean {owners[0]}?" if owners else "see: moe show switch_tiny"
        raise BadInput(dotted, got="a section that does not exist", needed=f"one of {', '.join(sections)}", fix=fix)
    if len(path) == 1:
        raise BadInput(
            dotted,
            got="a section without a key",
            needed=f"{dotted}.KEY",
            fix=f"for example --{next(k for k in known_keys() if k.startswith(dotted + '.'))} VALUE",
        )
    keys = list(_section(Run.model_fields[path[0]]).model_fields)
    near = did_you_mean(str(path[1]), keys)
    elsewhere = [k for k in known_keys() if k.split(".")[1] == path[1]]
    fix = (
        f"did you mean {path[0]}.{near}?"
        if near
        else f"did you mean {elsewhere[0]}?"
        if elsewhere
        else "remove it, or see: moe show switch_tiny"
    )
    raise BadInput(dotted, got="a key that does not exist", needed=f"one of {', '.join(keys)}", fix=fix)


_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def _explain(error: dict[str, Any], more: int) -> BadInput:
    """pydantic's first complaint as one line in our form."""
    loc = tuple(p for p in error["loc"])
    if error["type"] == "extra_forbidden":
        try:
            _refuse_key(loc)
        except BadInput as refused:
            return refused
    dotted = ".".join(map(str, loc[:2]))
    field = _section(Run.model_fields[loc[0]]).model_fields.get(str(loc[1])) if len(loc) > 1 else None
    choices = _choices(field.annotation) if field else []
    needed = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    fix = f"set {dotted} to a value like {field.default!r}" if field is not None else f"write {dotted}: {{key: value}}"
    if choices and error["type"] not in _RANGES:
        near = did_you_mean(str(error["input"]), choices)
        numbers = " or a number" if field is not None and _takes_number(field.annotation) else ""
        needed = f"{', '.join(choices)}{numbers}" if len(choices) > 1 or numbers else f"{choices[0]} (the only choice this version has)"
        fix = f"did you mean {near}?" if near and near != str(error["input"]) else f"set {dotted} to {choices[0]}"
    if more > 0:
        fix += f" ({more} more wrong {'value' if more == 1 else 'values'} after this one)"
    return BadInput(dotted, got=_shown(error["input"]), needed=needed, fix=fix)


def _shown(value: Any) -> str:
    """A wrong value in a few words, whatever is nested in it."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else short.repr(value)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    return [c for a in get_args(annotation) for c in _choices(a)]


def _takes_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(_takes_number(a) for a in get_args(annotation))


def resolved_yaml(run: Run, origins: dict[str, str]) -> str:
    """The whole recipe as YAML, each value with its origin as a comment; `load` reads it back."""
    lines = []
    for section, fields in run.model_dump(mode="json").items():
        lines.append(f"{section}:")
        width = max(len(key) + len(json.dumps(value)) for key, value in fields.items())
        for key, value in fields.items():
            text = f"{key}: {json.dumps(value)}"
            lines.append(f"  {text:<{width + 2}}  # {origins.get(f'{section}.{key}', 'default')}")
    return "\n".join(lines) + "\n"
