"""`moe rehearse`: memory and messages of one rank of a run, computed without the other ranks and without a GPU.

moe rehearse dense_8b --world 1024 --rank 37 --device cuda --degrees.tp 8 --degrees.pp 4

It runs the trainer's own code on tensors without values, and assumes that every other rank is like this one (parallel/rehearse/). With
`--rank all`, each rank is rehearsed in turn, and the order of collectives and messages is compared between ranks. Tokens are zeros, and
routing is balanced. The build gives the memory of parameters. Step 0 allocates optimizer states. Step 1, which is like every later step,
gives the collectives and the peak of memory. A save gathers each tensor of a checkpoint, but writes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
from torch import Tensor

from moe.checks.together import check_run
from moe.data import Dataset
from moe.launch import exit_codes
from moe.parallelize.sequence import shard_of
from moe.plan.pipeline import continuous
from moe.recipe.sections import Run
from moe.records.metrics import Records
from moe.records.panel import State
from moe.records.progress import Progress
from moe.records.results import write_json
from moe.train.loop.advance import advance
from moe.train.parts.rebalance import Rebalancer
from moe.train.start import state
from moe.train.start.job import Job, Saves, Training
from moe.train.start.opening import start_model
from moe.train.start.place import check_precision, settle_precision
from parallel.data.engine import Engine
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import Mesh
from parallel.mesh.traffic import Count
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.process import World
from parallel.rehearse.ledger import Ledger
from parallel.rehearse.order import Call, difference
from parallel.rehearse.pretended import RehearsalError
from parallel.rehearse.stage import rehearsal
from parallel.rehearse.work import Work
from parallel.store import checkpoint
from parallel.store.saver import Saver

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Walked:
    """Memory and messages of one rank, from `walk`. Bytes are of this rank's device; seconds are of the rehearsal itself.
    work: (module, pass) -> kernels, moved bytes and waits for the GPU. module: a part of a layer, such as layers.0.ffn; "" for the rest.
    pass: "forward" or "backward"."""

    build_s: float
    step_s: float  # of the last step
    save_s: float
    built_bytes: int  # after the build
    peak_bytes: int  # at the peak of a step
    held: dict[str, int]  # "parameters", "gradients", "optimizer" or "activations" -> bytes at that peak
    counts: dict[tuple[str, str], Count]  # (axis, name of the collective) -> calls and bytes in the last step
    saved_bytes: int  # bytes of the tensors that this rank writes to a checkpoint
    work: dict[tuple[str, str], Work]  # in the last step; {} for a CPU
    parameters: dict[str, tuple[int, ...]]  # name -> shape on this rank
    calls: list[Call]  # collectives and messages in order


def main(run: Run, *, recipe: str, world: int, rank: str = "0", device: str = "cpu", json: str | None = None) -> int:
    """Rehearse `rank` and print its memory and messages. With "all", rehearse every rank, and print the results of the rank with the
    highest peak. If the run itself would fail, or would hang because ranks call different collectives, print where, and return FAILED.
    Raises BadInput as the run itself would, and for an impossible world, rank or device."""
    if world < 1:
        raise BadInput("--world", got=world, needed="at least 1 rank", fix="--world 8")
    ranks = [r for r in range(world) if rank in (str(r), "all")]
    if not ranks:
        raise BadInput("--rank", got=rank, needed=f"0 to {world - 1} in a world of {world}, or all", fix=f"--rank {world // 2}")
    if device not in DEVICES:
        raise BadInput("--device", got=device, needed=f"one of {', '.join(DEVICES)}", fix="--device cuda")
    run, replaced = carried(check_run(run, world))
    walked, rows, wrong = dict[World, Walked](), list[dict[str, Any]](), None
    for this in (World(r, world, place=device) for r in ranks):
        try:
            walked[this] = walk(run, this)
        except RehearsalError as found:
            wrong = f"rank {this.rank} of {world} on {device} fails: {found}"
            rows.append({"rank": this.rank, "device": device, "found": str(found), "passed": False})
            break
        rows.append({"rank": this.rank, "device": str(this.device)} | row_of(walked[this]) | {"stands_for": replaced})
    if wrong is None and len(walked) > 1:
        wrong = difference([found.calls for found in walked.values()], partial(_named, run))
        rows.append({"rank": "all", "device": device, "found": wrong, "passed": wrong is None})
    if wrong is None:
        largest = max(walked, key=lambda this: walked[this].peak_bytes)
        agree = [f"collectives and messages of all {world} ranks have the same order within each group"] if len(walked) > 1 else []
        print(*table(run, walked[largest], largest), *([replaced] if replaced else []), *agree, sep="\n")
    else:
        print(wrong)
    if json is not None:
        write_json(json, verb="rehearse", rows=[{"world": world} | row for row in rows], recipe=recipe)
    return exit_codes.DONE if wrong is None else exit_codes.FAILED


def _named(run: Run, rank: int) -> str:
    """Return a rank's name for messages, with its pipeline stage."""
    return f"rank {rank} (stage {Mesh.of(run.mesh_degrees(), rank).axis('pp').index})"


