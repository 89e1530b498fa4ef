"""The metrics file of a run: one JSON line per step, and the same numbers for TensorBoard.

    step's dict --> metrics.jsonl   the source of truth: plain JSON (no NaN token), appended and flushed line by line
              \\--> tensorboard/     the same scalars, as a view; losing it loses nothing

The file holds each step once. A run that resumes from step n first removes all lines after n, and a line that a kill left
half-written; the remaining lines keep their bytes. docs/use/records.md describes the fields.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from moe.records.tracker import Board
from parallel.errors import BadInput
from parallel.store.files import read_text, replace_file

METRICS, SUMMARY, TENSORBOARD = "metrics.jsonl", "summary.json", "tensorboard"
_STEP = re.compile(rb'"step":\s*([0-9]{1,18})\b')
_LAST_SECOND = 2**36  # in the year 4147
PREVIOUS, PREVIOUS_SUMMARY = "metrics.previous.jsonl", "summary.previous.json"


class Records:
    """Metrics of one run, open for appending. With `out=None` (every rank but 0) the same calls write nothing.

    `resume_step=n` keeps the lines of steps up to n (0: only lines from before the first step). `resume_step=None` starts a new run: the
    earlier run's lines move to `metrics.previous.jsonl`, and its summary to `summary.previous.json`. Raises BadInput if the folder cannot
    be written. `say` is called with one line if TensorBoard is missing. `trackers` by name are opened after the file.
    """

    def __init__(
        self,
        out: Path | None,
        *,
        resume_step: int | None = None,
        say: Callable[[str], None] = print,
        trackers: Mapping[str, Callable[[], Board]] | None = None,
    ) -> None:
        self._file: FileIO | None = None
        self._board: TensorBoard | None = None
        self._trackers: dict[str, Board] = {}
        self._say = say
        if out is None:
            return
        self._path = Path(out) / METRICS
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                cut_after(self._path, resume_step)
            else:
                if self._path.exists() and self._path.stat().st_size:
                    os.replace(self._path, self._path.with_name(PREVIOUS))
                if (summary := self._path.with_name(SUMMARY)).exists():  # else it would pass for the new run's
                    os.replace(summary, summary.with_name(PREVIOUS_SUMMARY))
            if self._path.exists():
                _regular(self._path)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close(): it lives as long as the run)
        except OSError as error:
            raise _unwritable(self._path, error) from None
        try:
            self._board = TensorBoard(Path(out) / TENSORBOARD, first_step=(resume_step or 0) + 1)
        except Exception as error:  # a missing or broken TensorBoard (protobuf clashes raise anything) must not stop a run
            say(f"TensorBoard is off ({type(error).__name__}: {_first_line(error)}); {METRICS} has every number")
        for name, opened in (trackers or {}).items():
            try:
                self._trackers[name] = opened()
            except Exception as error:  # no account, no network: a failed view must not stop a run
                say(f"{name} is off ({type(error).__name__}: {_first_line(error)}); {METRICS} has every number")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. `kind` is "train" and `time` is now unless given. NaN and inf become null and are named in `nonfinite`."""
        if self._file is None:
            return
        clean = finite({"kind": "train", "time": time.time(), **line})
        try:
            line_bytes = json.dumps(clean, allow_nan=False).encode() + b"\n"
            if self._file.write(line_bytes) != len(line_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not self._is_there():  # the line is lost, and checkpoints would go to another folder than the lines
                raise FileNotFoundError(errno.ENOENT, f"{METRICS} was removed or renamed, or its folder was, while the run went on")
        except OSError as error:
            raise _unwritable(self._path, error) from None
        self._track(clean)
        if self._board is None:
            return
        try:
            self._board.write(clean)
        except Exception as error:
            self._board = None
            self._say(f"TensorBoard stops here ({type(error).__name__}: {_first_line(error)}); {METRICS} goes on")

    def _is_there(self) -> bool:
        """Return whether the open file still has its name."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _track(self, line: Mapping[str, Any]) -> None:
        values = dict(scalars(line)) if self._trackers else {}
        for name, board in list(self._trackers.items()) if values else ():
            try:
                board.log(values, line["step"])
            except Exception as error:
                del self._trackers[name]
                self._say(f"{name} stops here ({type(error).__name__}: {_first_line(error)}); {METRICS} goes on")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close()
            except Exception as error:
                self._say(f"{name}'s last numbers are lost ({type(error).__name__}: {_first_line(error)}); {METRICS} has them")
        board, self._board = self._board, None
        if board is not None:
            try:
                board.close()
            except Exception as error:  # a full disk: the error that ends the run is printed elsewhere
                self._say(f"TensorBoard's last numbers are lost ({type(error).__name__}: {_first_line(error)}); {METRICS} has them")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoard:
    """Scalars of each line, under <run>/tensorboard. Steps from `first_step` on in older files are hidden.

    Raises ImportError if tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # late, since it is optional and takes half a second

        folder.mkdir(exist_ok=True)  # the writer would recreate a run's folder that was renamed meanwhile
        older = any(folder.glob("events.*"))
        _silence_writers()
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step if older else None, flush_secs=10)

    def write(self, line: Mapping[str, Any]) -> None:
        for tag, value in scalars(line):
            self._writer.add_scalar(tag, value, line["step"], walltime=line["time"])

    def close(self) -> None:
        self._writer.close()


