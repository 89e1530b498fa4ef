"""Writes checkpoints that any other mesh can read: tensors have global names. Only safetensors and JSON, so loading runs no code.

    checkpoints/step-120/
        rank-00000.safetensors     tensors that this rank owns: "layers.3.experts.17.w1/weight", ".../exp_avg", ".../exp_avg_sq"
        rank-00000-1.safetensors   more of these tensors, if they take more than 256 MiB; and so on
        manifest.json              size and SHA-256 of every file; every tensor's full shape, and its pieces in the files; trainer's state
        manifest.sha256            SHA-256 of the manifest, in the format of `sha256sum -c`

A save is committed by renaming a finished folder: write to step-120.tmp, fsync, manifest with hashes, fsync, rename, fsync the parent.
So a folder with a final name is always complete, even if a process dies at any moment. The next save removes unfinished folders.
Before a checkpoint is loaded, every hash is checked. If one is wrong, the log says so, and the next older checkpoint is tried.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parallel.errors import BadInput, plain, some
from parallel.mesh.collectives import largest
from parallel.mesh.layout import Layout, stored
from parallel.mesh.mesh import Axis, Mesh
from parallel.store.files import MOST_BYTES, of_contents, read_text, replace_file, step_of, sync, usual_mode, write_synced
from parallel.store.stored import Reader, Unreadable, check_finite, check_pieces, damaged, finite, reading, unreadable
from parallel.watch.outcome import of_all

T = TypeVar("T")
FORMAT = 1
_NONE = -1  # in place of a step if there is no checkpoint; a number, because ranks exchange steps as numbers
_NAMED = 3  # at most this many names are listed in a message
MANIFEST_BYTES = 2**31  # largest manifest that is read; enough for more than a million tensors
FILE_BYTES = 256 * 2**20  # bytes of tensors after which a rank begins another file


@dataclass(frozen=True)
class Piece:
    """The part `tensor` of the whole tensor `name`. shape: of the whole tensor. start: index in the whole tensor at which the part
    begins."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor


def pieces(name: str, layout: Layout, mesh: Mesh, local: Tensor) -> Iterator[Piece]:
    """Yield the pieces in which `local`, this rank's shard of a parameter, is saved: one, or one for each entry of a stack of experts."""
    for part in stored(name, layout, mesh):
        yield Piece(part.name, part.shape, tuple(s.start for s in part.region), local if part.entry is None else local[part.entry])


def save(
    folder: Path, step: int, held: Iterable[tuple[str, Piece]], *, state: dict[str, Any], world: Axis, keep: int, prune: bool = True
) -> Path:
    """Write a checkpoint and return its folder. Collective. Raise BadInput on all ranks if a rank cannot write, or has a value that is
    not finite.

    held: ("weight" or name of an optimizer state, piece) for all tensors that this rank owns. state: the trainer's state, written by rank
    0. keep: number of newest checkpoints that are not removed; none is removed if `prune` is False."""
    begin(folder, step, world)
    agreed(folder, step, world, lambda: write_part(temporary(folder, step), world.index, held))
    agreed(folder, step, world, lambda: commit(folder, step, state, world, keep if prune else None) if world.index == 0 else None)
    return folder / f"step-{step}"


