"""Compares the losses of 20 steps on two ranks between this checkout and an earlier commit. They are bitwise equal if no number changed.

    python -m tests.measured losses --before 9c24c8f          a commit of this repository, checked out into a temporary folder

Each pair of a recipe and a layout is trained on both sides from its first weights. If both sides refuse a pair, the refusal is printed.
"""

from __future__ import annotations

import json as json_format
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.launch import exit_codes
from moe.records.results import write_json

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("switch_tiny", "glam_tiny", "switch_t5_tiny")
LAYOUTS = {
    "ddp": "",
    "zero1": "--sharding.kind zero --sharding.stage 1",
    "fsdp": "--sharding.kind fsdp",
    "pp 2": "--degrees.pp 2",
    "tp 2": "--degrees.tp 2",
    "sp 2": "--degrees.sp 2",
}


def main(*, before: str, steps: int = 20, only: str = "", json: str | None = None) -> int:
    """Print a row for each pair with `only` in its name. Returns 1 if a loss differs from the commit `before`."""
    rows: list[dict[str, Any]] = []
    with checked_out(before) as earlier:
        for recipe in RECIPES:
            for layout, flags in LAYOUTS.items():
                if only in f"{recipe} {layout}":
                    sides = [losses(tree, recipe, [*flags.split(), "--train.steps", str(steps)]) for tree in (earlier, ROOT)]
                    rows.append({"recipe": recipe, "layout": layout, "losses": sides[1], "passed": agree(*sides)})
                    said = sides[1] if isinstance(sides[1], str) else f"{len(sides[1])} losses, the last {sides[1][-1]!r}"
                    verdict = ("refused" if isinstance(sides[1], str) else "equal") if rows[-1]["passed"] else "DIFFERENT"
                    print(f"{recipe:<16}{layout:<8}{verdict:<10}{said}", flush=True)
    if json:
        write_json(json, verb="measured losses", rows=rows, before=before)
    return exit_codes.of(all(row["passed"] for row in rows))


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Return a context with a temporary folder that has the files of this commit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=True)


def agree(before: list[float] | str, after: list[float] | str) -> bool:
    """Return whether both sides have equal losses, or both refuse the layout, in whatever words."""
    return before == after or (isinstance(before, str) and isinstance(after, str))


def losses(tree: Path, recipe: str, flags: list[str]) -> list[float] | str:
    """Train with the code in the folder `tree`. Return the loss of each step, or the error message if the layout is refused."""
    with tempfile.TemporaryDirectory() as out:
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "moe", "train", recipe, "--nproc", "2", "--out", f"{out}/run", *flags]
        done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, timeout=1200)
        if done.returncode == exit_codes.BAD_INPUT:
            return done.stderr.strip().splitlines()[-1]
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        lines = (Path(out) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line["loss"] for line in map(json_format.loads, lines) if line["kind"] == "train"]
