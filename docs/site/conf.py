"""The documentation as a site: `make docs` builds docs/ with Sphinx into build/docs, and fails where a link leads nowhere.

docs/**/*.md                        the pages, as they are
docs/**/*.ipynb                     notebooks: text, code, and what it printed
docs/index.md, its tables           the table of contents beside every page
docs/site/api.rst, docstrings       the reference
README, CONTRIBUTING, CHANGELOG     stand at docs/site/*.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
FOREIGN = ("Alias for field number", "Define the computation performed at every call")  # docstrings of fields of a NamedTuple, of forward
BESIDE = {"site/readme": "README", "site/contributing": "CONTRIBUTING", "site/changelog": "CHANGELOG"}
sys.path.insert(0, str(DOCS.parent))

project = html_title = "moe-parallel"
project_copyright = "2026, moe-parallel contributors"  # as in LICENSE
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_static_path = ["style"]
html_css_files = ["wide.css"]
html_copy_source = False
root_doc = "index"
source_suffix = {".md": "markdown", ".ipynb": "markdown", ".rst": "restructuredtext"}
default_role = "code"
highlight_language = "text"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
suppress_warnings = ["ref.python"]  # names that several modules have


def read(app: Any, name: str, source: list[str]) -> None:
    """Files of the project's root stand as pages; behind the index stands a table of contents for each of its tables."""
    if (DOCS / f"{name}.ipynb").is_file():
        source[0] = as_page(json.loads(source[0]))
    if name in BESIDE:
        source[0] = (DOCS.parent / f"{BESIDE[name]}.md").read_text(encoding="utf-8").replace("](docs/", "](/")
        source[0] = re.sub(r"\[([^]]+)\]\((recipes/[^)]*|LICENSE)\)", r"\1", source[0])  # no pages
    for page, file in BESIDE.items():
        source[0] = re.sub(rf"\]\((?:\.\./)*{file}\.md", f"](/{page}.md", source[0])
    if name == "index":
        tables = re.split(r"^\*\*(.+?)\*\*$", source[0], flags=re.M)
        for title, table in zip(tables[1::2], tables[2::2], strict=True):
            source[0] += contents(title, re.findall(r"^\| \[[^]]+\]\(([^)#]+)\.(?:md|ipynb)\)", table, flags=re.M))
        source[0] += contents("Project", [*BESIDE, "site/api"])


def as_page(notebook: dict[str, Any]) -> str:
    """Return a notebook in Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def contents(title: str, pages: list[str]) -> str:
    return "\n\n```{toctree}\n:hidden:\n:caption: " + title + "\n\n" + "\n".join(pages) + "\n```\n"


def as_written(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text: paragraphs are told as such, and diagrams, which have columns or are indented, stand as they are typed.
    Docstrings that come from Python and torch are left out."""
    text = "\n".join(lines).strip("\n")
    text = "" if text.startswith(FOREIGN) else text
    lines[:] = []
    for block in re.split(r"\n\s*\n", text):
        rows = block.split("\n")
        if any(re.search(r"\S {2,}\S", row) or row.startswith(" ") for row in rows):
            lines.extend(["::", "", *(f"    {row}" for row in rows), ""])
        else:
            lines.extend([*("".join(_plain(part) for part in re.split(r"(`+[^`]*`+)", row)) for row in rows), ""])


def _plain(text: str) -> str:
    """Code in backticks as it is, everything else without a meaning in reStructuredText."""
    return text if text.startswith("`") else re.sub(r"([*_|\\])", r"\\\1", text)


def setup(app: Any) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", as_written)
