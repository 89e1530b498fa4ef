"""A recipe's pipeline, planned without tensors: its schedule, the layers of each stage, and combinations that it refuses.

schedule_of(run)      the actions of one step, or of several steps between two drains
layers_of(run, ...)   the layers of each stage: cut by FLOPs, or as pipeline.layers says
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from moe.plan.choose.legal import KEYS
from moe.plan.job.cut import cut, empty_rank
from moe.plan.job.stages import layer_flops, stage_flops
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Fix, Set, fix_of
from parallel.pipeline.check import check
from parallel.pipeline.energy.plan_file import Clocked, read_plan
from parallel.pipeline.order_file import read_order
from parallel.pipeline.schedule import Op, Schedule
from parallel.pipeline.schedules.catalog import ADVISED, SCHEDULES, fewer_ranks, make_schedule
from parallel.pipeline.simulator.simulate import costs, simulate
from parallel.store.files import user_path


def continuous(run: Run) -> bool:
    """Return whether updates follow each other without draining the pipeline in between."""
    kind = SCHEDULES.get(run.pipeline.schedule)
    return run.degrees.pp > 1 and kind is not None and kind.continuous


def schedule_of(run: Run, *, batches: int = 1) -> Schedule:
    """Return the schedule of `batches` steps on the recipe's ranks. Raises BadInput for sizes that the schedule cannot have."""
    return _named(run, batches) if run.pipeline.energy_plan is None else energy_plan(run).schedule


def energy_plan(run: Run) -> Clocked:
    """Return the recipe's energy plan. Raises BadInput for a plan of another schedule, and for a schedule without drains between steps."""
    p, what = run.pipeline, "pipeline.energy_plan"
    if run.degrees.pp == 1 or continuous(run):
        alone = run.degrees.pp == 1
        other = Set("degrees.pp", 2) if alone else Set("pipeline.schedule", ADVISED)
        needed = "stages, and a schedule that drains the pipeline: a plan is of one step"
        got = f"it with {'degrees.pp=1' if alone else p.schedule}"
        raise BadInput(what, got=got, needed=needed, fix=Set("it", None) | other)
    assert p.energy_plan is not None
    schedule = _named(run, 1)
    size = "" if p.schedule.endswith(".csv") else f" --stages {run.degrees.pp} --microbatches {p.microbatches}"
    chunks = "" if p.chunks is None else f" --chunks {p.chunks}"
    fix = f"moe energy {p.schedule}{size}{chunks} --out plan.json" | Set("it", None)
    if p.pipelines not in (None, 2):  # moe energy does not plan such schedules
        fix = Set("it", None) | Set("pipeline.pipelines", None)
    return read_plan(user_path(p.energy_plan, what=what), schedule, what=what, fix=fix)


def _named(run: Run, batches: int) -> Schedule:
    p = run.pipeline
    if p.schedule.endswith(".csv"):
        return _from_file(run)
    try:
        return _checked(p.schedule, run.degrees.pp, p.microbatches, p.chunks, batches, p.vertical_sync or None, p.pipelines)
    except BadInput as refused:
        what = KEYS.get(refused.what, refused.what)
        raise BadInput(what, got=refused.got, needed=refused.needed, fix=refused.fix) from None


@lru_cache(maxsize=4)
def _checked(
    name: str, ranks: int, microbatches: int, chunks: int | None, batches: int, vertical_sync: bool | None, pipelines: int | None
) -> Schedule:
    """Build and check a schedule once: a run needs it several times, and a planner for each plan that it shows."""
    size = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks, "batches": batches}
    return check(make_schedule(name, **size, vertical_sync=vertical_sync, pipelines=pipelines))  # type: ignore[arg-type]


def _from_file(run: Run) -> Schedule:
    p = run.pipeline
    schedule = read_order(user_path(p.schedule, what="pipeline.schedule"))
    for what, got, needed in (
        ("degrees.pp", run.degrees.pp, schedule.num_ranks),
        ("pipeline.microbatches", p.microbatches, schedule.microbatches),
    ):
        if got != needed:
            raise BadInput(what, got=got, needed=f"{needed}, as in {p.schedule}", fix=Set(what, needed) | "take another order")
    if schedule.num_updates > 1:
        raise BadInput(
            "pipeline.schedule",
            got=f"{p.schedule} with {schedule.num_updates} updates",
            needed="one: a file is the order of one step",
            fix="remove the others" | Set("it", *(name for name, kind in SCHEDULES.items() if kind.continuous)),
        )
    return schedule