def _silence_writers() -> None:
    """Suppress tracebacks of TensorBoard's writer threads. The next write raises the same error, which is printed in one line."""
    before = threading.excepthook

    def said(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    threading.excepthook = said


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) pairs for TensorBoard, without nulls. Loads are relative to uniform: 1 is a fair share, 0 a dead expert."""
    if line.get("kind") == "event":
        return
    validation = line.get("kind") == "eval"
    found: list[tuple[str, Any]] = []
    for key, value in line.items():
        if key not in ("step", "kind", "time", "tokens", "skipped") and isinstance(value, int | float) and not isinstance(value, bool):
            found.append((f"validation/{key.removeprefix('validation_')}" if validation else key, value))
    found += [(f"grad_norm/{part}", value) for part, value in (line.get("grad_norm_parts") or {}).items()]
    for layer in line.get("moe") or ():
        where = f"layer_{layer['layer']}"
        load = layer.get("load") or []
        if load and None not in load:
            even = len(load) / (sum(load) or 1.0)
            spread = {"max": max(load) * even, "mean": sum(load) / len(load) * even, "min": min(load) * even}
            found += [(f"{where}/load_{name}", value) for name, value in spread.items()]
        found += [
            (f"{where}/{key}", layer.get(key)) for key in ("dropped", "balance_loss", "importance_loss", "load_loss", "z_loss", "entropy")
        ]
    yield from ((tag, float(value)) for tag, value in found if value is not None)


# --- files --------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl, or of the run folder that holds it. A half-written last line is left out.

    Raises BadInput if the file is missing, or a line before the last is not a JSON object.
    """
    path = Path(path) / METRICS if Path(path).is_dir() else Path(path)
    try:
        raw = _regular(path).read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(str(path), got=error.strerror or error, needed=f"a run's {METRICS}", fix="name the run's folder") from None
    lines = []
    for number, text in enumerate(raw, start=1):
        line = _parse(text)
        if line is not None:
            lines.append(line)
        elif text.strip() and number < len(raw):
            raise BadInput(f"{path}, line {number}", got=repr(text[:40]), needed="one JSON object with a step", fix="delete that line")
    return lines


