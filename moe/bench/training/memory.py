"""Measures the bytes of model states on each rank, and compares them with the ZeRO formulas (moe/plan/job/states.py).

    torch holds    bytes of tensors between the backward pass and the update, without buckets of a fixed size. In ZeRO stages 0 and
                   1 gradients count at their peak, because an engine may free other ranks' gradients before the backward pass returns
    resident       the process's memory at the same time, as the system reports it, minus buckets and minus the process's memory before
                   the model was built
    device         with offload: bytes that remain on the device, and bytes moved to the host or to files on disk

Every case runs in new processes. The model has two wide layers and few tokens, so that nearly all memory is model states.

moe bench memory            ddp and ZeRO's stages on two ranks, 14M parameters: about 20 s on two idle cores
moe bench memory --full     all kinds on 1, 2 and 4 ranks (offload: on 2), 100M parameters, also a sparse model: many minutes
moe bench memory --kinds ddp,fsdp --only dense          only some rows of --full
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe.bench.timing import conclude
from moe.bench.training.sharded import ShardedKind, kind_of, kinds_of, load_engines, start, tokens_of
from moe.calibrate.own_step import Training
from moe.plan.job.states import States, sparse_model_states
from moe.train.start.prediction import storages
from parallel.data.buckets import SummedEarly
from parallel.data.engine import Engine
from parallel.errors import BadInput
from parallel.mesh.mesh import divisors
from parallel.process.extensions import missing_for_nvme
from parallel.process.fork import run_on_ranks
from parallel.process.libc import give_freed_memory_back

TOLERANCE = 0.05  # largest allowed difference between measured bytes and the formula, as a fraction of the formula
KINDS = (
    *("ddp", "fsdp", "zero1", "zero2", "zero3", "deepspeed1", "deepspeed2", "deepspeed3"),
    *("zero2+cpu", "zero3+cpu", "zero3+cpu-all", "zero3+nvme", "zero3+nvme-all"),
)
LENGTH = 7  # tokens of a sequence


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. hidden: hidden units of a feed-forward network or expert. experts: number of experts in the second layer; 0: that
    layer is dense."""

    layers: int = 2
    width: int = 2048
    hidden: int = 8192
    experts: int = 0

    @property
    def name(self) -> str:
        return "sparse" if self.experts else "dense"

    def recipe(self, kind: ShardedKind, ranks: int, *, ep: int = 1, precision: str = "bf16") -> dict[str, Any]:
        """Return a recipe (section -> key -> value) for `ranks` data-parallel ranks. ep: number of these ranks over which experts are
        split."""
        model = {"num_layers": self.layers, "d_model": self.width, "num_heads": 4, "d_ff": self.hidden, "max_length": LENGTH}
        values: dict[str, Any] = {"model": model, "sharding": kind.sharding, "degrees": {"dp": ranks, "ep": ep}}
        values |= {"train": {"global_batch": ranks, "eval_sequences": ranks}, "optimizer": {"warmup_steps": 0}}
        values |= {"precision": {"compute": precision}}
        if self.experts:
            model |= {"moe_every": 2}
            values |= {"experts": {"num_experts": self.experts}, "router": {"preset": "switch", "capacity_factor": None}}
        return values


DENSE = Shape()
SPARSE = Shape(width=1152, hidden=4608, experts=8)
QUICK = Shape(width=768, hidden=3072)


# --- measuring ------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Return the bytes of this process's anonymous memory, after the C library has returned its free memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def living() -> list[Tensor]:
    """Return every tensor known to Python's garbage collector."""
    time.sleep(0.1)  # gloo's threads free the tensors of the last message a little after the call returns
    gc.collect()
    return [t for t in gc.get_objects() if issubclass(type(t), Tensor)]


def shards_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield this rank's shards of the parameters in DeepSpeed's ZeRO stage 3; nothing in other engines."""
    yield from (parameter.ds_tensor for parameter in model.parameters() if hasattr(parameter, "ds_tensor"))


def _of_optimizers() -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (tensor, its gradient or None) for every parameter and every state of all optimizers in this process."""
    for optimizer in [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]:
        for stepped in (*(p for group in optimizer.param_groups for p in group["params"]), *optimizer.state):
            yield stepped, stepped.grad
        for state in optimizer.state.values():
            yield from ((value, None) for value in state.values() if isinstance(value, Tensor))


def _buckets(engine: Engine) -> Iterator[Tensor]:
    zero = getattr(getattr(engine, "engine", None), "optimizer", None)
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        yield from [bucket.buffer] if isinstance(bucket.buffer, Tensor) else bucket.buffer or ()


@dataclass(frozen=True)
class Held:
    """Bytes of tensor storages, by purpose. shards: DeepSpeed's parameter shards (ZeRO-3), which are a part of states.parameters. buckets:
    buffers in which DeepSpeed collects gradients. other: all other storages that are newer than the model, so a leak counts here.
    """

    states: States
    shards: int
    buckets: int
    other: int


