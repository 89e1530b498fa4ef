"""Laws of checkpoints: bitwise equal on any mesh, complete after a crash at any moment; damaged or foreign files are never read."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import math
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from moe.train.start import state
from moe.train.start.state import Counters
from moe.verify.cases import Case
from parallel.data.deepspeed import load_deepspeed
from parallel.errors import BadInput
from parallel.mesh.collectives import largest
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import EXPERT, Axis, Degrees, Mesh, divisors
from parallel.numerics.precision import LossScale
from parallel.process.fork import run_on_ranks
from parallel.process.process import World, connect
from parallel.store import checkpoint
from parallel.store.checkpoint import Piece, newest, numbered, pieces, save, verify
from parallel.store.saver import Saver
from parallel.store.stored import Reader, TensorFile, check_same_parameters
from tests.support import trained
from tests.support.tiny import Tiny, start

ALONE = Axis("world")
KINDS = ("weight", "exp_avg", "exp_avg_sq")
LAYOUTS = {
    "embedding": Layout((33, 12)),
    "norm.weight": Layout((7,)),
    "layers.1.experts.w1": Layout((4, 9, 5), {0: "ep"}, EXPERT, "expert", "layers.1.experts.{}.w1"),
}


def tensor(name: str, kind: str, salt: int, shape: tuple[int, ...]) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{name} {kind} {salt}".encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held(mesh: Mesh, salt: int) -> Iterator[tuple[str, Piece]]:
    """Yield (kind, piece) for the pieces of LAYOUTS' tensors that one rank owns. salt: different numbers give different values."""
    for name, layout in LAYOUTS.items():
        for kind in KINDS:
            if layout.is_owner(mesh):
                full = tensor(name, kind, salt, layout.shape)
                yield from ((kind, piece) for piece in pieces(name, layout, mesh, full[layout.region(mesh)]))


def put(folder: Path, step: int, *, keep: int = 9) -> Path:
    return save(folder, step, held(Mesh.of(Degrees()), step), state={"step": step}, world=ALONE, keep=keep)


def is_whole(path: Path, step: int) -> bool:
    """Return whether the checkpoint verifies, and every value equals the saved one. step: the salt of the values."""
    verify(path)
    reader = Reader(path)
    mesh = Mesh.of(Degrees())
    return reader.state == {"step": step} and all(
        torch.equal(reader.load(name, kind, layout, mesh), tensor(name, kind, step, layout.shape))
        for name, layout in LAYOUTS.items()
        for kind in KINDS
    )


def silent(_: str) -> None:
    pass


# --- equal bits on any mesh -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4)])
def test_a_tensor_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (size * max(1, torch.Size(shape).numel()),), dtype=torch.uint8)  # random bits, so -0 and subnormals too
    whole = raw.view(dtype).view(shape)
    whole[~whole.isfinite()] = -0.0
    piece = Piece("x", shape, (0,) * len(shape), whole)
    path = save(tmp_path, 1, [("weight", piece)], state={}, world=ALONE, keep=1)
    back = Reader(path).region("x", "weight", tuple(slice(0, n) for n in shape))
    assert back.dtype == dtype and back.shape == shape and torch.equal(back.reshape(-1).view(torch.uint8), raw)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=50)
def test_any_box_of_any_tensor_is_read(tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: st.DataObject) -> None:
    """Reader.region of any box equals the slice of the saved tensor, whether it was saved whole or in two pieces."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape) + 7
    held = [Piece("whole", tuple(shape), (0,) * len(shape), whole)]
    if shape:
        cut = data.draw(st.integers(0, shape[0]))
        held += [
            Piece("parts", tuple(shape), (at, *(0,) * (len(shape) - 1)), part.clone())
            for at, part in ((cut, whole[cut:]), (0, whole[:cut]))
        ]
    box = tuple(slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape)
    path = save(tmp_path_factory.mktemp("box"), 1, (("weight", piece) for piece in held), state={}, world=ALONE, keep=1)
    verify(path)
    for name in {piece.name for piece in held}:
        assert torch.equal(Reader(path).region(name, "weight", box), whole[box])


def test_files_are_read_and_not_mapped(tmp_path: Path) -> None:
    """Reader does not map files, because mapped pages would count as the process's memory and under `ulimit -d`."""
    reader = Reader(put(tmp_path, 1))
    kept = reader.region("embedding", "weight", (slice(2, 30), slice(0, 12)))
    assert kept.shape == (28, 12) and ".safetensors" not in Path("/proc/self/maps").read_text()


