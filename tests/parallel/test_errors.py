"""Words of error messages, such as "1 file" and "2 files", and the pages of docs that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallel.errors import BadInput, counted


def test_one_is_singular_and_any_other_number_is_not() -> None:
    assert [counted(n, "text") for n in (0, 1, 2, 12_345)] == ["0 texts", "1 text", "2 texts", "12,345 texts"]
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [counted(n, "micro-batch") for n in (1, 3)] == ["1 micro-batch", "3 micro-batches"]


def test_a_page_is_named_by_a_path_that_exists_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = str(BadInput("a", got=1, needed="one of a (docs/use/data.md)", fix="see: docs/use/hangs.md"))
    pages = [Path(page) for page in re.findall(r"[^\s(]*docs/\w+/\w+\.md", line)]
    assert [page.name for page in pages] == ["data.md", "hangs.md"]
    assert all(page.is_file() for page in pages)
