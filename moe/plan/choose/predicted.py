"""Predicts a run's memory and time before it starts. If it does not fit into memory, finds a change of the recipe with which it fits.

    predict(run, Place)     bytes by moe/plan/memory/memory.py; seconds by moe/plan/time/cost.py, if the cluster is known
    line, warning, refusal  the prediction in words for the user; `compared` adds the measurements for the summary
    change_that_fits(run)   the first of these changes that works. The cheapest in time come first:

    1  recompute of activations: selective, full            4  change 2 or 3, or both, with full recompute
    2  smaller micro-batches                                5  change 4 with the loss in chunks
    3  model states sharded: ZeRO-1, 2, 3, FSDP             6  full recompute, loss in chunks, model states in the host's memory (GPUs only)
                                                            7  full recompute, loss in chunks, shorter sequences

A run is refused only if a lower bound of its memory is too large. On a GPU, the bound is the bytes of tensors, without the allocator's
reserve and CUDA's context. On a CPU host, the tensors of all ranks must fit into its memory, and the tensors of one rank into the process's
`ulimit`. The bound assumes that experts' rows are divided equally among the ep ranks. If only the full prediction is too large, the run may
fit, and a warning is printed. This file needs no torch.

A change is printed only if the changed recipe passes its checks and is predicted to fit. Source of the order: the guide
(moe/plan/choose/guide.py); of change 6: ZeRO-Infinity (arXiv 2104.07857), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moe.plan.choose.recipe_of import Values, with_values
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster
from moe.plan.memory.memory import CONTEXT_BYTES, RESERVED, Memory, memory, peak
from moe.plan.memory.stack import OURS, OURS_ON_CPU, Stack
from moe.plan.time.cost import Time, step_time
from moe.recipe.sections import Run
from moe.records.summary import size
from parallel.data.kinds import ENGINES, offloading
from parallel.data.kinds.kind import EngineKind
from parallel.errors import BadInput
from parallel.fixes import Fix, Words, typed

SHORTEST = 64  # tokens: shorter sequences are not proposed
CALIBRATE = "moe plan --calibrate"


@dataclass(frozen=True)
class Place:
    """Devices on which a run trains. cluster: their description, for predicting time; None if unknown.

    limit_bytes: memory of one rank's device, or on a CPU its share of the host's memory; None if unknown. own_bytes: bytes that one
    process on a CPU may still allocate (`ulimit`); None without such a limit.
    """

    kind: Literal["cpu", "cuda"]
    limit_bytes: float | None = None
    cluster: Cluster | None = None
    own_bytes: float | None = None

    @classmethod
    def of(cls, cluster: Cluster, world: int) -> Place:
        """Return the Place for `world` ranks on as many nodes of `cluster` as they need."""
        return cls("cpu" if cluster.cores else "cuda", cluster.memory_bytes(world), cluster.holding(world))


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of a run. ranks: memory of each pipeline rank, for the ep rank whose experts get the most rows (choices of
    tokens). even: the same if rows were divided equally among the ep ranks."""

    place: Place
    network: Network
    plan: Plan
    ranks: tuple[Memory, ...]
    even: tuple[Memory, ...]
    time: Time | None

    @property
    def fullest(self) -> Memory:
        """Memory of the rank that needs most."""
        return max(self.ranks, key=_held(self.place))

    @property
    def rank_bytes(self) -> float:
        """Bytes of tensors on the rank that needs most. On a CPU, states offloaded to the host count too: they use the same memory."""
        return _held(self.place)(self.fullest)

    @property
    def needed_bytes(self) -> float:
        """Predicted bytes of one rank, for comparison with `limit_bytes`. On a GPU: `rank_bytes`, the allocator's reserve and CUDA's
        context. On a CPU: the mean over ranks (`least_bytes`), because they share the host's memory."""
        return self.least_bytes if self.place.kind == "cpu" else RESERVED * self.rank_bytes + CONTEXT_BYTES

    @property
    def least_bytes(self) -> float:
        """Lower bound of `needed_bytes`: bytes of the rank that needs most, on a CPU the mean over ranks. It leaves out the allocator's
        reserve and CUDA's context, and assumes that experts' rows are divided equally among the ep ranks."""
        sizes = list(map(_held(self.place), self.even))
        return sum(sizes) / len(sizes) if self.place.kind == "cpu" else max(sizes)

    @property
    def tightest(self) -> Bound | None:
        """The memory limit that the run exceeds by the most bytes. If the run exceeds no limit: the limit with the fewest bytes left. None
        if no limit is known."""
        known = []
        if self.place.limit_bytes is not None:
            where = "on the fullest rank" if self.place.kind == "cuda" else "a rank (all ranks share this host's memory)"
            known.append(Bound(self.least_bytes, self.place.limit_bytes, where))
        if self.place.own_bytes is not None:
            known.append(
                Bound(max(map(_held(self.place), self.even)), self.place.own_bytes, "on the fullest rank, under the ulimit of its process")
            )
        return max(known, key=lambda bound: bound.over, default=None)

    @property
    def over_bytes(self) -> float:
        """Bytes by which the run exceeds the tightest limit; negative if it stays below, or if no limit is known."""
        return -1.0 if self.tightest is None else self.tightest.over

    @property
    def fits(self) -> bool:
        """True if the run fits even with the allocator's reserve and CUDA's context."""
        return self.over_bytes <= 0 and (self.place.limit_bytes is None or self.needed_bytes <= self.place.limit_bytes)


