"""Checkpoints by global names, readable on any other mesh; safetensors and JSON only, so loading runs no code.

    checkpoints/step-120/
        rank-00000.safetensors     the tensors this rank owns: "layers.3.experts.17.w1/weight", ".../exp_avg", ".../exp_avg_sq"
        rank-00000-1.safetensors   where they are more than 256 MiB; and so on
        manifest.json              every file's size and SHA-256; every tensor's full shape and where its pieces lie; the trainer's state
        manifest.sha256            the manifest's own, as `sha256sum -c` reads it

A save is committed by renaming a finished folder: write to step-120.tmp, fsync, manifest with hashes, fsync, rename, fsync
the parent; only then may older ones go. Whatever the instant a process dies, a folder with the final name is whole: one
that goes loses its name first. What a dead process left behind (step-*.tmp) goes with the next save.
Reading checks every hash first and falls back to the newest one that verifies, saying what was passed over and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parallel.collectives import largest
from parallel.errors import BadInput
from parallel.files import read_text
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh
from parallel.stored import Reader, check_pieces, damaged

FORMAT = 1
_NONE, _UNREADABLE = -2, -1  # instead of a step
MANIFEST_BYTES = 2**31  # more than a million tensors take
FILE_BYTES = 256 * 2**20  # of tensors, after which a rank begins another file


@dataclass(frozen=True)
class Piece:
    """A part of one logical tensor: its global name, full shape, where the part starts, and the part itself."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor


def pieces(name: str, layout: Layout, mesh: Mesh, local: Tensor) -> Iterator[Piece]:
    """What this rank holds of a parameter, by global names: a stack becomes one tensor per element."""
    region = layout.region(mesh)
    if layout.unstack is None:
        yield Piece(name, layout.shape, tuple(s.start for s in region), local)
        return
    for i, number in enumerate(layout.stacked(mesh)):
        yield Piece(layout.unstack.format(number), layout.shape[1:], tuple(s.start for s in region[1:]), local[i])


# --- saving -----------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, held: Iterable[tuple[str, Piece]], *, state: dict[str, Any], world: Axis, keep: int) -> Path:
    """Write `held` ((kind, piece), the ones this rank owns) and rank 0's `state`; returns the committed folder.

    Collective. Raises BadInput on every rank when any of them cannot write.
    """
    begin(folder, step, world)
    problem = agreed(world, lambda: write_part(temporary(folder, step), world.index, held))
    if not problem:
        problem = agreed(world, lambda: commit(folder, step, state, world, keep) if world.index == 0 else None)
    if problem:
        raise refused(folder, step, problem, world)
    return folder / f"step-{step}"


