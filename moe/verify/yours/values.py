"""Values of a recorded step: tensors of each rank, whole or as samples, with their places in the tensor of the whole program.

    Piece        one tensor of one rank: elements, shape, and the part that it is of a larger tensor, as far as its DTensor says
    Recorded     what one rank recorded: pieces by Key, in the order of their events
    Recording    all ranks of a folder: rank-<r>.pt (tensors) and rank-<r>.json (index); `rounded`: the same step with other orders of sums

A tensor of more than `most` elements is sampled: along each dim, of each 64 indices the first k of a hashed order are kept. k is halved
along the longest dim until the sample is small enough. So two ranks that hold parts of one tensor keep the same elements of it, if a part
begins at a multiple of 64 or its place is known. The norm of all elements is kept with a sample.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.errors import BadInput

PERIOD = 64
MOST = 2**14
VERSION = 2


class Key(NamedTuple):
    """Name of a value. kind: weight, input, output, "output gradient", "local gradient", gradient, norm, note, "weight after".
    name: of the module or parameter; slot: place of the tensor among a module's inputs or outputs."""

    kind: str
    name: str
    slot: str = ""


@dataclass(frozen=True)
class Piece:
    """A rank's tensor, or its sample. whole: shape of the DTensor that it is a part of; offset: where in it the part begins; summed_over:
    ranks that hold terms of one sum (Partial); kept: indices kept of each PERIOD, by dim."""

    values: Tensor
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    kept: tuple[int, ...]
    dtype: str
    summed_over: tuple[int, ...] = ()
    norm: float | None = None  # of all elements, if this is a sample
    name: str = ""
    rows: tuple[str, ...] = ()  # of the first input: a hash of each sample

    @staticmethod
    def of(tensor: Tensor, name: str, most: int, *, hashed: bool = False) -> Piece:
        """Copy a tensor to the host, or a sample of at most about `most` elements of it. hashed: keep a hash of each index of dim 0."""
        whole, offset, summed, local = _place(tensor.detach())
        shape, dtype = tuple(local.shape), str(local.dtype).removeprefix("torch.")
        kept = _kept(shape, most if local.is_floating_point() else 64 * most)
        piece = Piece(local, shape, whole, offset, kept, dtype, summed, name=re.sub(r"\d+", "#", name))
        if hashed and local.dim():
            samples = [row.flatten().view(torch.uint8).numpy().tobytes() for row in local.cpu()]
            piece = replace(piece, rows=tuple(hashlib.blake2b(sample, digest_size=8).hexdigest() for sample in samples))
        if local.numel() == 0 or all(k == PERIOD for k in kept):
            return replace(piece, values=local.to("cpu", copy=True))
        values = local
        for dim, at in enumerate(piece.at):
            values = values if kept[dim] == PERIOD else values.index_select(dim, (at - offset[dim]).to(local.device))
        rows = torch.linalg.vector_norm(local, dim=-1) if local.is_floating_point() else torch.zeros(())
        return replace(piece, values=values.to("cpu", copy=True), norm=float(rows.double().norm()))

    @property
    def at(self) -> list[Tensor]:
        """Indices of the kept elements in the DTensor, for each dim."""
        return [
            _sampled(torch.arange(start, start + size), self.name, dim, kept)
            for dim, (start, size, kept) in enumerate(zip(self.offset, self.shape, self.kept, strict=True))
        ]

    @property
    def sampled(self) -> bool:
        return any(k < PERIOD for k in self.kept)


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Tensor]:
    """Return (shape of the whole, offset, ranks that hold terms of a sum, local tensor)."""
    if not hasattr(tensor, "placements"):
        return tuple(tensor.shape), (0,) * tensor.dim(), (), tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    partial = [p.is_partial() for p in placements]
    here = mesh.get_coordinate() or []
    ranks = mesh.mesh[tuple(slice(None) if p else c for p, c in zip(partial, here, strict=True))]
    return tuple(tensor.shape), tuple(offset), tuple(ranks.flatten().tolist()) if any(partial) else (), tensor.to_local()


