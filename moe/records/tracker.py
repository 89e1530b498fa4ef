"""Trackers of a run: TensorBoard, and wandb, trackio or mlflow if train.trackers names them.

    metrics.jsonl --> scalars(line) --> add_scalar of TensorBoard, wandb.log({...}, step=...), ...

If a tracker fails, one line is printed, and training continues without it. Resumed training continues the same run in the tracker, whose id
is stored in the run's folder. The project's name is the environment variable WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME;
if it is not set, moe-parallel.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from parallel.errors import BadInput
from parallel.fixes import Set

IDS = ".trackers.json"
_PROJECT = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}


class Board(NamedTuple):
    """An open tracker. log(values, step, time): records the scalars (name -> value) of a metrics.jsonl line at its step and Unix time."""

    log: Callable[[Mapping[str, float], int, float], None]
    close: Callable[[], None]


def check_trackers(names: Sequence[str]) -> None:
    """Raise BadInput for a tracker that is not installed or is named twice. The trackers are not imported."""
    for name in names:
        if find_spec(name) is None:
            fix = f"pip install {name}" | Set("it", [each for each in names if each != name])
            raise BadInput("train.trackers", got=f"{name}, which is not installed", needed="an installed tracker", fix=fix)
        if names.count(name) > 1:
            raise BadInput("train.trackers", got=f"{name} twice", needed="each tracker once", fix=Set("it", list(dict.fromkeys(names))))


def open_tracker(name: str, out: Path, *, recipe: str, config: Mapping[str, Any], goes_on: bool) -> Board:
    """Open a run in the tracker `name`. out: the run's folder. recipe: the recipe's name, which becomes the run's name. config:
    recipe key -> value. goes_on: continue the tracker's run whose id is stored in `out`, if there is one."""
    module, project = importlib.import_module(name), os.environ.get(_PROJECT[name], "moe-parallel")
    before, opened = _ids(out).get(name) if goes_on else None, _mlflow if name == "mlflow" else _wandb
    id, board = opened(module, project=project, name=recipe, id=before, config=config, folder=out)
    (out / IDS).write_text(json.dumps(_ids(out) | {name: id}))
    return board


def open_tensorboard(folder: Path, *, first_step: int) -> Board:
    """Open TensorBoard's files. Steps from `first_step` on in older files are hidden. Raises ImportError if TensorBoard is not
    installed."""
    from torch.utils.tensorboard import SummaryWriter  # not at the top: the package is optional, the import takes half a second

    folder.mkdir(exist_ok=True)  # without parents, so that the folder of a renamed run is not made again (the writer would)
    older = any(folder.glob("events.*"))
    _silence_writers()
    writer: Any = SummaryWriter(str(folder), purge_step=first_step if older else None, flush_secs=10)

    def log(values: Mapping[str, float], step: int, time: float) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step, walltime=time)

    return Board(log, writer.close)


def _silence_writers() -> None:
    """Suppress tracebacks from TensorBoard's writer threads: the next write raises the same error, which is then printed in one line."""
    before = threading.excepthook

    def said(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    threading.excepthook = said


def _wandb(module: Any, *, project: str, name: str, id: str | None, config: Mapping[str, Any], folder: Path) -> tuple[str, Board]:
    """Open a run in wandb, or in trackio, which has the same interface but identifies runs by name. Return (the run's id, the tracker). id:
    the run to continue; None: a new run."""
    id = id or secrets.token_hex(4)
    own = {"name": f"{name}-{id}"} if module.__name__ == "trackio" else {"name": name, "id": id, "dir": str(folder)}
    module.init(project=project, config=dict(config), resume="allow", **own)
    return id, Board(lambda values, step, time: module.log(dict(values), step=step), module.finish)


def _mlflow(module: Any, *, project: str, name: str, id: str | None, config: Mapping[str, Any], folder: Path) -> tuple[str, Board]:
    """Open a run in mlflow. A new run gets the recipe's values as parameters. Return (the run's id, the tracker). id: the run to continue;
    None: a new run."""
    module.set_experiment(project)
    found = module.start_run(run_id=id, run_name=name).info.run_id
    if id is None:
        module.log_params(dict(config))
    return found, Board(lambda values, step, time: module.log_metrics(dict(values), step=step), module.end_run)


def _ids(out: Path) -> dict[str, str]:
    try:
        found = json.loads((out / IDS).read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of the numbers in a line of metrics.jsonl. Experts' loads are divided by the mean load. An alarm's value is the
    number that its rule measured."""
    if line.get("kind") == "event":
        if line.get("event") == "alarm":
            yield f"alarm/{line['rule']}", float(line["value"])
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
        keys = ("dropped", "balance_loss", "importance_loss", "load_loss", "z_loss", "entropy", "bias_min", "bias_max", "bias_mean_abs")
        found += [(f"{where}/{key}", layer.get(key)) for key in keys]
    yield from ((tag, float(value)) for tag, value in found if value is not None)
