"""replace_file is atomic."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.store import files
from parallel.store.files import replace_file


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new content is synced to disk before the rename. After a failure, the folder has only the file with its old content."""
    path = tmp_path / "a.json"
    replace_file(path, "old")
    order: list[str] = []
    monkeypatch.setattr(files, "sync", lambda written: order.append(f"sync {written.read_text()}"))

    def fails(*_: object) -> None:
        order.append("replace")
        raise OSError("no space")

    monkeypatch.setattr(files.os, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, b"new")
    assert order == ["sync new", "replace"] and path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
