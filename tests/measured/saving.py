"""Measures how long a training step waits for a checkpoint, with synchronous and with asynchronous saving of the same tensors.

    waits       synchronous: the step waits until every byte is written, hashed and committed
    copies      asynchronous: it waits only for the copy to host memory; the first save also allocates this memory
    bound       the same bytes by memmove into memory that is there: no copy takes less
    beside      time of a matrix product during asynchronous writing, divided by its time without writing

Every round saves changed tensors once synchronously and once asynchronously. Seconds are of the slowest rank. Passes if `copies` takes at
most SHARE of the time of `waits`, and if both files are bitwise equal.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.records.results import write_json
from parallel.mesh.mesh import Degrees
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from parallel.store.checkpoint import Piece, sha256
from parallel.store.saver import Saver

SHARE = 0.05
ROWS, WIDTH, MATRICES = 2048, 1024, 8  # of tensors on a rank: MATRICES weights of 8 MiB, each with two moments
KINDS = ("weight", "exp_avg", "exp_avg_sq")
PRODUCT = 512


def main(*, nproc: int = 2, rounds: int = 5, json: str | None = None) -> int:
    """Print the table row. Returns 1 if it does not pass (see above)."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_on_ranks(measured, nproc, nproc, rounds, Path(folder), timeout_s=900)
        same = all(files(Path(folder) / "waits" / name) == files(Path(folder) / "copies" / name) for name in (f"step-{rounds}",))
    slowest = {what: [max(each) for each in zip(*(rank[what] for rank in ranks), strict=True)] for what in ranks[0]}
    first, *copies = slowest["copies"]
    row: dict[str, Any] = {"ranks": nproc, "bytes": 4 * ROWS * WIDTH * MATRICES * len(KINDS), "rounds": rounds, "same_files": same}
    row |= {"waits_seconds": statistics.median(slowest["waits"]), "first_copy_seconds": first, "copy_seconds": statistics.median(copies)}
    row |= {"bound_share": statistics.median(slowest["bound"]) / row["waits_seconds"]}
    row |= {"share": row["copy_seconds"] / row["waits_seconds"], "first_share": first / row["waits_seconds"]}
    row |= {"beside": statistics.median(slowest["beside"]) / statistics.median(slowest["alone"])}
    row["passed"] = same and row["share"] <= SHARE
    head = ("ranks", "MiB each", "waits", "copies", "share", "bound", "first", "products beside", "same files")
    values = [f"{row['waits_seconds']:.2f} s", f"{row['copy_seconds']:.3f} s"]
    values += [f"{row[key]:.1%}" for key in ("share", "bound_share", "first_share")]
    values = [str(nproc), f"{row['bytes'] / 2**20:.0f}", *values, f"{row['beside']:.2f}", "yes" if same else "NO"]
    print("  ".join(head))
    print("  ".join(f"{value:>{len(name)}}" for name, value in zip(head, values, strict=True)), "" if row["passed"] else "  FAIL")
    if json:
        write_json(json, verb="bench saving", rows=[row], aim=SHARE)
    return 0 if row["passed"] else 1


def measured(rank: int, ranks: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Save on this rank. Return `waits`, `copies`, `bound`, `beside` and `alone` -> seconds of each round, the last two of a matrix
    product."""
    torch.set_num_threads(1)
    world = process.connect(Degrees(dp=ranks), World(rank, ranks)).axis("world")
    draw = torch.Generator().manual_seed(rank)
    held = [
        (kind, Piece(f"layers.{n}.w", (ROWS * ranks, WIDTH), (ROWS * rank, 0), torch.randn(ROWS, WIDTH, generator=draw)))
        for n in range(MATRICES)
        for kind in KINDS
    ]
    waits, copies = (Saver(folder / name, world, keep=1) for name in ("waits", "copies"))
    found: dict[str, list[float]] = {"waits": [], "copies": [], "bound": [], "beside": [], "alone": []}
    there = [torch.zeros_like(piece.tensor) for _, piece in held]
    for step in range(1, rounds + 1):
        for _, piece in held:
            piece.tensor.add_(step)
        state = {"counters": {"step": step}}
        found["waits"].append(seconds(lambda step=step, state=state: waits.save(step, held, state=state)))  # type: ignore[misc]
        found["alone"].append(seconds(product))
        dist.barrier()
        found["bound"].append(seconds(lambda: moved(held, there)))
        dist.barrier()
        found["copies"].append(seconds(lambda step=step, state=state: copies.begin(step, held, state=state)))  # type: ignore[misc]
        found["beside"].append(seconds(product))
        copies.settle()
    return found


def moved(held: list[tuple[str, Piece]], there: list[Tensor]) -> None:
    for (_, piece), to in zip(held, there, strict=True):
        ctypes.memmove(to.data_ptr(), piece.tensor.data_ptr(), to.nbytes)


def seconds(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of work()."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def product() -> None:
    """Compute matrix products for about a tenth of a second on one core."""
    x = torch.ones(PRODUCT, PRODUCT)
    for _ in range(20):
        x @ x


def files(folder: Path) -> dict[str, str]:
    """Return name -> SHA-256 of every file in the folder."""
    return {path.name: sha256(path) for path in folder.iterdir()}
