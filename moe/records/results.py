"""JSON that every verb writes for `--json FILE`: {"verb", "commit", "hardware", "rows", "passed", "failed"}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.store.files import write_text


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
