"""Predicts the bytes that each rank of a plan needs, tensor by tensor.

    allocated = states + activations + temporary tensors + buffers, at the point of a step at which this sum is largest

    states         parameters, gradients, optimizer states                          moe/plan/job/states.py, counts.py
    activations    micro-batches in flight x bytes of one micro-batch               moments.py, kept.py
    temporary      at the loss, in a layer's backward pass, by ZeRO stage 3         temporary.py
    buffers        gradient buckets

The device needs more, because torch's allocator reserves whole blocks, and CUDA's context is not a tensor:

    reserved  = 1.10 allocated         median of 16 published measurements of both (1.06 to 1.15)
    used      = reserved + 1.5 GB      CUDA's context, 1.3 to 1.6 GB on A100 nodes

Sources: ZeRO (arXiv 1910.02054), Korthikanti et al. (arXiv 2205.05198), ZeRO-Infinity (arXiv 2104.07857) for tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from moe.plan.job.counts import Elements
from moe.plan.job.network import Network, Plan
from moe.plan.job.states import States, model_states
from moe.plan.memory.moments import MOST_STARTED, Moment, RankMoments, ranks_of, without_order
from moe.plan.memory.rows import FP32_BYTES
from moe.plan.memory.stack import OURS, Stack
from moe.plan.memory.stages import differs_by_moment
from moe.plan.memory.temporary import Unit, at_any_moment, gathered
from parallel.data.kinds.kind import At
from parallel.pipeline.schedules import placed

RESERVED = 1.10  # bytes that the allocator reserves, as a multiple of the allocated bytes
CONTEXT_BYTES = 1.5e9  # of CUDA's context
EMPTY = Moment("forward")  # a point of a step at which no micro-batch is in flight
ROUNDED = 1e-9  # relative tolerance of comparisons, because the order of a sum changes its last digits
PARTS = (
    *("parameters", "gradients", "optimizer", "older weights"),
    *("activations", "loss and logits", "embedding's gradient", "layer at work", "dispatch buffers"),
    *("gathered layers", "gradient buckets"),
)


@dataclass(frozen=True)
class Memory:
    """Peak memory of one pipeline rank. parts: name in PARTS -> bytes on the device. host: name in PARTS -> bytes offloaded to the host."""

    rank: int
    parts: dict[str, float]
    host: dict[str, float] = field(default_factory=dict)

    @property
    def allocated(self) -> float:
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        return RESERVED * self.allocated

    @property
    def used(self) -> float:
        """Bytes that nvidia-smi shows: reserved by the allocator, plus CUDA's context."""
        return self.reserved + CONTEXT_BYTES


def memory(network: Network, plan: Plan, stack: Stack = OURS) -> tuple[Memory, ...]:
    """Return the memory of each pipeline rank. Ranks that differ only on other axes need the same memory. Raises BadInput if the schedule
    does not allow the plan's numbers of stages and micro-batches."""
    plan = plan.carried if stack.gathers == "moments" else plan
    engine = _Engine(plan, stack)
    return tuple(_memory(plan, rank, engine.fullest_moment(rank)) for rank in ranks_of(network, plan, stack, "all"))


def peak(network: Network, plan: Plan, stack: Stack = OURS) -> Memory:
    """Return the memory of the pipeline rank that needs the most."""
    return _peak(network, without_order(plan.carried if stack.gathers == "moments" else plan), stack)


@lru_cache(maxsize=512)  # plans that differ only in settings without effect on memory (`without_order`) share the result
def _peak(network: Network, plan: Plan, stack: Stack) -> Memory:
    engine = _Engine(plan, stack)
    ranks = [(rank, engine.fullest_moment(rank)) for rank in ranks_of(network, plan, stack, "fullest")]
    sizes = [engine.states(rank) + full.total for rank, full in ranks]
    least = max(sizes) * (1 - ROUNDED)
    fullest = [_memory(plan, *of) for of, size in zip(ranks, sizes, strict=True) if size >= least]
    return max(fullest, key=lambda m: m.allocated)


