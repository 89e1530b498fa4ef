"""Bad input, reported in one line: what, got, needed, fix."""

from __future__ import annotations

import difflib
import traceback
import unicodedata
from collections.abc import Iterable

_LONGEST = 800  # characters of what is shown of an input
_SOME = 5  # names in a line


class BadInput(ValueError):
    """An error in the user's input; the message is one line that says what to write instead.

    The command line prints it and exits with 2; a library caller catches it as a ValueError. `speaker`: on one of several ranks whose
    watchdog knows of it, whether this rank is the one to print it; None: nobody has settled that.
    """

    speaker: bool | None = None

    def __init__(self, what: str, *, got: object, needed: str, fix: str) -> None:
        self.what, self.got, self.needed, self.fix = what, got, needed, fix
        super().__init__(plain(" ".join(f"{cut(what)}: got {cut(got) or repr(got)}, needed {needed}; fix: {fix}".split())))


def plain(text: str) -> str:
    """One line that a terminal shows and does not obey: control characters, line ends and broken characters as \\x1b, \\n, \\udcff."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_TURNS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # the order in which a terminal shows what follows


def harmless(text: str) -> bool:
    """Whether a terminal shows it as it is: no control characters, line ends, halves of characters or changes of direction."""
    return text.isprintable() or not any(c in _TURNS or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


def cut(shown: object) -> str:
    """What is shown of it where it is long."""
    text = str(shown)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... of {len(text)} characters"


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 file", "2,000 files", "3 processes"."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word most similar to `word`, or None if none is similar. Dashes before words do not count: all flags have them."""
    bare = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.7)
    return bare[near[0]] if near else None


def some(names: Iterable[str], *, rest: str = "") -> str:
    """Names for a line of text: all up to five, of more the first five and their number. `rest`: the command that prints all."""
    held = list(names)
    if len(held) <= _SOME:
        return ", ".join(held)
    return f"{', '.join(held[:_SOME])} or {len(held) - _SOME} more{f' ({rest})' if rest else ''}"


class Ended(RuntimeError):
    """What ended a run on several ranks, in one line that is the same on each of them: a stack trace would add nothing.

    `speaker`: whether this rank is the one to print it, where nobody waits for all of them.
    """

    def __init__(self, line: str, *, speaker: bool = True) -> None:
        super().__init__(line)
        self.speaker = speaker


def where(error: BaseException) -> str:
    """The innermost line of a program that raised it, "my_train.py, line 12", and what it said."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    said = cut(f"{type(error).__name__}: {error}")
    return f"{said}{place}".replace("\n", " ")
