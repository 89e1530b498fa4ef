"""Shared by the verbs' functions: the call of a module's main function, and the folder of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from parallel.errors import BadInput, did_you_mean, some
from parallel.store.files import user_path


def call(module: str, *words: Any, **flags: Any) -> int:
    """Call module.main(...) and return its exit code. None counts as 0."""
    return int(importlib.import_module(module).main(*words, **flags) or 0)


def text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def run_dir(name: str, holds: str, *, also: str | None = None, what: str = "RUN_DIR") -> str:
    from moe.recipe.load import ON_HUB, download_of, of_transformers

    user_path(Path(name) / holds, what=what)
    if (hub := download_of(name)) is not None:
        fix = f"{hub[0]}, then moe convert {hub[1]} runs/NAME, then runs/NAME"
        raise BadInput(what, got=f"{name}{ON_HUB}", needed=f"a run's folder, with {holds} in it", fix=fix)
    if name.startswith("hf:") or of_transformers(Path(name)):
        fix = f"moe convert hf:{name.removeprefix('hf:')} runs/NAME, then runs/NAME"
        raise BadInput(what, got=f"{name}, a model of transformers", needed=f"a run's folder, with {holds} in it", fix=fix)
    if (Path(name) / holds).exists() or (also and (Path(name) / also).exists()):
        return name
    runs = sorted(str(p) for p in Path("runs").glob("*") if (p / holds).exists()) if Path("runs").is_dir() else []
    near = did_you_mean(name, runs) or did_you_mean(f"runs/{name}", runs)
    fix = f"did you mean {near}?" if near else f"one of {some(runs, rest='ls runs')}" if runs else "train first: moe train switch_tiny"
    raise BadInput(what, got=name, needed=f"a run's folder, with {holds} in it", fix=fix)