def _memory(plan: Plan, rank: RankMoments, full: _Full) -> Memory:
    """Return the memory of a rank at `full`, the moment of its peak."""
    (states, host), at = _states(plan, rank.held), full.moment
    sizes = (
        *(states.parameters, states.gradients - full.missing, states.optimizer),
        (rank.versions - 1) * rank.held.parameters * plan.storage.parameters,
        *(at.activations, at.loss, at.embedding + full.waiting, at.work, at.dispatch),
        *(full.gathered, full.bucket),
    )
    return Memory(rank.number, dict(zip(PARTS, sizes, strict=True)), host)


class _Full(NamedTuple):
    """A moment of a step, with the bytes that depend on the plan's data-parallel engine. bucket: bytes of gradient buckets. missing: bytes
    of gradients that do not exist yet. waiting: bytes of a tied head's gradient until it is added to the embedding's. gathered: bytes of
    gathered weights and unreduced gradients with ZeRO stage 3."""

    moment: Moment
    missing: float
    waiting: float
    gathered: float
    bucket: float

    @property
    def total(self) -> float:
        return self.moment.total - self.missing + self.waiting + self.gathered + self.bucket


class _Engine:
    """Bytes that depend on a plan's data-parallel engine: the states of each parameter, and the engine's additional bytes at each moment.

    dense, expert: bytes of the model states of one parameter outside of experts, and in experts. of_dense, of_expert: bytes of such a
    parameter's gradient that are allocated only in a step's first backward pass. of_head: bytes of an element of the gradient that a tied
    head has in addition to the embedding's. bucket_at_loss, bucket: bytes of gradient buckets at the loss, and at other moments. late:
    whether gradients are reduced and sharded only at the end of a step (FSDP that keeps gathered weights, with pipeline stages).
    """

    def __init__(self, plan: Plan, stack: Stack) -> None:
        self.plan, self.stack, self.by_moment = plan, stack, differs_by_moment(plan, stack)
        self.dense, self.expert = _states(plan, Elements(1.0))[0], _states(plan, Elements(expert=1.0))[0]
        self.of_dense = self.of_expert = self.of_head = 0.0
        if stack.gradients == "freed":
            freed = _freed(plan)
            self.of_dense, self.of_expert = self.dense.gradients * freed[0], self.expert.gradients * freed[1]
            self.of_head = plan.storage.gradients if plan.stage < 3 or self.by_moment else 0.0
        self.bucket_at_loss, self.bucket = _bucket(plan, stack, "loss"), _bucket(plan, stack, "work")
        self.late = stack.gathers == "moments" and plan.stage == 3 and plan.pp > 1 and not plan.reshard and plan.copies > 1

    def states(self, rank: RankMoments) -> float:
        """Bytes of the states of all parameters that the rank holds."""
        held, dense, expert = rank.held, self.dense, self.expert
        trained = dense.total * (held.dense - held.frozen_dense) + expert.total * (held.expert - held.frozen_expert)
        older = (rank.versions - 1) * self.plan.storage.parameters * held.parameters
        frozen = dense.parameters * held.frozen_dense + expert.parameters * held.frozen_expert + self.plan.storage.blocks * held.blocks
        return trained + older + frozen

    def _missing(self, to_come: Elements) -> float:
        """Bytes of gradients that are not allocated yet: of the parameters `to_come` if gradients are freed between steps; otherwise
        0."""
        return self.of_dense * to_come.dense + self.of_expert * to_come.expert

    def fullest_moment(self, rank: RankMoments) -> _Full:
        """Return the point of a step at which the rank needs the most memory."""
        plan, stack = self.plan, self.stack
        whole = _gathered(plan, stack, rank) if plan.stage == 3 and not self.by_moment else None
        sharded = self._missing(rank.held.trained)
        found = [
            _Full(
                one,
                sharded if self.late else self._missing(one.to_come),
                self.of_head * one.waiting,
                whole(one) if whole else one.gathered,
                max(self.bucket_at_loss if one.at == "loss" else self.bucket, _started(plan, stack, one.summed)),
            )
            for one in rank.moments
        ]
        if self.late and whole:  # moments of the first and of the last reduce-scatter of a step
            unit, trained = plan.copies * self._missing(rank.largest.trained), plan.copies * sharded
            found.append(_Full(EMPTY._replace(at="sums"), sharded, 0.0, whole(EMPTY._replace(at="sums")) + unit, 0.0))
            found.append(_Full(EMPTY._replace(at="sums"), 0.0, 0.0, trained + unit, 0.0))
        if stack.gathers == "moments" and plan.kind.gradients == "buckets" and plan.copies == 2 and plan.pp == 1:
            found.append(_new_buckets(plan, rank))
        if stack.gathers == "moments" and (copies := _copied(plan, stack, rank)):
            found.append(_Full(EMPTY._replace(at="sums"), 0.0, 0.0, 0.0, copies))
        return max(found, key=lambda of: of.total)


