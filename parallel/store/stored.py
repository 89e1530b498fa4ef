"""Reads tensors of a committed checkpoint: any box (rectangular region) of any tensor, joined from the pieces in which it was saved.

    Reader.load(name, kind, layout, mesh, box)     this rank's shard of a parameter, or a box of the shard
    Reader.region(name, kind, region)              a box of the full tensor   <-  pieces that overlap it  <-  runs of bytes of their files

Files are read directly into the returned tensor. safetensors' own reader maps files into memory instead, which counts as the process's
memory: resident pages, and the whole file under a limit on data (`ulimit -d`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.errors import BadInput
from parallel.mesh.layout import Box, Layout, Layouts, stored
from parallel.mesh.mesh import Degrees, Mesh
from parallel.store.files import of_contents

CHECKED_BYTES = 2**20  # bytes that are read at a time to check for finite values, few enough for a core's cache
HEADER_BYTES = 100_000_000  # largest header of a safetensors file
MOST_TENSORS = 2**18  # most tensors in one file: the largest models have fewer
STORED = {  # name in the safetensors format -> torch's dtype
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}


class _Place(NamedTuple):
    """The dtype and shape of a tensor in a file, and the byte `begin` at which its elements start, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class TensorFile:
    """Reads a safetensors file: the length of the header in 8 bytes, the header as JSON, then the tensors. `places`: key -> _Place.

    Raises ValueError, KeyError or TypeError if the header is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError("a header longer than the file")
            if length > HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes, more than the format allows")
            text = file.read(length)
            if (count := text.count(b'"data_offsets"')) > MOST_TENSORS:
                raise ValueError(f"a header of {count} tensors, more than {MOST_TENSORS}")
            try:
                header: dict[str, Any] = json.loads(text)
            except RecursionError:
                raise ValueError("a header nested too deeply") from None
        if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
            raise TypeError("a header that is no table of tensors")
        header.pop("__metadata__", None)
        self.places = {key: self._place(entry, data=8 + length, end=size) for key, entry in header.items()}
        runs = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        if any(begin < end for (_, end), (begin, _) in pairwise(runs)):
            raise ValueError("tensors that share bytes")

    @staticmethod
    def _place(entry: dict[str, Any], *, data: int, end: int) -> _Place:
        first, last = entry["data_offsets"]
        place = _Place(STORED[entry["dtype"]], tuple(entry["shape"]), data + first)
        if not data <= place.begin <= data + last <= end:
            raise ValueError("a tensor beyond the end of the file")
        if last - first != math.prod(place.shape) * place.dtype.itemsize:
            raise ValueError("a tensor whose number of bytes does not match its shape")
        return place

    def read(self, key: str, box: Box) -> Tensor:
        """Return a box of the tensor `key`. The dims after the last dim that the box cuts are whole, so each index of the dims before that
        dim is one contiguous run of bytes."""
        dtype, shape, begin = self.places[key]
        out = torch.empty([part.stop - part.start for part in box], dtype=dtype)
        if not out.numel():
            return out
        steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # strides, in elements
        cut = max((dim for dim, part in enumerate(box) if (part.start, part.stop) != (0, shape[dim])), default=0)
        walked = [range(part.start, part.stop) for part in box[:cut]]
        first = box[cut].start * steps[cut] if box else 0
        raw = memoryview(out.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        length = len(raw) // math.prod(map(len, walked))
        with self.path.open("rb", buffering=0) as file:
            for number, index in enumerate(product(*walked)):
                at = first + sum(i * step for i, step in zip(index, steps, strict=False))
                self._read_run(file.fileno(), raw[number * length : (number + 1) * length], begin + at * dtype.itemsize)
        return out

    def not_finite(self) -> str | None:
        """Return the key of the first tensor with a value that is not finite; None if all are finite. Reads CHECKED_BYTES at a time."""
        buffer = torch.empty(CHECKED_BYTES, dtype=torch.uint8)
        raw = memoryview(buffer.numpy())  # type: ignore[arg-type]
        with self.path.open("rb", buffering=0) as file:
            for key, (dtype, shape, begin) in self.places.items():
                end = begin + math.prod(shape) * dtype.itemsize if dtype.is_floating_point else begin
                for at in range(begin, end, CHECKED_BYTES):
                    size = min(CHECKED_BYTES, end - at)
                    self._read_run(file.fileno(), raw[:size], at)
                    if not finite(buffer[:size].view(dtype)):
                        return key
        return None

    def _read_run(self, handle: int, into: memoryview, at: int) -> None:
        while into:
            got = os.preadv(handle, [into], at)
            if not got:
                raise damaged(self.path.parent, self.path.name)
            into, at = into[got:], at + got


def finite(tensor: Tensor) -> bool:
    """Return whether the tensor has no NaN and no infinity, by its minimum and maximum, which are NaN if any value is. Copies only 8-bit
    tensors."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    tensor = tensor.half() if tensor.dtype.itemsize == 1 else tensor  # torch has no aminmax of 8 bits
    return all(math.isfinite(bound) for bound in tensor.detach().aminmax())