@st.composite
def meshes(draw: st.DrawFn) -> Degrees:
    """Draw degrees that divide 4 experts and a dim of 12."""
    dp, tp, sp = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (6, 1, 1), (2, 3, 2)]))
    ep = draw(st.sampled_from([d for d in divisors(dp * tp * sp) if 4 % d == 0]))
    return Degrees(dp=dp, tp=tp, sp=sp, ep=ep, etp=draw(st.sampled_from([d for d in divisors(dp * tp * sp // ep) if 12 % d == 0])))


@given(meshes(), meshes())
@settings(max_examples=25)
def test_every_mesh_reads_what_any_other_wrote(tmp_path_factory: pytest.TempPathFactory, writer: Degrees, reader: Degrees) -> None:
    """Shards saved by all ranks of one mesh are read bit by bit on any other mesh, for parameters cut along different dims and views."""
    layouts = {
        "dense": Layout((5, 12)),
        "column": Layout((12, 5), {0: "tp"}),
        "row": Layout((5, 12), {1: "tp"}),
        "both": Layout((12, 24), {0: "dp", 1: "tp"}),
        "experts": Layout((4, 12, 5), {0: "ep", 1: "etp"}, ("pp", "edp", "ep", "etp"), "expert", "experts.{}.w"),
    }
    full = {name: tensor(name, "weight", 0, layout.shape) for name, layout in layouts.items()}
    written = (
        ("weight", piece)
        for rank in range(writer.world)
        for mesh in [Mesh.of(writer, rank)]
        for name, layout in layouts.items()
        if layout.is_owner(mesh)
        for piece in pieces(name, layout, mesh, full[name][layout.region(mesh)])
    )
    path = save(tmp_path_factory.mktemp("mesh"), 1, written, state={}, world=ALONE, keep=1)
    stored = Reader(path)
    check_same_parameters(stored, layouts)
    for rank in range(reader.world):
        mesh = Mesh.of(reader, rank)
        for name, layout in layouts.items():
            assert torch.equal(stored.load(name, "weight", layout, mesh), full[name][layout.region(mesh)])


def contents(path: Path) -> dict[str, str]:
    """Return "name/kind" -> SHA-256 of the whole tensor, for every tensor of a checkpoint."""
    reader = Reader(path)
    found = {}
    for (name, kind), entries in sorted(reader.entries.items()):
        whole = reader.region(name, kind, tuple(slice(0, n) for n in entries[0]["shape"]))
        found[f"{name}/{kind}"] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    return found


RECIPE = Case("switch", "ddp", 1, 1, 1, "fp32").run().model_dump(mode="json")


def commit(tiny: Tiny, folder: Path, counters: Counters, scale: LossScale) -> None:
    state.save(folder, tiny.engine, tiny.mesh, counters=counters, scale=scale, recipe=RECIPE, tokenizer={}, data="text", keep=2)


def reopen(tiny: Tiny, folder: Path) -> tuple[Counters, LossScale]:
    counters, scale = Counters(), LossScale(2.0, growth_interval=5)
    told: list[str] = []
    found = state.find(folder, tiny.mesh, log=told.append)
    assert state.resume(found, tiny.engine, tiny.mesh, counters=counters, scale=scale, data="text", recipe=RECIPE, log=told.append)
    assert told == []
    return counters, scale


TOPOLOGIES = [
    ("ddp", 1, 1),
    ("ddp", 2, 2),
    ("zero1", 2, 2),
    ("zero2", 2, 1),
    ("zero3", 2, 1),
    ("zero3+cpu-all", 2, 2),
    ("fsdp", 2, 1),
    ("zero1", 4, 4),
    ("zero2+cpu", 4, 2),
    ("zero3", 4, 2),
    ("fsdp", 4, 1),
    ("ddp", 4, 2),
]
BACK = [("ddp", 1, 1), ("zero3", 2, 1), ("fsdp", 4, 1)]  # one whole, two in shards of their own


@pytest.mark.long
def test_no_expert_is_lost_or_swapped_between_layouts(tmp_path: Path) -> None:
    """A checkpoint of dp 4, ep 4 that is loaded and saved on another layout keeps each expert's weights and moments bit by bit, and also
    counters and loss scale."""
    load_deepspeed()

    def write(rank: int) -> None:
        tiny = start(Case("switch", "ddp", 4, 4, 1, "fp32"), rank)
        for step in range(2):
            tiny.step(step)
        commit(tiny, tmp_path / "first", Counters(3, 2, 1, 0), LossScale(64.0, growth_interval=5, good_steps=3))

    def convert(rank: int, world: int) -> list[Any]:
        found = []
        for kind, dp, ep in TOPOLOGIES:
            if dp == world:
                tiny = start(Case("switch", kind, dp, ep, 1, "fp32"), rank, train={"seed": 99})
                counters, scale = reopen(tiny, tmp_path / "first")
                found.append([vars(counters), scale.value, scale.good_steps, sorted(tiny.adam_steps())])
                commit(tiny, tmp_path / f"{kind} {dp} {ep}", counters, scale)
        return found

    def back(rank: int) -> None:
        for kind, dp, ep in BACK:
            tiny = start(Case("switch", "ddp", 4, 4, 1, "fp32"), rank, train={"seed": 98})
            commit(tiny, tmp_path / f"{kind} {dp} {ep} back", *reopen(tiny, tmp_path / f"{kind} {dp} {ep}"))

    run_on_ranks(write, 4, timeout_s=90)
    for world in (1, 2, 4):
        for found in run_on_ranks(convert, world, world, timeout_s=90):
            assert all(f == [{"step": 3, "updates": 2, "skipped": 1, "in_a_row": 0}, 64.0, 3, [2.0]] for f in found)
    run_on_ranks(back, 4, timeout_s=90)
    original = contents(tmp_path / "first" / "step-3")
    experts = {f"layers.1.experts.{i}.{w}/{kind}" for i in range(4) for w in ("w1", "w2", "w3") for kind in KINDS}
    assert experts <= original.keys() and len({original[e] for e in experts}) == len(experts)
    for name in [*(f"{kind} {dp} {ep}" for kind, dp, ep in TOPOLOGIES), *(f"{kind} {dp} {ep} back" for kind, dp, ep in BACK)]:
        assert contents(tmp_path / name / "step-3") == original, name


def test_a_rank_begins_another_file_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's tensors are equal in one file and in several. A file ends when FILE_BYTES are reached, and only one file's tensors are
    taken from the iterator at a time."""
    named = {f"w{number}": torch.randn(number, 100) for number in range(1, 8)}  # 400, 800 ... 2800 bytes
    asked: list[str] = []
    before: list[int] = []  # for each file: number of tensors taken from `held` when it was written
    write = checkpoint.save_file

    def held() -> Iterator[tuple[str, Piece]]:
        for name, tensor in named.items():
            asked.append(name)
            yield "weight", Piece(name, tuple(tensor.shape), (0, 0), tensor)

    monkeypatch.setattr(checkpoint, "save_file", lambda tensors, path: (before.append(len(asked)), write(tensors, path)))
    found = []
    for limit in (2**20, 1200):
        asked.clear(), before.clear()
        monkeypatch.setattr(checkpoint, "FILE_BYTES", limit)
        path = save(tmp_path / str(limit), 1, held(), state={}, world=ALONE, keep=1)
        found.append([contents(path), sorted(p.name for p in path.glob("*.safetensors")), list(before)])
    (one, files, at_end), (many, parts, on_the_way) = found
    assert one == many and files == ["rank-00000.safetensors"] and at_end == [7]
    assert parts == [*(f"rank-00000-{n}.safetensors" for n in range(1, 6)), "rank-00000.safetensors"]
    assert on_the_way == [3, 4, 5, 6, 7, 7]  # one more than the files so far contain


# --- a crash at any moment --------------------------------------------------------------------------------------------


class Boundaries:
    """Counts the system calls of a save, and calls `act(count, writes)` before each. `act` may copy the folder, or raise."""

    SEEN = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")
    hears: ClassVar[list[Boundaries]] = []  # Python cannot remove an audit hook, so one hook serves the objects in this list

    def __init__(self, act: Callable[[int, bool], None]) -> None:
        self.act, self.count = act, 0

    def save(self, folder: Path, keep: int) -> int:
        """Save step 3. Return 0, or 3 if the save raised BadInput."""
        listen()
        save_file = checkpoint.save_file

        def in_halves(tensors: dict[str, Tensor], path: Path) -> None:
            self._pass_by()
            save_file(tensors, path)
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            self._pass_by()
            path.write_bytes(whole)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda handle: self._pass_by())
            patch.setattr(checkpoint, "save_file", in_halves)
            patch.setattr(Boundaries, "hears", [self])
            try:
                put(folder, 3, keep=keep)
            except BadInput:
                return 3
            return 0

    def _pass_by(self, *, writes: bool = True) -> None:
        self.count += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Boundaries, "hears", [])
            self.act(self.count, writes)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in self.SEEN:
            self._pass_by(writes=event in ("os.rename", "os.mkdir") or (event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))))


def _hear(event: str, args: tuple[Any, ...]) -> None:
    for each in Boundaries.hears:
        each.hear(event, args)


@cache
def listen() -> None:
    """Add the hook once, by the first test that needs it: from then on each `id()` of this process calls Python code."""
    sys.addaudithook(_hear)


def killed(origin: Path, copies: Path, keep: int) -> Iterator[tuple[int, Path, int]]:
    """Yield (number of a system call, copy of the folder before this call, 77) for each call before which the folder changed. The copy is
    the folder that a process killed at this point would leave."""
    last: dict[str, bytes | None] = {}

    def copy(at: int, writes: bool) -> None:
        now = {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
        if now != last:
            last.clear(), last.update(now)
            shutil.copytree(folder, copies / str(at))

    folder = shutil.copytree(origin, copies / "saved")
    assert Boundaries(copy).save(folder, keep) == 0
    taken = sorted(int(path.name) for path in copies.iterdir() if path.name != "saved")
    assert len(taken) > 10
    yield from ((at, copies / str(at), 77) for at in taken)


def failing(origin: Path, copies: Path, keep: int, *, ever: bool) -> Iterator[tuple[int, Path, int]]:
    """Yield (number of a system call, folder, result of the save) for saves in which this call fails with ENOSPC; with `ever`, all later
    writes fail too."""
    for stop in range(1, 1000):

        def fail(at: int, writes: bool, stop: int = stop) -> None:
            if at == stop or (ever and at > stop and writes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        folder, boundaries = shutil.copytree(origin, copies / str(stop)), Boundaries(fail)
        code = boundaries.save(folder, keep)
        if boundaries.count < stop:
            assert code == 0 and stop > 20
            return
        yield stop, folder, code
    raise AssertionError("a save has no end")


def nothing_before(folder: Path) -> None:
    pass


def two_before(folder: Path) -> None:
    put(folder, 1), put(folder, 2)


def two_before_and_a_dead_one(folder: Path) -> None:
    two_before(folder)
    shutil.copytree(folder / "step-1", folder / "step-3.tmp")
    shutil.copytree(folder / "step-1", folder / "step-2.old.tmp")


def the_same_one_damaged(folder: Path) -> None:
    two_before(folder)
    put(folder, 3)
    (folder / "step-3" / "rank-00000.safetensors").write_bytes(b"damaged")


# Failing calls are tried only in the folders with the most files, which contain the files of all other cases.
@pytest.mark.parametrize(
    "before, keep, what",
    [
        (nothing_before, 2, "kill"),
        (two_before_and_a_dead_one, 2, "kill"),
        (two_before_and_a_dead_one, 1, "once"),
        *((the_same_one_damaged, 1, what) for what in ("kill", "once", "ever")),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_at_every_boundary_what_has_a_name_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None], keep: int, what: str
) -> None:
    """A save of step 3 is interrupted at each of its system calls. Older checkpoints are removed only after it is committed, the newest
    complete checkpoint is read afterwards, and the next save succeeds."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # for speed: a killed process loses nothing that is in the page cache
    origin = tmp_path / "origin"
    origin.mkdir()
    before(origin)
    good = {step for step, _ in numbered(origin)} - ({3} if before is the_same_one_damaged else set())
    copies = tmp_path / "copies"
    copies.mkdir()
    trials = killed(origin, copies, keep) if what == "kill" else failing(origin, copies, keep, ever=what == "ever")
    for at, folder, code in trials:
        named = dict(numbered(folder))
        stands = 3 in named and named[3].joinpath("rank-00000.safetensors").read_bytes() != b"damaged"
        assert all(is_whole(path, step) for step, path in named.items() if stands or step in good), at
        assert stands or good <= named.keys(), at
        assert stands or code != 0, at
        found = newest(folder, world=ALONE, log=silent)
        assert (found.name if found else None) == ("step-3" if stands else f"step-{max(good)}" if good else None), at
        assert is_whole(put(folder, 4, keep=keep), 4)
        assert not list(folder.glob("*.tmp")), at  # temporary folders of the killed save are removed
        shutil.rmtree(folder)


def test_everything_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a save: fsync each complete file, fsync the folder, rename it, fsync its parent, then remove the old checkpoint."""
    put(tmp_path, 1)
    told: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        told.append(("fsync", path.name, path.stat().st_size if path.is_file() else 0))
        fsync(handle)

    def note_rename(self: Path, target: Path) -> Path:
        told.append(("rename", f"{self.name} {target.name}", 0))
        return rename(self, target)

    monkeypatch.setattr(checkpoint.os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    path = put(tmp_path, 2, keep=1)
    order = [(what, name) for what, name, _ in told]
    named = order.index(("rename", "step-2.tmp step-2"))
    for file in path.iterdir():
        assert ("fsync", file.name, file.stat().st_size) in told[:named]
    assert order[named - 1] == ("fsync", "step-2.tmp") and order[named + 1] == ("fsync", tmp_path.name)
    assert order[named + 2 :] == [("rename", "step-1 step-1.old.tmp")]


# --- damage -----------------------------------------------------------------------------------------------------------

SHARDS = ("rank-00000.safetensors", "rank-00001.safetensors")
FILES = (*SHARDS, "manifest.json", "manifest.sha256")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two intact checkpoints of two ranks with ep 2."""
    folder = tmp_path_factory.mktemp("two")

    def work(rank: int) -> None:
        mesh = connect(Degrees(dp=2, ep=2), World(rank, 2))
        for step in (1, 2):
            save(folder, step, held(mesh, step), state={"step": step}, world=mesh.axis("world"), keep=9)

    run_on_ranks(work, 2, timeout_s=60)
    return folder


def rewritten(path: Path, manifest: str) -> None:
    """Replace a checkpoint's manifest, and write the digest that matches."""
    (path / "manifest.json").write_text(manifest)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(manifest.encode()).hexdigest()}  manifest.json\n")


def mutants() -> dict[str, tuple[str, Callable[[Path], object]]]:
    """Return name of a kind of damage -> (file that the error must name, function that damages a checkpoint's folder)."""
    chance = random.Random(7)
    found: dict[str, tuple[str, Callable[[Path], object]]] = {}

    def edit(file: str, name: str, change: Callable[[bytes], bytes]) -> None:
        told = "manifest.json" if file == "manifest.sha256" else file
        found[f"{name} of {file}"] = told, lambda path: (path / file).write_bytes(change((path / file).read_bytes()))

    for file in FILES:
        for _ in range(10):
            place, bit = chance.random(), chance.randrange(8)
            edit(file, f"bit {bit} at {place:.4f}", lambda b, p=place, n=bit: _flip(b, int(p * len(b)), n))
        for share in (0.0, 0.3, 0.9):
            edit(file, f"the first {share}", lambda b, s=share: b[: int(s * len(b))])
        edit(file, "all but a byte", lambda b: b[:-1])
        edit(file, "one byte more", lambda b: b + b"\0")
        edit(file, "a zeroed page", lambda b: b[: len(b) // 3] + bytes(min(64, len(b) // 3)) + b[len(b) // 3 + min(64, len(b) // 3) :])
        edit(file, "the header", lambda b: b"\xff" * 8 + b[8:])
        told = "manifest.json" if file == "manifest.sha256" else file
        found[f"no {file}"] = file, lambda path, f=file: (path / f).unlink()
        found[f"a folder instead of {file}"] = file, lambda path, f=file: ((path / f).unlink(), (path / f).mkdir())
        found[f"{file} of another step"] = told, lambda path, f=file: shutil.copy(path.parent / "step-1" / f, path / f)
        found[f"{file} that leads nowhere"] = file, lambda path, f=file: ((path / f).unlink(), (path / f).symlink_to("gone"))
    for shard in SHARDS:
        found[f"{shard} that never ends"] = shard, lambda path, f=shard: ((path / f).unlink(), (path / f).symlink_to("/dev/zero"))
    found["swapped shards"] = SHARDS[0], _swap
    found["one shard twice"] = SHARDS[1], lambda path: shutil.copy(path / SHARDS[0], path / SHARDS[1])
    found["another step's whole manifest"] = SHARDS[0], lambda path: [shutil.copy(path.parent / "step-1" / f, path / f) for f in FILES[2:]]
    found["no file at all"] = "manifest.json", lambda path: [(path / f).unlink() for f in FILES]
    for text in ("", "hello", "5", "null", "[]", "{}", '"x"', '{"format": 1}', '{"format": 1, "files": []}'):
        found[f"a manifest that is {text!r}"] = "manifest.json", lambda path, t=text: rewritten(path, t)
    found["a record that is none"] = "a damaged a:", lambda path: rewritten(path, _with(path, files={"a": 5}))
    found["a manifest without end"] = "manifest.json", lambda path: rewritten(path, "[" * 200_000)
    for what, told, change in (
        ("a tensor that its file has not", SHARDS[0], {"key": "nothing"}),
        ("a piece beyond its tensor", SHARDS[0], {"start": [9, 9]}),
        ("a piece of fewer dims", SHARDS[0], {"start": [0]}),
        ("a tensor in part", "manifest.json", {"shape": [34, 12]}),
    ):
        found[what] = told, lambda path, c=change: rewritten(path, _with(path, tensors=[_entries(path)[0] | c, *_entries(path)[1:]]))
    found["a file whose tensors go on after its end"] = SHARDS[0], _cut_short
    found["another format"] = "format 2", lambda path: rewritten(path, _with(path, format=2))
    return found


def _flip(raw: bytes, place: int, bit: int) -> bytes:
    return raw[:place] + bytes([raw[place] ^ (1 << bit)]) + raw[place + 1 :]


def _swap(path: Path) -> None:
    a, b = ((path / shard).read_bytes() for shard in SHARDS)
    (path / SHARDS[0]).write_bytes(b), (path / SHARDS[1]).write_bytes(a)


def _entries(path: Path) -> list[dict[str, Any]]:
    return json.loads((path / "manifest.json").read_text())["tensors"]


def _cut_short(path: Path) -> None:
    """Remove the last byte of a file, and write the new size and hash into the manifest."""
    shard = path / SHARDS[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewritten(path, _with(path, files=files | {shard.name: {"bytes": shard.stat().st_size, "sha256": checkpoint.sha256(shard)}}))


def _with(path: Path, **changes: Any) -> str:
    return json.dumps(json.loads((path / "manifest.json").read_text()) | changes)


MUTANTS = mutants()


@pytest.mark.parametrize("name", MUTANTS)
def test_damage_is_refused_by_name_and_the_one_before_is_used(two_steps: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(two_steps, tmp_path / "x")
    told_file, mutate = MUTANTS[name]
    mutate(folder / "step-2")
    with pytest.raises(BadInput, match="^checkpoint step-2: got .*; fix: ") as refused:
        verify(folder / "step-2")
    assert told_file in str(refused.value) and "\n" not in str(refused.value)
    told: list[str] = []
    found = newest(folder, world=ALONE, log=told.append)
    assert found == folder / "step-1" and is_whole(found, 1)
    assert told == [f"skipped: {refused.value}"]


def test_there_are_many_mutants_and_the_unharmed_one_is_read(two_steps: Path) -> None:
    assert len(MUTANTS) >= 100
    assert newest(two_steps, world=ALONE, log=silent) == two_steps / "step-2" and is_whole(two_steps / "step-2", 2)


def test_all_damaged_is_refused_and_says_each(two_steps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_steps, tmp_path / "x")
    for step in (1, 2):
        _swap(folder / f"step-{step}")
    told: list[str] = []
    with pytest.raises(BadInput, match="--fresh"):  # a silent start from step 0 would replace them
        newest(folder, world=ALONE, log=told.append)
    assert [line.split(":")[1].strip() for line in told] == ["checkpoint step-2", "checkpoint step-1"]
    assert newest(tmp_path / "nowhere", world=ALONE, log=told.append) is None and len(told) == 2
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="a broken link"):
        newest(tmp_path / "link", world=ALONE, log=told.append)


def test_every_rank_takes_the_same_one_and_the_first_says_why(two_steps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_steps, tmp_path / "x")
    _swap(folder / "step-2")

    def work(rank: int) -> list[Any]:
        told: list[str] = []
        found = newest(folder, world=connect(Degrees(dp=2), World(rank, 2)).axis("world"), log=told.append)
        return [str(found), len(told)]

    assert run_on_ranks(work, 2, timeout_s=60) == [[str(folder / "step-1"), 1], [str(folder / "step-1"), 0]]


@pytest.mark.parametrize(
    ("starts", "whole"), [([(0, 0), (2, 0), (2, 3)], True), ([(0, 0), (0, 0), (2, 3)], False), ([(0, 0), (1, 2), (2, 3)], False)]
)
def test_pieces_make_up_the_whole_each_element_once(tmp_path: Path, starts: list[tuple[int, int]], whole: bool) -> None:
    """Pieces must cover a tensor without overlap. Counting their elements is not enough: overlapping pieces leave a gap elsewhere."""
    sizes = [(2, 5), (2, 3), (2, 2)]
    pieces = [("weight", Piece("w", (4, 5), start, torch.ones(size))) for start, size in zip([(0, 0), (2, 0), (2, 3)], sizes, strict=True)]
    path = save(tmp_path, 1, pieces, state={}, world=ALONE, keep=1)
    rewritten(path, _with(path, tensors=[entry | {"start": list(start)} for entry, start in zip(_entries(path), starts, strict=True)]))
    if whole:
        assert verify(path)
        return
    with pytest.raises(BadInput, match="^checkpoint step-1: got a damaged"):
        verify(path)


# --- unreadable files, which may be intact ----------------------------------------------------------------------------

UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.EMFILE)


@pytest.mark.parametrize("name", ["", "step-2", "step-2/manifest.json", "step-2/manifest.sha256", f"step-2/{SHARDS[1]}"])
def test_a_file_that_cannot_be_read_ends_the_resume_in_a_line_that_names_it(two_steps: Path, tmp_path: Path, name: str) -> None:
    """`newest` raises one line about an unreadable file on all ranks, removes nothing, and takes no older checkpoint, because the
    file may be intact."""
    folder = shutil.copytree(two_steps, tmp_path / "x")
    before, where = trained.files(folder), folder / name

    def work(rank: int) -> list[str]:
        numbers, found = list[int](), []

        def refused(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any, *a: Any, **k: Any) -> Any:
                if not isinstance(path, int) and os.fspath(path) == str(where):
                    raise OSError(numbers[-1], os.strerror(numbers[-1]), str(where))
                return real(path, *a, **k)

            return call

        if rank == 0:
            for of, what in (
                (io, "open"),
                (builtins, "open"),
                (os, "open"),
                (os, "listdir"),
                *([(os, "stat")] if name == "step-2" else []),
            ):
                setattr(of, what, refused(getattr(of, what)))
        world = connect(Degrees(dp=2), World(rank, 2)).axis("world")
        for number in UNREADABLE:
            told: list[str] = []
            numbers.append(number)
            with pytest.raises(BadInput) as said:
                newest(folder, world=world, log=told.append)
            found.append(f"{said.value} {told}")
        return found

    first, second = run_on_ranks(work, 2, timeout_s=30)
    assert first == second and trained.files(folder) == before
    for number, said in zip(UNREADABLE, first, strict=True):
        assert said.startswith(f"checkpoint file {where}: got {os.strerror(number)}, needed ")
        assert "remove" not in said and said.endswith(" []")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_file_of_another_user_is_unreadable(two_steps: Path) -> None:
    """A process without root's rights gets the error for a file without read permission, and takes no older checkpoint."""
    with tempfile.TemporaryDirectory() as home:
        folder = shutil.copytree(two_steps, Path(home) / "x")
        for place in (folder, folder.parent):
            place.chmod(0o755)
        (folder / "step-2" / SHARDS[0]).chmod(0o600)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                newest(folder, world=ALONE, log=silent)
            except BadInput as said:
                os.write(writing, str(said).encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            assert pipe.read().startswith(f"checkpoint file {folder / 'step-2' / SHARDS[0]}: got Permission denied")


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_modes_of_all_files_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = put(tmp_path / "run", 1)
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (path.parent, path, *path.iterdir())}
    assert len(modes) == 5
    assert all(mode == (0o777 if name in ("run", "step-1") else 0o666) & ~mask for name, mode in modes.items()), modes


# --- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_is_not_saved_and_older_ones_stay(two_steps: Path, tmp_path: Path, where: int) -> None:
    """If one rank has a NaN or infinity, `save` and `begin` raise the same line on all ranks. Older checkpoints are not changed."""
    folder = shutil.copytree(two_steps, tmp_path / "x")
    before = trained.files(folder)

    def work(rank: int) -> list[str]:
        mesh, said = connect(Degrees(dp=2, ep=2), World(rank, 2)), []
        saver = Saver(folder, mesh.axis("world"), keep=1)
        for value, write in product((math.nan, math.inf, -math.inf), (saver.save, saver.begin)):
            mine = list(held(mesh, 3))
            if rank == where:
                mine[-1][1].tensor.view(-1)[-1] = value
            with pytest.raises(BadInput) as refused:
                write(3, mine, state={"step": 3})
                saver.settle()
            said.append(str(refused.value))
        return said

    first, second = run_on_ranks(work, 2, timeout_s=60)
    assert first == second and trained.files(folder) == before and len(first) == 6
    assert all(
        f"step-3: got values of layers.1.experts.{2 * where + 1}.w1/exp_avg_sq that are not finite, on rank {where}" in s for s in first
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_is_not_finite_is_passed_over_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """`newest` skips a checkpoint with a NaN in its last chunk, with one line, and takes the one before. (Old versions saved NaNs.)"""
    put(tmp_path, 1)
    bad = torch.ones(5, 7, dtype=dtype)
    bad[4, 6] = math.nan
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "finite", lambda tensor: True)
        save(tmp_path, 2, [("weight", Piece("w", (5, 7), (0, 0), bad))], state={}, world=ALONE, keep=9)
    monkeypatch.setattr("parallel.store.stored.CHECKED_BYTES", 64)
    told: list[str] = []
    assert newest(tmp_path, world=ALONE, log=told.append) == tmp_path / "step-1"
    said = "checkpoint step-2: got values of w/weight that are not finite, needed finite numbers; fix: take an earlier one"
    assert told == [f"skipped: {said}"]


# --- files outside the checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["../outside", "../../x/outside", "{}/outside", "sub/../../outside", "..", "/", ""])
def test_a_manifest_cannot_name_files_outside(tmp_path: Path, way: str) -> None:
    """A manifest with paths of files outside the checkpoint's folder is refused as damaged, even if their hashes are correct."""
    folder = tmp_path / "x"
    path = put(folder, 1)
    shard = path / SHARDS[0]
    outside = folder / "outside"
    shutil.copy(shard, outside)
    name = way.format(folder)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: manifest["files"][SHARDS[0]]}
    for entry in manifest["tensors"]:
        entry["file"] = name
    rewritten(path, json.dumps(manifest))
    with pytest.raises(BadInput, match="^checkpoint step-1: got a damaged "):
        verify(path)
    shard.unlink()
    with pytest.raises(Exception):  # noqa: B017 (whatever it is, no tensor comes back)
        Reader(path).region("norm.weight", "weight", (slice(0, 7),))
    if name.endswith("outside"):  # the same name inside the checkpoint's folder is allowed
        shutil.copy(put(tmp_path / "y", 2) / SHARDS[0], path / "outside")
        assert torch.equal(Reader(path).region("norm.weight", "weight", (slice(0, 7),)), tensor("norm.weight", "weight", 2, (7,)))


# --- another model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, named, got, needed",
    [
        ({"norm.weight": Layout((8,))}, "norm.weight", "shape [7] in step-1", "shape [8]"),
        ({"embedding": Layout((12, 33))}, "embedding", "shape [33, 12] in step-1", "shape [12, 33]"),
        ({"a.weight": Layout((2,)), "z.weight": Layout((2,))}, "a.weight", "nothing in step-1", "shape [2]"),
        ({"norm.weight": None}, "norm.weight", "shape [7] in step-1", "no such parameter"),
        ({"layers.1.experts.w1": None}, "layers.1.experts.0.w1", "shape [9, 5] in step-1", "no such parameter"),
        (
            {"layers.1.experts.w1": Layout((6, 9, 5), {0: "ep"}, EXPERT, "expert", "layers.1.experts.{}.w1")},
            "layers.1.experts.4.w1",
            "nothing in step-1",
            "shape [9, 5]",
        ),
        (
            {"layers.1.experts.w1": Layout((4, 9, 6), {0: "ep"}, EXPERT, "expert", "layers.1.experts.{}.w1"), "norm.weight": None},
            "layers.1.experts.0.w1",
            "shape [9, 5] in step-1",
            "shape [9, 6]",
        ),
    ],
)
def test_another_model_is_refused_by_its_first_parameter(
    tmp_path: Path, changes: dict[str, Layout | None], named: str, got: str, needed: str
) -> None:
    reader = Reader(put(tmp_path, 1))
    check_same_parameters(reader, LAYOUTS)
    other = {name: layout for name, layout in (LAYOUTS | changes).items() if layout is not None}
    with pytest.raises(BadInput) as refused:
        check_same_parameters(reader, other)
    assert (refused.value.what, refused.value.got) == (f"parameter {named}", got) and str(refused.value.needed).startswith(needed)
    assert "--fresh" in str(refused.value.fix)


def test_a_checkpoint_without_a_moment_is_refused_where_moments_are_asked_for(tmp_path: Path) -> None:
    weights = ((kind, piece) for kind, piece in held(Mesh.of(Degrees()), 1) if (kind, piece.name) != ("exp_avg", "norm.weight"))
    reader = Reader(save(tmp_path, 1, weights, state={}, world=ALONE, keep=1))
    check_same_parameters(reader, LAYOUTS)
    with pytest.raises(BadInput, match="^exp_avg of parameter norm.weight: got nothing in step-1, needed shape"):
        check_same_parameters(reader, LAYOUTS, KINDS)


def test_resuming_another_model_changes_nothing(tmp_path: Path) -> None:
    case = Case("switch", "ddp", 1, 1, 1, "fp32")

    def work(rank: int) -> list[Any]:
        commit(start(case, rank), tmp_path, Counters(1, 1), LossScale())
        other = start(case, rank, experts={"num_experts": 2}, train={"seed": 5})
        before, counters = other.state(), Counters()
        try:
            found = state.find(tmp_path, other.mesh, log=silent)
            state.resume(found, other.engine, other.mesh, counters=counters, scale=other.scale, data="text", recipe={}, log=silent)
        except BadInput as refused:
            unchanged = all(torch.equal(t, before[n][k]) for n, parts in other.state().items() for k, t in parts.items())
            return [str(refused), unchanged, vars(counters) == vars(Counters())]
        return []

    ((text, unchanged, counted),) = run_on_ranks(work, 1, timeout_s=60)
    assert text.startswith("parameter layers.1.experts.2.w1: got shape [24, 20] in step-1, needed no such parameter")
    assert unchanged and counted


def test_resuming_says_what_moves_the_order_of_samples(tmp_path: Path) -> None:
    def work(rank: int) -> list[Any]:
        tiny = start(Case("switch", "ddp", 1, 1, 1, "fp32"), rank)
        told: list[str] = []
        opened = []
        train, data = RECIPE["train"] | {"seed": 8, "global_batch": 24, "steps": 5}, RECIPE["data"] | {"packing": True}
        recipe = RECIPE | {"train": train, "data": data}
        for _ in range(2):
            found = state.find(tmp_path, tiny.mesh, log=told.append)
            opened.append(
                state.resume(
                    found, tiny.engine, tiny.mesh, counters=Counters(), scale=LossScale(), data="b", recipe=recipe, log=told.append
                )
            )
            commit(tiny, tmp_path, Counters(1), LossScale())
        return [opened, told]

    ((opened, told),) = run_on_ranks(work, 1, timeout_s=60)
    assert opened == [False, True]
    assert [line.split(":", 1)[0] for line in told] == [
        "the training text is not the one this run was started with",
        "changed since the checkpoint, and the order of samples with it",
        "changed since the checkpoint",
    ]
    assert told[2].endswith(": train.steps: 300 -> 5")
    assert told[1].endswith(": data.packing: false -> true, train.global_batch: 12 -> 24, train.seed: 7 -> 8")


# --- disks ------------------------------------------------------------------------------------------------------------


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["save_file", "fsync", "a real limit"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk_on_one_rank_is_bad_input_on_every_rank(two_steps: Path, tmp_path: Path, what: str, where: int) -> None:
    folder = shutil.copytree(two_steps, tmp_path / "x")

    def work(rank: int) -> str:
        mesh = connect(Degrees(dp=2, ep=2), World(rank, 2))
        if rank == where and what == "save_file":
            checkpoint.save_file = full_disk
        elif rank == where and what == "fsync":
            checkpoint.os.fsync = full_disk  # type: ignore[assignment]
        elif rank == where:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            save(folder, 3, held(mesh, 3), state={"step": 3}, world=mesh.axis("world"), keep=1)
        except BadInput as refused:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
            return str(refused)
        return "saved"

    told = run_on_ranks(work, 2, timeout_s=60)
    reason = "File too large" if what == "a real limit" else os.strerror(errno.ENOSPC)
    assert told[0] == told[1] and reason in told[0] and f"on rank {where}" in told[0]
    assert all(str(folder) in text and "free disk space" in text for text in told)
    assert sorted(p.name for p in folder.iterdir()) == ["step-1", "step-2"]  # no unfinished save takes disk space
    assert is_whole(folder / "step-1", 1) and is_whole(folder / "step-2", 2)


def test_any_error_of_one_rank_is_told_on_every_rank_and_none_waits(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        world = connect(Degrees(dp=2), World(rank, 2)).axis("world")
        if rank == 1:
            checkpoint.save_file = lambda *_, **__: {}["no such entry"]
        with pytest.raises(BadInput) as refused:
            save(tmp_path, 3, [("weight", Piece(f"w{rank}", (2,), (0,), torch.ones(2)))], state={}, world=world, keep=1)
        return str(refused.value)

    first, second = run_on_ranks(work, 2, timeout_s=60)
    assert first == second and "KeyError: 'no such entry'" in first
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_between_two_files_leaves_no_rank_in_a_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of `held` may be gathered from all ranks. Rank 1 cannot write its second file of five, and still takes part in each gather."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1)

    def work(rank: int) -> str:
        world = connect(Degrees(dp=2), World(rank, 2)).axis("world")

        def gathered() -> Iterator[tuple[str, Piece]]:
            for n in range(5):
                largest(n, world)
                yield "weight", Piece(f"w{rank}{n}", (2,), (0,), torch.ones(2))

        if rank == 1:
            write = checkpoint.save_file
            checkpoint.save_file = lambda held, path, *_: full_disk() if "-1.safe" in path.name else write(held, path)
        with pytest.raises(BadInput) as refused:
            save(tmp_path, 3, gathered(), state={}, world=world, keep=1)
        return str(refused.value.got)

    first, second = run_on_ranks(work, 2, timeout_s=60)
    assert first == second == f"{os.strerror(errno.ENOSPC)} on rank 1"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_bad_input_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(rank: int) -> str:
        mesh = connect(Degrees(dp=2), World(rank, 2))
        with pytest.raises(BadInput) as refused:
            save(tmp_path / "file", 3, held(mesh, 3), state={}, world=mesh.axis("world"), keep=1)
        return str(refused.value.got)

    first, second = run_on_ranks(work, 2, timeout_s=60)
    assert first == second and first.endswith("on rank 0")


def test_a_rank_that_dies_while_saving_leaves_the_older_one(two_steps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_steps, tmp_path / "x")

    def work(rank: int) -> None:
        mesh = connect(Degrees(dp=2, ep=2), World(rank, 2))
        if rank == 1:
            checkpoint.save_file = lambda *_: os._exit(9)
        save(folder, 3, held(mesh, 3), state={"step": 3}, world=mesh.axis("world"), keep=1)

    with pytest.raises(RuntimeError, match="rank 1 gave no result"):
        run_on_ranks(work, 2, timeout_s=30)
    assert newest(folder, world=ALONE, log=silent) == folder / "step-2" and {step for step, _ in numbered(folder)} == {1, 2}


# --- number of checkpoints that are kept ------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    steps = [2, 5, 9, 10, 100]
    for done, step in enumerate(steps, 1):
        put(tmp_path, step, keep=keep)
        assert sorted(n for n, _ in numbered(tmp_path)) == steps[max(0, done - keep) : done]
    assert all(is_whole(path, step) for step, path in numbered(tmp_path))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_of_a_higher_number_does_not_push_out_the_new(tmp_path: Path, keep: int) -> None:
    """A run that skipped the damaged step 100 and resumed from 80 saves at 90: step 100 does not count among the `keep` newest."""
    for step in (80, 100):
        put(tmp_path, step)
    (tmp_path / "step-100" / SHARDS[0]).unlink()
    put(tmp_path, 90, keep=keep)
    assert newest(tmp_path, world=ALONE, log=silent) == tmp_path / "step-90"
    assert ((tmp_path / "step-80").exists()) == (keep == 2)


def test_only_committed_folders_count(tmp_path: Path) -> None:
    put(tmp_path, 7)
    for name in ("step-8.tmp", "step-9.old.tmp", "step-", "step-x", "step-1e3", "other-10"):
        shutil.copytree(tmp_path / "step-7", tmp_path / name)
    (tmp_path / "step-11").write_text("a file")
    assert numbered(tmp_path) == [(7, tmp_path / "step-7")] and numbered(tmp_path / "nowhere") == []


NO_STEPS = ("step-999999999999999999999", f"step-{2**53}", "step-+9", "step-٣", "step-0009", "step--1", "step-1e3", "step-9.0", "step-")


@pytest.mark.parametrize("name", [*NO_STEPS, "a file", "a dangling link", "a link in a circle"])
def test_other_files_in_the_folder_are_named_and_ignored(tmp_path: Path, name: str) -> None:
    """`newest` names entries that are no checkpoints, and takes the newest checkpoint. A later save of that step replaces such an entry,
    which does not count among the kept checkpoints."""
    put(tmp_path, 4), put(tmp_path, 6)
    there = tmp_path / (name if name in NO_STEPS else "step-9")
    if name == "a file":
        there.write_text("of somebody")
    elif name in NO_STEPS:
        shutil.copytree(tmp_path / "step-6", there)
    else:
        there.symlink_to("step-9" if "circle" in name else "nowhere")
    told: list[str] = []
    assert newest(tmp_path, world=ALONE, log=told.append) == tmp_path / "step-6"
    assert told == [f"ignored, because they are no checkpoints: {there.name} in {tmp_path}"]
    put(tmp_path, 9, keep=2)
    assert sorted(numbered(tmp_path)) == [(step, tmp_path / f"step-{step}") for step in (6, 9)] and is_whole(tmp_path / "step-9", 9)
    put(tmp_path, 12, keep=9)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_named_step_is_taken_or_refused_with_those_that_are_there(tmp_path: Path) -> None:
    put(tmp_path, 10), put(tmp_path, 9), put(tmp_path, 100)
    assert newest(tmp_path, world=ALONE, log=silent, step=9) == tmp_path / "step-9"
    with pytest.raises(BadInput, match="^--from_step: got 11, needed one of 9, 10, 100; fix: --from_step 100$"):
        newest(tmp_path, world=ALONE, log=silent, step=11)
    with pytest.raises(BadInput, match="^--from_step: got 11, needed a checkpoint in .*nowhere; fix: train first$"):
        newest(tmp_path / "nowhere", world=ALONE, log=silent, step=11)
    (tmp_path / "step-10" / SHARDS[0]).unlink()
    with pytest.raises(BadInput, match="^checkpoint step-10: got a damaged"):  # another step is not taken instead
        newest(tmp_path, world=ALONE, log=silent, step=10)


def test_a_header_of_more_tensors_than_any_model_has_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_file({f"t{n}": torch.zeros(0) for n in range(5)}, path)
    assert len(TensorFile(path).places) == 5
    monkeypatch.setattr("parallel.store.stored.MOST_TENSORS", 4)
    monkeypatch.setattr("json.loads", lambda text: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="a header of 5 tensors, more than 4"):
        TensorFile(path)