def held(model: nn.Module, engine: Engine, *, before: set[int]) -> Held:
    """Return the bytes that torch now holds for the model. before: addresses of storages that are older than the model."""
    shards = storages(shards_of(model))
    parameters = shards | storages(model.parameters())
    stepped = list(_of_optimizers())
    waiting = [p.grad for p in model.parameters()] + [grad for _, grad in stepped] + [grad for _, grad in engine.owned_gradients()]
    gradients = (grad for grad in waiting if grad is not None)
    sizes, counted = [], set(before)
    for tensors in (parameters, storages(t for t, _ in stepped), storages(gradients), storages(_buckets(engine)), storages(living())):
        sizes.append(sum(size for where, size in tensors.items() if where not in counted))
        counted |= tensors.keys()
    return Held(States(sizes[0], sizes[2], sizes[1]), sum(shards.values()), sizes[3], sizes[4])


class GradientPeak:
    """Watches all later backward passes. gradients: peak bytes of all p.grad. resident: bytes of the process's memory at that peak, less
    the buffers of gradients whose sum over ranks is still running."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.model, self.engine, self.gradients, self.resident = model, engine, 0, 0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: Tensor) -> None:
        grads = storages(p.grad for p in self.model.parameters() if p.grad is not None)
        now = sum(grads.values())
        if now > self.gradients:
            started = self.engine.sums.started if isinstance(self.engine, SummedEarly) else ()
            flat = storages(one.flat for bucket in started for one in bucket)
            in_flight = sum(size for where, size in flat.items() if where not in grads)
            self.gradients, self.resident = now, resident_bytes() - in_flight


def warm_up(shape: Shape, rank: int, ranks: int, precision: str) -> None:
    """Train one step of a model with one layer of each kind (dense, MoE), before memory is measured. Libraries then allocate scratch
    memory and compile kernels, which would otherwise count as model states: oneDNN's kernels take 8 MB in bf16 on a CPU with AMX."""
    kind, values = kind_of("ddp"), replace(shape, layers=2 if shape.experts else 1)
    started = start(kind, values.recipe(kind, ranks, precision=precision), rank, ranks)
    started.step(tokens_of(rank, sequences=1, length=LENGTH), step=0)
    del started
    gc.collect()


def measure(rank: int, ranks: int, kind: ShardedKind, shape: Shape, precision: str, ep: int, folder: str) -> dict[str, Any]:
    """Train a step, then run a second one up to its update. Return this rank's table row. ep: number of ranks over which experts are split.
    folder: for model states offloaded to disk."""
    give_freed_memory_back()
    warm_up(shape, rank, ranks, precision)
    before, known = resident_bytes(), set(storages(living()))
    started = start(kind, shape.recipe(kind.with_path(folder), ranks, ep=ep, precision=precision), rank, ranks)
    engine, model = started.engine, started.model
    batch = tokens_of(rank, sequences=1, length=LENGTH)
    started.step(batch, step=0)  # allocates Adam's moments
    peak = GradientPeak(model, engine)
    started.accumulate(batch, step=1)
    found, resident = held(model, engine, before=known), resident_bytes()
    states = found.states
    if kind.stage < 2 and kind.place == "device" and peak.gradients > states.gradients:
        resident, found = peak.resident, replace(found, states=replace(states, gradients=peak.gradients), buckets=0)
    disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) // ranks
    return _row(kind, shape, started, found, resident=resident - before, disk=disk)


def _row(kind: ShardedKind, shape: Shape, started: Training, found: Held, *, resident: int, disk: int) -> dict[str, Any]:
    """Return a rank's table row: measured and expected bytes. found: bytes that torch holds. resident: growth of the process's memory.
    disk: the rank's bytes in files."""
    mesh, precision, states = started.mesh, started.run.precision.compute, found.states
    dp, ep, etp = (mesh.axis(name).size for name in ("dp", "ep", "etp"))
    sizes = {name: torch.Size(layout.shape).numel() for name, layout in started.layouts.items()}
    expert = sum(size for name, size in sizes.items() if "ep" in started.layouts[name].cut_by())
    dense, storage = sum(sizes.values()) - expert, kind.storage(precision)
    want = sparse_model_states(dense=dense, expert=expert, stage=kind.stage, dp=dp, ep=ep, etp=etp, storage=storage)
    measured, expected, resident = states.total + found.other, want.total, resident - found.buckets
    row: dict[str, Any] = {"kind": kind.name, "model": shape.name, "ranks": dp, "ep": ep, "precision": precision}
    row |= {"num_parameters": dense + expert, "measured_bytes": int(measured), "expected_bytes": expected}
    row |= {"error": measured / expected - 1, "resident_bytes": resident, "resident_error": resident / expected - 1}
    row |= {f"measured_{name}": int(value) for name, value in vars(states).items()}
    row |= {"measured_other": found.other, "buckets": found.buckets} | {f"expected_{name}": value for name, value in vars(want).items()}
    if kind.place != "device":
        left = states.parameters - (found.shards if kind.moves_parameters else 0)
        should = 0.0 if kind.moves_parameters else want.parameters
        row |= {"moved_to": kind.place, "moved_bytes": int(states.total - left) + disk, "device_bytes": int(left)}
        row |= {"expected_device_bytes": should, "disk_bytes": disk, "device_error": (left - should) / expected}
        row["passed"] = abs(row["device_error"]) <= TOLERANCE
    elif not kind.is_peer:
        row["passed"] = max(abs(row["error"]), abs(row["resident_error"])) <= TOLERANCE
    return row


