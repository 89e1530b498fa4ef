"""Predicts memory and time before a run starts, and refuses a run that cannot fit. Measures both during the run, for its summary.

On a GPU, memory is torch's allocations. On a CPU, torch counts no allocations, so memory is the process's peak resident memory. Memory
other than tensors is then added to the prediction. If the prediction raises an error, the run prints it in one line and starts anyway.

Model states are counted from the engine's live tensors, each storage once. `parameters`: the weights that the model reads. `gradients`:
between backward pass and update. `optimizer`: the optimizer's states, and the master weights if the model reads other copies.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.plan.choose.predicted import Place, Prediction, predict
from moe.plan.machine.cluster import load_cluster, measured_cluster
from moe.recipe.sections import Run
from moe.records import prediction
from moe.records.summary import size
from moe.train.start.place import maxima, own_peak_bytes
from parallel.data.engine import Engine
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.machine import memory_limit_bytes, own_limit_bytes, processor, resident_bytes
from parallel.mesh.mesh import Mesh
from parallel.process import process
from parallel.process.process import World

STEPS_OF_MEMORY = 2  # memory is measured in the first two steps, because all optimizer states exist only from the second on
PARTS = ("parameters", "gradients", "optimizer")  # kinds of model states


def here(world: World) -> Place:
    """Return this rank's device, its memory (the GPU's, or a share of the host's) and the stored measurements of this machine, if there are
    any."""
    if world.device.type == "cuda":
        made = torch.cuda.get_device_properties(world.device)
        return Place("cuda", float(made.total_memory), measured_cluster(made.name))
    return Place("cpu", memory_limit_bytes() / world.local_size, measured_cluster(processor()), own_limit_bytes())


def foretell(run: Run, asked: Run, world: World, *, cluster: str | None, force: bool, say: Callable[[str], None]) -> Prediction | None:
    """Predict memory and time, print and return them; return None if the prediction raises an error. Collective: all ranks decide alike.
    run: the checked run. asked: the same run before `auto` values were replaced, for the fix in the error. cluster: a cluster file; None:
    this machine. Raises BadInput, unless `force`, if the run is predicted not to fit in memory, or if the token ids that an evaluation
    loads would take more than half of a rank's host memory."""
    found: Prediction | None = None
    limits = [float("inf")] * 2
    host = memory_limit_bytes() / world.local_size
    try:
        place = here(world) if cluster is None else Place.of(load_cluster(cluster), world.size)
        if place.cluster is not None:
            place = replace(place, cluster=place.cluster.holding(world.size))
        found = predict(run, place)
        limits = [float("inf") if limit is None else limit for limit in (place.limit_bytes, place.own_bytes)]
    except Exception as error:  # an error in the prediction must not stop a run that would work
        say(f"no prediction of memory and time ({type(error).__name__}: {error})".splitlines()[0])
    *least_of_all, host = (-most for most in maxima([-limit for limit in (*limits, host)], process.everyone(world)))
    whole, own = (None if limit == float("inf") else limit for limit in least_of_all)
    if large := _too_large_evaluation(run, host):
        if not force:
            raise large
        say(f"starting nevertheless (--force): {large.what}: got {large.got}")
    if found is None:
        return None
    found = replace(found, place=replace(found.place, limit_bytes=whole, own_bytes=own))  # limits of the rank with the least memory
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
    """Return an error if the token ids of an evaluation (8 bytes each) would take more than half of `host_bytes`, a rank's share of the
    host's memory."""
    assert isinstance(run.degrees.dp, int)
    needed_bytes = 8.0 * (run.model.max_length + 1) * run.train.eval_sequences / run.degrees.dp
    if needed_bytes <= host_bytes / 2:
        return None
    needed = f"fewer: their token ids would take {size(needed_bytes)} of a rank's {size(host_bytes)} of host memory"
    fix = Set("it", run.train.global_batch) | "--force starts the run anyway"
    return BadInput("train.eval_sequences", got=run.train.eval_sequences, needed=needed, fix=fix)


class Measured:
    """Measured seconds of a run's steps, and memory in its first two steps: the peak, and bytes of model states. In the second step the
    optimizer has all its states; in later steps, saves and evaluations could raise the peak. Create it after the model and its engine."""

    def __init__(self, world: World) -> None:
        self.device = world.device
        things = gc.get_objects()
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Tensor)}
        tensors = (thing for thing in things if type(thing) in kinds)
        # on a CPU, bytes of this process other than tensors; on a GPU 0, because torch counts only tensors
        self.beside = 0.0 if self.device.type == "cuda" else resident_bytes() - sum(storages(tensors).values())
        self.peak_bytes = 0.0
        self.state_bytes = dict.fromkeys(PARTS, 0)  # kind of state -> most bytes after a step
        self.seconds: list[float] = []  # seconds of each step

    @property
    def _counts_memory(self) -> bool:
        return len(self.seconds) < STEPS_OF_MEMORY

    def before_update(self, engine: Engine) -> None:
        """Count the bytes of gradients: `.grad` of parameters, and this rank's shard of summed gradients. Call it before the update."""
        if self._counts_memory:
            at_parameters = [p.grad for p in engine.module.parameters() if p.grad is not None]
            self._add("gradients", storages([*at_parameters, *(held.tensor for held in engine.summed_gradients())]))

    def after_step(self, seconds: float, engine: Engine) -> None:
        """Record the seconds of a step. In the first two steps, also measure peak memory, and bytes of parameters and optimizer states."""
        if self._counts_memory:
            self.peak_bytes = own_peak_bytes(self.device)
            held = list(engine.tensors())
            read = storages([*engine.module.parameters(), *(each.tensor for each in held if each.kind == "working weight")])
            if not read:  # the model has no weights between passes (weights are gathered for a pass), so the engine's shards count
                read = storages(each.tensor for each in held if each.kind == "weight")
            self._add("parameters", read)
            self._add("optimizer", {at: size for at, size in storages(each.tensor for each in held).items() if at not in read})
        self.seconds.append(seconds)

    def _add(self, part: str, found: dict[int, int]) -> None:
        self.state_bytes[part] = max(self.state_bytes[part], sum(found.values()))

    def largest_states(self, mesh: Mesh) -> dict[str, int] | None:
        """Return {kind of model state: most bytes on any rank}; None if no step was made. Collective."""
        most = maxima(list(self.state_bytes.values()), mesh.axis("world"))
        return {part: int(size) for part, size in zip(PARTS, most, strict=True)} if any(most) else None

    def against(self, found: Prediction | None, mesh: Mesh) -> dict[str, Any] | None:
        """Return the prediction with the measurements (maxima over ranks), for summary.json; None if either is missing. Collective."""
        measured = [self.peak_bytes, self.beside, median(self.seconds or [0.0])]
        memory_bytes, beside_bytes, step_seconds = maxima(measured, mesh.axis("world"))
        if found is None or not self.seconds:
            return None
        return prediction.compared(found, memory_bytes=memory_bytes, beside_bytes=beside_bytes, step_seconds=step_seconds)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return a dict: address -> bytes of each storage of these tensors. For a DTensor, only this rank's shard counts."""
    found: dict[int, int] = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):  # a sparse tensor has no storage
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)  # tensors without memory, such as those on the meta device
    return found
