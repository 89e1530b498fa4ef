"""Measures the peak memory of resuming a run, compared with training it: a row for each kind of data parallelism.

    training    peak in three steps
    resuming    peak while another process loads the checkpoint
    afterwards  peak in its next step, which shows whether loaded tensors are kept twice

    torch holds    peak bytes of torch's allocator, from the profiler's allocation events
    resident       peak resident memory of the process (VmHWM) minus its memory before there was a model

All peaks are measured after the engine has started.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from moe.bench.training.memory import DENSE, LENGTH, Shape, warm_up
from moe.bench.training.sharded import ShardedKind, kinds_of, load_engines, start, tokens_of
from moe.calibrate.own_step import CPU, Training
from moe.launch import exit_codes
from moe.records.results import write_json
from moe.train.loop.step import finish
from moe.train.start import state
from moe.train.start.state import Counters
from parallel.numerics.precision import LossScale
from parallel.process.fork import run_on_ranks
from parallel.process.libc import give_freed_memory_back

STEPS, ALLOWED = 3, 0.10  # ALLOWED: memory of resuming may exceed that of training by this fraction


class Peaks:
    """Measures the peak memory of code within `with peaks.part(name)`. resident: name -> peak resident bytes."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self.resident: dict[str, int] = {}
        self.before = _status("VmRSS")

    def __enter__(self) -> Peaks:
        self.profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory resident now
        with record_function(name):
            yield
        self.resident[name] = _status("VmHWM") - self.before

    def torch_bytes(self) -> dict[str, int]:
        """Return name of a part -> peak bytes of torch's allocator in it; 0 if it allocated nothing. Must be called after the context."""
        results = self.profile.profiler
        assert results is not None and results.kineto_results is not None
        events = list(_flat(results.kineto_results.experimental_event_tree()))
        spans = {event.name: (event.start_time_ns, event.end_time_ns) for event in events if event.name in self.resident}
        found = dict.fromkeys(self.resident, 0)
        for event in events:
            for name, (begin, end) in spans.items() if event.tag == _EventType.Allocation else ():
                if begin <= event.start_time_ns <= end:
                    found[name] = max(found[name], event.extra_fields.total_allocated)
        return found


def _status(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


def train(rank: int, ranks: int, kind: ShardedKind, shape: Shape, folder: str) -> dict[str, int]:
    """Train STEPS steps and save a checkpoint. Return this rank's peak bytes in training, by torch and resident."""
    give_freed_memory_back()
    warm_up(shape, rank, ranks, "bf16")
    with Peaks() as peaks:
        started = _start(rank, ranks, kind, shape, folder)
        with peaks.part("training"):
            for step in range(STEPS):
                _step(started, rank, step)
    counters, scale = Counters(STEPS, STEPS), LossScale.of("none")
    about: dict[str, Any] = {"recipe": started.run.model_dump(mode="json"), "tokenizer": {}, "data": ""}
    state.save(Path(folder) / "checkpoints", started.engine, started.mesh, counters=counters, scale=scale, keep=1, **about)
    return _found(peaks)


def resume(rank: int, ranks: int, kind: ShardedKind, shape: Shape, folder: str) -> dict[str, int]:
    """Resume from the checkpoint and train one step. Return this rank's peak bytes in each, by torch and resident."""
    give_freed_memory_back()
    warm_up(shape, rank, ranks, "bf16")
    with Peaks() as peaks:
        started = _start(rank, ranks, kind, shape, folder)
        counters, recipe = Counters(), started.run.model_dump(mode="json")
        with peaks.part("resuming"):
            found = state.resume(
                state.find(Path(folder) / "checkpoints", started.mesh, log=print),
                started.engine,
                started.mesh,
                counters=counters,
                scale=LossScale.of("none"),
                data="",
                recipe=recipe,
                log=print,
            )
        assert found and counters.updates == STEPS
        with peaks.part("afterwards"):
            _step(started, rank, STEPS)
    return _found(peaks)


def _start(rank: int, ranks: int, kind: ShardedKind, shape: Shape, folder: str) -> Training:
    placed = kind.with_path(folder)
    return start(placed, shape.recipe(placed, ranks, ep=2 if shape.experts else 1), rank, ranks)


def _step(started: Training, rank: int, step: int) -> None:
    batch = tokens_of(rank, sequences=1, length=LENGTH, step=step)
    numbers = started.accumulate(batch, step=step)
    world, scale = started.mesh.axis("world"), LossScale.of("none")
    finish(started.engine, numbers, world=world, scale=scale, lr=1e-3, clip_norm=1.0, device=CPU)


def _found(peaks: Peaks) -> dict[str, int]:
    told = {f"torch_{name}": size for name, size in peaks.torch_bytes().items()}
    return told | {f"resident_{name}": size for name, size in peaks.resident.items()}


def print_head() -> None:
    """Print the column names of the table."""
    held = f"{'torch holds':>15}{'training':>15}{'ratio':>8}{'resident':>15}{'training':>15}{'ratio':>8}"
    print(f"\n{'resume':<15}{'ranks':>6}{held}{'next step':>11}")


def case(kind: ShardedKind, shape: Shape, ranks: int) -> dict[str, Any]:
    """Train and resume on `ranks` ranks; print and return the table's row, with the maximum over ranks of each number."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # suppresses the profiler's own lines on stderr
    with tempfile.TemporaryDirectory() as folder:
        parts = [run_on_ranks(work, ranks, ranks, kind, shape, folder, timeout_s=600) for work in (train, resume)]
    most = {name: max(rank[name] for rank in found) for found in parts for name in found[0]}
    resuming, training = ({what: most[f"{what}_{part}"] for what in ("torch", "resident")} for part in ("resuming", "training"))
    afterwards = {what: most[f"{what}_afterwards"] for what in ("torch", "resident")}
    over = {what: max(resuming[what], afterwards[what]) / training[what] - 1 for what in training}
    row = {"kind": kind.name, "model": f"{shape.name}, resumed", "ranks": ranks}
    row |= {"measured_bytes": max(resuming["torch"], afterwards["torch"]), "expected_bytes": training["torch"], "error": over["torch"]}
    row |= {"resident_bytes": max(resuming["resident"], afterwards["resident"]), "resident_expected_bytes": training["resident"]}
    row |= {"resident_error": over["resident"], "passed": max(over.values()) <= ALLOWED}
    row |= {"resuming_bytes": resuming["torch"], "resuming_resident_bytes": resuming["resident"]}
    print(
        f"{kind.name:<15}{ranks:>6}{resuming['torch']:>15,}{training['torch']:>15,}{resuming['torch'] / training['torch']:>8.2f}"
        f"{resuming['resident']:>15,}{training['resident']:>15,}{resuming['resident'] / training['resident']:>8.2f}"
        f"{max(afterwards[w] / training[w] for w in training):>11.2f}{'' if row['passed'] else '  FAIL'}",
        flush=True,
    )
    return row


def main(*, kinds: str = "ddp,fsdp,zero1,zero2,zero3,zero2+cpu,zero3+cpu", nproc: int = 2, json: str | None = None) -> int:
    """Print a row for each kind. Return 1 if resuming needs over 10 % more memory than training."""
    torch.set_num_threads(1)
    chosen = kinds_of(kinds)
    load_engines(chosen)
    print_head()
    rows = [case(kind, DENSE, nproc) for kind in chosen]
    if json:
        write_json(json, verb="counted resume", rows=rows, tolerance=ALLOWED)
    return exit_codes.of(all(row["passed"] for row in rows))
