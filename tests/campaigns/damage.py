"""Damaged checkpoints, for `python -m tests.campaigns damage`: a tiny run saves twice, and the newer save is changed on disk.

    step-2, step-4 -> one damage to step-4 -> resume, and load to generate -> step-2 is loaded with a message, or one line refuses

A try fails if values other than the saved ones are loaded, if an error is not one line, or if it takes more than a few seconds. Some
damages are signed: the checkpoint's hashes are computed again after the change, as by a faulty converter.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe.data import load as load_tokenizer
from moe.model.transformer import extra_state
from moe.parallelize.build import build
from moe.parallelize.engines import start_engine
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.start.resume import Resumed
from moe.train.start.state import EXTRA, SQUARES, Counters, find, parts, resume
from moe.train.use import opened
from parallel.data.engine import MOMENTS, Engine
from parallel.errors import BadInput
from parallel.mesh.layout import Box
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.precision import LossScale
from parallel.store import checkpoint
from tests.campaigns.faults import Row

LONGEST_S = 5.0
FEW, MANY = 2, 24  # tries of each kind of damage that has a random choice
KINDS = ("weight", *MOMENTS)
RUN = {
    "model": {"num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 12, "max_length": 12, "moe_every": 2},
    "experts": {"num_experts": 3},
    "router": {"preset": "deepseek_v3", "num_choices": 2, "expert_groups": 1, "top_groups": 1},  # a router with a bias
    "degrees": {"dp": 1, "ep": 1},
}
FILES = ("rank-00000.safetensors", "manifest.json", "manifest.sha256")
_RECIPES: tuple[Any, ...] = (None, [], {"model": {"num_layers": "x"}}, {"no": {}})
Values = dict[tuple[str, str], torch.Tensor]
Taken = tuple[int, Values, dict[str, Any]]
Damage = Callable[[Path, random.Random], object]


@dataclass(frozen=True)
class Saved:
    """A run's folder with two saves. values, states: by step, the tensors and the trainer's state that were saved."""

    folder: Path
    run: Run
    values: dict[int, Values]
    states: dict[int, dict[str, Any]]


def saved(folder: Path) -> Saved:
    """Save a tiny model twice, as a run of one process does."""
    folder.mkdir(parents=True)
    run, mesh = build_run(RUN), Mesh.of(Degrees())
    values: dict[int, Values] = {}
    states = {}
    for step in (2, 4):
        engine = _engine(run, mesh)
        engine.load_state(engine.layouts, partial(_numbers, engine, step), steps=step)
        for bias in extra_state(engine.module).values():
            bias.fill_(0.5 * step)
        about: dict[str, Any] = {"recipe": run.model_dump(mode="json"), "tokenizer": {"kind": "bytes"}, "data": "text"}
        made = parts(engine, mesh, counters=Counters(step, step), scale=LossScale(), **about)
        checkpoint.save(folder / "checkpoints", world=mesh.axis("world"), keep=9, **made)
        values[step], states[step] = held_by(engine), made["state"]
    return Saved(folder, run, values, states)


def _engine(run: Run, mesh: Mesh) -> Engine:
    model, layouts = build(run, mesh, device=torch.device("cpu"))
    return start_engine(run, model, layouts, mesh)


def _numbers(engine: Engine, step: int, name: str, kind: str, box: Box) -> torch.Tensor:
    """Return made-up values, different in each save, of the region `box` of a parameter's weight or moment. Moments are not negative,
    because a mean of squares is not."""
    first = dict(engine.module.named_parameters())[name].detach()[box]
    return first + step if kind == "weight" else first.abs() * step


def held_by(engine: Engine) -> Values:
    """Return copies of all values of an engine and its model by (name, kind): weights, optimizer moments, routers' biases."""
    found = {(name, kind): tensor.clone() for name in engine.layouts for kind, tensor in engine.state(name).items()}
    return found | {(name, EXTRA): bias.clone() for name, bias in extra_state(engine.module).items()}


# --- kinds of damage: each changes the folder of the newer save -------------------------------------------------------------