def temporary(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its final name."""
    return folder / f"step-{step}.tmp"


def record_of(folder: Path, rank: int) -> Path:
    """What a rank says of its part in a temporary folder, once all of it is there."""
    return folder / f"rank-{rank:05d}.json"


def begin(folder: Path, step: int, world: Axis) -> None:
    """Make the temporary folder. Collective. Raises BadInput on every rank where that cannot be."""
    problem = agreed(world, lambda: _make(folder, temporary(folder, step)) if world.index == 0 else None)
    if problem:
        raise refused(folder, step, problem, world)


def refused(folder: Path, step: int, problem: str, world: Axis) -> BadInput:
    """What to raise where a checkpoint cannot be written. Removes what there is of it, on a full disk most of all."""
    if world.index == 0:
        shutil.rmtree(temporary(folder, step), ignore_errors=True)
    return BadInput(
        "checkpoint", got=problem, needed=f"a folder that can be written: {folder}", fix="free disk space or choose another --out"
    )


def agreed(world: Axis, work: Callable[[], None]) -> str | None:
    """Do one rank's work; every rank learns whether any failed."""
    problem = None
    try:
        work()
    except (OSError, SafetensorError) as error:  # the latter is how safetensors reports a disk that is full
        problem = f"{getattr(error, 'strerror', None) or error} on rank {world.index}"
    elsewhere = largest(float(problem is not None), world)  # the rank that failed must ask too: the others wait for it
    return problem or ("a failure on another rank" if elsewhere else None)


def _make(folder: Path, temporary: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()


Entry = dict[str, Any]  # of a tensor in the manifest


def in_files(held: Iterable[tuple[str, Piece]]) -> Iterator[list[tuple[Entry, Tensor]]]:
    """What a rank saves, on the host, in as many files as it takes to have no more than one file's tensors in memory: an engine's states
    may lie on a disk. At least one file."""
    tensors: list[tuple[Entry, Tensor]] = []
    held_bytes = 0
    for kind, piece in held:
        if held_bytes >= FILE_BYTES:
            yield tensors
            tensors, held_bytes = [], 0
        whole = list(piece.tensor.shape) == list(piece.shape)
        key = f"{piece.name}/{kind}" + ("" if whole else "@" + ",".join(map(str, piece.start)))
        tensor = piece.tensor.detach().cpu().contiguous()
        tensors.append(({"name": piece.name, "kind": kind, "shape": list(piece.shape), "start": list(piece.start), "key": key}, tensor))
        held_bytes += tensor.nbytes
    yield tensors


def write_part(temporary: Path, rank: int, held: Iterable[tuple[str, Piece]]) -> None:
    """One rank's files, and then its record."""
    entries: list[Entry] = []
    files: dict[str, dict[str, Any]] = {}
    for number, tensors in enumerate(in_files(held)):
        path = temporary / (f"rank-{rank:05d}-{number}.safetensors" if number else f"rank-{rank:05d}.safetensors")
        save_file({entry["key"]: tensor for entry, tensor in tensors}, path)
        _fsync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        entries += [entry | {"rank": rank, "file": path.name} for entry, _ in tensors]
        tensors.clear()  # before the next file's are gathered
    record = record_of(temporary, rank)
    unnamed = record.with_suffix(".tmp")  # rank 0 may look for the record meanwhile
    _write(unnamed, json.dumps({"files": files, "tensors": entries}))
    unnamed.rename(record)


def commit(folder: Path, step: int, state: dict[str, Any], world: Axis, keep: int) -> None:
    """On rank 0, when every rank's record is there: the manifest, the final name, and older ones go."""
    final, unnamed = folder / f"step-{step}", temporary(folder, step)
    files: dict[str, dict[str, Any]] = {}
    tensors: list[dict[str, Any]] = []
    for rank in range(world.size):
        part = record_of(unnamed, rank)
        record = json.loads(part.read_text())
        files |= record["files"]
        tensors += record["tensors"]
        part.unlink()
    manifest = json.dumps({"format": FORMAT, "files": files, "tensors": tensors, "state": state})
    _write(unnamed / "manifest.json", manifest)
    _write(unnamed / "manifest.sha256", _digest_line(manifest.encode()))
    _fsync(unnamed)
    if final.exists():  # a damaged one that was passed over
        _remove(final)
    unnamed.rename(final)
    _fsync(folder)
    keep_newest(folder, step, keep)


def keep_newest(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to that of `step`, which is good, the newest `keep` stay. Also for a run that goes on: the one before may
    have died between a commit and this."""
    # only lower numbers: a higher one was passed over as damaged, and must not push out the one just written
    older = [path for number, path in sorted(numbered(folder)) if number < step]
    for old in older[: max(0, len(older) - (keep - 1))]:
        with suppress(OSError):  # the new one stands, whatever becomes of the old
            _remove(old)


def _remove(path: Path) -> None:
    """Its name goes first: dying half way must not leave half a checkpoint under a final name."""
    nameless = path.with_name(f"{path.name}.old.tmp")
    path.rename(nameless)
    shutil.rmtree(nameless, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _fsync(path)


def _digest_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  manifest.json\n"


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- choosing one to read (parallel/stored.py reads it) ----------------------------------------------------------------


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint, in any order."""
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        number = path.name.removeprefix("step-")
        if number.isdecimal() and path.name == f"step-{int(number)}" and path.is_dir():  # not step-0080, nor other scripts' digits
            found.append((int(number), path))
    return found


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file has its size and hash, and what the manifest says is in it.

    Raises BadInput naming the file that has not.
    """
    try:
        raw = read_text(path / "manifest.json", most_bytes=MANIFEST_BYTES, newline="").encode()
        if read_text(path / "manifest.sha256", newline="") != _digest_line(raw):
            raise damaged(path, "manifest.json")
        manifest: dict[str, Any] = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise BadInput(
                f"checkpoint {path.name}",
                got=f"format {manifest['format']}",
                needed=f"format {FORMAT}",
                fix="use the version that wrote it",
            )
        for name, record in manifest["files"].items():
            file = path / Path(name).name
            if not file.is_file() or file.stat().st_size != record["bytes"] or sha256(file) != record["sha256"]:
                raise damaged(path, name)
        check_pieces(Reader(path))
    except BadInput:
        raise
    except FileNotFoundError as error:
        raise damaged(path, f"{Path(error.filename).name}: it is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"manifest.json ({type(error).__name__})") from None
    return manifest


def newest(folder: Path, *, world: Axis, log: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies, the same on every rank; rank 0 looks. None if there is none at all.

    Raises BadInput, on every rank, where there are some and none can be read: to start over then would bury them.
    """
    step = _NONE
    if world.index == 0:
        there = sorted(numbered(folder), reverse=True)
        if there or (os.path.lexists(folder) and not folder.is_dir()):
            step = _UNREADABLE
        for number, path in there:
            try:
                verify(path)
            except BadInput as refused:
                log(f"passed over: {refused}")
                continue
            step = number
            break
    step = int(largest(step, world))
    if step == _UNREADABLE:
        raise BadInput(
            str(folder),
            got="checkpoints of which none can be read" if folder.is_dir() else "no folder, or a link to one that is not there",
            needed="at least one that verifies",
            fix="bring back what is missing, or start over with --fresh, which sets them aside",
        )
    return None if step == _NONE else folder / f"step-{step}"
