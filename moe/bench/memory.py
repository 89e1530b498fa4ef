"""Bytes of model states on each rank, measured, against the ZeRO formulas (parallel/states.py).

    storages    what torch holds when a backward pass is over and the step is not yet made: unique storages, told apart into parameters,
                gradients and optimizer state; `other` is the rest. Whole gradients (stages 0 and 1) count as they arrive, because an
                engine may drop those of others before the backward pass returns
    resident    what the process then holds more than before the model was made, as the system sees it

Each case runs in processes of its own, which give freed memory back. The model has 100M parameters in two wide layers and sees a few
tokens, so that activations do not matter. `moe bench memory --kinds ddp,zero1 --nproc 4 --json FILE`.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe.bench.sharded import CPU, Kind, Started, kinds_of, load_engines, start, tokens_of
from moe.results import write_json
from moe.train.step import accumulate, finish
from parallel.fork import run_on_ranks
from parallel.mesh import divisors
from parallel.precision import LossScale
from parallel.states import MIXED, STAGES, States, model_states, sparse_model_states

LENGTH, TOLERANCE = 7, 0.05


@dataclass(frozen=True)
class Shape:
    """Of the model; with `experts` its second layer has so many, each as wide as the first layer's network."""

    layers: int = 2
    width: int = 2048
    hidden: int = 8192
    experts: int = 0

    def recipe(self, kind: Kind, ranks: int, *, ep: int = 1) -> dict[str, Any]:
        """`ep` ranks share the experts."""
        model = {"num_layers": self.layers, "d_model": self.width, "num_heads": 4, "d_ff": self.hidden, "max_length": LENGTH}
        values: dict[str, Any] = {"model": model, "sharding": kind.sharding, "degrees": {"dp": ranks, "ep": ep}}
        values |= {"train": {"global_batch": ranks, "eval_sequences": ranks}, "optimizer": {"warmup_steps": 0}}
        if self.experts:
            model |= {"moe_every": 2}
            values |= {"experts": {"num_experts": self.experts}, "router": {"preset": "switch", "capacity_factor": None}}
        return values


DENSE = Shape()
SPARSE = Shape(width=1152, hidden=4608, experts=8)


# --- what is there -------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Anonymous memory of this process, after the C library has given back what it keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return _status("RssAnon")


