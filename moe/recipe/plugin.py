"""Plugins: a user's own function or class, named in a recipe as `module:name` in place of a built-in one.

    optimizer.kind: my_parts:lion        ->  the object `lion` of the module my_parts
    optimizer.kind: lion                 ->  the same, if an installed package registers lion = my_parts:lion in moe_parallel.optimizers

A registered name (an entry point) is looked up in the packages' metadata when the recipe is read, and replaced by module:name. Built-in
names come first. Reading a recipe imports nothing: `moe show`, `moe plan` and checks are safe with any recipe. Commands that use the model
(training, evaluation, generation, verify, conversion) import the module and print a line about it; its code then has all the rights of the
user. The working folder is searched last, so that no file there replaces an installed package.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from parallel.errors import BadInput, did_you_mean, where

_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
GROUPS = {  # key that accepts plugins -> group of entry points in which packages register plugins for it
    "optimizer.kind": "moe_parallel.optimizers",
    "optimizer.schedule": "moe_parallel.schedules",
    "data.source": "moe_parallel.sources",
    "train.loss": "moe_parallel.losses",
    "router.score": "moe_parallel.scores",
    "router.select": "moe_parallel.selections",
    "router.balance_loss": "moe_parallel.balance_losses",
    "dispatch.kind": "moe_parallel.dispatchers",
}


class _ModuleAndName:
    """Makes pydantic check the form module:name. Only the method imports pydantic, so a program that uses only a router does not need
    pydantic."""

    def __get_pydantic_core_schema__(self, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.str_schema(pattern=_PATTERN, max_length=200)


Plugin = Annotated[str, _ModuleAndName()]
WORDS = "module:name of your own function or class"  # how lists of a key's possible values describe a plugin


def is_plugin(value: object) -> bool:
    """Return whether a recipe's value names a plugin, as module:name."""
    return isinstance(value, str) and ":" in value


def registered(key: str) -> list[str]:
    """Return the names of plugins that installed packages register for this key. The packages' metadata are read; no module is imported."""
    return sorted(entry_points(group=GROUPS[key]).names) if key in GROUPS else []


def by_name(key: str, name: str) -> str:
    """Return module:name of the plugin that an installed package registers under `name` for this key; `name` itself if none does.
    Raises BadInput for a name that packages register for different plugins, and for an entry point that is not module:name."""
    found = {point.value.partition("[")[0].strip(): point for point in entry_points(group=GROUPS[key], name=name)} if key in GROUPS else {}
    packages = " and ".join(sorted({point.dist.name if point.dist else "a package" for point in found.values()}))
    if len(found) > 1:
        needed = f"one plugin of that name, not {' and '.join(sorted(found))}"
        raise BadInput(key, got=f"{name}, registered by {packages}", needed=needed, fix=f"write {min(found)}")
    for value in found:
        if not re.match(_PATTERN, value):
            got, needed = f"{name}, registered by {packages} as {value}", "module:name, with a name that has no dots"
            raise BadInput(key, got=got, needed=needed, fix=f"correct the entry point of {packages}, or write module:name here")
        return value
    return name


def check_there(key: str, value: str) -> None:
    """Raise BadInput if the top-level package of the plugin `value` (module:name) cannot be found. Nothing is imported."""
    top = value.partition(":")[0].partition(".")[0]
    with suppress(ImportError, ValueError):
        if top in sys.modules or _in_folder(top) or find_spec(top) is not None:
            return
    raise _missing(key, value, top)


def load_plugin(key: str, value: str, *, arguments: int | None) -> Any:
    """Import and return the plugin `value` (module:name) of a key. arguments: number of arguments with which it is called; None: unchecked.
    Raises BadInput if the module is missing, fails on import or lacks the name, or if the object cannot be called with these arguments."""
    module, _, name = value.partition(":")
    found = _imported(key, value, module)
    if not hasattr(found, name):
        near = did_you_mean(name, [known for known in vars(found) if not known.startswith("_")])
        fix = f"did you mean {module}:{near}?" if near else f"define {name} in {file_of(found) or module}"
        raise BadInput(key, got=value, needed=f"a name that {module} has", fix=fix)
    part = getattr(found, name)
    if not callable(part):
        raise BadInput(key, got=f"{value}, a {type(part).__name__}", needed="a function or a class", fix=f"make {name} a function or class")
    if arguments is not None:
        _check_arguments(key, value, part, arguments)
    return part


def _check_arguments(key: str, value: str, part: Callable[..., Any], arguments: int) -> None:
    try:
        signature = inspect.signature(part)
    except ValueError:  # a C function has no signature to check, so it is accepted
        return
    try:
        signature.bind(*range(arguments))
    except TypeError:
        needed = f"a function that can be called with {arguments} argument{'s' * (arguments != 1)}"
        raise BadInput(key, got=f"{value}{signature}", needed=needed, fix="see: docs/use/plugins.md") from None


def loaded(key: str, value: str, *, arguments: int | None) -> Any:
    """Return the plugin of a key, quickly enough for every step. If its module is already imported and has the name, nothing is checked;
    otherwise `load_plugin` imports it, and checks that it can be called with this number of arguments."""
    module, _, name = value.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    return load_plugin(key, value, arguments=arguments) if found is None else found


def source_of(value: str) -> str:
    """Return the SHA-256 of the file of a loaded plugin's module; "" if the module has no file."""
    path = file_of(sys.modules[value.partition(":")[0]])
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""


def file_of(module: Any) -> str | None:
    return getattr(module, "__file__", None)


def _imported(key: str, value: str, module: str) -> Any:
    top = module.partition(".")[0]
    try:
        if top not in sys.modules and find_spec(top) is None:
            if not _in_folder(top):
                raise _missing(key, value, top)
            sys.path.append(os.getcwd())  # last, so that no file there replaces an installed package
            importlib.invalidate_caches()
        new = module not in sys.modules
        found = importlib.import_module(module)
        if new and os.environ.get("RANK", "0") == "0":
            line = f"{key} {value}: runs code of {file_of(found) or module}, because the recipe names it"
            print(line, file=sys.stderr, flush=True)
        return found
    except BadInput:
        raise
    except ModuleNotFoundError as error:
        if error.name in (module, top):
            raise _missing(key, value, str(error.name)) from None
        raise _raised(key, value, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(key, value, error) from error


def _in_folder(top: str) -> bool:
    here = Path.cwd() / top
    return here.with_suffix(".py").is_file() or here.is_dir()


def _missing(key: str, value: str, name: str) -> BadInput:
    fix = f"pip install it, start where {name}.py is, or add its folder to PYTHONPATH"
    return BadInput(key, got=value, needed=f"a module {name} that can be imported here", fix=fix)


def _raised(key: str, value: str, error: BaseException) -> BadInput:
    return BadInput(key, got=f"{value}, which raised {where(error)} as it was imported", needed="a module that loads", fix="correct it")