def row_of(walked: Walked) -> dict[str, Any]:
    """Return the result as a JSON row: seconds, bytes, collectives and parameters' shapes."""
    row = {"passed": True, "build_seconds": walked.build_s, "step_seconds": walked.step_s, "save_seconds": walked.save_s}
    row |= {"built_bytes": walked.built_bytes, "peak_bytes": walked.peak_bytes, "saved_bytes": walked.saved_bytes}
    row |= {f"peak_{kind}": size for kind, size in walked.held.items()}
    counts = [{"axis": axis, "collective": name, **vars(count)} for (axis, name), count in walked.counts.items()]
    names = {"waits": "host_synchronizations", "kernels": "launches", "moved_bytes": "bytes", "copies": "copies"}
    work = [
        {"module": module, "pass": passing, **{names[name]: value for name, value in vars(w).items()}}
        for (module, passing), w in walked.work.items()
    ]
    return row | {"collectives": counts, "work": work, "parameters": {name: list(shape) for name, shape in walked.parameters.items()}}


def table(run: Run, walked: Walked, world: World) -> list[str]:
    """Return the lines to print about one rank. world: its number and device, and the number of all ranks."""
    d = run.degrees
    place = " ".join(f"{name} {size}" for name in ("pp", "dp", "sp", "tp", "ep", "etp") if (size := getattr(d, name)) != 1)
    lines = [f"rank {world.rank} of {world.size} ({place or 'alone'}) on {world.device}: build, two steps and a save go through"]
    lines += ["", f"{'held at the peak of a step':<34}{walked.peak_bytes:>20,} bytes"]
    lines += [f"  {kind:<32}{walked.held.get(kind, 0):>20,}" for kind in ("parameters", "gradients", "optimizer", "activations")]
    lines += [f"{'held once built':<34}{walked.built_bytes:>20,}", f"{'saved':<34}{walked.saved_bytes:>20,}"]
    lines += ["", f"{'collectives of a step':<34}{'calls':>8}{'bytes':>20}{'sent':>20}"]
    for (axis, name), c in sorted(walked.counts.items()):
        lines.append(f"  {axis:<14} {name:<17}{c.calls:>8,}{c.bytes:>20,}{c.sent:>20,}")
    if not walked.counts:
        lines.append("  none")
    lines += work_lines(walked.work)
    lines += ["", f"{'parameters held here, by shape':<34}"]
    lines += [
        f"  {' x '.join(map(str, shape)) or 'a number':<24}{count:>8,}" for shape, count in Counter(walked.parameters.values()).items()
    ]
    took = f"build {walked.build_s:.1f} s, step {walked.step_s:.1f} s, save {walked.save_s:.1f} s, of this process"
    return [*lines, "", took]


def work_lines(work: Mapping[tuple[str, str], Work]) -> list[str]:
    """Format a GPU's work in a step, then the places in the code at which the host waits for the GPU. Each part of a layer, such as
    attention, has a line. Layers with equal work in a part share its line."""
    if not work:
        return []
    alike: dict[tuple[Any, ...], list[str]] = {}
    for module in dict.fromkeys(module for module, _ in work):
        passes = [work.get((module, passing), Work()) for passing in ("forward", "backward")]
        layer, _, part = module.removeprefix("layers.").partition(".")
        numbers = [number for w in passes for number in (w.waits.total(), w.kernels, w.moved_bytes)]
        alike.setdefault((part or "outside of the layers", *numbers), []).append(layer)
    widths = (8, 9, 17, 8, 9, 17)

    def columns(values: Iterable[str]) -> str:
        return "".join(value.rjust(width) for value, width in zip(values, widths, strict=True))

    lines = ["", f"{'':<34}{'forward':>34}{'backward':>34}"]
    lines += [f"{'work of a GPU in a step':<34}{columns(('waits', 'kernels', 'bytes moved') * 2)}"]
    for (part, *numbers), layers in alike.items():
        name = part if layers == [""] else f"{part} of layer {layers[0]}" if len(layers) == 1 else f"{part} of {len(layers)} layers"
        lines.append(f"  {name:<32}{columns(f'{n:,}' for n in numbers)}")
    places: Counter[str] = sum((w.waits for w in work.values()), Counter())
    lines += [f"  {times:>4} x the host waits at {place}" for place, times in places.most_common()]
    return lines