def temporary(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it gets its final name."""
    return folder / f"step-{step}.tmp"


def record_of(folder: Path, rank: int) -> Path:
    """Return the file that a rank writes into a temporary folder when its part of the checkpoint is complete."""
    return folder / f"rank-{rank:05d}.json"


def begin(folder: Path, step: int, world: Axis) -> None:
    """Make the temporary folder. Collective. Raise BadInput on all ranks if this fails."""
    agreed(folder, step, world, lambda: _make(folder, temporary(folder, step)) if world.index == 0 else None)


def agreed(folder: Path, step: int, world: Axis, work: Callable[[], None]) -> None:
    """Call work(), this rank's part of a save. Collective. If it fails on any rank, remove the unfinished save (the disk may be full) and
    raise the same BadInput on all ranks."""

    def here() -> None:
        try:
            work()
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk by its own error
            got = f"{getattr(error, 'strerror', None) or error} on rank {world.index}"
            needed, fix = f"a folder that can be written: {folder}", "free disk space or choose another --out"
            raise BadInput("checkpoint", got=got, needed=needed, fix=fix) from error

    try:
        of_all(here, world, what="checkpoint")
    except BadInput:
        if world.index == 0:
            shutil.rmtree(temporary(folder, step), ignore_errors=True)
        raise


def _make(folder: Path, temporary: Path) -> None:
    folder.mkdir(exist_ok=True)  # not its parents: if the run's folder was renamed meanwhile, the save must fail
    for left in folder.glob("step-*.tmp"):
        _discard(left)
    temporary.mkdir()


Entry = dict[str, Any]  # a tensor's entry in the manifest


def in_files(held: Iterable[tuple[str, Piece]]) -> Iterator[list[tuple[Entry, Tensor]]]:
    """Yield the content of each file of a rank, at least one: [(entry of the manifest, tensor on the CPU)]. held: as in `save`. Only one
    file's tensors are in memory at a time, because an engine may keep its states on a disk."""
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
    """Write a rank's files into the folder `temporary`, then its record. held: as in `save`. Raise BadInput for values that are not finite,
    and OSError or SafetensorError if a file cannot be written. Errors are raised after the last item of `held`, because its items may be
    gathered from all ranks, and without this rank the other ranks would wait."""
    entries: list[Entry] = []
    files: dict[str, dict[str, Any]] = {}
    problem: Exception | None = None
    for number, tensors in enumerate(in_files(held)):
        try:
            problem = problem or _not_finite(temporary, rank, tensors)
            if problem is None:
                path = temporary / (f"rank-{rank:05d}-{number}.safetensors" if number else f"rank-{rank:05d}.safetensors")
                files[path.name] = _write_file(path, tensors)
                entries += [entry | {"rank": rank, "file": path.name} for entry, _ in tensors]
        except (OSError, SafetensorError) as error:
            problem = error.with_traceback(None)  # the frames of the traceback would keep the tensors in memory
        tensors.clear()  # free their memory before the next file's tensors are gathered
    if problem is not None:
        raise problem
    replace_file(record_of(temporary, rank), json.dumps({"files": files, "tensors": entries}))  # atomic, as rank 0 polls for it


def _not_finite(temporary: Path, rank: int, tensors: list[tuple[Entry, Tensor]]) -> BadInput | None:
    bad = next((entry["key"] for entry, tensor in tensors if not finite(tensor)), None)
    if bad is None:
        return None
    got = f"values of {bad} that are not finite, on rank {rank}, so this checkpoint is not saved"
    fix = "start again: the run goes on from the newest saved checkpoint"
    return BadInput(temporary.stem, got=got, needed="finite numbers", fix=fix)


def _write_file(path: Path, tensors: list[tuple[Entry, Tensor]]) -> dict[str, Any]:
    """Write a file of tensors and return its entry in the manifest: size in bytes and SHA-256."""
    with usual_mode(path):
        save_file({entry["key"]: tensor for entry, tensor in tensors}, path)
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def commit(folder: Path, step: int, state: dict[str, Any], world: Axis, keep: int | None) -> None:
    """Write the manifest, rename the folder, and remove all but the newest `keep` checkpoints (None: keep all). state: the trainer's state.
    Rank 0 calls this when the records of all ranks exist."""
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
    write_synced(unnamed / "manifest.json", manifest)
    write_synced(unnamed / "manifest.sha256", _digest_line(manifest.encode()))
    sync(unnamed)
    if os.path.lexists(final):  # a damaged checkpoint that was skipped, or another file or folder of this name
        _remove(final)
    unnamed.rename(final)
    sync(folder)
    if keep is not None:
        keep_newest(folder, step, keep)


def keep_newest(folder: Path, step: int, keep: int) -> None:
    """Remove the oldest checkpoints, so that `keep` remain: the checkpoint of `step`, which is intact, and the newest earlier ones. A
    resumed run calls this too, because the previous process may have died between committing a checkpoint and removing old ones."""
    # Only lower steps count: a higher one was skipped as damaged, and must not displace the one just written.
    older = [path for number, path in sorted(numbered(folder)) if number < step]
    for old in older[: max(0, len(older) - (keep - 1))]:
        with suppress(OSError):  # the new checkpoint is good even if an old one cannot be removed
            _remove(old)


def _remove(path: Path) -> None:
    """Rename a checkpoint to a temporary name, then remove it, so that a crash leaves no incomplete checkpoint under a final name."""
    nameless = path.with_name(f"{path.name}.old.tmp")
    path.rename(nameless)
    _discard(nameless)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def _digest_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  manifest.json\n"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every committed checkpoint, in any order. Raise BadInput if the folder exists but cannot be read."""
    found = [(step_of(path.name), path) for path in _entries(folder)]
    return [(step, path) for step, path in found if step is not None and _is_folder(path)]


def _entries(folder: Path) -> list[Path]:
    names: list[str] = _unless_gone(lambda folder: os.listdir(folder), folder, [])
    return [folder / name for name in names if name.startswith("step-")]


def _is_folder(path: Path) -> bool:
    return _unless_gone(lambda path: stat.S_ISDIR(path.stat().st_mode), path, False)


def _unless_gone(read: Callable[[Path], T], path: Path, gone: T) -> T:
    """Return read(path); `gone` if there is no such file or folder. Raise Unreadable after other errors."""
    try:
        return read(path)
    except OSError as error:
        if of_contents(error):
            return gone
        raise unreadable(path, error) from None


def verify(path: Path) -> dict[str, Any]:
    """Check a checkpoint (size and hash of every file, complete and finite tensors) and return its manifest.

    Raises BadInput that names a damaged file, and Unreadable that names a file that cannot be read but may be intact."""
    try:
        raw = _text(path / "manifest.json", most_bytes=MANIFEST_BYTES).encode()
        if _text(path / "manifest.sha256") != _digest_line(raw):
            raise damaged(path, "manifest.json")
        manifest: dict[str, Any] = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise BadInput(
                f"checkpoint {path.name}",
                got=f"format {manifest['format']}",
                needed=f"format {FORMAT}",
                fix="use the version of moe-parallel that wrote it",
            )
        for name, record in manifest["files"].items():
            file = path / Path(name).name
            with reading(file):
                about = file.stat()
                whole = stat.S_ISREG(about.st_mode) and about.st_size == record["bytes"] and sha256(file) == record["sha256"]
            if not whole:
                raise damaged(path, name)
        reader = Reader(path)
        check_pieces(reader)
        check_finite(reader)
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"manifest.json ({type(error).__name__})") from None
    return manifest