def _kept(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Return for each dim how many of PERIOD indices a sample keeps."""
    kept = [PERIOD] * len(shape)
    sizes = [float(size) for size in shape]
    while sizes and torch.tensor(sizes).prod() > most:
        free = [d for d in range(len(sizes)) if shape[d] >= PERIOD and kept[d] > 1] or [d for d in range(1, len(sizes)) if kept[d] > 1]
        if not free:
            break
        dim = max(free, key=lambda d: sizes[d])
        kept[dim], sizes[dim] = kept[dim] // 2, sizes[dim] / 2
    return tuple(kept)


def _sampled(index: Tensor, name: str, dim: int, kept: int) -> Tensor:
    if kept == PERIOD:
        return index
    order = sorted(range(PERIOD), key=lambda i: hashlib.blake2b(f"{name} {dim} {i}".encode()).digest())
    return index[torch.isin(index % PERIOD, torch.tensor(order[:kept]))]


@dataclass
class Recorded:
    """Record of one rank. pieces: each Key's tensors, one for each call; they are in the order in which their first call happened.
    modules: name -> class."""

    rank: int
    world: int
    modules: dict[str, str] = field(default_factory=dict)
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    seconds: float = 0.0
    step: str = ""  # id that all ranks' records of one step share

    @property
    def bytes(self) -> int:
        return sum(p.values.nbytes for pieces in self.pieces.values() for p in pieces)

    def write(self, folder: Path, name: str) -> None:
        """Write NAME.pt and NAME.json into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = [(key, piece) for key, pieces in self.pieces.items() for piece in pieces]
        torch.save([piece.values for _, piece in flat], folder / f"{name}.pt")
        meta = [[*key, {n: v for n, v in vars(piece).items() if n != "values"}] for key, piece in flat]
        head = {"version": VERSION, "rank": self.rank, "world": self.world, "step": self.step, "seconds": self.seconds, "bytes": self.bytes}
        (folder / f"{name}.json").write_text(json.dumps({**head, "modules": self.modules, "pieces": meta}))

    @staticmethod
    def read(file: Path) -> Recorded:
        """Read a record from its index NAME.json. Raises BadInput if it is not whole."""
        try:
            return Recorded._read(file)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, RuntimeError, UnpicklingError) as error:
            got = f"a broken record ({type(error).__name__})"
            raise BadInput(str(file), got=got, needed="an index with its .pt file", fix="record the step again") from error

    @staticmethod
    def _read(file: Path) -> Recorded:
        index = json.loads(file.read_text())
        if index["version"] != VERSION:
            raise BadInput(str(file), got=f"version {index['version']}", needed=f"version {VERSION}", fix="record the step again")
        record = Recorded(index["rank"], index["world"], index["modules"], seconds=index["seconds"], step=index["step"])
        tensors = torch.load(file.with_suffix(".pt"), weights_only=True)
        for (*key, meta), values in zip(index["pieces"], tensors, strict=True):
            lists = {n: tuple(v) for n, v in meta.items() if isinstance(v, list)}
            record.pieces.setdefault(Key(*key), []).append(Piece(values, **{**meta, **lists}))
        return record


@dataclass(frozen=True)
class Recording:
    """A folder's records: one of each rank, and one of each other order of sums, of one process."""

    folder: Path
    ranks: list[Recorded]
    rounded: list[Recorded]

    @staticmethod
    def read(folder: str | Path, *, what: str) -> Recording:
        """Read a folder that `record` wrote. Raises BadInput if it has no records, or lacks ranks."""
        home = Path(folder)
        files = sorted(home.glob("rank-*.json"), key=lambda f: int(re.sub(r"\D", "", f.stem)))
        fix = f"in your program: for step in record({str(folder)!r}, model, optimizer): ..."
        if not files:
            raise BadInput(what, got=f"{folder}, which has no rank-0.json", needed="a folder that moe.verify.record wrote", fix=fix)
        ranks = [Recorded.read(file) for file in files]
        if [r.rank for r in ranks] != list(range(ranks[0].world)):
            got = f"{folder} with records of ranks {[r.rank for r in ranks]}"
            raise BadInput(what, got=got, needed=f"records of all {ranks[0].world} ranks", fix="record the step again into a new folder")
        if len({r.step for r in ranks}) > 1:
            got = f"{folder} with records of different steps"
            raise BadInput(what, got=got, needed="records of one step", fix="record the step again into a new folder")
        return Recording(home, ranks, [Recorded.read(file) for file in sorted(home.glob("rounded-*.json"))])


@dataclass(frozen=True)
class Deviation:
    """A compared value. order: number of its event; deviation and bound: relative to the largest element; factor: of the expected
    value, if one explains the deviation; cause: in words."""

    name: str
    kind: str
    order: int
    deviation: float
    bound: float
    factor: float | None
    cause: str
    passed: bool

    def row(self) -> dict[str, Any]:
        return asdict(self)
