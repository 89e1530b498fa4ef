"""An error's fix that changes a key is a `Fix` object (Set, Remove, Rename), which can be applied, never a text; its keys exist.

Checked in the syntax trees of all expressions that are passed as `fix=`, or assigned to a variable `fix`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from moe.recipe.load import known_keys
from moe.recipe.sections import Run
from parallel.fixes import IT
from tests.laws.test_architecture import PACKAGES, check, python_files, tree, where

HOLE = "§"  # stands for each {value} of an f-string
_KEY = rf"[a-z_{HOLE}]+(?:\.[a-z_0-9{HOLE}]+)+"
CHANGE = re.compile(rf"(?:^|\b(?:or|and) )(?:(?:set )?{_KEY} to |(?:remove|leave) {_KEY}|add --nproc [\d{HOLE}])")
CHANGE_OF_IT = re.compile("(?:set |use )?(?:it to|one of) |(?:remove|leave) it")
_NAMED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(Run.model_fields)})(?:\.[a-z_0-9{HOLE}]+)++(?!\()")
CHANGES = ("Set", "Remove", "Rename")


def text_of(node: ast.AST) -> str | None:
    """Return the text of a string or f-string, with HOLE for each {value}; None for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


def fixes(path: Path) -> Iterator[tuple[ast.expr, str | None]]:
    """Yield (expression of a fix, key of its BadInput). The key is None if it is not a literal."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield from ((given.value, text_of(node.args[0]) if node.args else None) for given in node.keywords if given.arg == "fix")
        elif isinstance(node, ast.Assign) and any(isinstance(name, ast.Name) and name.id == "fix" for name in node.targets):
            yield node.value, None


def exists(key: str) -> bool:
    """Return whether recipes have this key or section. HOLE matches any name."""
    pattern = re.compile(re.escape(key).replace(HOLE, r"[a-z_0-9.]+") + r"(\..+)?")
    return any(pattern.fullmatch(known) for known in known_keys())


def faults(fix: ast.expr, what: str | None) -> Iterator[str]:
    """Yield a message for each text in `fix` that describes a change of a key, and for each key that does not exist. what: the key of
    the BadInput."""
    is_key = what is not None and "." in what and exists(what)
    for node in ast.walk(fix):
        words = text_of(node) or ""
        if CHANGE.search(words) or (is_key and CHANGE_OF_IT.match(words)):
            yield f"{words!r} is a text"
        named = _NAMED.findall(words)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHANGES:
            key = what if text_of(node.args[0]) == IT else text_of(node.args[0])
            named += [key] if key is not None and "." in key else []
        yield from (f"{key} does not exist" for key in named if not exists(key))


def test_a_fix_that_changes_a_key_is_a_value_and_its_key_exists() -> None:
    found = ((path, fix, what) for path in python_files(*PACKAGES) for fix, what in fixes(path))
    wrong = [f"{where(path, fix.lineno)}: {fault}" for path, fix, what in found for fault in faults(fix, what)]
    check(wrong, "Set, Remove, Rename and Nproc of parallel/fixes.py are tried before they are told; a text is not")
