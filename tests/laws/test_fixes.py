"""A fix that sets, removes or renames a key is a value, which can be tried, and no text; each key that a fix names exists.

Read from the syntax trees of all expressions that are passed as `fix`, or assigned to a name that is.
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

HOLE = "§"  # a value that is put into a text
_KEY = rf"[a-z_{HOLE}]+(?:\.[a-z_0-9{HOLE}]+)+"
CHANGE = re.compile(rf"(?:^|\b(?:or|and) )(?:(?:set )?{_KEY} to |(?:remove|leave) {_KEY}|add --nproc [\d{HOLE}])")
CHANGE_OF_IT = re.compile("(?:set |use )?(?:it to|one of) |(?:remove|leave) it")
_NAMED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(Run.model_fields)})(?:\.[a-z_0-9{HOLE}]+)++(?!\()")
CHANGES = ("Set", "Remove", "Rename")


def text_of(node: ast.AST) -> str | None:
    """Return a literal's text, with HOLE for each value that is put in; None for another expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


def fixes(path: Path) -> Iterator[tuple[ast.expr, str | None]]:
    """Yield each expression of a fix, with the text of the key that its refusal is about, if that is a literal."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield from ((given.value, text_of(node.args[0]) if node.args else None) for given in node.keywords if given.arg == "fix")
        elif isinstance(node, ast.Assign) and any(isinstance(name, ast.Name) and name.id == "fix" for name in node.targets):
            yield node.value, None


def exists(key: str) -> bool:
    """Return whether a recipe has such a key or section. HOLE is any text."""
    pattern = re.compile(re.escape(key).replace(HOLE, r"[a-z_0-9.]+") + r"(\..+)?")
    return any(pattern.fullmatch(known) for known in known_keys())


def faults(fix: ast.expr, what: str | None) -> Iterator[str]:
    """Yield each change of a key that is written as text, and each key that does not exist."""
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
