"""Predicts memory and time of a run before it starts, whether it fits, and a change with which it fits.

    predict(run, Place)     bytes by moe/plan/memory/memory.py; seconds by moe/plan/time/cost.py if the place has a cluster
    change_that_fits(run)   the first of these changes of the recipe that works, cheapest in time first:

    1  recompute of activations: selective, full            4  steps 2 or 3 with full recompute and the smallest micro-batches
    2  smaller micro-batches                                5  step 4 with the loss in chunks
    3  states sharded: ZeRO-1, 2, 3, FSDP                   6  step 5 with states in the host's memory, if the device has its own memory
                                                            7  steps 1, 2 and the loss in chunks, with shorter sequences

A run "cannot fit" only by a lower bound. On a GPU the tensors alone exceed the device, without the allocator's share and the context. On a
CPU host the tensors of all its ranks exceed its memory, or the tensors of one rank exceed its process's `ulimit`. If the need is between
this bound and the device's memory, the run may fit, and only a warning is printed (moe/records/prediction.py has its text). No torch.

Each change is tried by the recipe's own checks and by the prediction, so the printed flags work. Source of their order: the guide
(moe/plan/choose/guide.py), and ZeRO-Infinity (arXiv 2104.07857), section 3, for step 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster
from moe.plan.memory.memory import CONTEXT_BYTES, RESERVED, Memory, memory, peak
from moe.plan.memory.stack import OURS, OURS_ON_CPU, Stack
from moe.plan.time.cost import Time, step_time
from moe.recipe.sections import Run
from parallel.data.kinds.catalog import ENGINES, offloading
from parallel.data.kinds.kind import EngineKind
from parallel.errors import BadInput
from parallel.fixes import Fix, typed

Values = dict[str, Any]  # key of the recipe with its section, such as train.global_batch -> value
SHORTEST = 64  # tokens: shorter sequences are not proposed


@dataclass(frozen=True)
class Place:
    """Devices on which ranks train. cluster: description for predicting time, if any.

    limit_bytes: memory of one rank, on a CPU its share of the host's; None if unknown. own_bytes: bytes that one process on a CPU may
    still allocate (`ulimit`); None without such a limit.
    """

    kind: Literal["cpu", "cuda"]
    limit_bytes: float | None = None
    cluster: Cluster | None = None
    own_bytes: float | None = None

    @classmethod
    def of(cls, cluster: Cluster, world: int) -> Place:
        """Return the place with as many of the cluster's nodes as `world` ranks need."""
        return cls("cpu" if cluster.cores else "cuda", cluster.memory_bytes(world), cluster.holding(world))


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a run. ranks: memory of each pipeline rank; ranks that differ only in other axes need the same."""

    place: Place
    network: Network
    plan: Plan
    ranks: tuple[Memory, ...]
    time: Time | None

    @property
    def fullest(self) -> Memory:
        return max(self.ranks, key=_held(self.place))

    @property
    def rank_bytes(self) -> float:
        """Bytes of the fullest rank's tensors. On a CPU, states offloaded to the host count: they use the same memory."""
        return _held(self.place)(self.fullest)

    @property
    def needed_bytes(self) -> float:
        """Bytes of one rank to compare with limit_bytes: on a GPU including the allocator's share and the context."""
        return self.least_bytes if self.place.kind == "cpu" else RESERVED * self.rank_bytes + CONTEXT_BYTES

    @property
    def least_bytes(self) -> float:
        """Lower bound of `needed_bytes`: the fullest rank's tensors on a GPU; the mean of all ranks on a CPU, whose memory they share."""
        return sum(map(_held(self.place), self.ranks)) / len(self.ranks) if self.place.kind == "cpu" else self.rank_bytes

    @property
    def tightest(self) -> Bound | None:
        """The memory limit that the run exceeds by most or, if it exceeds none, comes nearest to; None if no limit is known."""
        known = []
        if self.place.limit_bytes is not None:
            of = "on the fullest rank" if self.place.kind == "cuda" else "a rank, all of which share this host's memory"
            known.append(Bound(self.least_bytes, self.place.limit_bytes, of))
        if self.place.own_bytes is not None:
            known.append(Bound(self.rank_bytes, self.place.own_bytes, "on the fullest rank, under the ulimit of its process"))
        return max(known, key=lambda bound: bound.over, default=None)

    @property
    def over_bytes(self) -> float:
        """Bytes by which the run exceeds the tightest limit; negative if it does not, or if no limit is known."""
        return -1.0 if self.tightest is None else self.tightest.over

    @property
    def fits(self) -> bool:
        """True if the run fits even with the allocator's share and the context."""
        return self.over_bytes <= 0 and (self.place.limit_bytes is None or self.needed_bytes <= self.place.limit_bytes)


