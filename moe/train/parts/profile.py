"""Time of a step by region: `moe train RECIPE --profile` records a few steps with torch's profiler, then prints a table.

    steps of this process    1  2  | 3  4  5 |  6 ...
                             warm    recorded                ->  RUN/profile/rank-0.json.gz   a Chrome trace: ui.perfetto.dev
                                                                 RUN/profile/rank-0.txt       region: forward, backward, share

Regions are named parts of the code (parallel/mesh/regions.py). An operation of the forward pass counts for the innermost region in which it
starts. An operation of the backward pass counts for the region of the forward operation that it differentiates; autograd's sequence number
identifies that operation. Time outside regions is `between`: norms, residual sums, Python. The rows of the table add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from parallel.errors import counted
from parallel.mesh.mesh import Mesh
from parallel.mesh.regions import PREFIX, region

WARM, RECORDED = 2, 3  # number of steps before the recording, and number of recorded steps
STEP = "step"
BETWEEN = "between"
_NODE = "autograd::engine::evaluate_function"

Phase = Literal["forward", "backward"]


class Spent(NamedTuple):
    """Milliseconds per step that the host spent in one region. device: milliseconds of the GPU kernels that the region launched; 0 on a
    CPU."""

    region: str
    forward: float
    backward: float
    device: float


class Recording:
    """Profiler of a few steps: the training loop makes each step through `of`. It writes its files after RECORDED steps, then does nothing.
    name: stem of the files, such as rank-0. note: prints a line for the user. device: of the rank; a GPU's kernels are recorded too."""

    def __init__(self, folder: Path, name: str, *, note: Callable[[str], None], device: torch.device) -> None:
        self.folder, self.name, self.note = folder, name, note
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._profiler: profile | None = profile(activities=activities)
        self._done, self._recorded = 0, list[int]()  # steps made so far; for each recorded call of `of`, the steps that it made

    def of(self, work: Callable[[], list[Any]]) -> list[Any]:
        """Call work(), which makes one or more steps, and return its result, a list with one entry for each step."""
        if self._profiler is None:
            return work()
        if self._done < WARM:
            made = work()
        else:
            if not self._recorded:
                self._profiler.start()
            with region(STEP):
                made = work()
            self._recorded.append(len(made))
        self._done += len(made)
        if sum(self._recorded) >= RECORDED:
            self.close()
        return made

    def close(self) -> None:
        """Stop the profiler and write its files for the steps recorded so far, which may be fewer than RECORDED. If no step was recorded,
        print a line about this instead. Later calls do nothing."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if not self._recorded:
            self.note(f"--profile has no effect: it records from step {WARM + 1} of a process on, and this one made {self._done}")
            return
        profiler.stop()
        lines = table(spent(profiler.events() or (), steps=self._recorded))
        trace = self.folder / f"{self.name}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            trace.with_name(f"{self.name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OSError, RuntimeError) as error:  # a profile that cannot be written must not end a run
            self.note(f"no profile in {self.folder} ({type(error).__name__}: {error})")
            return
        recorded = f"{counted(sum(self._recorded), 'step')} recorded in {trace}"
        for line in (f"{recorded} (open it at ui.perfetto.dev); time of the fastest one by region:", *lines):
            self.note(line)


def first_of_its_stage(mesh: Mesh) -> bool:
    """Return whether this rank is the first rank of its pipeline stage. Other ranks record no profile: they do the same work."""
    return all(mesh.axis(name).index == 0 for name in ("dp", "sp", "tp"))


def spent(events: Iterable[Any], *, steps: Sequence[int]) -> list[Spent]:
    """Return the milliseconds that each region of the code took in a step, longest first. events: FunctionEvents of a torch profiler;
    the nth recorded call of `Recording.of` is a STEP event, which covers steps[n] training steps. Only the call with the least
    time per step is used, because other work on the machine disturbed it least."""
    call, end = -1, 0.0  # index of the current `step` event, and the time at which that event ends
    host: dict[int, dict[tuple[str, Phase], float]] = defaultdict(lambda: defaultdict(float))  # call -> (region, phase) -> host ms
    device: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # call -> region -> ms of GPU kernels
    place: dict[int, tuple[str, Phase]] = {}  # id of an event inside a `step` event -> its region and phase
    region_of_node: dict[int, str] = {}  # autograd's sequence number -> region of the forward operation
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        where, phase = place.get(id(event.cpu_parent), ("", "forward"))
        if event.name == PREFIX + STEP:
            where, call, end = BETWEEN, call + 1, event.time_range.end
        elif event.name.startswith(_NODE) and event.time_range.start < end:  # found by time: a thread of autograd has no `step` event
            where, phase = region_of_node.get(event.sequence_nr, BETWEEN), "backward"
        elif not where:
            continue
        elif event.name.startswith(PREFIX):
            where = event.name.removeprefix(PREFIX)
        elif event.sequence_nr >= 0:
            region_of_node[event.sequence_nr] = where  # of several operations with this number, autograd differentiates the last
        place[id(event)] = (where, phase)
        host[call][where, phase] += event.self_cpu_time_total / 1e3 / steps[call]
        device[call][where] += event.self_device_time_total / 1e3 / steps[call]
    best = min(host, key=lambda n: sum(host[n].values()), default=-1)
    names = dict.fromkeys(name for name, _ in host[best])
    found = [Spent(name, host[best][name, "forward"], host[best][name, "backward"], device[best][name]) for name in names]
    return sorted(found, key=lambda one: -(one.forward + one.backward))


def table(rows: list[Spent]) -> list[str]:
    """Format rows, and their sum, as lines of text: milliseconds per step, and the share of the step."""
    total = Spent("all", *(sum(getattr(row, name) for row in rows) for name in ("forward", "backward", "device")))
    whole = total.forward + total.backward
    lines = [f"{'region':<28} {'forward ms':>11} {'backward ms':>12} {'share':>7}" + (f" {'kernels ms':>11}" if total.device else "")]
    for row in (*rows, total):
        share = (row.forward + row.backward) / whole if whole else float(row is total)
        line = f"{row.region:<28} {row.forward:>11.2f} {row.backward:>12.2f} {share:>7.1%}"
        lines.append(line + (f" {row.device:>11.2f}" if total.device else ""))
    return lines
