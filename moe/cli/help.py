"""Help texts and shell completion of the command `moe`, which tyro makes from the dataclasses of verbs (subcommands).

tyro's completion script has a table of words, COMPLETION_SPEC = {...}. It is corrected here, so that a shell offers exactly the words that
the command line accepts. tyro's own table lacks the words after a verb, such as recipes. It also has words that are not accepted: a switch
for each boolean (`--model.no_tied_embeddings`), and None instead of null.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import re
import shutil
import textwrap
from pathlib import Path
from typing import Annotated, Any, Union, get_type_hints

from moe.cli.verbs import RECIPE_VERBS, VERBS, Bench
from parallel.errors import BadInput

SHELLS = ("bash", "zsh", "fish")
_TABLE = "COMPLETION_SPEC = "
_FISH = (("\\", "\\\\"), ('"', '\\"'), ("$", "\\$"))  # (character, its escape) in fish's script, which has the table in double quotes
_ABOUT = (
    "Dense and Mixture-of-Experts Transformers, trained in parallel from one recipe. "
    "More on a verb: moe VERB --help. The version: moe --version"
)
_OVERRIDES = "{} can be set by --section.key VALUE, anywhere after the verb: {}."
_SETS = ("Any value of the recipe", "--degrees.ep 2 --model.d_ff=512 (moe show RECIPE lists the keys)")  # words of _OVERRIDES
_SETS_OF = {  # the same for verbs that differ
    "eval": ("Most keys of section data", "--data.path texts/ (moe show --keys data lists the keys)"),
    "convert": (_SETS[0].replace("the recipe", "the --to recipe"), _SETS[1]),
} | dict.fromkeys(("simulate", "energy"), ("With --recipe, any value of the recipe", _SETS[1]))


def print_verbs(*, benches: list[str]) -> None:
    """Print the list of verbs. benches: names of the measurements of `moe bench`. tyro is not used, because importing it is slow."""
    width = min(100, shutil.get_terminal_size().columns)
    print(f"usage: moe {{{','.join(VERBS)}}} ...\n\n{textwrap.fill(_ABOUT, width)}\n")
    print_list({verb: about(kind, benches) for verb, kind in VERBS.items()})


def print_help(verb: str, *, benches: list[str]) -> None:
    """Print a verb's help: tyro's text, with the lines of its description filled to the terminal's width."""
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        _tyro([verb, "--help"], benches=benches)
    about, frame, flags = text.getvalue().partition("╭")
    print(filled(about) + frame + flags, end="")


def print_bench(name: str, about: str, takes: dict[str, str]) -> None:
    """Print the help of `moe bench NAME`. about: the measurement's docstring. takes: name of each flag -> its default as text."""
    print(f"usage: moe bench {name}{''.join(f' [--{flag}]' for flag in takes)}\n\n{filled(about)}\n")
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(Bench)}
    print_list({f"--{flag}": helps[flag] + (f" (default: {default})" if default else "") for flag, default in takes.items()})


def filled(text: str) -> str:
    """Return a docstring with its paragraphs filled to the terminal's width. An entry of a table is filled within its last column."""
    width, blocks = min(100, shutil.get_terminal_size().columns), []
    for block in text.split("\n\n"):
        entries: list[tuple[str, int]] = []  # (text, indentation of its further lines)
        for line in block.splitlines():
            start, gaps = len(line) - len(line.lstrip()), list(re.finditer(r"(?<=\S) {2,}(?=\S)", line))
            if entries and not gaps and start == entries[-1][1]:
                entries[-1] = (f"{entries[-1][0]} {line.strip()}", start)
            else:
                entries.append((line, gaps[-1].end() if gaps else start))
        blocks.append("\n".join(textwrap.fill(entry, width, subsequent_indent=" " * indent) for entry, indent in entries))
    return "\n\n".join(blocks)


def print_list(entries: dict[str, str]) -> None:
    """Print the names and the texts of the entries, in two columns."""
    width, indent = min(100, shutil.get_terminal_size().columns), max((len(name) for name in entries), default=0) + 4
    for name, text in entries.items():
        print(textwrap.fill(text, width, initial_indent=f"  {name:<{indent - 2}}", subsequent_indent=indent * " "))


def print_completion(words: list[str], *, benches: list[str]) -> None:
    """Print a completion script (`words`: --tyro-print-completion SHELL), or write it (`words`: --tyro-write-completion SHELL FILE). It
    completes verbs, flags, dotted keys and their choices. Raises BadInput for an unknown shell or a missing FILE."""
    from moe.recipe.load import published_names, recipe_names

    least = 3 if "write" in words[0] else 2
    if len(words) < least or words[1] not in SHELLS:
        got = " ".join(words[1:]) or "no shell"
        raise BadInput(
            words[0],
            got=got,
            needed=" or ".join(SHELLS) + (", then a FILE" if least == 3 else ""),
            fix=f"{words[0]} bash{' FILE' if least == 3 else ''}",
        )
    script = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(script):
        _tyro(["--tyro-print-completion", words[1]], benches=benches, complete=True)
    names = [*recipe_names(), *published_names()]
    text = _corrected(script.getvalue(), words[1], dict.fromkeys(("train", "show", "plan", "rehearse"), names) | {"bench": benches})
    if least == 2:
        print(text, end="")
    else:
        Path(words[2]).write_text(text)


