"""Compares pipelines with the times that their schedules promise, and with torch's own pipelining.

    times      seconds a step against the timeline simulated from the mean seconds of each action (Recorder): the stages sleep, as
               if devices were at work, so that two cores suffice for four processes; every schedule
    peers      seconds a step of the same modules and micro-batches in torch.distributed.pipelining, in turn with ours: GPipe, 1F1B and
               interleaved 1F1B on two processes; losses and all gradients are compared too

`moe bench pipeline --json FILE`; `--only times` (or memory, peers) and `--kinds 1f1b,zb_v` select some of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe.bench.grids import pipeline_peers
from moe.bench.grids.pipeline_peers import peers_row
from moe.bench.grids.pipeline_times import times_rows
from moe.launch import exit_codes
from moe.records.results import write_json
from parallel.errors import BadInput
from parallel.pipeline.schedules.catalog import SCHEDULES, kind_of

PARTS = ("times", "peers")


def main(
    *, nproc: int | None = None, only: str = ",".join(PARTS), kinds: str | None = None, rounds: int = 15, json: str | None = None
) -> int:
    """`moe bench pipeline`: returns 1 if a schedule's time is wrong, or it is slower than torch's. nproc: default 2 and 4."""
    parts = only.split(",")
    for part in parts:
        if part not in PARTS:
            raise BadInput("--only", got=part, needed=f"some of {', '.join(PARTS)}, with commas between", fix=f"--only {PARTS[0]}")
    names = kinds.split(",") if kinds else list(SCHEDULES)
    for name in names:
        kind_of(name)
    if nproc is not None and (nproc < 2 or nproc % 2):
        raise BadInput("--nproc", got=nproc, needed="an even number of processes, as chimera needs", fix="--nproc 2")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for part in parts:
        print(HEADS[part], flush=True)
        for row in _rows(part, [nproc] if nproc else [2, 4], names, rounds):
            rows.append(row)
            print(SAID[part](row) + ("" if row["passed"] else "  FAIL"), flush=True)
    if json:
        write_json(json, verb="bench pipeline", rows=rows)
    return exit_codes.of(all(row["passed"] for row in rows))


def _rows(part: str, sizes: list[int], names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    if part == "peers":
        yield from (peers_row(name, rounds=rounds) for name in names if name in pipeline_peers.NAMES)
        return
    for ranks in sizes:
        yield from times_rows(ranks, names, microbatches=2 * ranks)


def _times(row: dict[str, Any]) -> str:
    return f"{_what(row)}{1000 * row['measured_seconds']:>11.1f} ms{1000 * row['simulated_seconds']:>11.1f} ms{row['error']:>+9.2%}"


def _peers(row: dict[str, Any]) -> str:
    times = "".join(f"{1000 * row[key]:>11.1f} ms" for key in ("seconds", "torch_seconds"))
    return f"{_what(row)}{times}{row['ratio']:>9.3f}{row['losses_apart']:>12.1e}{row['gradients_apart']:>12.1e}"


def _what(row: dict[str, Any]) -> str:
    return f"{row['schedule']:<12}{row['ranks']:>6}{row['stages']:>7}{row['microbatches']:>7}"


_OF = f"{'schedule':<12}{'ranks':>6}{'stages':>7}{'micro':>7}"
HEADS = {
    "times": f"{_OF}{'measured':>14}{'simulated':>14}{'error':>9}",
    "peers": f"{_OF}{'ours':>14}{'torch':>14}{'ratio':>9}{'losses':>12}{'gradients':>12}",
}
SAID = {"times": _times, "peers": _peers}
