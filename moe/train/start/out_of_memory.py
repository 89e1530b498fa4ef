"""Turns an out-of-memory error into one line that says what did not fit and which key to set.

    with during("the optimizer's step"): ...      adds this name to an exception that the `with` block raises
    did_not_fit(error, run, ...)                  returns the line, or None if the error is not about memory

The line advises the first measure that the recipe does not use yet, in the order of ZeRO-Infinity (arXiv 2104.07857, section 3): less
memory for activations (recompute, smaller micro-batches, sequence parallelism), then for model states (shard, offload to host memory, then
to a disk), then tiling of the largest layer.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

from moe.plan.job import flops
from moe.plan.job.of_recipe import state_bytes
from moe.recipe.sections import Run
from moe.records.summary import count, size
from parallel.errors import BadInput
from parallel.fixes import Fix, Nproc, typed

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