def _edit(name: str, change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return lambda path, rng: (path / name).write_bytes(change((path / name).read_bytes(), rng))


def _flip(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]


def _zero(raw: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(raw)), rng.randrange(1, 4096)
    return raw[:at] + b"\0" * len(raw[at : at + length]) + raw[at + length :]


def _swap(raw: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.sample(range(len(raw)), 2))
    return raw[:a] + raw[b : b + 1] + raw[a + 1 : b] + raw[a : a + 1] + raw[b + 1 :]


def _instead(name: str, make: Callable[[Path], object]) -> Damage:
    def change(path: Path, _: random.Random) -> None:
        (path / name).unlink()
        make(path / name)

    return change


def _beside(name: str, make: Callable[[Path], object]) -> Damage:
    """Return a damage that calls `make` for a path `name` next to the newer save. The save stays complete and must be loaded."""
    return lambda path, _: make(path.parent / name)


def _other_save(name: str) -> Damage:
    return lambda path, _: shutil.copy(path.parent / "step-2" / name, path / name)


def _header(text: Callable[[dict[str, Any], random.Random], Any], *, signed: bool) -> Damage:
    """Return a damage that replaces the header of a safetensors file by `text(header, rng)`. signed: compute the hashes again."""

    def change(path: Path, rng: random.Random) -> None:
        raw = (path / FILES[0]).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        made = json.dumps(text(json.loads(raw[8 : 8 + length]), rng)).encode()
        (path / FILES[0]).write_bytes(len(made).to_bytes(8, "little") + made + raw[8 + length :])
        if signed:
            sign(path)

    return change


def _length(length: int) -> Damage:
    def change(path: Path, _: random.Random) -> None:
        raw = (path / FILES[0]).read_bytes()
        (path / FILES[0]).write_bytes(length.to_bytes(8, "little") + raw[8:])
        sign(path)

    return change


def _manifest(change: Callable[[dict[str, Any], random.Random], object]) -> Damage:
    """Return a damage that changes the manifest with `change` and computes its hash again."""

    def apply(path: Path, rng: random.Random) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest, rng)
        _write(path, json.dumps(manifest))

    return apply


def _write(path: Path, manifest: str) -> None:
    (path / "manifest.json").write_text(manifest)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(manifest.encode()).hexdigest()}  manifest.json\n")


def sign(path: Path) -> None:
    """Write sizes and hashes of the changed files into the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        raw = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    _write(path, json.dumps(manifest))


def _entry(key: str, value: Callable[[Any, random.Random], Any]) -> Damage:
    def change(manifest: dict[str, Any], rng: random.Random) -> None:
        entry = rng.choice(manifest["tensors"])
        entry[key] = value(entry[key], rng)

    return _manifest(change)


def _state(section: str, value: Any) -> Damage:
    return _manifest(lambda manifest, _: manifest["state"].__setitem__(section, value))


def _without(section: str) -> Damage:
    return _manifest(lambda manifest, _: manifest["state"].pop(section))


def _gone(name: str) -> Damage:
    return lambda path, _: (path / name).unlink()


def _values(change: Callable[[torch.Tensor], torch.Tensor], *kinds: str) -> Damage:
    """Return a damage that replaces one tensor of these kinds by `change(tensor)` and computes the hashes again."""

    def apply(path: Path, rng: random.Random) -> None:
        from safetensors.torch import load_file, save_file

        held = load_file(path / FILES[0])
        key = rng.choice([key for key in held if key.rpartition("/")[2] in kinds])
        held[key] = change(held[key].clone())
        save_file(held, path / FILES[0])
        sign(path)

    return apply


def _overlapping(path: Path, rng: random.Random) -> None:
    """Store a tensor as two pieces that overlap in one row and omit another, with correct hashes and number of elements."""
    from safetensors.torch import load_file, save_file

    held, manifest = load_file(path / FILES[0]), json.loads((path / "manifest.json").read_text())
    entry = rng.choice([entry for entry in manifest["tensors"] if entry["shape"][0] > 2])
    tensor = held.pop(entry["key"])
    at = rng.randrange(1, len(tensor) - 1)
    rest = entry["start"][1:]
    held |= {"first": tensor[:at].clone(), "second": tensor[at:].clone()}
    manifest["tensors"].remove(entry)
    manifest["tensors"] += [{**entry, "key": "first"}, {**entry, "key": "second", "start": [at - 1, *rest]}]
    save_file(held, path / FILES[0])
    _write(path, json.dumps(manifest))
    sign(path)


def _retyped(entry: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a safetensors header with another dtype, so that a tensor's bytes no longer fit its shape."""
    key = rng.choice([key for key in entry if key != "__metadata__"])
    return entry | {key: entry[key] | {"dtype": rng.choice(["I8", "I32", "U8", "F16", "F8", "", 7])}}