def _text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    with reading(path):
        return read_text(path, most_bytes=most_bytes, newline="")


def newest(folder: Path, *, world: Axis, log: Callable[[str], None], step: int | None = None, flag: str = "--from_step") -> Path | None:
    """Return the folder of the newest checkpoint that passes `verify`, or of the checkpoint of `step`; None if there is no checkpoint.
    Collective: rank 0 looks, and all ranks return its result.

    Raise BadInput on all ranks if checkpoints exist but none passes (starting over would replace them), if a file cannot be read but may
    be intact, or if `step` does not exist. flag: the command-line flag by which the user gave `step`. log: called with a
    line about each checkpoint that is skipped, and about names that are ignored."""

    def look() -> int:
        return _NONE if world.index else _newest(folder, log) if step is None else _named(folder, step, flag)

    found = of_all(look, world, what=f"checkpoints in {folder}")
    number = int(largest(found, world))
    return None if number == _NONE else folder / f"step-{number}"


def _newest(folder: Path, log: Callable[[str], None]) -> int:
    """Return the step of the newest checkpoint that passes `verify`; _NONE if there is no checkpoint. Log each newer one that is
    skipped."""
    there = sorted(numbered(folder), reverse=True)
    none = sorted(path.name for path in _entries(folder) if path.suffix != ".tmp" and (step_of(path.name) is None or not _is_folder(path)))
    if none:
        more = f" and {len(none) - _NAMED} more" if len(none) > _NAMED else ""
        log(plain(f"ignored, because they are no checkpoints: {', '.join(none[:_NAMED])}{more} in {folder}"))
    for number, path in there:
        try:
            verify(path)
        except Unreadable:
            raise
        except BadInput as refused:
            log(f"skipped: {refused}")
        else:
            return number
    if there or (os.path.lexists(folder) and not _is_folder(folder)):
        raise BadInput(
            str(folder),
            got="checkpoints, none of which verifies" if there else "a file or a broken link",
            needed="at least one checkpoint that verifies",
            fix="restore a checkpoint, or start over with --fresh, which sets the folder aside",
        )
    return _NONE


def _named(folder: Path, step: int, flag: str) -> int:
    there = sorted(number for number, _ in numbered(folder))
    if step not in there:
        needed = f"one of {some(map(str, there))}" if there else f"a checkpoint in {folder}"
        raise BadInput(flag, got=step, needed=needed, fix=f"{flag} {there[-1]}" if there else "train first")
    verify(folder / f"step-{step}")
    return step