@dataclass(frozen=True)
class Bound:
    """A memory limit. least: bytes that a run needs with any allocator. limit: available bytes. of: the ranks concerned, as text."""

    least: float
    limit: float
    of: str

    @property
    def over(self) -> float:
        return self.least - self.limit


def predict(run: Run, place: Place) -> Prediction:
    """Predict memory and time of a checked run with resolved degrees. Raises BadInput for a schedule that the planner does not know."""
    network, plan = network_of(run), plan_of(run)
    ranks = memory(network, plan, OURS_ON_CPU if place.kind == "cpu" else OURS)
    time = step_time(network, plan, place.cluster) if place.cluster else None
    return Prediction(place, network, plan, ranks, time)


def settled(run: Run, cluster: Cluster) -> Run:
    """Replace `precision.compute: auto` by the dtype of the cluster's devices: bf16, or fp32 if they lack it (moe/train/start/place.py)."""
    if run.precision.compute != "auto":
        return run
    compute = "bf16" if "bf16" in cluster.device.peak_tflops else "fp32"
    return run.model_copy(update={"precision": run.precision.model_copy(update={"compute": compute})})


def stack_on(cluster: Cluster) -> Stack:
    return OURS_ON_CPU if cluster.cores else OURS


def held_bytes(network: Network, plan: Plan, cluster: Cluster) -> float:
    """Bytes of the fullest rank, as Cluster.memory_bytes counts: with allocator and context, or on a CPU with states offloaded to the
    host.
    """
    fullest = peak(network, plan, stack_on(cluster))
    return fullest.allocated + sum(fullest.host.values()) if cluster.cores else fullest.used


def _held(place: Place) -> Callable[[Memory], float]:
    if place.kind == "cpu":
        return lambda rank: rank.allocated + sum(rank.host.values())
    return lambda rank: rank.allocated


# --- a change that fits --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of a recipe. fix: the change as flags. run: the changed run, checked."""

    fix: Fix
    run: Run


def change_that_fits(
    run: Run, world: int, *, fits: Callable[[Run], bool], checked: Callable[[Run, int], Run], has_gpus: bool
) -> Change | None:
    """Return the first change with which the run fits on `world` ranks; None if none works. checked: (run, world) -> the run after the
    recipe's checks, which raise BadInput."""
    for values in _changes(run, has_gpus=has_gpus):
        try:
            changed = checked(with_values(run, values), world)
            if fits(changed):
                return Change(typed(values), changed)
        except BadInput:
            continue
    return None


def with_values(run: Run, values: Values) -> Run:
    """Return the run with some values changed. Nothing is checked."""
    for key, value in values.items():
        first, *rest = key.split(".")
        run = _with(run, [first, *rest], value)
    return run


def _with(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with(getattr(section, path[0]), path[1:], value)
    return section.model_copy(update={path[0]: inner})


def _named(kind: EngineKind) -> Values:
    return {f"sharding.{key}": value for key, value in kind.sharding.items()}


def _changes(run: Run, *, has_gpus: bool) -> Iterator[Values]:
    again: list[Values] = [{"recompute.kind": "selective"}, {"recompute.kind": "full"}]
    smaller: list[Values] = [{"pipeline.microbatches": run.pipeline.microbatches * 2**n} for n in range(1, 11)]
    engines = sorted(reversed(ENGINES.values()), key=lambda kind: kind.stage)  # both engines of stage 3: ZeRO first, then FSDP
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