def _copied(plan: Plan, stack: Stack, rank: RankMoments) -> float:
    """Bytes of the buffers into which gradients are copied for their all-reduce after a stage's last backward pass. If two pipeline ranks
    hold each stage, all gradients are in buffers at the same time. Otherwise at most MOST_STARTED buckets are."""
    if plan.pp > 1 and placed(plan.schedule) == "both_ways":
        return _states(plan, rank.held)[0].gradients
    return stack.reduce_bytes * min(_in_buckets(plan, rank.held.trained), MOST_STARTED * stack.bucket_elements)


def _started(plan: Plan, stack: Stack, summed: Elements) -> float:
    """Bytes of the gradient buckets that may be summed over ranks at a moment of the last backward pass, at most MOST_STARTED buckets.
    summed: trained parameters whose gradients are complete at this moment."""
    if stack.gathers != "moments" or not (summed.total and stack.bucket_elements):
        return 0.0
    return stack.reduce_bytes * stack.bucket_elements * min(MOST_STARTED, _in_buckets(plan, summed) // stack.bucket_elements)


def _sums_itself(plan: Plan) -> bool:
    """Return whether the engine is ZeRO-1 and sums gradients in this project's buckets. If gradients are not fp32, or optimizer states are
    offloaded, DeepSpeed sums them."""
    return plan.stage == 1 and plan.storage.gradients == FP32_BYTES and plan.offload_optimizer == "none"


def _in_buckets(plan: Plan, trained: Elements) -> float:
    """Return how many of the parameters `trained` have gradients that are summed in the buckets of parallel/data/buckets.py: all with
    ZeRO-1 (`_sums_itself`) and with DDP in a pipeline; only experts' with DDP and no pipeline; else none."""
    if not _sums_itself(plan) and plan.kind.gradients != "buckets":
        return 0.0
    apart = _sums_itself(plan) or plan.pp > 1
    of_experts = plan.edp > 1 and (apart or (plan.ep, plan.etp) != (1, plan.tp))
    return (trained.dense if apart and plan.copies > 1 else 0.0) + (trained.expert if of_experts else 0.0)


def _new_buckets(plan: Plan, rank: RankMoments) -> _Full:
    """Return the moment in the second step at which DDP rebuilds its buckets, while gradients exist twice. Only for two
    ranks: with more, parallel/data/ddp.py makes DDP rebuild them before the optimizer has states, so this moment is not the peak."""
    of_experts = _states(plan, Elements(expert=rank.held.trained.expert * _freed(plan)[1]))[0].gradients
    return _Full(EMPTY, of_experts, 0.0, 0.0, _states(plan, rank.held)[0].gradients - of_experts)


def _gathered(plan: Plan, stack: Stack, rank: RankMoments) -> Callable[[Moment], float] | None:
    """Return a function: moment -> bytes of gathered weights and unreduced gradients in ZeRO stage 3; None if weights are not sharded."""
    if plan.copies == 1:
        return None
    if stack.gathers == "moments":

        def at(one: Moment) -> float:
            held = rank.held + one.freed.times(-1) if plan.reshard else rank.held
            unit = Unit(rank.largest, 0.0, one.reducing)
            return gathered(plan, stack, unit, held=held, table=rank.table, to_come=one.to_come)(one.at)

        return at
    size = at_any_moment(plan, stack, held=rank.held.total, table=rank.table.total, units=[of.total for of in rank.gathered])
    return lambda one: size


def _freed(plan: Plan) -> tuple[bool, bool]:
    """Return whether gradients of (dense, experts') parameters are freed between steps. Pipelines free all. DeepSpeed's stage 3 keeps
    all in one buffer. DDP keeps those in its buckets: dense ones, and experts' if ranks hold the same copies of both (ep 1, etp = tp)."""
    kept = plan.kind.gradients
    stays = plan.pp == 1 and (kept == "buffer" or (kept == "buckets" and plan.copies > 1))
    experts_too = kept == "buffer" or (plan.ep, plan.etp) == (1, plan.tp)
    return not stays, not (stays and experts_too)


def _states(plan: Plan, held: Elements) -> tuple[States, dict[str, float]]:
    """Return (bytes of the model states on the device, name in PARTS -> bytes on the host) for the parameters `held`. With an offloaded
    optimizer, gradients are on the host too. With pipeline stages or FSDP, the device sums gradients, and the host only has this rank's
    shard of the sums."""

    def of(elements: Elements, stage: int) -> States:
        dense = model_states(elements.dense, stage=stage, copies=plan.copies, storage=plan.storage)
        if not elements.expert:
            return dense
        return dense + model_states(elements.expert, stage=stage, copies=max(1, plan.edp), storage=plan.storage.expert)

    def states(stage: int) -> States:
        if not (held.frozen_dense or held.frozen_expert or held.blocks):
            return of(held, stage)
        frozen = of(held.frozen, stage).parameters + plan.storage.blocks * held.blocks
        return of(held.trained, stage) + States(frozen, 0.0, 0.0)

    whole = states(plan.stage)
    if plan.offload_parameters == plan.offload_optimizer == "none":
        return whole, {}
    parameters = whole.parameters - plan.storage.blocks * held.blocks  # quantized blocks stay on the device
    moved = States(
        parameters if plan.offload_parameters != "none" else 0.0,
        whole.gradients if plan.offload_optimizer != "none" else 0.0,
        whole.optimizer if plan.offload_optimizer != "none" else 0.0,
    )
    left = States(whole.parameters - moved.parameters, whole.gradients - moved.gradients, whole.optimizer - moved.optimizer)
    if plan.offload_optimizer != "none" and (plan.pp > 1 or not plan.carrier.master_copy):
        moved, left = replace(moved, gradients=states(2).gradients), replace(left, gradients=whole.gradients)
    if not plan.carrier.master_copy:  # FSDP: the weights stay on the device, and the host's optimizer updates a copy
        moved = replace(moved, parameters=parameters)
    return left, {name: size for name, size in vars(moved).items() if size}


def _bucket(plan: Plan, stack: Stack, at: At) -> float:
    """Bytes of DeepSpeed's gradient bucket, which has its full size even for a small model. In this project, ZeRO stages 1 and 2 allocate
    it at the first gradient, after the loss."""
    if not stack.bucket_elements or plan.kind.bucket == "none" or plan.copies == 1:
        return 0.0
    if stack.gathers == "moments" and (_sums_itself(plan) or (plan.kind.bucket == "passes" and plan.pp == 1 and at == "loss")):
        return 0.0
    return stack.bucket_elements * stack.bucket_bytes
