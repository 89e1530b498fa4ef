"""Functions that several verbs (moe train, moe plan, ...) use. They import modules only when called, so that wrong input is refused before
heavy imports."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import BadInput
from parallel.store.files import user_path


def call(module: str, *words: Any, **flags: Any) -> int:
    """Import `module`, call its main(*words, **flags), and return the exit code (0 for None). Paths in `flags` are passed as str."""
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    return int(importlib.import_module(module).main(*words, **texts) or 0)


def write_rows(path: Path | None, verb: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write the rows, and the entries `more`, as JSON to `path`, the value of --json. Do nothing for None. verb: the command, such as
    "plan", also written to the file. Raises BadInput if the file cannot be written."""
    if path is not None:
        from moe.records.results import write_json

        write_json(path, verb=verb, rows=rows, **more)


def check_least(flags: Any, **least: float) -> None:
    """Raise BadInput for the first flag with a number below its minimum in `least`. Flags that were not given are skipped."""
    for name, low in least.items():
        if (value := getattr(flags, name)) is not None and value < low:
            raise BadInput(f"--{name}", got=value, needed=f"at least {low}", fix=f"--{name} {low}")


def refuse(flags: Mapping[str, object], *, got: str, needed: str) -> None:
    """Raise BadInput for the first flag that was given. flags: name -> value, or None if the flag was not given. got: what the message
    says after the flag's name, such as "with --compare". needed: what it says is needed."""
    for name, value in flags.items():
        if value is not None:
            raise BadInput(f"--{name}", got=f"--{name} {got}", needed=needed, fix=f"remove --{name}")


def refuse_others(flags: Any, allowed: Collection[str], *, got: str, needed: str) -> None:
    """Raise BadInput for the first flag or positional argument that differs from its default and is not in `allowed`. got: what the message
    says after the flag's name, such as "with --compare". needed: what it says is needed."""
    for field in dataclasses.fields(flags):
        if field.name not in allowed and (value := getattr(flags, field.name)) != field.default:
            shown, given = (field.name.upper(), value) if field.metadata["word"] else (f"--{field.name}",) * 2
            raise BadInput(shown, got=f"{given} {got}", needed=needed, fix=f"remove {given}")


def run_dir(name: str, holds: str, *, also: str | None = None, what: str = "RUN_DIR") -> str:
    """Return `name`, a folder, if it contains an entry with the name `holds` or `also`. Otherwise raise BadInput, which proposes a folder
    with a similar name. what: name of the command's argument, for errors."""
    from moe.checks.begins import another_run
    from moe.recipe.load import of_transformers, refuse_on_hub

    user_path(Path(name) / holds, what=what)
    got, needed = name, f"a run's folder, with {holds} in it"
    refuse_on_hub(name, what, needed=needed, then="moe convert hf: runs/NAME, then runs/NAME")
    if name.startswith("hf:") or of_transformers(Path(name)):
        got, fix = f"{name}, a model of transformers", f"moe convert hf:{name.removeprefix('hf:')} runs/NAME, then runs/NAME"
    elif (Path(name) / holds).exists() or (also and (Path(name) / also).exists()):
        return name
    else:
        fix = another_run(Path(name), holds)
    raise BadInput(what, got=got, needed=needed, fix=fix)