def _corrected(script: str, shell: str, words: dict[str, list[str]]) -> str:
    """Return tyro's completion script with a corrected table of words. words: verb -> positional words that may follow it."""
    escapes = _FISH if shell == "fish" else ()
    lines = script.split("\n")
    for at, line in enumerate(lines):
        start = line.find(_TABLE)
        if start < 0 or "{" not in line:
            continue
        text = line[start + len(_TABLE) :]
        for plain, escaped in reversed(escapes):
            text = text.replace(escaped, plain)
        table = ast.literal_eval(text)
        for verb, spec in table["subcommands"].items():
            more = {"type": "flag", "cascade": False, "nargs": None}
            added = [{"flags": [word], "description": word, **more} for word in words.get(verb, [])]
            spec["options"] = [_option(option) for option in spec["options"]] + added
        text = repr(table)
        for plain, escaped in escapes:
            text = text.replace(plain, escaped)
        lines[at] = line[:start] + _TABLE + text
    return "\n".join(lines)


def _option(option: dict[str, Any]) -> dict[str, Any]:
    from moe.recipe.keys import choices as choices_of
    from moe.recipe.keys import field_of, further_values, known_keys
    from moe.recipe.load import recipe_names

    flag, choices = option["flags"][-1], option.get("choices")
    if flag in ("--recipe", "--to"):
        return option | {"type": "choice", "choices": recipe_names()}
    if "." not in flag:
        return option | ({"choices": [c for c in choices if c != "None"]} if choices else {})
    if further_values(field_of(flag[2:])):
        return option | {"type": "choice", "choices": [name for name in choices_of(flag[2:]) if name != "given"]}
    if option["type"] == "flag":
        section, _, key = flag[2:].rpartition(".")
        key = key if f"{section}.{key}" in known_keys() else key.removeprefix("no_")
        return option | {"flags": [f"--{section}.{key}"], "type": "choice", "nargs": 1, "choices": ["true", "false"]}
    return option | ({"choices": ["null" if c == "None" else c for c in choices]} if choices else {})


def about(kind: type, benches: list[str]) -> str:
    """Return a verb's description: the docstring of its dataclass `kind`; for bench, followed by the names of the measurements."""
    there = f" Measurements: {', '.join(benches) or 'none in this version'}. More on one: moe bench NAME --help"
    return " ".join((kind.__doc__ or "").split()) + (there if kind is Bench else "")


def _tyro(words: list[str], *, benches: list[str], complete: bool = False) -> Any:
    import tyro

    arms = []
    for verb, kind in VERBS.items():
        text = about(kind, benches) + (f"\n\n{_OVERRIDES.format(*_SETS_OF.get(verb, _SETS))}" if verb in RECIPE_VERBS else "")
        arms.append(Annotated[_for_tyro(verb, kind, complete), tyro.conf.subcommand(verb, description=text)])
    union: Any = Union[tuple(arms)]  # noqa: UP007 (as many arms as there are verbs)
    config = (tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.UseAppendAction)
    return tyro.cli(union, prog="moe", description=_ABOUT, args=words, config=config, use_underscores=True)


def _for_tyro(verb: str, kind: type, complete: bool) -> type:
    """Return the verb's dataclass in the form that tyro reads: help texts and names of positional words are annotations of its fields.
    complete: for the completion script, add each section of a recipe as a field if the verb accepts recipe values."""
    from tyro.conf import Positional, arg

    hints = get_type_hints(kind)
    positional: Any = Positional
    fields: list[Any] = []
    for f in dataclasses.fields(kind):
        about: dict[str, Any] = {"help": f.metadata["help"]}
        if f.metadata["word"]:
            about |= {"metavar": f.name.upper() if f.default is dataclasses.MISSING else f"[{f.name.upper()}]"}
        if f.default in (None, False, ()):
            about |= {"help_behavior_hint": ""}
        hint = positional[hints[f.name]] if f.metadata["word"] else hints[f.name]
        fields.append((f.name, Annotated[hint, arg(**about)], dataclasses.field(default=f.default)))
    if complete and verb in RECIPE_VERBS:
        from moe.recipe.sections import Run

        fields += [(name, f.annotation, dataclasses.field(default=f.default)) for name, f in Run.model_fields.items()]
    return dataclasses.make_dataclass(kind.__name__, fields, frozen=True, namespace={"__doc__": kind.__doc__})
