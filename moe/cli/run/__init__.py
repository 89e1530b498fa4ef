"""The function of each verb. Each imports what it needs, so that wrong input is refused before anything heavy is imported.

This file has the helpers that several of these functions call.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import BadInput, did_you_mean, some
from parallel.store.files import user_path


def call(module: str, *words: Any, **flags: Any) -> int:
    """Call module.main(*words, **flags) with paths in `flags` as text, and return its exit code. None counts as 0."""
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    return int(importlib.import_module(module).main(*words, **texts) or 0)


def write_rows(path: Path | None, verb: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write the rows and the entries `more` as JSON to `path` (of --json), unless it is None. Raises BadInput if it cannot be written."""
    if path is not None:
        from moe.records.results import write_json

        write_json(path, verb=verb, rows=rows, **more)


def refuse_others(flags: Any, allowed: Collection[str], *, got: str, needed: str) -> None:
    """Raise BadInput for the first flag or word that was given (differs from its default) and is not `allowed`."""
    for field in dataclasses.fields(flags):
        if field.name not in allowed and getattr(flags, field.name) != field.default:
            shown = "RECIPE" if field.name == "recipe" else f"--{field.name}"
            raise BadInput(shown, got=got, needed=needed, fix=f"remove {shown}")


def run_dir(name: str, holds: str, *, also: str | None = None, what: str = "RUN_DIR") -> str:
    """Return `name` if it is a folder that contains `holds` or `also`. Otherwise raise BadInput for `what` and propose another folder."""
    from moe.recipe.load import ON_HUB, download_of, of_transformers

    user_path(Path(name) / holds, what=what)
    got, needed = name, f"a run's folder, with {holds} in it"
    if (hub := download_of(name)) is not None:
        got, fix = f"{name}{ON_HUB}", f"{hub[0]}, then moe convert {hub[1]} runs/NAME, then runs/NAME"
    elif name.startswith("hf:") or of_transformers(Path(name)):
        got, fix = f"{name}, a model of transformers", f"moe convert hf:{name.removeprefix('hf:')} runs/NAME, then runs/NAME"
    elif (Path(name) / holds).exists() or (also and (Path(name) / also).exists()):
        return name
    else:
        runs = sorted(str(p) for p in Path("runs").glob("*") if (p / holds).exists()) if Path("runs").is_dir() else []
        near = did_you_mean(name, runs) or did_you_mean(f"runs/{name}", runs)
        fix = f"did you mean {near}?" if near else f"one of {some(runs, rest='ls runs')}" if runs else "train first: moe train switch_tiny"
    raise BadInput(what, got=got, needed=needed, fix=fix)