def cases(names: str | None, nproc: int) -> list[tuple[Shape, ShardedKind, int]]:
    """Return (shape, kind, number of ranks) for the kinds `names` (None: all) on each number of ranks that divides nproc. Leaves out cases
    that cannot run or would repeat others. Raises BadInput for an unknown kind.
    """
    nvme = missing_for_nvme()
    if names is None and nvme:
        print(f"no rows with nvme: {', '.join(nvme)} missing\n")
    chosen = kinds_of(names or ",".join(name for name in KINDS if not (nvme and "nvme" in name)))
    return [
        (shape, kind, ranks)
        for shape in (DENSE, SPARSE)
        for kind in chosen
        for ranks in divisors(nproc)
        if ranks > 1 or (shape is DENSE and not kind.is_peer and kind.place == "device")
        if kind.place == "device" or ranks == 2
        if shape is DENSE or not (kind.is_peer or kind.place == "nvme")
    ]


def main(*, kinds: str | None = None, nproc: int = 4, only: str | None = None, full: bool = False, json: str | None = None) -> int:
    """`moe bench memory`. Returns 1 if, for a kind of data parallelism, the measured bytes of model states (with offload: their bytes on
    the device) differ by over 5 % from the ZeRO formula. Bytes of DeepSpeed's own engine (deepspeed1 to 3) are printed, but cause no error.
    kinds: comma-separated names; None: all. nproc: the kinds run on each number of ranks that divides nproc. only: dense or sparse. Without
    kinds, only and full, four kinds run with a smaller model on min(2, nproc) ranks.
    """
    quick = [(QUICK, kind, min(2, nproc)) for kind in kinds_of("ddp,zero1,zero2,zero3")]
    if only is not None and not any(only in shape.name for shape in (DENSE, SPARSE)):
        raise BadInput("--only", got=only, needed="dense or sparse", fix="leave it out")
    every = quick if kinds is None and only is None and not full else cases(kinds, nproc)
    chosen = [case for case in every if only is None or only in case[0].name]
    if not chosen:
        needed = "2 ranks for offload, 2 or more for sparse models and deepspeed1 to 3, a dense model for nvme and deepspeed1 to 3"
        fix = "leave out --only" if every else f"use --nproc 2{' without --only' if only else ''}"
        raise BadInput("moe bench memory", got="flags that leave no case", needed=needed, fix=fix)
    torch.set_num_threads(1)
    load_engines([kind for _, kind, _ in chosen])
    print(f"{'model':<8}{'kind':<15}{'ranks':>6}{'ep':>4}{'torch holds':>15}{'formula':>15}{'error':>9}{'resident':>15}{'error':>9}")
    rows = [_run(kind, shape, ranks) for shape, kind, ranks in chosen]
    return conclude(json, "memory", rows, tolerance=TOLERANCE)


def _run(kind: ShardedKind, shape: Shape, ranks: int) -> dict[str, Any]:
    """Run one case in new processes. Print and return the table row of the rank that differs most from the formula."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_on_ranks(measure, ranks, ranks, kind, shape, "bf16", 2 if shape.experts else 1, folder, timeout_s=300)
    row: dict[str, Any] = max(found, key=lambda row: max(abs(row["error"]), abs(row["resident_error"])))
    cells = f"{row['model']:<8}{kind.name:<15}{ranks:>6}{row['ep']:>4}{row['measured_bytes']:>15,.0f}{row['expected_bytes']:>15,.0f}"
    cells += f"{row['error']:>9.2%}{row['resident_bytes']:>15,.0f}{row['resident_error']:>9.2%}"
    if kind.place != "device":
        cells += f"  device {row['device_bytes']:,} (formula {row['expected_device_bytes']:,.0f}), disk {row['disk_bytes']:,}"
    print(cells + ("" if row.get("passed", True) else "  FAIL"), flush=True)
    return row
