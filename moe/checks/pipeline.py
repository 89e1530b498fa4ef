"""Checks of pipeline stages (degrees.pp): the schedule, the division of layers, sharding, and schedules whose steps overlap. Also reasons
not to run a recipe that the checks accept, because another recipe computes the same with less time or memory.
"""

from __future__ import annotations

from moe.checks.clash import clash
from moe.plan.pipeline import continuous, energy_plan, layers_of, schedule_of
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted
from parallel.fixes import Set, all_of
from parallel.pipeline.schedules import ADVISED, SCHEDULES, fewer_ranks, kind_of


def check_pipeline(run: Run) -> None:
    """Raise BadInput for values with which a pipeline cannot run or would give wrong results."""
    pp, layers = run.degrees.pp, run.model.num_layers
    if pp == 1:
        _check_without_stages(run)
        return
    bare = 0 if run.pipeline.layers is None else 2  # ranks without layers: one with only the embedding, and one with only the head
    if pp > layers + bare:  # checked before `schedule_of`, which is slow for thousands of ranks
        fewer = fewer_ranks(run.pipeline.schedule, layers)
        fix = Set("degrees.pp", *range(fewer, max(0, fewer - 16), -1), said=f"{fewer} or less") | "add layers"
        more = " and two without layers, as pipeline.layers allows" if bare else ""
        raise BadInput("degrees.pp", got=pp, needed=f"at most one stage a layer{more}: model.num_layers={layers}", fix=fix)
    schedule = schedule_of(run)
    layers_of(run, schedule)
    _check_sharding(run)
    if continuous(run):
        _check_continuous(run)


def _check_without_stages(run: Run) -> None:
    """With degrees.pp 1, raise BadInput for a wrong pipeline.schedule, layers or energy_plan, although these keys then have no effect."""
    p, layers = run.pipeline, run.model.num_layers
    if not p.schedule.endswith(".csv"):
        try:
            kind_of(p.schedule)
        except BadInput as unknown:
            raise BadInput("pipeline.schedule", got=unknown.got, needed=unknown.needed, fix=unknown.fix) from None
    if p.layers is not None and (sum(p.layers) != layers or min(p.layers, default=-1) < 0):
        needed, fix = f"numbers from 0 that add up to model.num_layers={layers}", Set("it", None, said="null, for a cut by FLOPs")
        raise BadInput("pipeline.layers", got=list(p.layers), needed=needed, fix=fix)
    if p.energy_plan is not None:
        energy_plan(run)


def _check_sharding(run: Run) -> None:
    s, pp = run.sharding, run.degrees.pp
    slow = slow_sharding(run)
    if slow is not None and not s.allow_slow:
        raise slow
    for key, place in (("optimizer", s.offload.optimizer), ("parameters", s.offload.parameters)):
        if place != "none" and "offload" in s.named.keys and (key, place) not in s.carrier(pp=pp).offloads:
            got = f"{place} with sharding.stage={s.stage} and degrees.pp={pp}"
            needed = "only optimizer states on cpu: with pipeline stages ZeRO 2 and 3 run as FSDP, and it offloads nothing else"
            works = {"sharding.offload.optimizer": "cpu", "sharding.offload.parameters": "none"}
            raise BadInput(f"sharding.offload.{key}", got=got, needed=needed, fix=all_of(works) | Set("degrees.pp", 1))


def slow_sharding(run: Run) -> BadInput | None:
    """Return the error for sharding that is slow with pipeline stages, even if sharding.allow_slow permits it; None for other sharding."""
    s = run.sharding
    if run.degrees.pp == 1 or s.named.stage < 2 or not s.reshard:
        return None
    kind = f"zero stage {s.stage}" if "stage" in s.named.sharding else s.kind
    needed = "fsdp with reshard false, ddp, or zero of stage 1: gradients and weights would be scattered and gathered for every micro-batch"
    once = Set("sharding.kind", "zero") & Set("sharding.stage", 1)
    if "reshard" in s.carrier().keys:
        once = Set("sharding.reshard", False)
    fix = once | Set("sharding.allow_slow", True)
    return BadInput("sharding.kind", got=f"{kind} with degrees.pp={run.degrees.pp}", needed=needed, fix=fix)