def carried(run: Run) -> tuple[Run, str]:
    """Replace an engine that cannot run on tensors without values. Return (the run, a line about the replacement; "" if none was needed).
    Raises BadInput for offload and for the engine dp, which have no replacement."""
    s, kind = run.sharding, run.carrier
    if kind.threads:
        got, needed = "dp, whose replicas are threads of one process", "one process per rank"
        raise BadInput("sharding.kind", got=got, needed=needed, fix=Set("sharding.kind", "ddp"))
    if (s.offload.optimizer, s.offload.parameters) != ("none", "none"):
        got = "offload, which copies tensors to the host's memory; a rehearsal's tensors have no values"
        fix = Set("sharding.offload.optimizer", "none") & Set("sharding.offload.parameters", "none")
        raise BadInput("sharding.offload", got=got, needed="optimizer states and weights on the device", fix=fix)
    if kind.stands_in is None:
        return run, ""
    return run.model_copy(update={"sharding": s.model_copy(update=dict(kind.stands_in.sharding))}), kind.stands_in.why


def walk(run: Run, world: World, *, steps: int = 2) -> Walked:
    """Rehearse build, `steps` steps and a save of a checked run. If the pipeline is not drained after each step, `steps` counts groups of
    steps, from drain to drain. Raises BadInput as the run itself would, and RehearsalError for any other error of the run."""
    # tensors have no values, so a user's loss could not read them, and compiling would only cost time
    run = run.model_copy(update={"train": run.train.model_copy(update={"compile": False, "loss": "cross_entropy"})})
    if continuous(run):
        run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"drain_every": max(2, int(run.degrees.pp))})})
    with rehearsal(world) as pretended:
        ledger, started = pretended.ledger, time.perf_counter()
        job = open_job(run, world)
        engine, build_s = job.engine, time.perf_counter() - started
        for name, module in engine.module.named_modules():
            if name.startswith(("layers.", "ahead.")) and name.rpartition(".")[2] in ("attention", "cross", "ffn", "moe"):
                pretended.work.watch(name, module)
        ledger.name("parameters", (local(parameter) for parameter in engine.module.parameters()))
        built_bytes = ledger.now
        with mock.patch.object(engine, "step", _naming(engine, ledger, ledger.mark())):
            for _ in range(steps):
                started = time.perf_counter()
                ledger.begin()
                pretended.work.begin()
                take_step(job)
        step_s, counts = time.perf_counter() - started, job.mesh.communicator.counts()
        held, peak_bytes, work = ledger.at_peak(), ledger.most, pretended.work.by_module
        pretended.work.begin()
        started = time.perf_counter()
        saved_bytes = sum(tensor.nbytes for tensors in checkpoint.in_files(state.held(engine, job.mesh)) for _, tensor in tensors)
        save_s = time.perf_counter() - started
        shapes = {name: tuple(local(p).shape) for name, p in engine.module.named_parameters()}
        return Walked(build_s, step_s, save_s, built_bytes, peak_bytes, held, counts, saved_bytes, work, shapes, pretended.calls.made)


def open_job(run: Run, world: World) -> Job:
    """Return a job like the trainer's, but with tokens that are 0 and without a folder. Collective."""
    run = settle_precision(run, world)
    check_precision(run, world)
    mesh = process.connect(run.mesh_degrees(), world)
    executor = start_model(run, mesh, world)
    return Job(
        run=run,
        name="rehearsal",
        out=Path(),
        world=world,
        mesh=mesh,
        training=Training(executor, LossScale.of(run.precision.loss_scale), Rebalancer(run, executor.engine, mesh)),
        data=cast(Dataset, SimpleNamespace(train=SimpleNamespace(batch=lambda step, shard: np.zeros(shard.shape, np.int64)))),
        shard=shard_of(run, mesh, run.train.global_batch),
        records=Records(None),
        progress=Progress(State(run.train.steps, recipe=""), kind="none"),
        saves=Saves(Saver(Path(), mesh.axis("world"), keep=1)),
    )


def take_step(job: Job) -> None:
    """Take the next step, or several if the pipeline is not drained between them. Afterwards, the communicator's counts of
    collectives are those of this call. Collective."""
    job.mesh.communicator.reset_counts()
    made = advance(job, lambda: False)
    job.counters.step += len(made)
    job.counters.updates += len(made)


def _naming(engine: Engine, ledger: Ledger, built: int) -> Callable[..., None]:
    """Return a function that calls the engine's step and labels the tensors of gradients and optimizer states in `ledger`, which counts
    live bytes. built: `ledger.mark()` at the end of the build, the number of storages made until then."""
    step = engine.step

    def named(lr: float, **how: float) -> None:
        ledger.name("gradients", _gradients(engine))
        ledger.name_alive("optimizer", before=built)  # what the build made and has no label yet, such as master weights
        now = ledger.mark()
        step(lr, **how)
        ledger.name_alive("optimizer", since=now)

    return named


def _gradients(engine: Engine) -> Iterator[Tensor]:
    yield from (gradient for _, gradient in engine.owned_gradients())
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield local(parameter.grad)


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor that torch's FSDP has sharded; other tensors unchanged."""
    return cast(Tensor, tensor.to_local() if hasattr(tensor, "to_local") else tensor)
