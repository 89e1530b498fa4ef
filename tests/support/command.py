"""Starts a measurement of one of the tests' folders by its name: `python -m tests.counted comm --nproc 2`.

A measurement is a module with `main(**flags) -> int`. Its flags are main's arguments, its help is main's docstring.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from moe.launch import exit_codes
from parallel.errors import BadInput, did_you_mean


def measurements(folder: Path) -> dict[str, str]:
    """Return the folder's measurements by name, each with the first line of its docstring. Nothing is imported."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))}
    return {
        stem.replace("_", "-"): (ast.get_docstring(tree) or "").partition("\n")[0]
        for stem, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    }


def carry_out(main: Callable[..., int], name: str, words: list[str]) -> int:
    """Run main with the words as its arguments. Returns its exit code. Bad input and words that do not parse are one line and 2."""

    @functools.wraps(main)
    def read(**values: Any) -> Callable[[], int]:
        return functools.partial(main, **values)

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro draws a box
            call = tyro.cli(read, prog=name, args=words)
    except SystemExit as ended:
        if not ended.code:
            raise
        needed = "its flags, each with a value of its type"
        return _refused(BadInput(name, got=shlex.join(words), needed=needed, fix=f"see: {name} --help"))
    try:
        return int(call())
    except BadInput as bad:
        return _refused(bad)


def _refused(bad: BadInput) -> int:
    print(bad, file=sys.stderr)
    return exit_codes.BAD_INPUT


def run(folder: Path, words: list[str]) -> int:
    """Run the measurement that the first word names, with the other words as its flags. Returns its exit code."""
    command = f"python -m tests.{folder.name}"
    named = measurements(folder)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: {command} NAME [--help]\n", *(f"  {name:<18} {about}" for name, about in named.items()), sep="\n")
        return exit_codes.DONE
    if words[0] not in named:
        near = did_you_mean(words[0], named) or next(iter(named))
        print(BadInput("NAME", got=words[0], needed=f"one of {', '.join(named)}", fix=f"{command} {near}"), file=sys.stderr)
        return exit_codes.BAD_INPUT
    module = importlib.import_module(f"tests.{folder.name}.{words[0].replace('-', '_')}")
    return carry_out(module.main, f"{command} {words[0]}", words[1:])
