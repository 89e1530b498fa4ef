"""Checks the machine before a run (writable folder, dtypes that every rank supports), measures memory, and catches stop signals."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.collectives import device_of, largest, max_over
from parallel.mesh.host import on_device, read_later
from parallel.mesh.mesh import Axis, Mesh
from parallel.numerics.precision import DTYPES, multiplies
from parallel.process import process
from parallel.process.process import World
from parallel.store.checkpoint import numbered

_PROBE_BYTES = 64 << 10  # size of the test file of `make_writable`: as large as the recipe and the first metrics need


def settle_precision(run: Run, world: World) -> Run:
    """Replace precision.compute "auto" by bf16 if all ranks support it, else by fp32. Collective."""
    if run.precision.compute != "auto":
        return run
    compute = "bf16" if _everywhere(torch.bfloat16, world) else "fp32"
    return run.model_copy(update={"precision": run.precision.model_copy(update={"compute": compute})})


def check_precision(run: Run, world: World) -> str | None:
    """If any rank's processor would emulate precision.compute, raise BadInput for fp16 and return a warning for bf16. Otherwise return
    None. Collective."""
    compute = run.precision.compute
    if compute == "fp32" or _everywhere(DTYPES[compute], world):
        return None
    if compute == "fp16":
        raise BadInput(
            "precision.compute",
            got="fp16 on a processor that has no instructions for it",
            needed="bf16 or fp32: an emulated matrix product would take tens of times as long as in fp32",
            fix=Set("precision.compute", "auto") & Set("precision.loss_scale", "none"),
        )
    return (
        "precision.compute bf16 on a processor that has no instructions for it: products are emulated and take many times as long as in "
        "fp32; --precision.compute auto takes fp32 here"
    )


def _everywhere(dtype: torch.dtype, world: World) -> bool:
    lacking = torch.tensor(int(not multiplies(dtype, world.device)), device=world.device)
    return not max_over(lacking, process.everyone(world)).item()


def make_writable(out: Path, world: World) -> None:
    """Make the run's folder. Raises BadInput on all ranks if it cannot be made, or if rank 0 cannot write into it. Collective."""
    problem = ""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if world.rank == 0:
            probe = out / ".writable"
            try:
                probe.write_bytes(bytes(_PROBE_BYTES))  # an empty file would fit even on a full disk
            finally:
                probe.unlink(missing_ok=True)
    except OSError as error:
        problem = error.strerror or str(error)
    if largest(float(bool(problem)), process.everyone(world)):
        got = f"{out}: {problem or 'not writable on another rank'}"
        raise BadInput("--out", got=got, needed="a folder that can be written", fix="choose another --out, or free disk space")


def set_aside(folder: Path, world: World, *, after: int | None = None) -> Path | None:
    """If `after` is None (--fresh), rename `folder`; otherwise move its checkpoints of steps above `after` into a new folder. Return the
    renamed or new folder on rank 0; None on other ranks, and if there is nothing to rename or move. Collective."""
    process.barrier()
    aside = _renamed(folder, after) if world.rank == 0 else None
    process.barrier()
    return aside


def _renamed(folder: Path, after: int | None) -> Path | None:
    later = [path for step, path in numbered(folder) if after is not None and step > after]
    if not later and (after is not None or not os.path.lexists(folder)):
        return None
    aside = unused_name(folder)
    if after is None:
        return folder.rename(aside)
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    return aside


def unused_name(folder: Path) -> Path:
    """Return the first path FOLDER.before-N, N = 1, 2, ..., that does not exist."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    return aside


def own_peak_bytes(device: torch.device) -> float:
    """Return the peak memory of this process so far, in bytes: allocated by torch on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


def maxima(values: Sequence[float], world: Axis) -> list[float]:
    """Return the maximum of each value over all ranks. Collective."""
    return max_over(torch.tensor(values, dtype=torch.float64, device=device_of(world)), world).tolist()


def peak_memory_bytes(mesh: Mesh, device: torch.device) -> float:
    """Return the maximum of the ranks' peak bytes. Collective."""
    return largest(own_peak_bytes(device), mesh.axis("world"))


def peak_later(mesh: Mesh, device: torch.device) -> Callable[[], float]:
    """Start to compute the maximum over ranks of the peak bytes so far. Return a function that waits for it and returns it. Collective."""
    own = on_device(torch.tensor([own_peak_bytes(device)], dtype=torch.float64), device)
    read = read_later(max_over(own, mesh.axis("world")))
    return lambda: float(read()[0][0])


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once SIGTERM, SIGINT, SIGUSR1 or SIGHUP (a closed terminal) was received. If SIGHUP is ignored, as
    under nohup, it stays ignored."""
    seen: list[int] = []

    def handler(number: int, _: Any) -> None:
        seen.append(number)

    try:
        heard = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            heard.remove(signal.SIGHUP)
        before = {s: signal.signal(s, handler) for s in heard}
    except ValueError:  # Python can set handlers only in the main thread
        before = {}
    try:
        yield lambda: bool(seen)
    finally:
        for number, old in before.items():
            # the handler of moe/launch/launch.py would report that a signal came before training, which is wrong after training
            if getattr(old, "before_training", False):
                old = signal.SIG_IGN
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: a handler set from C, which cannot be restored
