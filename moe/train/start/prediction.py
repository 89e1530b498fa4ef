"""Predicts memory and time before a run starts, prints them in a line, and refuses a run that cannot fit. Measures both at its end.

    foretell(run, ...)      on every rank, before anything is built     -> the same decision on all of them
    Measured                peak, model states and seconds of the steps, and other memory in use when they began

On a GPU, bytes are torch's allocations. On a CPU torch counts none, so bytes are the process's peak; memory that it used for other things
than tensors when the model was built is added to the prediction. A failed prediction is a line, never an error.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from moe.checks.together import check_run
from moe.plan.choose.predicted import Place, Prediction, predict
from moe.plan.machine.cluster import load_cluster, measured_cluster
from moe.recipe.sections import Run
from moe.records import prediction
from moe.records.summary import size
from moe.train.parts.model_states import ModelStates
from moe.train.start.place import own_peak_bytes
from parallel.data.engine import Engine
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.machine import memory_limit_bytes, own_limit_bytes, processor, resident_bytes
from parallel.mesh.collectives import max_over
from parallel.mesh.mesh import Mesh
from parallel.process import process
from parallel.process.process import World

STEPS_OF_MEMORY = 2  # moments exist from the second on


def here(world: World) -> Place:
    """Return this machine as a place: memory of the GPU or a share of the host's, and the cluster file measured on it, if there is one."""
    if world.device.type == "cuda":
        made = torch.cuda.get_device_properties(world.device)
        return Place("cuda", float(made.total_memory), measured_cluster(made.name))
    return Place("cpu", memory_limit_bytes() / world.local_size, measured_cluster(processor()), own_limit_bytes())


def foretell(run: Run, asked: Run, world: World, *, cluster: str | None, force: bool, say: Callable[[str], None]) -> Prediction | None:
    """Predict memory and time. Collective. `run`: checked; `asked`: the user's own, on which the fix is based. Raises BadInput if the run
    cannot fit."""
    found: Prediction | None = None
    limits = [float("inf")] * 2
    host = memory_limit_bytes() / world.local_size
    try:
        place = here(world) if cluster is None else Place.of(load_cluster(cluster), world.size)
        if place.cluster is not None:
            place = replace(place, cluster=place.cluster.holding(world.size))
        found = predict(run, place)
        limits = [float("inf") if limit is None else limit for limit in (place.limit_bytes, place.own_bytes)]
    except Exception as error:  # a failed prediction must not stop a run that works
        say(f"no prediction of memory and time ({type(error).__name__}: {error})".splitlines()[0])
    least = torch.tensor([-limit for limit in (*limits, host)], dtype=torch.float64, device=world.device)
    *least_of_all, host = (-max_over(least, process.everyone(world))).tolist()
    whole, own = (None if limit == float("inf") else limit for limit in least_of_all)
    if large := _too_large_evaluation(run, host):
        if not force:
            raise large
        say(f"starting nevertheless (--force): {large.what}: got {large.got}")
    if found is None:
        return None
    found = replace(found, place=replace(found.place, limit_bytes=whole, own_bytes=own))  # the minima over ranks, so that all decide alike
    say(prediction.line(found))
    if found.over_bytes > 0:
        refused = prediction.refusal(found, asked.model_copy(update={"precision": run.precision}), world.size, checked=check_run)
        if not force:
            raise refused
        say(f"starting nevertheless (--force): {refused.got}")
    elif warned := prediction.warning(found):
        say(warned)
    return found


def _too_large_evaluation(run: Run, host_bytes: float) -> BadInput | None:
    """Return an error if the token ids of an evaluation, 64 bits each, take more than half of a rank's share of host memory."""
    assert isinstance(run.degrees.dp, int)
    needed_bytes = 8.0 * (run.model.max_length + 1) * run.train.eval_sequences / run.degrees.dp
    if needed_bytes <= host_bytes / 2:
        return None
    needed = f"fewer: the tokens alone would take {size(needed_bytes)} of a rank's {size(host_bytes)}"
    fix = Set("it", run.train.global_batch) | "--force tries all the same"
    return BadInput("train.eval_sequences", got=run.train.eval_sequences, needed=needed, fix=fix)


class Measured:
    """Measurements of a run, begun when the model and its engine exist: each step's peak bytes and seconds.

    `beside`: resident bytes of a process on a CPU, other than tensors. It is 0 on a GPU, where torch counts tensors alone.
    """

    def __init__(self, world: World) -> None:
        self.beside = 0.0 if world.device.type == "cuda" else resident_bytes() - _tensor_bytes()
        self.peak_bytes = 0.0
        self.states = ModelStates()
        self.seconds: list[float] = []

    @property
    def looks(self) -> bool:
        """Return whether memory is still measured. The first two steps decide it, so later saves and evaluations do not count."""
        return len(self.seconds) < STEPS_OF_MEMORY

    def gradients(self, engine: Engine) -> None:
        """Measure the bytes of gradients in the first steps. Call it before the optimizer's update."""
        if self.looks:
            self.states.before_step(engine)

    def step(self, seconds: float, engine: Engine) -> None:
        """Record the `seconds` that this step took. In the first steps also measure the peak memory, to compare it with the prediction."""
        if self.looks:
            self.peak_bytes = own_peak_bytes()
            self.states.after_step(engine)
        self.seconds.append(seconds)

    def against(self, found: Prediction | None, mesh: Mesh) -> dict[str, Any] | None:
        """Return the summary's comparison of prediction and measurement, with maxima over ranks; None if either is missing.

        Collective.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mine = torch.tensor([self.peak_bytes, self.beside, median(self.seconds or [0.0])], dtype=torch.float64, device=device)
        memory_bytes, beside_bytes, step_seconds = max_over(mine, mesh.axis("world")).tolist()
        if found is None or not self.seconds:
            return None
        return prediction.compared(found, memory_bytes=memory_bytes, beside_bytes=beside_bytes, step_seconds=step_seconds)


def _tensor_bytes() -> int:
    """Return bytes of all tensors known to Python, each storage once."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # a DTensor has no storage; its inner tensor is another object and has it
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