def _status(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the unique storages behind some tensors, by address; of a distributed tensor, those of this rank."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta" and not local.is_sparse:
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def living() -> list[Tensor]:
    """Every tensor that Python knows of."""
    gc.collect()
    return [t for t in gc.get_objects() if issubclass(type(t), Tensor)]


def _of_parameters(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter
        yield getattr(parameter, "ds_tensor", parameter)  # DeepSpeed's shard of a parameter that is not gathered


def _of_optimizers() -> Iterator[Tensor]:
    for optimizer in [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@dataclass(frozen=True)
class Held:
    """Bytes by what they are for; `other`: buckets, buffers, copies, batches."""

    states: States
    other: int


def held(started: Started, *, before: set[int]) -> Held:
    """What torch holds of the model now, apart from storages that were there before."""
    parameters = storages(_of_parameters(started.model))
    optimizer = {k: n for k, n in storages(_of_optimizers()).items() if k not in parameters}
    grads = [p.grad for p in started.model.parameters() if p.grad is not None]
    gradients = storages([*grads, *(grad for _, grad in started.engine.owned_gradients())])
    gradients = {k: n for k, n in gradients.items() if k not in parameters and k not in optimizer}
    named = parameters.keys() | optimizer.keys() | gradients.keys()
    other = {k: n for k, n in storages(living()).items() if k not in named and k not in before}
    return Held(States(sum(parameters.values()), sum(gradients.values()), sum(optimizer.values())), sum(other.values()))


@dataclass
class Arriving:
    """The most that whole gradients took at once as they arrived, and what the process held at that moment."""

    model: nn.Module
    gradients: int = 0
    resident: int = 0
    hooks: list[Any] = field(default_factory=list)

    def watch(self) -> Arriving:
        self.hooks = [p.register_post_accumulate_grad_hook(self._look) for p in self.model.parameters()]
        return self

    def _look(self, _: Tensor) -> None:
        now = sum(storages(p.grad for p in self.model.parameters() if p.grad is not None).values())
        if now > self.gradients:
            self.gradients, self.resident = now, resident_bytes()


def measure(rank: int, ranks: int, kind: Kind, shape: Shape, ep: int, folder: str) -> dict[str, Any]:
    """One case on the ranks that are running: this rank's row."""
    before, known = resident_bytes(), set(storages(living()))
    started = start(shape.recipe(kind.with_path(folder), ranks, ep=ep), rank, ranks)
    engine, mesh = started.engine, started.mesh
    batch = tokens_of(rank, sequences=1, length=LENGTH)
    numbers = accumulate(engine, batch, mesh=mesh, microbatches=1, seed=0, step=0)
    finish(engine, numbers, world=mesh.axis("world"), scale=LossScale.of("none"), lr=1e-3, clip_norm=1.0, device=CPU)  # moments are born
    arriving = Arriving(started.model).watch()
    accumulate(engine, batch, mesh=mesh, microbatches=1, seed=0, step=1)
    found, resident = held(started, before=known), resident_bytes()
    states = found.states
    if kind.stage < 2 and arriving.gradients > states.gradients:
        states, resident = States(states.parameters, arriving.gradients, states.optimizer), arriving.resident
    return row_of(kind, shape, started, states, other=found.other, resident=resident - before, disk=_bytes_in(folder))


def row_of(kind: Kind, shape: Shape, started: Started, states: States, *, other: int, resident: int, disk: int) -> dict[str, Any]:
    """What was measured beside the formula."""
    mesh = started.mesh
    dp, ep, etp = (mesh.axis(name).size for name in ("dp", "ep", "etp"))
    sizes = {True: 0, False: 0}  # of the whole model: experts, and the rest
    for layout in started.layouts.values():
        sizes["ep" in layout.split.values()] += torch.Size(layout.shape).numel()
    want = sparse_model_states(dense=sizes[False], expert=sizes[True], stage=kind.stage, dp=dp, ep=ep, etp=etp, storage=kind.storage)
    measured, expected = states.total + other, want.total
    row: dict[str, Any] = {"kind": kind.name, "model": "sparse" if shape.experts else "dense", "ranks": dp, "ep": ep}
    row |= {"num_parameters": sizes[True] + sizes[False], "measured_bytes": int(measured), "expected_bytes": expected}
    row |= {"error": measured / expected - 1, "resident_bytes": resident, "resident_error": resident / expected - 1}
    row |= {f"measured_{name}": int(value) for name, value in vars(states).items()} | {"measured_other": other}
    row |= {f"expected_{name}": value for name, value in vars(want).items()}
    if kind.place == "device":
        row["passed"] = max(abs(row["error"]), abs(row["resident_error"])) <= TOLERANCE
    else:
        row |= {"moved_to": kind.place, "disk_bytes": disk}
    return row


def _bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


# --- the verb -----------------------------------------------------------------------------------------------------------


def print_papers_table(say: Callable[[str], None] = print) -> None:
    """Table 1 of the ZeRO paper by the same code: GB of model states a rank."""
    say("ZeRO paper, table 1: GB of model states on each of N ranks, 16 bits and Adam")
    say(f"{'parameters':>11}{'N':>6}" + "".join(f"{name:>10}" for name in ("DP", "stage 1", "stage 2", "stage 3")))
    for parameters in (7.5e9, 128e9, 1e12):
        for ranks in (1, 4, 16, 64, 256, 1024):
            sizes = [model_states(parameters, stage=stage, copies=ranks, storage=MIXED).total / 1e9 for stage in STAGES]
            say(f"{parameters / 1e9:>10g}B{ranks:>6}" + "".join(f"{size:>10.4g}" for size in sizes))


def main(*, kinds: str | None = None, nproc: int = 4, only: str | None = None, json: str | None = None) -> int:
    """`moe bench memory`: 1 if a kind without offload takes other bytes than the formula says, by more than 5 %."""
    chosen = kinds_of(kinds)
    torch.set_num_threads(1)
    load_engines(chosen)
    print_papers_table()
    print(f"\n{'model':<8}{'kind':<12}{'ranks':>6}{'ep':>4}{'torch holds':>15}{'formula':>15}{'error':>9}{'resident':>15}{'error':>9}")
    rows: list[dict[str, Any]] = []
    for name, shape in (("dense", DENSE), ("sparse", SPARSE)):
        if only is None or only in name:
            rows += [case(kind, shape, ranks) for kind in chosen for ranks in divisors(nproc) if ranks > 1 or shape is DENSE]
    if json:
        write_json(json, verb="bench memory", rows=rows, tolerance=TOLERANCE)
    return 1 if any(row.get("passed") is False for row in rows) else 0


def case(kind: Kind, shape: Shape, ranks: int) -> dict[str, Any]:
    """Run one case in processes of its own and print its row; of the ranks, the one that is furthest from the formula."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_on_ranks(measure, ranks, ranks, kind, shape, 2 if shape.experts else 1, folder, timeout_s=300)
    row: dict[str, Any] = max(found, key=lambda row: max(abs(row["error"]), abs(row["resident_error"])))
    cells = "".join(f"{row[name]:>15,.0f}" for name in ("measured_bytes", "expected_bytes"))
    said = "" if row.get("passed", True) else "  FAIL"
    print(
        f"{row['model']:<8}{kind.name:<12}{ranks:>6}{row['ep']:>4}{cells}{row['error']:>9.2%}"
        f"{row['resident_bytes']:>15,.0f}{row['resident_error']:>9.2%}{said}",
        flush=True,
    )
    return row
