"""Entry point of the command `moe`.

    argv -> recipe values are taken out (take_overrides) -> the rest fills the verb's dataclass (flags.py, verbs.py) -> the verb's function

Wrong input gives one line on stderr and exit code 2, before anything heavy is imported. All exit codes: moe/launch/exit_codes.py.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moe.cli import verbs
from moe.cli.flags import read_words
from moe.cli.help import print_bench, print_completion, print_help, print_list, print_verbs
from moe.cli.run import call
from moe.cli.run.recipes import plan, recipes, show, with_recipe
from moe.cli.run.runs import about_bench, arguments_of_main, bench, bench_file, bench_names, convert, evaluate, generate, report, verify
from moe.cli.run.train import rehearse, train
from moe.launch import exit_codes
from moe.launch.environment import set_before_torch
from moe.recipe.overrides import take_overrides
from parallel.errors import BadInput, did_you_mean, harmless, some
from parallel.store.files import check_writable, user_path

# verb -> function that runs it: (the verb's flags, recipe key -> value from the command line) -> exit code
FUNCTIONS: dict[str, Callable[[Any, dict[str, str]], int]] = {
    "train": train,
    "verify": verify,
    "generate": generate,
    "eval": evaluate,
    "report": report,
    "bench": bench,
    "plan": plan,
    "simulate": partial(call, "moe.cli.simulate"),
    "energy": partial(call, "moe.cli.energy"),
    "convert": convert,
    "hash-table": partial(call, "moe.cli.hash_table"),
    "show": show,
    "rehearse": rehearse,
    "recipes": recipes,
    "doctor": partial(call, "moe.cli.doctor"),
}

REMOVED = {"combinations": "see docs/parallel/combinations.md"}  # verb of an earlier version -> what replaces it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that each line appears immediately, also in a pipe or a file
    try:
        return _run(words)
    except BadInput as bad:
        print(f"error: {bad}", file=sys.stderr, flush=True)
        return exit_codes.BAD_INPUT
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as in `moe show switch_tiny | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return exit_codes.DONE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if error.filename is None:  # print has failed; at exit, Python would try again to write its buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        full = BadInput(error.filename or "output", got=error.strerror, needed="a disk with room for it", fix="free space")
        print(f"error: {full}", file=sys.stderr, flush=True)
        return exit_codes.BAD_INPUT


def _run(words: list[str]) -> int:
    _check_printable(words)
    _check_folder()
    if not words or words[0] in ("-h", "--help"):
        print_verbs(benches=bench_names())
        return exit_codes.DONE
    if words[0] in ("-V", "--version"):
        from moe import __version__

        print(f"moe-parallel {__version__}")
        return exit_codes.DONE
    if words[0] in ("--tyro-print-completion", "--tyro-write-completion"):
        print_completion(words, benches=bench_names())
        return exit_codes.DONE
    verb, *rest = words
    if verb not in FUNCTIONS:
        _refuse_verb(verb)
    if "-h" in rest or "--help" in rest:
        _help(verb, rest)
        return exit_codes.DONE
    overrides: dict[str, str] = {}
    if verb in verbs.RECIPE_VERBS:
        rest, overrides = take_overrides(rest)
    set_before_torch(os.environ)  # for verbs that compute in this process or fork ranks from it
    flags = read_words(verb, verbs.VERBS[verb], rest)
    if (results := getattr(flags, "json", None)) is not None:
        check_writable(user_path(results, what="--json"), what="--json")
    with with_recipe(flags, overrides) as flags:
        return FUNCTIONS[verb](flags, overrides)


def _help(verb: str, rest: list[str]) -> None:
    """Print a verb's words and flags; for `bench`, also the list of measurements; for `bench NAME`, that measurement's help instead. rest:
    the command line after the verb."""
    names = bench_names()
    named = [word for word in rest if word in names] if verb == "bench" else []
    if named:
        print_bench(named[0], about_bench(named[0]), arguments_of_main(bench_file(named[0])))
        return
    print_help(verb, benches=names)
    if verb == "bench":
        print_list({name: about_bench(name).partition("\n")[0] for name in names})


def _check_printable(words: list[str]) -> None:
    for before, word in zip(["", *words], words, strict=False):
        is_prompt = before == "--prompt" or word.startswith("--prompt=")
        if not (word.encode(errors="replace").decode() == word if is_prompt else harmless(word)):
            needed, fix = "words without control characters, in UTF-8", "rename the file, or leave these characters out"
            raise BadInput("the command line", got=repr(word), needed=needed, fix=fix)


def _check_folder() -> None:
    """Raise BadInput if the working folder was removed: torch's libraries would end this process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise BadInput("working folder", got="one that was removed", needed="a folder that exists", fix="cd to another one") from None


def _refuse_verb(verb: str) -> None:
    near = did_you_mean(verb, FUNCTIONS)
    fix = f"did you mean moe {near}?" if near else REMOVED.get(verb, "see: moe --help")
    if near is None and not verb.startswith("-"):
        from moe.recipe.load import recipe_names

        recipe = did_you_mean(verb, recipe_names())
        fix = f"did you mean moe train {recipe}?" if recipe else fix
    raise BadInput("verb", got=verb, needed=f"one of {some(FUNCTIONS, rest='moe --help')}", fix=fix)


if __name__ == "__main__":
    sys.exit(main())
