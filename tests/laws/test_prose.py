"""Laws of plain English: unclear phrases are rare, sentences and pages are short.

A sentence of docs that a new reader does not understand is a fault even if it has none of these phrases.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST = 0.3  # hits in 1,000 words
PHRASES = {  # phrase -> (the rule that it breaks, allowed hits in 1,000 words)
    r"\bwhat (is|are|it|they|was|were|has|have|had|stands?|comes?|goes|would|can|may|must|no|each|others)\b": (
        "a subject has a noun",
        MOST,
    ),
    r"\bso (many|much|often|long)\b": ("name the number", MOST),
    r"\b(nobody|somebody|whoever|who|whom|whose)\b": ("things, not persons", 0.7),
    r"\bbeside\b": ("next to, compared with, in addition to, at the same time as", MOST),
    r"\bwhere (there|it|they|that|one|none|some|those|nothing|nobody)\b": ("if, not where", MOST),
    r"\bthe same (of|for|with|as)\b": ("the noun again", MOST),
    r"\b(those|that) (of|that|with|which)\b": ("the noun again", MOST),
    r"\b(stands?|stood|lies?|lay|goes on|go on|going on|came of|comes of)\b": ("the plain verb", MOST),
}
OPENERS = r"(Of|Those|The same|Whether it|What (is|they|it))\b"  # a docstring begins with a verb or with a noun
PLAIN = (  # folders whose docstrings and comments are checked
    *sorted(f"moe/{folder.name}" for folder in (ROOT / "moe").iterdir() if folder.name != "__pycache__"),
    "parallel",
    *(f"tests/{folder}" for folder in ("support", "laws", "campaigns", "counted", "measured", "mutations", "planner")),
)


def blocks(page: Path) -> Iterator[str]:
    """Yield the paragraphs and tables of a page, without code and headings."""
    text = re.sub(r"^```.*?^```|^#[^\n]*", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    yield from (block for block in re.split(r"\n\s*\n", text) if block.strip())


def written(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a source file."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
            yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and len(token.string) > 25:
            yield token.string[1:].strip()


def too_many(texts: list[str]) -> dict[str, tuple[str, float]]:
    """Return phrase -> (its rule, hits in 1,000 words) for the phrases with more hits than are allowed."""
    words = sum(len(text.split()) for text in texts)
    rates = {phrase: 1000 * sum(len(re.findall(phrase, text, flags=re.I)) for text in texts) / words for phrase in PHRASES}
    return {phrase: (PHRASES[phrase][0], round(rate, 2)) for phrase, rate in rates.items() if rate > PHRASES[phrase][1]}


def test_pages_are_plain() -> None:
    pages = [page for page in PAGES if page.name != "log.md"]
    assert too_many([block for page in pages for block in blocks(page)]) == {}


def test_docstrings_and_comments_are_plain() -> None:
    texts = [text for folder in PLAIN for path in sorted((ROOT / folder).rglob("*.py")) for text in written(path)]
    assert too_many(texts) == {}
    assert [text.split("\n")[0] for text in texts if re.match(OPENERS, text)] == []


def test_sentences_are_short() -> None:
    """The median of the docs' sentences has at most 15 words, and nine of ten have at most 28."""
    prose = [block for page in PAGES if page.name != "log.md" for block in blocks(page) if "|" not in block]
    lengths = sorted(len(s.split()) for block in prose for s in re.split(r"(?<=[.!?])\s+", block) if len(s.split()) > 3)
    assert (lengths[len(lengths) // 2] <= 15, lengths[int(0.9 * len(lengths))] <= 28) == (True, True)


def test_pages_are_short() -> None:
    """README has at most 1,800 words; all pages of docs without the log at most 80,000."""
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert words[ROOT / "README.md"] <= 1800
    assert sum(n for page, n in words.items() if page.is_relative_to(ROOT / "docs") and page.name != "log.md") <= 80_000
