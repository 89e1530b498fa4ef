"""The JSON that every verb writes for `--json FILE`: {"verb", "commit", "hardware", "rows", "passed", "failed"}."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.errors import BadInput


def check_writable(path: Path, *, what: str = "--json") -> None:
    """Refuse a place for results in which nothing can be written, before the work whose results they are. Raises BadInput."""
    folder = next(place for place in (path.absolute().parent, *path.absolute().parents) if place.exists())
    why = (
        "Is a directory" if path.is_dir()
        else f"{folder} is no folder" if not folder.is_dir()
        else "Permission denied" if not os.access(path if path.exists() else folder, os.W_OK)
        else None
    )  # fmt: skip
    if why:
        raise BadInput(what, got=f"{path}: {why}", needed="a file that can be written", fix="choose another path")


def write_text(path: Path, text: str, *, what: str) -> None:
    """Write a file that the user asked for, and the folder that it is to be in. Raises BadInput if it cannot write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(what, got=f"{path}: {error.strerror}", needed="a file that can be written", fix="choose another path") from None


def write_json(path: str | Path, *, verb: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write the rows; a row has failed if its "passed" is False. NaN and infinity become null. Raises BadInput if it cannot write."""
    import torch

    from moe.records.metrics import finite
    from moe.records.speed import hardware, source_commit

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = sum(row.get("passed") is False for row in rows)
    value = {
        "verb": verb,
        "commit": source_commit(),
        "hardware": hardware(device),
        "rows": [finite(row) for row in rows],
        "passed": len(rows) - failed,
        "failed": failed,
        **more,
    }
    write_text(Path(path), json.dumps(value, indent=1) + "\n", what="--json")