@dataclass(frozen=True)
class Bound:
    """A memory limit. least: lower bound of the bytes that the run needs. limit: available bytes. where: ranks to which the
    limit applies, in words for messages."""

    least: float
    limit: float
    where: str

    @property
    def over(self) -> float:
        return self.least - self.limit


def predict(run: Run, place: Place) -> Prediction:
    """Predict memory and time of a run that has passed its checks and has resolved degrees. Raises BadInput for an unknown schedule."""
    network, plan = network_of(run), plan_of(run)
    stack = OURS_ON_CPU if place.kind == "cpu" else OURS
    ranks, even = (memory(of, plan, stack) for of in (network, network.balanced))
    time = step_time(network, plan, place.cluster) if place.cluster else None
    return Prediction(place, network, plan, ranks, even, time)


def settled(run: Run, cluster: Cluster) -> Run:
    """Replace `precision.compute: auto` by the dtype of the cluster's devices: bf16, or fp32 if they lack it (moe/train/start/place.py)."""
    if run.precision.compute != "auto":
        return run
    compute = "bf16" if "bf16" in cluster.device.peak_tflops else "fp32"
    return run.model_copy(update={"precision": run.precision.model_copy(update={"compute": compute})})


def stack_on(cluster: Cluster) -> Stack:
    return OURS_ON_CPU if cluster.cores else OURS


def held_bytes(network: Network, plan: Plan, cluster: Cluster) -> float:
    """Bytes of the rank that needs most, for comparison with Cluster.memory_bytes. On a GPU they include the allocator's reserve and CUDA's
    context, on a CPU the states offloaded to the host."""
    fullest = peak(network, plan, stack_on(cluster))
    return fullest.allocated + sum(fullest.host.values()) if cluster.cores else fullest.used


def _held(place: Place) -> Callable[[Memory], float]:
    if place.kind == "cpu":
        return lambda rank: rank.allocated + sum(rank.host.values())
    return lambda rank: rank.allocated


# --- a change with which the recipe fits into memory ---------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of a recipe. fix: command-line flags that make the change. run: the changed run after the recipe's checks."""

    fix: Fix
    run: Run


def change_that_fits(
    run: Run, world: int, *, fits: Callable[[Run], bool], checked: Callable[[Run, int], Run], has_gpus: bool
) -> Change | None:
    """Return the first change with which the run fits on `world` ranks; None if none works. checked: returns a run after the recipe's
    checks, which raise BadInput. has_gpus: also try to offload model states to the host's memory."""
    for values in _changes(run, has_gpus=has_gpus):
        try:
            changed = checked(with_values(run, values), world)
            if fits(changed):
                return Change(typed(values), changed)
        except BadInput:
            continue
    return None


def _named(kind: EngineKind) -> Values:
    """Return the keys of the section `sharding` that select this engine."""
    return {f"sharding.{key}": value for key, value in kind.sharding.items()}


