"""Trackers in addition to TensorBoard: the same scalars to wandb, trackio or mlflow, each imported only if a recipe asks for it.

    train.trackers: [wandb]        metrics.jsonl --> scalars(line) --> wandb.log({...}, step=...)

wandb and trackio share an interface; mlflow's has other names. A resumed run continues the tracker's run, whose id is kept in the run's
folder. A tracker is a view: if it fails, it is off from then on, with one line, and training continues. Project: WANDB_PROJECT,
TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME, else moe-parallel. The tracker's own settings choose its destination (WANDB_MODE=offline, ...).
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from parallel.errors import BadInput
from parallel.fixes import Set

IDS = ".trackers.json"
_PROJECT = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}


class Board(Protocol):
    """Receiver of the scalars of a run's lines."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

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
    """Open the tracker's run for this run, a new one unless it `goes_on`. `config`: recipe values shown by the tracker."""
    module, project = importlib.import_module(name), os.environ.get(_PROJECT[name], "moe-parallel")
    kept = _ids(out) if goes_on else {}
    made = Mlflow if name == "mlflow" else Wandb
    board = made(module, project=project, name=recipe, id=kept.get(name), config=config, folder=out)
    (out / IDS).write_text(json.dumps(_ids(out) | {name: board.id}))
    return board


class Wandb:
    """Interface of wandb, shared by trackio, which identifies a run by its name."""

    def __init__(self, module: Any, *, project: str, name: str, id: str | None, config: Mapping[str, Any], folder: Path) -> None:
        self.module, self.id = module, id or secrets.token_hex(4)
        if module.__name__ == "trackio":
            module.init(project=project, name=f"{name}-{self.id}", config=dict(config), resume="allow")
        else:
            module.init(project=project, name=name, id=self.id, dir=str(folder), config=dict(config), resume="allow")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


class Mlflow:
    """Interface of mlflow: parameters are flat texts."""

    def __init__(self, module: Any, *, project: str, name: str, id: str | None, config: Mapping[str, Any], folder: Path) -> None:
        self.module = module
        module.set_experiment(project)
        self.id = module.start_run(run_id=id, run_name=name).info.run_id
        if id is None:
            module.log_params(dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.module.end_run()


def _ids(out: Path) -> dict[str, str]:
    try:
        found = json.loads((out / IDS).read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
