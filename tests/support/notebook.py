"""Runs a notebook, without Jupyter or in its kernel: `python -m tests.support.notebook docs/use/look_inside.ipynb` writes what its cells
print into it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def executed(notebook: dict[str, Any]) -> list[str]:
    """Return what each code cell prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), f"cell {len(printed) + 1}", "exec"), names)
            printed.append(out.getvalue())
    return printed


def in_a_kernel(path: Path, folder: Path, *, timeout_s: int) -> list[str]:
    """Return what each code cell of the notebook `path` prints in Jupyter's own kernel, which works in `folder`. Needs nbclient and
    ipykernel. An exception in a cell raises nbclient's CellExecutionError."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}).execute()
    of_code = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert all(out.output_type == "stream" and out.name == "stdout" for outs in of_code for out in outs), of_code
    return ["".join(out.text for out in outs) for outs in of_code]


def stored(notebook: dict[str, Any]) -> list[str]:
    """Return what each code cell printed when the notebook was written."""
    return ["".join(cell["outputs"][0]["text"]) if cell["outputs"] else "" for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    printed = iter(executed(notebook))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = next(printed)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
