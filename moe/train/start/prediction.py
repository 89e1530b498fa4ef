"""Predicts memory and time before a run starts, and refuses a run that cannot fit. Measures both during the run, for its summary. Says in
one line what did not fit if a run is out of memory nevertheless.

On a GPU, memory is torch's allocations. On a CPU, torch counts no allocations, so memory is the process's peak resident memory. Memory
other than tensors is then added to the prediction. If the prediction raises an error, the run prints it in one line and starts anyway.

Model states are counted from the engine's live tensors, each storage once. `parameters`: the weights that the model reads. `gradients`:
between backward pass and update. `optimizer`: the optimizer's states, and the master weights if the model reads other copies.

    with during("the optimizer's step"): ...      adds this name to an exception that the `with` block raises
    did_not_fit(error, run, ...)                  returns the line, or None if the error is not about memory

That line advises the first measure that the recipe does not use yet, in the order of ZeRO-Infinity (arXiv 2104.07857, section 3): less
memory for activations (recompute, smaller micro-batches, sequence parallelism), then for model states (shard, offload to host memory, then
to a disk), then tiling of the largest layer.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.plan.choose import predicted
from moe.plan.choose.predicted import Place, Prediction, predict
from moe.plan.job import flops
from moe.plan.job.of_recipe import state_bytes
from moe.plan.machine.cluster import load_cluster, measured_cluster
from moe.recipe.sections import Run
from moe.records.summary import count, size
from moe.train.start.place import maxima, own_peak_bytes
from parallel.data.engine import Engine
from parallel.errors import BadInput
from parallel.fixes import Fix, Nproc, Set, typed
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
    say(predicted.line(found))
    if found.over_bytes > 0:
        refused = predicted.refusal(found, asked.model_copy(update={"precision": run.precision}), world.size, checked=check_run)
        if not force:
            raise refused
        say(f"starting nevertheless (--force): {refused.got}")
    elif warned := predicted.warning(found):
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
        return predicted.compared(found, memory_bytes=memory_bytes, beside_bytes=beside_bytes, step_seconds=step_seconds)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return a dict: address -> bytes of each storage of these tensors. For a DTensor, only this rank's shard counts."""
    found: dict[int, int] = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):  # a sparse tensor has no storage
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)  # tensors without memory, such as those on the meta device
    return found


# what needed the memory: names for `during`
WEIGHTS, STATES = "the model's weights", "the engine's copies of the weights"
PASSES, STEP = "a forward or backward pass", "the optimizer's step"
RESUMING, EVALUATION = "resuming from the checkpoint", "the sequences of an evaluation"
_NOTE = "during "
_ZERO_3 = {"sharding.kind": "zero", "sharding.stage": 3}
_SAYINGS = ("allocate memory", "out of memory", "not enough memory")  # in errors of torch's allocators, the C library and Linux


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(_NOTE + what)
        raise


def did_not_fit(error: BaseException, run: Run, *, world: int, cpu: bool) -> str | None:
    """Return the line for an out-of-memory error, recognized by its type or text; None for other errors. cpu: the device is a CPU."""
    said = str(error)
    ran_out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not ran_out and not (isinstance(error, RuntimeError) and any(words in said.lower() for words in _SAYINGS)):
        return None
    notes = [note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
    where = notes[0] if notes else "training"
    asked = re.search(r"allocate (\d+) bytes", said)
    more = f" ({size(int(asked[1]))} more asked for)" if asked else ""
    total = flops.size(run).total
    of_states = f"{size(state_bytes(run))} are weights, gradients and optimizer states"
    needed = f"a smaller peak ({of_states} of {count(total)} parameters, on all ranks together)"
    return str(BadInput("memory", got=f"none left for {where}{more}", needed=needed, fix=next_step(run, where, world=world, cpu=cpu)))


def next_step(run: Run, where: str, *, world: int, cpu: bool) -> Fix:
    """Return the keys to set: the first measure, in the order of the module's docstring, that the recipe does not use yet. where: what
    needed the memory, a name given to `during`."""
    s, microbatches = run.sharding, run.pipeline.microbatches
    if where == EVALUATION and run.train.eval_sequences > run.train.global_batch:
        return typed({"train.eval_sequences": run.train.global_batch})
    if where == PASSES and run.recompute.kind != "full":
        return typed({"recompute.kind": "full"})
    held = run.train.global_batch // (run.degrees.dp if isinstance(run.degrees.dp, int) else world)
    if where == PASSES and held // microbatches > 1 and microbatches < 4:
        return typed({"pipeline.microbatches": 2 * microbatches})
    if where == PASSES and held // microbatches <= 1 and _is_long(run):
        return typed({"degrees.sp": 2 * max(1, run.degrees.sp)}) & Nproc(2 * world)
    if world > 1 and s.named.stage < 3:
        return typed(_ZERO_3)
    if not cpu and s.offload.optimizer == "none":
        return typed(_ZERO_3 | {"sharding.offload.optimizer": "cpu", "sharding.offload.parameters": "cpu"})
    if s.offload.parameters != "nvme":
        disk = {"sharding.offload.optimizer": "nvme", "sharding.offload.parameters": "nvme", "sharding.offload.path": "FOLDER_ON_A_DISK"}
        return typed(_ZERO_3 | disk)
    return typed({"tiling.ffn": 4 * run.tiling.ffn})


def _is_long(run: Run) -> bool:
    """Return whether the inputs of all layers for one sequence, in fp32 and divided by sp, take more bytes than the model's weights,
    gradients and optimizer states."""
    m = run.model
    return 4 * m.max_length * m.d_model * m.num_layers > state_bytes(run) * max(1, run.degrees.sp)
