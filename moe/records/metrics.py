"""The metrics file of a run, metrics.jsonl: one line of JSON for each step, with null for NaN. docs/use/records.md lists the fields.

The file has each step once: a run that resumes from step n removes the lines of later steps, and a half-written last line. TensorBoard and
other trackers (moe/records/tracker.py) get copies of the numbers.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from moe.records.tracker import Board, open_tensorboard, scalars
from parallel.errors import BadInput
from parallel.store.files import read_text, replace_file

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
_STEP = re.compile(rb'"step":\s*([0-9]{1,18})\b')
_LAST_SECOND = 2**36  # Unix time of the year 4147: a line with a later time was not written by a run
PREVIOUS, PREVIOUS_SUMMARY = "metrics.previous.jsonl", "summary.previous.json"


class Records:
    """Writer of a run's metrics.jsonl and trackers. With `out=None` (on all ranks except rank 0) it writes nothing. resume_step=n: keep the
    lines of steps up to n (0: only events before the first step). resume_step=None: start a new run; an earlier run's files are renamed to
    metrics.previous.jsonl and summary.previous.json. say: called with a line about each tracker that fails. trackers: name -> function that
    opens it, in addition to TensorBoard. Raises BadInput if the folder cannot be written."""

    def __init__(
        self,
        out: Path | None,
        *,
        resume_step: int | None = None,
        say: Callable[[str], None] = print,
        trackers: Mapping[str, Callable[[], Board]] | None = None,
    ) -> None:
        self._file: FileIO | None = None
        self._boards: dict[str, Board] = {}
        self._say = say
        if out is None:
            return
        self._path = out / METRICS
        try:
            out.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                cut_after(self._path, resume_step)
            else:
                if self._path.exists() and self._path.stat().st_size:
                    os.replace(self._path, out / PREVIOUS)
                if (out / SUMMARY).exists():  # otherwise it would be read as the new run's summary
                    os.replace(out / SUMMARY, out / PREVIOUS_SUMMARY)
            if self._path.exists():
                _regular(self._path)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close(): it is open as long as the run)
        except OSError as error:
            raise _unwritable(self._path, error) from None
        board = partial(open_tensorboard, out / "tensorboard", first_step=(resume_step or 0) + 1)
        for name, opened in ({"TensorBoard": board} | dict(trackers or {})).items():
            try:
                self._boards[name] = opened()
            except Exception as error:  # a tracker must not stop a run, for example if it has no account or network
                self._failed(f"{name} is off", error, "has every number")

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of a resumed run's earlier steps; [] if a line is damaged."""
        try:
            return [] if self._file is None else read(self._path)
        except BadInput:
            return []

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, and send its numbers to the trackers. Adds `kind` "train" and the present `time` if the line
        lacks them. NaN and inf become null; `nonfinite` lists the paths of these values. Raises BadInput if the file cannot be written."""
        if self._file is None:
            return
        clean = finite({"kind": "train", "time": time.time(), **line})
        try:
            line_bytes = json.dumps(clean, allow_nan=False).encode() + b"\n"
            if self._file.write(line_bytes) != len(line_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not self._is_there():  # the line is lost, and checkpoints would go to a new folder: end the run
                raise FileNotFoundError(errno.ENOENT, f"{METRICS} or its folder was removed or renamed during the run")
        except OSError as error:
            raise _unwritable(self._path, error) from None
        for name, board in list(self._boards.items()):
            try:
                if values := dict(scalars(clean)):
                    board.log(values, clean["step"], clean["time"])
            except Exception as error:
                del self._boards[name]
                self._failed(f"{name} stops here", error, "goes on")

    def event(self, name: str, **fields: Any) -> None:
        """Append a line of kind "event" with the event's name and fields."""
        self.write({"kind": "event", "event": name, **fields})

    def _is_there(self) -> bool:
        """Return whether the open file is still at its path: False if it, or its folder, was removed or renamed."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _failed(self, what: str, error: Exception, metrics: str) -> None:
        first_line = (str(error).splitlines() or [""])[0][:120]
        self._say(f"{what} ({type(error).__name__}: {first_line}); {METRICS} {metrics}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        while self._boards:
            name, board = self._boards.popitem()
            try:
                board.close()
            except Exception as error:
                self._failed(f"{name}'s last numbers are lost", error, "has them")


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl, given its path or the run's folder. A half-written last line is left out. Raises BadInput if the
    file is missing, or if an earlier line is not a valid record."""
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
    """Remove the lines of steps after `step`, and incomplete lines; other lines stay unchanged. The file is replaced atomically."""
    if not path.exists():
        return
    old = _regular(path).read_bytes()
    if (new := b"".join(text + b"\n" for text, line in _whole(old) if line["step"] <= step)) != old:
        replace_file(path, new)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines that are neither half-written nor damaged; an empty list if there is no file."""
    return [line for _, line in _whole(_content(path))]


def latest_lines(path: Path, step: int, *, key: str) -> list[dict[str, Any]]:
    """Return the lines of steps after `step`, and earlier lines with `key`. Other lines are not parsed, so that long runs resume fast."""
    named, found = f'"{key}"'.encode(), []
    for text in _content(path).split(b"\n"):
        steps = _STEP.findall(text)
        line = _parse(text) if named in text or not steps or max(map(int, steps)) > step else None
        found += [line] if line is not None and (line["step"] > step or key in line) else []
    return found


def first_time(path: Path) -> float | None:
    """Return the `time` (Unix seconds) of the first line that has one; None if no line has one."""
    return next((line["time"] for _, line in _whole(_content(path)) if line.get("time")), None)


def _content(path: Path) -> bytes:
    """Return the file's bytes; b"" if it does not exist yet. Raises BadInput if it cannot be read."""
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
    """Return the run's summary, or None if it has none yet. Raises BadInput for a file that is not the JSON object of a run."""
    path = Path(out) / SUMMARY
    if not path.exists():
        return None
    try:
        summary = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        got = getattr(error, "strerror", None) or error
        raise BadInput(str(path), got=got, needed="JSON", fix="delete it; the report is then made without it") from None
    is_dict = isinstance(summary, dict)
    if is_dict and _in_range(summary) and isinstance(summary.get("predicted") or {}, dict) and _of_numbers(summary.get("redone")):
        return dict(summary)
    got = "values that no run writes" if is_dict else type(summary).__name__
    raise BadInput(str(path), got=got, needed="a run's JSON object", fix="delete it; the report is then made without it")


def finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with JSON values. NaN and inf become null, and a key `nonfinite` lists their paths, such as "moe.0.z_loss"."""
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
    return line if isinstance(line, dict) and _typed(line) and _in_range(line) else None


def _typed(line: dict[str, Any]) -> bool:
    """Return whether the values that other code computes with have the right types. Other keys may have any value."""
    layers, parts, places = (line.get(key) or kind() for key, kind in (("moe", list), ("grad_norm_parts", dict), ("nonfinite", list)))
    return (
        type(line.get("step")) is int
        and isinstance(line.get("kind", "train"), str)
        and all(_is_number(line.get(key)) for key in ("time", "step_seconds", "validation_loss"))
        and (line.get("time") or 0) < _LAST_SECOND
        and _of_numbers(line.get("so_far"))
        and isinstance(places, list)
        and isinstance(parts, dict)
        and isinstance(layers, list)
        and all(isinstance(layer, dict) and type(layer.get("layer")) is int for layer in layers)
        and all(_is_number(layer.get(key)) for layer in layers for key in ("kept", "dropped"))
        and all(isinstance(loads := layer.get("load") or [], list) and all(map(_is_number, loads)) for layer in layers)
    )


def _of_numbers(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(_is_number(number) and number is not None for number in value.values()))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _in_range(value: Any) -> bool:
    """Return whether all numbers in `value`, at any depth, are finite, and all integers fit in 64 bits."""
    if isinstance(value, dict | list):
        return all(map(_in_range, value.values() if isinstance(value, dict) else value))
    return math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < 2**63


def _regular(path: Path) -> Path:
    """Return the path of a regular file unchanged. Raises OSError for a pipe, on which reading would wait, and for a device, which has no
    end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "not a regular file", str(path))
    return path


def _unwritable(path: Path, error: OSError) -> BadInput:
    if isinstance(error, FileNotFoundError):
        needed = "a folder that stays in place while the run writes into it"
        fix = "start the run again, with --out if its folder has another name now: it continues from the remaining records"
    else:
        needed, fix = "a folder with room to write", "free space, or --out DIR"
    return BadInput(f"run folder {path.parent}", got=error.strerror or error, needed=needed, fix=fix)
