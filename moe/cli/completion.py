"""Shell completion: corrects the table of words in tyro's script, so that a shell offers only words that the command line accepts.

    tyro's script -> COMPLETION_SPEC = {...} -> recipe names; true and false; null -> the same script with the corrected table

tyro does not complete words after a verb, gives each boolean a switch (`--model.no_tied_embeddings`), and writes null as None.
"""

from __future__ import annotations

import ast
from typing import Any

from moe.recipe.keys import known_keys, names_beside_plugins
from moe.recipe.load import recipe_names

_TABLE = "COMPLETION_SPEC = "
_FISH = (("\\", "\\\\"), ('"', '\\"'), ("$", "\\$"))  # fish: inside double quotes
_OF_RECIPES = ("--recipe", "--to")


def mended(script: str, *, shell: str, words: dict[str, list[str]]) -> str:
    """tyro's completion script with a corrected table. `words`: for each verb, the words other than flags that may follow it."""
    lines = script.split("\n")
    for at, line in enumerate(lines):
        start = line.find(_TABLE)
        if start < 0 or "{" not in line:
            continue
        table = ast.literal_eval(_unquoted(line[start + len(_TABLE) :], shell))
        for verb, spec in table["subcommands"].items():
            spec["options"] = [_mended(option) for option in spec["options"]] + [_word(word) for word in words.get(verb, [])]
        lines[at] = line[:start] + _TABLE + _quoted(repr(table), shell)
    return "\n".join(lines)


def _mended(option: dict[str, Any]) -> dict[str, Any]:
    flag = option["flags"][-1]
    if flag in _OF_RECIPES:
        return option | {"type": "choice", "choices": recipe_names()}
    choices = option.get("choices")
    if "." not in flag:
        return option | ({"choices": [c for c in choices if c != "None"]} if choices else {})
    if names := [name for name in names_beside_plugins(flag[2:]) if name != "given"]:
        return option | {"type": "choice", "choices": names}
    if option["type"] == "flag":
        section, _, key = flag[2:].rpartition(".")
        key = key if f"{section}.{key}" in known_keys() else key.removeprefix("no_")
        return option | {"flags": [f"--{section}.{key}"], "type": "choice", "nargs": 1, "choices": ["true", "false"]}
    return option | ({"choices": ["null" if c == "None" else c for c in choices]} if choices else {})


def _word(word: str) -> dict[str, Any]:
    return {"flags": [word], "description": word, "type": "flag", "cascade": False, "nargs": None}


def _unquoted(text: str, shell: str) -> str:
    for plain, quoted in reversed(_FISH) if shell == "fish" else ():
        text = text.replace(quoted, plain)
    return text


def _quoted(text: str, shell: str) -> str:
    for plain, quoted in _FISH if shell == "fish" else ():
        text = text.replace(plain, quoted)
    return text
