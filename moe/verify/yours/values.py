"""Values of a recorded step: tensors of each rank, complete or sampled, with their position in the unsharded tensor.

    Piece        one tensor of one rank: elements, shape, and, if it is a DTensor, its position in the global tensor
    Recorded     record of one rank: pieces by Key, in the order in which they were recorded
    Recording    all ranks of a folder: rank-<r>.pt (tensors) and rank-<r>.json (index); `rounded`: the same step with sums in other
                 orders, to measure rounding

Of a tensor with more than `most` elements, a sample is stored: along each dim, k of every 64 indices are kept, chosen by a hash. k begins
at 64 and is halved along the longest dim until the sample is small enough. A rank's shard therefore keeps the same elements as the
unsharded tensor does, if the shard begins at a multiple of 64 or its position is known. The norm of all elements is stored with a sample.
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

from parallel.errors import BadInput, counted

PERIOD = 64  # a sample keeps k of every PERIOD indices of a dim
MOST = 2**14  # default number of elements above which only a sample of a tensor is stored
VERSION = 3  # version of the files' format
# slot of a master weight, which DeepSpeed's optimizer updates. If it differs by more than rounding from the weight that the model reads,
# that is the cause of a deviation (causes.py)
MASTER = "master"


class Key(NamedTuple):
    """Name of a recorded value. name: of the module, parameter or note. slot: path of a tensor in its module's inputs or outputs, such as
    "0.mask". kind:

        input, output, output gradient    of a call of a module
        weight, weight after              a parameter or buffer, before and after the step
        local gradient, gradient          of a parameter, before and after the reduction over ranks
        norm, note                        norm of all gradients, as torch's clipping computes it; a value that the program notes"""

    kind: str
    name: str
    slot: str = ""


@dataclass(frozen=True)
class Piece:
    """A rank's tensor, or a sample of it. shape: of the rank's tensor. whole: shape of the global tensor; equal to `shape` if the tensor is
    no DTensor. offset: for each dim, the rank's first index in the global tensor. index: for each dim, all of the rank's indices in the
    global tensor, if they are not contiguous; else (). summed_over: ranks that hold the terms of a sum (DTensor's Partial). kept: for each
    dim, the number of stored indices out of every PERIOD."""

    values: Tensor
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    kept: tuple[int, ...]
    dtype: str
    summed_over: tuple[int, ...] = ()
    norm: float | None = None  # norm of all elements of the rank's tensor, if this is a sample; else None
    name: str = ""  # name of the value, with # for each number; decides which indices a sample keeps
    rows: tuple[str, ...] = ()  # only for the first input: a hash of the data at each index of dim 0
    index: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(tensor: Tensor, name: str, most: int, *, hashed: bool = False) -> Piece:
        """Copy a tensor, or a sample of about `most` elements of it, to the host. hashed: also store a hash of the data at each index of
        dim 0."""
        whole, index, summed, local = _place(tensor.detach())
        shape, dtype = tuple(local.shape), str(local.dtype).removeprefix("torch.")
        kept = _kept(shape, most if local.is_floating_point() else 64 * most)
        offset = tuple(int(at[0]) if len(at) else 0 for at in index) or (0,) * len(shape)
        strided = any(len(at) and int(at[-1] - at[0]) >= len(at) for at in index)
        places = tuple(tuple(at.tolist()) for at in index) if strided else ()
        piece = Piece(local, shape, whole, offset, kept, dtype, summed, name=re.sub(r"\d+", "#", name), index=places)
        if hashed and local.dim():
            samples = [row.flatten().view(torch.uint8).numpy().tobytes() for row in local.cpu()]
            piece = replace(piece, rows=tuple(hashlib.blake2b(sample, digest_size=8).hexdigest() for sample in samples))
        if local.numel() == 0 or all(k == PERIOD for k in kept):
            return replace(piece, values=local.to("cpu", copy=True))
        values = local
        for dim, (held, at) in enumerate(zip(piece.places, piece.at, strict=True)):
            values = values if kept[dim] == PERIOD else values.index_select(dim, torch.searchsorted(held, at).to(local.device))
        rows = torch.linalg.vector_norm(local, dim=-1) if local.is_floating_point() else torch.zeros(())
        return replace(piece, values=values.to("cpu", copy=True), norm=float(rows.double().norm()))

    @property
    def at(self) -> list[Tensor]:
        """Indices of the stored elements in the global tensor, for each dim."""
        return [_sampled(at, self.name, dim, kept) for dim, (at, kept) in enumerate(zip(self.places, self.kept, strict=True))]

    @property
    def places(self) -> list[Tensor]:
        """Indices of all elements of the rank's tensor in the global tensor, ascending, for each dim."""
        if self.index:
            return [torch.tensor(at) for at in self.index]
        return [torch.arange(start, start + size) for start, size in zip(self.offset, self.shape, strict=True)]

    def cut(self, gradient: Tensor) -> Tensor:
        """Return the elements of a gradient that belong to this weight, a rank's shard. (torch's tensor-parallel styles may leave the
        unsharded gradient on each rank.)"""
        for dim, at in enumerate(self.places if gradient.shape == self.whole and not self.sampled else ()):
            gradient = gradient.index_select(dim, at)
        return gradient

    @property
    def sampled(self) -> bool:
        return any(k < PERIOD for k in self.kept)