def layers_of(run: Run, schedule: Schedule, *, smaller: Fix | str | None = None) -> tuple[range, ...]:
    """Return the layers of each stage.

    `smaller`: the advice for fewer stages; None: advice to lower degrees.pp. Raises BadInput for more stages than layers without
    pipeline.layers, and for a pipeline.layers that does not fit.
    """
    layers, stages, given = run.model.num_layers, schedule.num_stages, run.pipeline.layers
    fewer = fix_of(smaller or Set("degrees.pp", fewer_ranks(schedule.name, layers // max(1, stages // schedule.num_ranks))))
    if given is None and stages > layers:
        chunks = layers // schedule.num_ranks
        if chunks and run.pipeline.chunks is not None:
            fewer = Set("pipeline.chunks", chunks)
        raise BadInput(
            "degrees.pp", got=f"{stages} stages", needed=f"at most one a layer: model.num_layers={layers}", fix=fewer | "add layers"
        )
    if given is not None:
        _check_list(run, schedule, given, otherwise=fewer & Set("pipeline.layers", None))
    return tuple(range(a, b) for a, b in pairwise([0, *accumulate(given or cut(layer_flops(run), stages))]))


def _check_list(run: Run, schedule: Schedule, given: tuple[int, ...], *, otherwise: Fix) -> None:
    """Refuse a pipeline.layers that does not fit the schedule's stages, or leaves a rank without weights.

    `otherwise`: the advice if no list fits these stages.
    """
    layers, stages = run.model.num_layers, schedule.num_stages
    if len(given) != stages or sum(given) != layers or min(given) < 0:
        near, by_flops = _some_list(run, stages), Set("it", None, said="null for a cut by FLOPs")
        raise BadInput(
            "pipeline.layers",
            got=list(given),
            needed=f"{stages} numbers from 0, one a stage, that add up to model.num_layers={layers}",
            fix=otherwise if near is None else Set("it", near) | by_flops if stages <= layers else Set("it", near),
        )
    empty = empty_rank(given, schedule.homes)
    if empty is not None:
        near = _some_list(run, stages)
        raise BadInput(
            "pipeline.layers",
            got=f"{list(given)}, which leaves rank {empty} of the pipeline without weights",
            needed="a layer, the embedding (first stage) or the head (last stage) on every rank",
            fix=Set("it", near) if near else otherwise,
        )


def _some_list(run: Run, stages: int) -> list[int] | None:
    """Return layers cut by FLOPs. With one stage more than layers the head is alone, with two more the embedding, too."""
    layers = run.model.num_layers
    if stages <= layers:
        return list(cut(layer_flops(run), stages))
    return {1: [*[1] * layers, 0], 2: [0, *[1] * layers, 0]}.get(stages - layers)


def described(run: Run) -> str:
    """Describe the stages, and the schedule's idle share: simulated by FLOPs, backward as twice forward, without transfers."""
    batches = run.pipeline.drain_every if continuous(run) else 1
    schedule = schedule_of(run, batches=batches)
    layers = layers_of(run, schedule)
    forward = stage_flops(run, layers)
    timeline = simulate(schedule, costs(forward, [2 * time for time in forward]))
    idle = 1 - sum(map(timeline.busy, range(schedule.num_ranks))) / (timeline.makespan * schedule.num_ranks)
    m, counts = run.pipeline.microbatches, ", ".join(str(len(held)) for held in layers)
    return f"{run.pipeline.schedule}: stages of {counts} layers, {m} micro-batch{'es' if m > 1 else ''}, ranks idle {idle:.0%} by FLOPs"


def splits_backward(schedule: Schedule) -> bool:
    """Return whether the schedule has actions that compute only the input's gradient, or only the weights'."""
    return any(action.op is Op.I for order in schedule.orders for action in order)