def _check_continuous(run: Run) -> None:
    """Raise BadInput for methods that need all stages' gradients before an update: in a continuous schedule, stages update at different
    times."""
    p, name = run.pipeline, run.pipeline.schedule
    by, other = f"{name}, whose stages update without waiting for each other", Set("pipeline.schedule", ADVISED)
    every = kind_of(name).update_every or p.microbatches
    if p.microbatches != every:
        of_any = [other for other, kind in SCHEDULES.items() if kind.continuous and kind.update_every is None]
        needed = f"{every}: {name} updates weights after {counted(every, 'micro-batch')}, and a training step is one update"
        fix = Set("it", every) | Set("pipeline.schedule", *of_any)
        raise BadInput("pipeline.microbatches", got=f"{p.microbatches} with {name}", needed=needed, fix=fix)
    if not run.sharding.named.steps_by_stage:
        got, needed = f"{run.sharding.kind} with {by}", "ddp: the other engines update all stages together"
        raise BadInput("sharding.kind", got=got, needed=needed, fix=Set("sharding.kind", "ddp"))
    if run.precision.compute == "fp16":
        needed = "no loss scale: an overflow on one stage could not undo the updates of the others"
        fix = Set("precision.compute", "bf16") & Set("precision.loss_scale", "none")
        raise BadInput("precision.compute", got=f"fp16 with {by}", needed=needed, fix=fix)
    if run.optimizer.clip_norm is not None:
        why = "there is no gradient norm of the whole model before an update"
        raise clash(run, "optimizer.clip_norm", by, None, why, other)
    if run.model.kind == "encoder_decoder":
        raise clash(
            run, "pipeline.schedule", "model.kind", ADVISED, "stages would hold different versions of a position bias that they share"
        )
    if run.model.ends_read_embedding:
        key, works = ("tied_embeddings", False) if run.model.tied_embeddings else ("ahead", 0)
        why = "the first and the last stage would hold different versions of one table"
        raise clash(run, f"model.{key}", by, works, why, other)
    if run.model.layers_with_experts():
        if p.microbatches > 1 and run.router.balance_scope == "global_batch" and run.router.asks_balance:
            needed = "a scope within a micro-batch: the loss would need the counts of all micro-batches before the first backward pass"
            fix = Set("it", "sequence", "micro_batch")
            raise BadInput("router.balance_scope", got=f"global_batch with {by}", needed=needed, fix=fix)
        if run.experts.rebalance_every:
            raise clash(run, "experts.rebalance_every", by, 0, "experts move between steps, and steps overlap", other)


def not_recommended(run: Run) -> list[str]:
    """Return the reasons not to run this recipe, each with a better choice. run: recipe with resolved degrees."""
    found, d, sequence = [], run.degrees, run.sequence
    if (slow := slow_sharding(run)) is not None:
        found.append(f"{slow.what} with degrees.pp: {slow.needed.partition(': ')[2]}; better: zero of stage 1, or fsdp with reshard false")
    kind = SCHEDULES.get(run.pipeline.schedule)
    if d.pp > 1 and kind is not None and kind.advice is not None:
        found.append(f"pipeline.schedule {run.pipeline.schedule}: {kind.advice}")
    if d.sp > 1 and (advice := sequence.named.advice(sequence.position_order, d.sp // sequence.heads_of(d.sp))) is not None:
        found.append(advice)
    if d.sp > 1 and run.recompute.kind == "full" and not sequence.keep_attention:
        found.append("recompute.kind full with degrees.sp: keys are sent a second time; better: also sequence.keep_attention true")
    if d.tp > 1 and run.tensor.kind == "copied":
        found.append("tensor.kind copied: every rank of tp does the same work, useful only in tests; better: 1d")
    return found