class Unreadable(BadInput):
    """Raised if a checkpoint's file cannot be read but may be intact. Ends the run, which else would resume from an older checkpoint."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Return a context for reading a checkpoint's file. It turns an OSError into BadInput if the contents are lost (`of_contents`, such as
    a missing file), and into Unreadable if they may be intact (such as no permission)."""
    try:
        yield
    except FileNotFoundError:
        raise damaged(path.parent, f"{path.name}: it is missing") from None
    except OSError as error:
        if of_contents(error):
            raise damaged(path.parent, path.name) from None
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> Unreadable:
    """Return the error for a checkpoint's file, or the folder of checkpoints, that this process cannot read."""
    fix = "give this user permission to read it, or wait until its disk answers (no older checkpoint is used, as this one may be intact)"
    return Unreadable(f"checkpoint file {path}", got=error.strerror or str(error), needed="a file that can be read", fix=fix)


def damaged(path: Path, name: str) -> BadInput:
    """Return the error for a checkpoint at `path` whose file `name` has changed since it was saved."""
    fix = f"restore it from a copy, or move {path} to another folder"
    return BadInput(f"checkpoint {path.name}", got=f"a damaged {name}", needed="each file with its recorded size and hash", fix=fix)


class Reader:
    """Reads the tensors of one verified checkpoint, by name and kind ("weight" or an optimizer state)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path / "manifest.json"):
            self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        self.state: dict[str, Any] = self.manifest["state"]
        self.entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for entry in self.manifest["tensors"]:
            self.entries.setdefault((entry["name"], entry["kind"]), []).append(entry)
        self._file = cache(self._open)

    def _open(self, name: str) -> TensorFile:
        with reading(path := self.path / Path(name).name):
            return TensorFile(path)

    def names(self, kind: str = "weight") -> dict[str, tuple[int, ...]]:
        """Return name -> whole shape of every tensor of a kind: "weight" (all parameters) or an optimizer state."""
        return {name: tuple(found[0]["shape"]) for (name, of), found in self.entries.items() if of == kind}

    def region(self, name: str, kind: str, region: Box) -> Tensor:
        """Read a box of a whole tensor, joined from the pieces in which the tensor was saved."""
        sizes, out = [want.stop - want.start for want in region], None
        missing = math.prod(sizes)
        for entry in self.entries[name, kind]:
            file = self._file(entry["file"])
            if not missing:
                return torch.empty(sizes, dtype=file.places[entry["key"]].dtype) if out is None else out
            shape = file.places[entry["key"]].shape
            common = [
                (max(want.start, start), min(want.stop, start + size))
                for want, start, size in zip(region, entry["start"], shape, strict=True)
            ]
            if any(high <= low for low, high in common):
                continue
            cut = tuple(slice(low - start, high - start) for (low, high), start in zip(common, entry["start"], strict=True))
            with reading(file.path):
                part = file.read(entry["key"], cut)
            if list(part.shape) == sizes:
                return part
            if out is None:
                out = part.new_empty(sizes)
            out[tuple(slice(low - want.start, high - want.start) for (low, high), want in zip(common, region, strict=True))] = part
            missing -= part.numel()
        if out is None or missing:
            raise damaged(self.path, "manifest.json")
        return out

    def load(self, name: str, kind: str, layout: Layout, mesh: Mesh, box: Box | None = None) -> Tensor:
        """Read this rank's shard of a parameter, or only this box of the shard."""
        parts = [self.region(part.name, kind, part.region) for part in stored(name, layout, mesh, box)]
        if layout.unstack is None:
            return parts[0]
        if len({part.dtype for part in parts}) > 1:  # torch.stack would convert them to one dtype silently
            raise damaged(self.path, "manifest.json")
        return torch.stack(parts)


