"""Sets GPU clocks as an energy plan says (`pipeline.energy_plan`), if NVML permits it on all ranks; otherwise prints the reason.

Before each action of the pipeline, a rank sets its GPU to the clock that the plan has for this action. After the last step, a signal or an
error, all clocks are unlocked. If one rank cannot set its clock at the start, no rank follows the plan, because its times hold only if all
ranks follow it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from moe.plan.pipeline import energy_plan
from moe.recipe.sections import Run
from moe.train.parts.executor import Executor, Pipelined
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Mesh
from parallel.pipeline.energy.nvml import ClockSetter, NoControl, connect
from parallel.process.process import World

AT_FULL_CLOCK = "training continues at the current clocks"


@contextmanager
def planned_clocks(run: Run, executor: Executor, mesh: Mesh, world: World, *, note: Callable[[str], None]) -> Iterator[None]:
    """Run the pipeline at the plan's clocks until the context exits. note: prints a line on rank 0. Collective if there is a plan."""
    if run.pipeline.energy_plan is None:
        yield
        return
    assert isinstance(executor, Pipelined)
    with ExitStack() as stack:
        gpus, reason = None, ""
        try:
            gpus = stack.enter_context(connect([gpu_of(world.device)]))
        except NoControl as refused:
            reason = str(refused)
        lacking = int(largest(float(world.size - world.rank) if gpus is None else 0.0, mesh.axis("world")))
        if gpus is None or lacking:
            why = reason or f"rank {world.size - lacking} cannot set its GPU's clock"
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

        # Waits only for the compute stream. Waiting for another stream could be a deadlock: the stream may be in a receive that completes
        # only after a later action of this rank.
        def settle() -> None:
            if world.device.type == "cuda":
                torch.cuda.current_stream(world.device).synchronize()

        pace = ClockSetter(gpus, energy_plan(run).mhz[mesh.axis("pp").index], settle=settle, lost=lost)
        try:
            with executor.watched(pace):
                yield
        finally:
            try:
                gpus.release()
            except gpus.nvml.NVMLError as error:  # not raised, because it would fail a finished run, or hide another error
                gpus.locked = [0.0] * len(gpus.locked)
                lost(f"its clock could not be unlocked ({error}): run nvidia-smi --reset-gpu-clocks")


def gpu_of(device: torch.device) -> str:
    """Return the GPU's UUID. By its UUID, NVML finds a GPU whatever CUDA_VISIBLE_DEVICES is. Raises NoControl for a CPU."""
    if device.type != "cuda":
        raise NoControl("this rank computes on a CPU, and plans are for GPUs")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
