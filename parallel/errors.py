"""Bad input, reported in one line: what, got, needed, fix."""

from __future__ import annotations

import difflib
import re
import traceback
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from parallel.fixes import Fix, fix_of

_LONGEST = 800  # largest number of characters of an input that an error message shows
_SOME = 5  # largest number of names that `some` lists


class BadInput(ValueError):
    """An error in the user's input. Its message is one line that says what to write instead; the command line prints it and exits with code
    2. prints: whether this rank prints the message if several ranks raise the same error; None: not decided yet.

    Example: `BadInput("degrees.tp", got=3, needed="a divisor of 8", fix=Set("it", 1, 2, 4, 8))`. Its message is
    "degrees.tp: got 3, needed a divisor of 8; fix: set it to one of [1, 2, 4, 8]"."""

    prints: bool | None = None

    def __init__(self, what: str, *, got: object, needed: str, fix: Fix | str) -> None:
        self.what, self.got, self.needed, self.fix = what, got, needed, fix_of(fix)
        asked = _PAGE.sub(_place_of, f"needed {needed}; fix: {fix}")
        super().__init__(plain(" ".join(f"{cut(what)}: got {cut(got) or repr(got)}, {asked}".split())))


# path of a page of this project's docs in a message; `_place_of` replaces it
_PAGE = re.compile(r"\bdocs/([a-z]+/\w+\.(?:md|py))\b")


def _place_of(page: re.Match[str]) -> str:
    """Return the path of a file of the docs for the user: relative if the current folder is a checkout of this project, else absolute."""
    if Path(page[0]).exists():
        return page[0]
    if (there := Path(__file__).parents[1] / page[0]).exists():
        return str(there)
    from importlib import metadata

    files = metadata.files("moe-parallel") or ()
    return next(
        (str(Path(str(f.locate())).resolve()) for f in files if f.as_posix().endswith(f"share/doc/moe-parallel/{page[1]}")), page[0]
    )


def plain(text: str) -> str:
    """Escape control characters, line ends and surrogates as \\x1b, \\n, \\udcff, so that a terminal does not act on them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_TURNS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # characters that change the direction of writing


def harmless(text: str) -> bool:
    """Return whether a terminal shows the text unchanged, because it has no control characters, line ends, surrogates or changes of writing
    direction."""
    return text.isprintable() or not any(c in _TURNS or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


def cut(shown: object) -> str:
    """Return str(shown). If it has over 800 characters, return the first 400 and the total number."""
    text = str(shown)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... of {len(text)} characters"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 file", "2,000 files", "3 processes"."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to `word`, or None if no word is similar. Upper and lower case count as
    equal, and dashes at the start of a word (a flag) are ignored."""
    bare = {name.lstrip("-").lower(): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-").lower(), bare, n=1, cutoff=0.7 if len(word) > 3 else 0.6)
    return bare[near[0]] if near else None


def some(names: Iterable[str], *, rest: str = "") -> str:
    """Return at most five names, joined by commas, and the number of further names: "a, b, c, d, e or 3 more (rest)". `rest`: the text in
    the parentheses."""
    held = list(names)
    if len(held) <= _SOME:
        return ", ".join(held)
    return f"{', '.join(held[:_SOME])} or {len(held) - _SOME} more{f' ({rest})' if rest else ''}"


class Ended(RuntimeError):
    """Raised on all ranks to end a run with one line of text, equal on all of them, instead of stack traces. prints: whether this rank
    prints the line if no launcher collects the ranks' messages."""

    def __init__(self, line: str, *, prints: bool = True) -> None:
        super().__init__(line)
        self.prints = prints


def where(error: BaseException) -> str:
    """Return an error's type, message and innermost line of code as text: "ValueError: boom (my_train.py, line 12)"."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    said = cut(f"{type(error).__name__}: {error}")
    return f"{said}{place}".replace("\n", " ")