def check_pieces(reader: Reader) -> None:
    """Check that each tensor's pieces exist and cover it exactly, each element once. Raise BadInput that names the file."""
    for entries in reader.entries.values():
        missing, dtype = math.prod(entries[0]["shape"]), None
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for entry in entries:
            try:
                place = reader._file(entry["file"]).places[entry["key"]]
                shape, dtype = place.shape, dtype or place.dtype
                within = place.dtype == dtype and all(
                    0 <= at <= at + n <= of for at, n, of in zip(entry["start"], shape, entries[0]["shape"], strict=True)
                )
            except Unreadable:
                raise
            except (ValueError, KeyError, TypeError):  # BadInput too, as it is a ValueError
                within = False
            if not within:
                raise damaged(reader.path, Path(entry["file"]).name)
            missing -= math.prod(shape)
            boxes.append((tuple(entry["start"]), tuple(at + n for at, n in zip(entry["start"], shape, strict=True))))
        if missing or _overlap(boxes):
            raise damaged(reader.path, "manifest.json")


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether any two boxes (start, stop) share an element. They are sorted by the first dim, so that few pairs are compared."""
    near: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, stop in sorted(box for box in boxes if all(a < b for a, b in zip(*box, strict=True))):
        near = [box for box in near if box[1][:1] > start[:1]] if start else near
        if any(all(a < d and c < b for a, b, c, d in zip(start, stop, *box, strict=True)) for box in near):
            return True
        near.append((start, stop))
    return False


def check_finite(reader: Reader) -> None:
    """Raise BadInput, which names the tensor, if a value is NaN or infinite: a run cannot resume from it."""
    for name in dict.fromkeys(entry["file"] for entry in reader.manifest["tensors"]):
        file = reader._file(name)
        with reading(file.path):
            key = file.not_finite()
        if key is not None:
            got = f"values of {key} that are not finite"
            raise BadInput(f"checkpoint {reader.path.name}", got=got, needed="finite numbers", fix="take an earlier one")


def check_same_parameters(
    reader: Reader,
    layouts: Layouts,
    kinds: tuple[str, ...] = ("weight",),
    *,
    spare: tuple[str, ...] = (),
    fix: str = "resume with the recipe the run was started with, choose another --out, or start over with --fresh",
) -> None:
    """Raise BadInput about the first tensor of these kinds with a name or shape that differs between the checkpoint and the layouts.
    spare: prefixes of names that the layouts may lack."""
    alone = Mesh.of(Degrees())
    wanted = {part.name: part.shape for name, layout in layouts.items() for part in stored(name, layout, alone)}
    for kind in kinds:
        held = reader.names(kind)
        for name in sorted(wanted.keys() | held.keys()):
            if wanted.get(name) != held.get(name) and not (name not in wanted and name.startswith(spare)):
                raise BadInput(
                    f"parameter {name}" if kind == "weight" else f"{kind} of parameter {name}",
                    got=f"shape {list(held[name])} in {reader.path.name}" if name in held else f"nothing in {reader.path.name}",
                    needed=f"shape {list(wanted[name])}" if name in wanted else "no such parameter: this model has none",
                    fix=fix,
                )