def cut_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`, byte for byte; remove later steps and incomplete lines. Atomic."""
    if not path.exists():
        return
    old = _regular(path).read_bytes()
    if (new := b"".join(text + b"\n" for text, line in _whole(old) if line["step"] <= step)) != old:
        replace_file(path, new)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines that are neither half-written nor damaged; an empty list if there is no file. Raises BadInput."""
    return [line for _, line in _whole(_there(path))]


def latest_lines(path: Path, step: int, *, key: str) -> list[dict[str, Any]]:
    """Return the lines of `whole_lines` that come after `step` or have `key`. Other lines are not parsed, so that a long run resumes
    immediately."""
    named, found = f'"{key}"'.encode(), []
    for text in _there(path).split(b"\n"):
        steps = _STEP.findall(text)
        line = _parse(text) if named in text or not steps or max(map(int, steps)) > step else None
        found += [line] if line is not None and (line["step"] > step or key in line) else []
    return found


def first_time(path: Path) -> float | None:
    """Return the time of the first line that has one, in Unix seconds, or None."""
    return next((line["time"] for _, line in _whole(_there(path)) if line.get("time")), None)


def _there(path: Path) -> bytes:
    """Return the whole file, empty if there is none yet. Raises BadInput."""
    try:
        return _regular(path).read_bytes() if path.exists() else b""
    except OSError as error:
        raise BadInput(str(path), got=error.strerror or error, needed=f"a run's {METRICS}", fix="move it away, or --out DIR") from None


def _whole(raw: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for text in raw.split(b"\n"):
        line = _parse(text)
        if line is not None:
            yield text, line


def write_summary(out: Path, summary: Mapping[str, Any]) -> Path:
    """Write <out>/summary.json (atomically; NaN and inf become null) and return its path."""
    path = Path(out) / SUMMARY
    try:
        replace_file(path, (json.dumps(finite(summary), indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def read_summary(out: Path) -> dict[str, Any] | None:
    """Return the run's summary, or None if it has none yet. Raises BadInput for a file that is not JSON."""
    path = Path(out) / SUMMARY
    if not path.exists():
        return None
    try:
        summary = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        got = getattr(error, "strerror", None) or error
        raise BadInput(str(path), got=got, needed="JSON", fix="delete it; the report is then made without it") from None
    if (
        not isinstance(summary, dict)
        or not _sizes(summary)
        or not isinstance(summary.get("predicted") or {}, dict)
        or not counts(summary.get("redone"))
    ):
        got = "values that no run writes" if isinstance(summary, dict) else type(summary).__name__
        raise BadInput(str(path), got=got, needed="a run's JSON object", fix="delete it; the report is then made without it")
    return summary


def finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same line in plain JSON values. NaN and inf become null, and `nonfinite` lists their places ("moe.0.z_loss")."""
    lost: list[str] = []
    clean: dict[str, Any] = _plain(line, "", lost)
    return {**clean, "nonfinite": lost} if lost else clean


def _plain(value: Any, place: str, lost: list[str]) -> Any:
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{place}{key}.", lost) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{place}{index}.", lost) for index, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(place.removesuffix("."))
        return None
    return str(value) if isinstance(value, Path) else value


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and _typed(line) and _sizes(line) else None


def _typed(line: dict[str, Any]) -> bool:
    """Return whether the keys that readers compute with have the types that runs write. Other keys may hold anything."""
    layers, parts, places = (line.get(key) or kind() for key, kind in (("moe", list), ("grad_norm_parts", dict), ("nonfinite", list)))
    return (
        type(line.get("step")) is int
        and isinstance(line.get("kind", "train"), str)
        and all(_is_number(line.get(key)) for key in ("time", "step_seconds", "validation_loss"))
        and (line.get("time") or 0) < _LAST_SECOND
        and counts(line.get("so_far"))
        and isinstance(places, list)
        and isinstance(parts, dict)
        and isinstance(layers, list)
        and all(isinstance(layer, dict) and type(layer.get("layer")) is int for layer in layers)
        and all(_is_number(layer.get(key)) for layer in layers for key in ("kept", "dropped"))
        and all(isinstance(loads := layer.get("load") or [], list) and all(map(_is_number, loads)) for layer in layers)
    )


def counts(value: Any) -> bool:
    """Return whether the value is None, or a dict of numbers."""
    return value is None or (isinstance(value, dict) and all(_is_number(number) and number is not None for number in value.values()))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _sizes(value: Any) -> bool:
    """Return whether all numbers in it are finite, and integers fit in 64 bits."""
    if isinstance(value, dict | list):
        return all(map(_sizes, value.values() if isinstance(value, dict) else value))
    return math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < 2**63


def _regular(path: Path) -> Path:
    """Return the path. Raises OSError for a pipe, which would block, and for a device, which has no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "not a regular file", str(path))
    return path


def _unwritable(path: Path, error: OSError) -> BadInput:
    if isinstance(error, FileNotFoundError):
        needed = "it to stay while the run writes there"
        fix = "start the run again, with --out if its folder has another name now: it continues from the remaining records"
    else:
        needed, fix = "a folder with room to write", "free space, or --out DIR"
    return BadInput(f"run folder {path.parent}", got=error.strerror or error, needed=needed, fix=fix)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]