def _place(tensor: Any) -> tuple[tuple[int, ...], list[Tensor], tuple[int, ...], Tensor]:
    """Return (global shape, for each dim the indices of the local tensor in the global one, ranks that hold terms of a sum, local tensor).
    For a tensor that is no DTensor, the second and third are empty."""
    if not hasattr(tensor, "placements"):
        return tuple(tensor.shape), [], (), tensor
    mesh, placements, here = tensor.device_mesh, tensor.placements, tensor.device_mesh.get_coordinate() or []
    index = [torch.arange(size).reshape([-1 if d == dim else 1 for d in range(tensor.dim())]) for dim, size in enumerate(tensor.shape)]
    for number, placement in enumerate(placements):
        if (dim := getattr(placement, "dim", None)) is not None:  # Shard, also strided (fused weights, FSDP2 with tensor parallelism)
            index[dim] = placement._split_tensor(index[dim], mesh.size(number), with_padding=False, contiguous=False)[0][here[number]]
    partial = [p.is_partial() for p in placements]
    ranks = mesh.mesh[tuple(slice(None) if p else c for p, c in zip(partial, here, strict=True))]
    summed = tuple(ranks.flatten().tolist()) if any(partial) else ()
    return tuple(tensor.shape), [at.flatten() for at in index], summed, tensor.to_local()


def _kept(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Return for each dim how many of every PERIOD indices a sample keeps, so that it has at most `most` elements if possible."""
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


def roundoff(of: list[list[Piece]]) -> float:
    """Return the largest machine epsilon of the pieces' dtypes."""
    dtypes = {p.dtype for pieces in of for p in pieces}
    return max((torch.finfo(getattr(torch, d)).eps for d in dtypes if d.startswith(("float", "bfloat"))), default=0.0)


@dataclass
class Recorded:
    """Record of one rank. pieces: Key -> its tensors, one for each call of the module; keys are in the order of their first calls. modules:
    module's name -> name of its class."""

    rank: int
    world: int
    modules: dict[str, str] = field(default_factory=dict)
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    seconds: float = 0.0  # time that copying and sampling took
    step: str = ""  # random id of the step, equal on all ranks

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
        """Read a record from its index NAME.json. Raises BadInput if it is damaged or incomplete."""
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
    """The records in a folder. ranks: one record for each rank. rounded: records of the step with sums in other orders, one for each order;
    only a single process makes them."""

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
            raise BadInput(
                what, got=got, needed=f"records of {counted(ranks[0].world, 'rank')}", fix="record the step again into a new folder"
            )
        if len({r.step for r in ranks}) > 1:
            got = f"{folder} with records of different steps"
            raise BadInput(what, got=got, needed="records of one step", fix="record the step again into a new folder")
        return Recording(home, ranks, [Recorded.read(file) for file in sorted(home.glob("rounded-*.json"))])


@dataclass(frozen=True)
class Deviation:
    """Result of comparing one value. order: position of the value in the order of computation. deviation: largest difference; bound:
    largest deviation that passes; both relative to the largest element. factor: found / expected value, if a factor explains the
    deviation. cause: likely cause in words."""

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