def _changes(run: Run, *, has_gpus: bool) -> Iterator[Values]:
    """Yield the changes that `change_that_fits` tries, in the order at the top of this file."""
    again: list[Values] = [{"recompute.kind": "selective"}, {"recompute.kind": "full"}]
    smaller: list[Values] = [{"pipeline.microbatches": run.pipeline.microbatches * 2**n} for n in range(1, 11)]
    engines = sorted(reversed(ENGINES.values()), key=lambda kind: kind.stage)  # zero3 before fsdp, which is also stage 3
    sharded = [_named(kind) for kind in engines if kind.stage]
    chunked: Values = {"recompute.loss_chunks": 8}
    host = _named(offloading("parameters", "cpu")) | {"sharding.offload.optimizer": "cpu", "sharding.offload.parameters": "cpu"}
    yield from again
    yield from smaller
    yield from sharded
    for more in ({}, chunked):
        yield from (again[1] | less | more for less in smaller)
        yield from (again[1] | states | more for states in sharded)
        yield from (again[1] | less | states | more for less in smaller for states in sharded)
    if has_gpus:
        yield from (again[1] | less | chunked | host for less in ({}, *smaller))
    lengths = (run.model.max_length // 2**n for n in range(1, 8) if run.model.max_length // 2**n >= SHORTEST)
    yield from (again[1] | less | chunked | {"model.max_length": length} for length in lengths for less in ({}, *smaller))


# --- what is printed -----------------------------------------------------------------------------------------------------


def line(found: Prediction) -> str:
    """Return the line that is printed at the start of a run: bytes of tensors on the fullest rank, and seconds per step."""
    of = "" if found.tightest is None else f" of {size(found.tightest.limit)}"
    said = f"predicted: {size(found.rank_bytes)} of tensors on the fullest rank{of}, "
    if found.time is None or found.place.cluster is None:
        return f"{said}time not predicted ({CALIBRATE} measures this machine)"
    return f"{said}{seconds(found.time.step)} a step ({found.place.cluster.name})"


def warning(found: Prediction) -> str | None:
    """Return a warning if tensors alone fit into the device's memory, but not together with the allocator's reserve (blocks that it keeps
    unused) and the CUDA context; else None."""
    limit = found.place.limit_bytes
    if limit is None or found.over_bytes > 0 or found.needed_bytes <= limit:
        return None
    return f"it may not fit: with the allocator's reserve and the CUDA context, a device needs {size(found.needed_bytes)} of {size(limit)}"


def refusal(found: Prediction, run: Run, world: int, *, checked: Callable[[Run, int], Run]) -> BadInput:
    """Return the error for a run that is predicted not to fit, with a fix. run: the recipe, with its "auto" values. checked: function
    of (recipe, world) that replaces "auto" values, and raises BadInput for a recipe that is refused."""
    bound = found.tightest
    assert bound is not None
    change = change_that_fits(
        run, world, fits=lambda changed: predict(changed, found.place).fits, checked=checked, has_gpus=found.place.kind == "cuda"
    )
    return BadInput(
        "memory",
        got=f"a prediction of {size(bound.least)} of tensors {bound.where}, {size(bound.over)} too much",
        needed=f"at most {size(bound.limit)}",
        fix=_fix(change, found, bound) | "--force starts the run anyway",
    )


def _fix(change: Change | None, found: Prediction, bound: Bound) -> Fix:
    if change is not None:
        then = predict(change.run, found.place)
        host = sum(then.fullest.host.values()) if then.place.kind == "cuda" else 0.0
        assert then.tightest is not None
        more = f", and {size(host)} in the memory of its host" if host else ""
        return Words(f"{change.fix}: then {size(then.tightest.least)}{more}", change.fix)
    many = f"with about {bound.least / bound.limit:.1f} times as much" if bound.limit > 2**20 else "with more"
    disk = "put model states on a disk (sharding.offload), or " if found.place.kind == "cpu" else ""
    return Words(f"{disk}use ranks {many} memory together (moe plan chooses a layout)")


def compared(found: Prediction, *, memory_bytes: float, beside_bytes: float, step_seconds: float | None) -> dict[str, Any]:
    """Return prediction, measurements and their ratios (measured / predicted) for the summary. found: the prediction. memory_bytes:
    measured peak. beside_bytes: memory of a CPU process other than tensors; it is part of the measured peak, so for the ratio it is added
    to the prediction. step_seconds: measured, or None."""
    step, cluster = None if found.time is None else found.time.step, found.place.cluster
    return {
        "memory_bytes": found.rank_bytes,
        "step_seconds": step,
        "cluster": None if cluster is None else cluster.name,
        "beside_bytes": beside_bytes,
        "measured_memory_bytes": memory_bytes,
        "measured_step_seconds": step_seconds,
        "memory_ratio": _ratio(memory_bytes, found.rank_bytes + beside_bytes),
        "step_ratio": _ratio(step_seconds, step),
    }


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def seconds(value: float) -> str:
    """Format seconds with three digits and a unit."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
