"""Trackers of a run: TensorBoard, and wandb, trackio or mlflow if the recipe's train.trackers names them.

    metrics.jsonl --> scalars(line) --> add_scalar of TensorBoard, wandb.log({...}, step=...), ...

A tracker only shows numbers. If it fails, one line says so, it gets no further numbers, and training continues. A resumed run continues the
tracker's run, whose id is in the run's folder. The project is WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME, else moe-parallel;
the tracker's own settings choose the destination (WANDB_MODE=offline, ...).
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from parallel.errors import BadInput
from parallel.fixes import Set

IDS = ".trackers.json"
_PROJECT = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}


class Board(Protocol):
    """A tracker: receives the scalars (name -> value) of each line of metrics.jsonl, with its step and its Unix time."""

    def log(self, values: Mapping[str, float], step: int, time: float) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not installed or is named twice. Imports none. Raises BadInput."""
    for name in names:
        if find_spec(name) is None:
            fix = f"pip install {name}" | Set("it", [each for each in names if each != name])
            raise BadInput("train.trackers", got=f"{name}, which is not installed", needed="a tracker that is there", fix=fix)
        if names.count(name) > 1:
            raise BadInput("train.trackers", got=f"{name} twice", needed="each once", fix=Set("it", list(dict.fromkeys(names))))


def open_tracker(name: str, out: Path, *, recipe: str, config: Mapping[str, Any], goes_on: bool) -> Board:
    """Open this run in the tracker: the tracker's run of an earlier start if `goes_on`, else a new one. config: values of the recipe."""
    module, project = importlib.import_module(name), os.environ.get(_PROJECT[name], "moe-parallel")
    kept = _ids(out) if goes_on else {}
    made = Mlflow if name == "mlflow" else Wandb
    board = made(module, project=project, name=recipe, id=kept.get(name), config=config, folder=out)
    (out / IDS).write_text(json.dumps(_ids(out) | {name: board.id}))
    return board


class TensorBoard:
    """TensorBoard, in `folder`. Steps from `first_step` on in older files are hidden. Raises ImportError if it is not installed."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, because it is optional and takes half a second

        folder.mkdir(exist_ok=True)  # without parents: the writer itself would make the folder of a run that was renamed
        older = any(folder.glob("events.*"))
        _silence_writers()
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step if older else None, flush_secs=10)

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, walltime=time)

    def close(self) -> None:
        self._writer.close()


def _silence_writers() -> None:
    """Suppress tracebacks of TensorBoard's writer threads. The next write raises the same error, which is printed in one line."""
    before = threading.excepthook

    def said(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    threading.excepthook = said


class Wandb:
    """wandb, and trackio, which has the same interface but identifies a run by its name instead of an id."""

    def __init__(self, module: Any, *, project: str, name: str, id: str | None, config: Mapping[str, Any], folder: Path) -> None:
        self.module, self.id = module, id or secrets.token_hex(4)
        if module.__name__ == "trackio":
            module.init(project=project, name=f"{name}-{self.id}", config=dict(config), resume="allow")
        else:
            module.init(project=project, name=name, id=self.id, dir=str(folder), config=dict(config), resume="allow")

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


class Mlflow:
    """mlflow, which takes a recipe's values once, as parameters of a new run."""

    def __init__(self, module: Any, *, project: str, name: str, id: str | None, config: Mapping[str, Any], folder: Path) -> None:
        self.module = module
        module.set_experiment(project)
        self.id = module.start_run(run_id=id, run_name=name).info.run_id
        if id is None:
            module.log_params(dict(config))

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        self.module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.module.end_run()


def _ids(out: Path) -> dict[str, str]:
    try:
        found = json.loads((out / IDS).read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of each number in a line of metrics.jsonl. Load of experts is relative to uniform: 1 is a fair share."""
    if line.get("kind") == "event":
        return
    found: list[tuple[str, Any]] = []
    for key, value in line.items():
        if key not in ("step", "kind", "time", "tokens", "skipped") and isinstance(value, int | float) and not isinstance(value, bool):
            found.append((f"validation/{key.removeprefix('validation_')}" if line.get("kind") == "eval" else key, value))
    found += [(f"grad_norm/{part}", value) for part, value in (line.get("grad_norm_parts") or {}).items()]
    for layer in line.get("moe") or ():
        where, load = f"layer_{layer['layer']}", layer.get("load") or []
        if load and None not in load:
            even = len(load) / (sum(load) or 1.0)
            spread = {"max": max(load) * even, "mean": sum(load) / len(load) * even, "min": min(load) * even}
            found += [(f"{where}/load_{name}", value) for name, value in spread.items()]
        keys = ("dropped", "balance_loss", "importance_loss", "load_loss", "z_loss", "entropy")
        found += [(f"{where}/{key}", layer.get(key)) for key in keys]
    yield from ((tag, float(value)) for tag, value in found if value is not None)