def _reshaped(entry: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    key = rng.choice([key for key in entry if key != "__metadata__"])
    shape = entry[key]["shape"]
    return entry | {key: entry[key] | {"shape": rng.choice([[], [-1, -5], [2**62, 4], [shape[0] - 1, *shape[1:]], [*shape, 1], "x"])}}


def _moved(entry: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    key = rng.choice([key for key in entry if key != "__metadata__"])
    return entry | {key: entry[key] | {"data_offsets": rng.choice([[2**60, 2**61], [-64, 0], [0], [8, 4], "x"])}}


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = math.nan
    return tensor


def damages() -> dict[str, list[Damage]]:
    """Return the damages by name of the table's row. A damage with a random choice makes a new choice in each try."""
    each = {name: [_edit(name, change) for change in (_flip, _zero, _swap)] for name in FILES}
    return {
        **{f"bits and bytes of {name}": found for name, found in each.items()},
        "files cut, or longer": [
            _edit(name, change)
            for name in FILES
            for change in (lambda raw, rng: raw[: rng.randrange(len(raw))], lambda raw, rng: raw + rng.randbytes(rng.randrange(1, 99)))
        ],
        "files missing": [_gone(name) for name in FILES],
        "links, pipes, devices and folders instead of files": [
            _instead(name, make)
            for name in FILES
            for make in (
                lambda p: p.symlink_to("/dev/zero"),
                lambda p: p.symlink_to("/etc/hostname"),
                lambda p: p.symlink_to(p),
                os.mkfifo,
                Path.mkdir,
            )
        ],
        "beside it: names that are not a checkpoint's": [
            *(_beside(name, Path.mkdir) for name in ("step-999999999999999999999", "step-+5", "step-٣", "step-0009")),
            _beside("step-9", Path.touch),
            _beside("step-9", lambda p: p.symlink_to("nowhere")),
            _beside("step-9", lambda p: p.symlink_to(p.name)),
        ],
        "mixed from two saves": [_other_save(name) for name in FILES],
        "manifests edited, not signed": [
            _edit("manifest.json", lambda raw, _: raw.replace(b'"step": 4', b'"step": 3')),
            _edit("manifest.json", lambda raw, _: raw.replace(b"rank-00000", b"../step-2/rank-00000")),
            _edit("manifest.json", lambda raw, _: raw + b" "),
        ],
        "signed: names out of the folder, tensors gone or twice": [
            _entry("file", lambda name, _: f"../step-2/{name}x"),
            _entry("file", lambda _, __: "/etc/hostname"),
            _entry("key", lambda _, __: "nothing"),
            _entry("name", lambda name, _: name + "x"),
            _entry("kind", lambda _, __: "other"),
            _entry("start", lambda start, rng: [rng.choice([-1, 1, 2**40])] + start[1:]),
            _entry("shape", lambda shape, rng: [shape[0] + rng.choice([-1, 1]), *shape[1:]]),
            _entry("shape", lambda shape, _: [*shape, 1]),
            _manifest(lambda m, rng: m["tensors"].pop(rng.randrange(len(m["tensors"])))),
            _manifest(lambda m, rng: m["tensors"].append(rng.choice(m["tensors"]))),
            _manifest(lambda m, rng: m["tensors"].clear()),
            _overlapping,
            _manifest(lambda m, _: m["tensors"].remove(next(t for t in m["tensors"] if t["kind"] == EXTRA))),
        ],
        "signed: headers of the tensors' file": [
            _length(2**63),
            _length(2**40),
            _length(0),
            _length(5),
            *(_header(change, signed=True) for change in (_retyped, _reshaped, _moved)),
            _header(lambda header, _: [header], signed=True),
            _header(lambda header, _: {}, signed=True),
        ],
        "signed: a state that no run has": [
            *(_state("counters", c) for c in ({}, 5, {"step": -4, "updates": 0, "skipped": 0, "in_a_row": 0})),
            _state("counters", {"step": 4, "updates": 9, "skipped": 0, "in_a_row": 0}),
            _state("counters", {"step": "4", "updates": 4, "skipped": 0, "in_a_row": 0}),
            *(_state("loss_scale", s) for s in ({}, None, {"value": "nan", "good_steps": 0}, {"value": -1.0, "good_steps": 0})),
            *(_state("recipe", recipe) for recipe in _RECIPES),
            *(_state("tokenizer", t) for t in (None, {}, {"kind": "pickle"}, {"kind": "bpe", "model": {"type": "x"}})),
            *(_without(name) for name in ("counters", "loss_scale", "recipe", "tokenizer", "data")),
        ],
        "signed: numbers that no run has": [
            _values(_nan, *KINDS),
            _values(_nan, EXTRA),
            _values(lambda t: t.repeat(2), EXTRA),
            _values(lambda t: t * math.inf, "weight"),
            _values(lambda t: -t - 1, SQUARES),
            _values(lambda t: t.to(torch.int32), *KINDS),
            _values(lambda t: t[..., :-1].contiguous() if t.shape[-1] > 1 else t.repeat(2), *KINDS),
        ],
    }


def rows(*, full: bool = False, rounds: int | None = None, only: str = "") -> Iterator[Row]:
    """Yield a row for each kind of damage."""
    tries = rounds or (MANY if full else FEW)
    with tempfile.TemporaryDirectory() as home:
        given = saved(Path(home) / "saved")
        for name, found in damages().items():
            if only in name:
                made = [(n, damage) for n in range(tries) for damage in found]
                yield Row.of(name, len(made), partial(_numbered, given, made, name, Path(home)))


def _numbered(given: Saved, made: list[tuple[int, Damage]], name: str, home: Path, number: int) -> tuple[str, float]:
    return once(given, made[number][1], f"{name} {number}", home)


def once(given: Saved, damage: Damage, seed: str, home: Path) -> tuple[str, float]:
    """Damage a copy of the run, then resume from it and load it to generate. Return (problem or "", seconds)."""
    folder = home / "tried"
    shutil.copytree(given.folder, folder)
    damage(folder / "checkpoints" / "step-4", random.Random(seed))
    started = time.perf_counter()
    try:
        problem = _judge(given, folder)
    finally:
        shutil.rmtree(folder)
    took = time.perf_counter() - started
    return problem or (f"{seed}: took {took:.1f} s" if took > LONGEST_S else ""), took


def _judge(given: Saved, folder: Path) -> str:
    return _read("trained on", given, folder, resumed) or _read("generated from", given, folder, generated)


def _read(how: str, given: Saved, folder: Path, take: Callable[[Saved, Path, Callable[[str], None]], Taken]) -> str:
    """Read the folder with `take`. Return "" if it was refused in one line or gave the saved values, else the problem, after `how`."""
    said: list[str] = []
    try:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            step, values, state = take(given, folder, said.append)
    except BadInput as bad:
        return "" if len(str(bad).splitlines()) == 1 else f"not one line: {bad}"
    except Exception as error:  # a user would see a traceback
        return f"{how}: {type(error).__name__}: {error}"
    if step == 2 and not said and not printed.getvalue():
        return f"{how}: the older one was taken without a word"
    same = all(torch.equal(tensor, given.values[step][key]) for key, tensor in values.items())
    return "" if same and state == given.states[step] else f"{how}: step {step} was loaded with other contents"


def resumed(given: Saved, folder: Path, log: Callable[[str], None]) -> Taken:
    """Resume as `moe train` does. Return (step, all values of the engine, the checkpoint's state). Raises BadInput."""
    mesh = Mesh.of(Degrees())
    found = find(folder / "checkpoints", mesh, log=log)
    assert found is not None
    load_tokenizer(Resumed.of(found, given.run, ()).tokenizer)
    engine, counters, scale = _engine(given.run, mesh), Counters(), LossScale()
    recipe = given.run.model_dump(mode="json")
    resume(found, engine, mesh, counters=counters, scale=scale, data="text", recipe=recipe, log=log)
    state = found.state | {"counters": vars(counters), "loss_scale": scale.state()}
    return int(found.path.name.removeprefix("step-")), held_by(engine), state


def generated(given: Saved, folder: Path, _: Callable[[str], None]) -> Taken:
    """Load as `moe generate` and `moe eval` do. Return (step, weights and routers' biases, the state that was saved)."""
    run = opened.open(folder)
    values = {(name, "weight"): parameter.detach() for name, parameter in run.model.named_parameters()}
    return run.step, values | {(name, EXTRA): bias for name, bias in extra_state(run.model).items()}, given.states[run.step]
