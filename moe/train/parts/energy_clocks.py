"""GPU clocks of an energy plan (`pipeline.energy_plan`), set if this machine permits it; otherwise one note and no change.

    with planned_clocks(...):     each rank locks its own GPU's clock before an action with another planned clock
                                  after the last step, a signal or an error, every clock is unlocked

All ranks follow the plan, or none. With a mixture, time and energy would match neither the plan nor full clocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from moe.plan.pipeline import energy_plan
from moe.recipe.sections import Run
from moe.train.parts.executor import Executor, Pipelined
from parallel.mesh.collectives import max_over
from parallel.mesh.mesh import Mesh
from parallel.pipeline.energy.nvml import Gpus, NoControl, Pace, connect
from parallel.process.process import World

AT_FULL_CLOCK = "training continues at the current clocks"


@contextmanager
def planned_clocks(run: Run, executor: Executor, mesh: Mesh, world: World, *, note: Callable[[str], None]) -> Iterator[None]:
    """Run the pipeline at its plan's clocks until the context exits. `note`: shown by rank 0. Collective if there is a plan."""
    if run.pipeline.energy_plan is None:
        yield
        return
    assert isinstance(executor, Pipelined)
    with ExitStack() as stack:
        gpus, reason = _own_gpu(stack, world)
        without = _first_without(gpus is None, mesh, world)
        if gpus is None or without is not None:
            why = reason or f"rank {without} cannot set its GPU's clock"
            note(f"energy plan: not applied: {why}; {AT_FULL_CLOCK}")
            yield
            return
        note(f"energy plan: clocks of {world.size} GPUs follow {run.pipeline.energy_plan}")

        def lost(why: str) -> None:
            said = f"energy plan: no longer applied on rank {world.rank}: {why}; {AT_FULL_CLOCK}"
            if world.rank:
                print(said, file=sys.stderr, flush=True)
            else:
                note(said)

        pace = Pace(gpus, energy_plan(run).mhz[mesh.axis("pp").index], settle=lambda: _settle(world.device), lost=lost)
        try:
            with executor.watched(pace):
                yield
        finally:
            _give_back(gpus, lost)


def _own_gpu(stack: ExitStack, world: World) -> tuple[Gpus | None, str]:
    """Return this rank's GPU, connected until the stack closes, or the reason why its clock cannot be set."""
    try:
        return stack.enter_context(connect([gpu_of(world.device)])), ""
    except NoControl as refused:
        return None, str(refused)


def gpu_of(device: torch.device) -> str:
    """Return NVML's name of a GPU, independent of CUDA_VISIBLE_DEVICES. Raises NoControl for a CPU."""
    if device.type != "cuda":
        raise NoControl("this rank computes on a CPU, and plans are for GPUs")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _first_without(lacking: bool, mesh: Mesh, world: World) -> int | None:
    found = torch.tensor((world.size - world.rank) if lacking else 0, device=world.device)
    most = int(max_over(found, mesh.axis("world")).item())
    return world.size - most if most else None


def _settle(device: torch.device) -> None:
    """Wait for this rank's own kernels. Waiting for the device would also wait for posted receives that only later actions satisfy."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _give_back(gpus: Gpus, lost: Callable[[str], None]) -> None:
    """Unlock the clocks. A driver's refusal must not end a finished run or hide its error."""
    try:
        gpus.release()
    except gpus.nvml.NVMLError as error:
        gpus.locked = [0.0] * len(gpus.locked)
        lost(f"its clock could not be given back ({error}): nvidia-smi --reset-gpu-clocks")
