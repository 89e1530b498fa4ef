"""Times functions on a noisy machine. Each function runs once in every round, and a ratio compares two times of the same round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from moe.launch import exit_codes
from parallel.errors import BadInput, did_you_mean

CPU = torch.device("cpu")
Run = Callable[[], object]


def in_turn(
    work: Mapping[str, Run], *, rounds: int, device: torch.device = CPU, warmups: int = 2, before: Run | None = None
) -> dict[str, list[float]]:
    """Call every function of `work` once in each round; every second round in reverse order. Return name -> seconds in each round.
    warmups: number of calls of each function before the first round, not timed. before: called before each timed call, not timed."""
    for run in work.values():
        for _ in range(warmups):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds):
        for name in list(work)[:: 1 if number % 2 == 0 else -1]:
            if before is not None:
                before()
            wait(device)
            started = time.perf_counter()
            work[name]()
            wait(device)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def wait(device: torch.device) -> None:
    """Wait for the work on a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median over rounds of a[round] / b[round]. a, b: seconds of each round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def slowest(seconds: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return a dict: name of a function -> its seconds in each round, on that round's slowest rank. seconds: the results of `in_turn`, one
    for each rank."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in seconds), strict=True)] for name in seconds[0]}


@dataclass(frozen=True)
class Race:
    """Comparison of two functions. ours, theirs: the functions' names in `in_turn`. most: largest allowed ratio of seconds, ours / theirs;
    None: no limit."""

    name: str
    ours: str
    theirs: str
    most: float | None


def race_row(race: Race, seconds: dict[str, list[float]], *, ranks: int) -> dict[str, Any]:
    """Print and return a table row: median and quartiles over rounds of the ratio of seconds, ours / theirs. The row passes if the lower
    quartile is at most `race.most`."""
    ratios = [a / b for a, b in zip(seconds[race.ours], seconds[race.theirs], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    took, processes = statistics.median(seconds[race.ours]), f"{ranks} rank{'s' * (ranks > 1)}"
    print(f"{race.name:<46} {processes} {took:8.3f} s   ratio {middle:5.2f} ({low:.2f} to {high:.2f})", flush=True)
    row = {"race": race.name, "ranks": ranks, "seconds": took, "ratio": middle, "quartiles": [low, high]}
    return row if race.most is None else row | {"passed": low <= race.most}


def peak_bytes(run: Run, device: torch.device) -> int:
    """Return the largest number of bytes that torch allocates during run(), in addition to the bytes allocated before. On a CPU, torch's
    profiler counts them."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events: list[Any] = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def conclude(json: str | None, name: str, rows: Sequence[dict[str, Any]], **more: Any) -> int:
    """Write the table rows of `moe bench NAME` and the entries `more` to the file `json`, if given. Return exit code 1 if a row failed."""
    if json:
        from moe.records.results import write_json  # not at the top: its packages may not be installed where `python -m moe.bench.gpu` runs

        write_json(json, verb=f"bench {name}", rows=rows, **more)
    return exit_codes.of(all(row.get("passed") is not False for row in rows))


def importable(name: str) -> bool:
    """Return whether a package that benches compare with can be imported. If not, print the reason."""
    try:
        import_module(name)
    except ImportError as error:
        print(f"not compared with {name}: {error}", flush=True)
        return False
    return True


def chosen_peers(peers: str, known: Collection[str]) -> list[str]:
    """Return the names of the other implementations to compare with: all of `known`, none, or the comma-separated names in `peers`. Raises
    BadInput for an unknown name."""
    if peers in ("all", "none"):
        return list(known) if peers == "all" else []
    for name in (names := peers.split(",")):
        if name not in known:
            near = did_you_mean(name, known)
            fix = f"did you mean {near}?" if near else "--peers all"
            raise BadInput("--peers", got=name, needed=f"all, none, or some of {', '.join(known)}", fix=fix)
    return names
