"""A recipe's pipeline without tensors: its schedule, the layers of each stage, and the stages' costs for the simulator.

    schedule_of(run)          actions of one step, or of several steps between which the pipeline is not drained
    layers_of(run, schedule)  layers of each stage: cut by FLOPs, or as pipeline.layers says
    stages_of(run, layers)    FLOPs and bytes of one micro-batch on each stage
    Device.cost(stages)       seconds of each action: FLOPs / speed, bytes / bandwidth

For each matrix product of the forward pass, the backward pass has two: one for the gradient of the weights (action W), one for the gradient
of the input. Attention between q, k and v has no weights, so both of its products belong to the input's gradient. Recomputed layers run
their forward pass again just before the input's gradient. An embedding lookup adds parameters to the first stage but no FLOPs. The times of
norms, of the optimizer's step and of memory accesses are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from moe.plan.choose.legal import KEYS
from moe.plan.job.cut import cut, empty_rank
from moe.plan.job.flops import (
    attention_products,
    block_size,
    core_forward,
    end_flops,
    expert_size,
    head_forward,
    layer_flops,
    multi_token_size,
    stage_flops,
)
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import compute_bytes, network_of, storage_of
from moe.plan.memory.kept import casts_kept
from moe.plan.memory.stack import OURS
from moe.plan.memory.stages import StageBytes, Stages
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted
from parallel.fixes import Fix, Set, fix_of
from parallel.mesh.mesh import divisors
from parallel.pipeline.check import check
from parallel.pipeline.energy.plan_file import ClockedSchedule, read_plan
from parallel.pipeline.order_file import read_order
from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.schedules import ADVISED, SCHEDULES, fewer_ranks, make_schedule
from parallel.pipeline.simulator.simulate import Cost, costs, simulate
from parallel.store.files import user_path

STATE_BYTES = 16  # bytes of a parameter on every rank that holds it: fp32 weight and gradient, and AdamW's two moments
WEIGHT_BYTES = 4  # bytes of a parameter in each older version of the weights that is kept


def continuous(run: Run) -> bool:
    """Return whether the schedule starts the next step before all micro-batches of a step have left the pipeline, as PipeDream does."""
    kind = SCHEDULES.get(run.pipeline.schedule)
    return run.degrees.pp > 1 and kind is not None and kind.continuous


def schedule_of(run: Run, *, batches: int = 1) -> Schedule:
    """Return the schedule of `batches` steps on the recipe's pipeline ranks. Raises BadInput for sizes that the schedule does not allow."""
    return _named(run, batches) if run.pipeline.energy_plan is None else energy_plan(run).schedule


def energy_plan(run: Run) -> ClockedSchedule:
    """Read the recipe's energy plan: the clock rate of each action, written by `moe energy`. Raises BadInput if the plan is for another
    schedule, or if the recipe has no pipeline or does not drain it between steps."""
    p, what = run.pipeline, "pipeline.energy_plan"
    if run.degrees.pp == 1 or continuous(run):
        alone = run.degrees.pp == 1
        other = Set("degrees.pp", 2) if alone else Set("pipeline.schedule", ADVISED)
        needed = "stages, and a schedule that drains the pipeline, because an energy plan is for one step"
        got = f"a plan with {'degrees.pp=1' if alone else p.schedule}"
        raise BadInput(what, got=got, needed=needed, fix=Set("it", None) | other)
    assert p.energy_plan is not None
    schedule = _named(run, 1)
    size = "" if p.schedule.endswith(".csv") else f" --stages {run.degrees.pp} --microbatches {p.microbatches}"
    chunks = "" if p.chunks is None else f" --chunks {p.chunks}"
    fix = f"moe energy {p.schedule}{size}{chunks} --out plan.json" | Set("it", None)
    if p.pipelines not in (None, 2):  # `moe energy` makes no plan for this number of pipelines
        fix = Set("it", None) | Set("pipeline.pipelines", None)
    return read_plan(user_path(p.energy_plan, what=what), schedule, what=what, fix=fix)


def _named(run: Run, batches: int) -> Schedule:
    """Return the schedule that pipeline.schedule names, from the catalog or from a file. Errors name keys of the recipe."""
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
    """Build and check a schedule. Cached, because a run calls this several times, and the planner calls it for each plan that it shows."""
    size = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks, "batches": batches}
    return check(make_schedule(name, **size, vertical_sync=vertical_sync, pipelines=pipelines))  # type: ignore[arg-type]


def _from_file(run: Run) -> Schedule:
    """Read the schedule from the file that pipeline.schedule names. Raises BadInput if its number of ranks or micro-batches differs from
    the recipe's, or if the schedule has several updates."""
    p = run.pipeline
    schedule = read_order(user_path(p.schedule, what="pipeline.schedule"))
    both = (("degrees.pp", run.degrees.pp, schedule.num_ranks), ("pipeline.microbatches", p.microbatches, schedule.microbatches))
    for what, given, number in both:
        if given != number:
            raise BadInput(what, got=given, needed=f"{number}, as in {p.schedule}", fix=Set(what, number) | "take another schedule file")
    if schedule.num_updates > 1:
        got, needed = f"{p.schedule} with {schedule.num_updates} updates", "one update: a file is the order of one step"
        fix = "remove the other updates" | Set("it", *(name for name, kind in SCHEDULES.items() if kind.continuous))
        raise BadInput("pipeline.schedule", got=got, needed=needed, fix=fix)
    return schedule


def layers_of(run: Run, schedule: Schedule, *, smaller: Fix | str | None = None) -> tuple[range, ...]:
    """Return the layers of each stage. Raises BadInput if pipeline.layers does not fit, or if it is not set and stages outnumber layers.
    smaller: the fix to propose if there are too many stages; None: lower degrees.pp."""
    layers, stages, given = run.model.num_layers, schedule.num_stages, run.pipeline.layers
    fewer = fix_of(smaller or Set("degrees.pp", fewer_ranks(schedule.name, layers // max(1, stages // schedule.num_ranks))))
    if given is None and stages > layers:
        chunks = layers // schedule.num_ranks
        if chunks and run.pipeline.chunks is not None:
            fewer = Set("pipeline.chunks", chunks)
        needed = f"at most one stage per layer: model.num_layers={layers}"
        raise BadInput("degrees.pp", got=counted(stages, "stage"), needed=needed, fix=fewer | "add layers")
    if given is not None:
        _check_list(run, schedule, given, otherwise=fewer & Set("pipeline.layers", None))
    return tuple(range(a, b) for a, b in pairwise([0, *accumulate(given or cut(layer_flops(run), stages))]))


def _check_list(run: Run, schedule: Schedule, given: tuple[int, ...], *, otherwise: Fix) -> None:
    """Raise BadInput for a pipeline.layers that does not fit the schedule's stages, or leaves a rank without weights. otherwise: the fix to
    propose if no list fits these stages."""
    layers, stages = run.model.num_layers, schedule.num_stages
    fits = len(given) == stages and sum(given) == layers and min(given) >= 0
    if fits and (empty := empty_rank(given, schedule.homes)) is None:
        return
    near = _some_list(run, stages)
    if not fits:
        needed = f"{stages} numbers from 0, one a stage, that add up to model.num_layers={layers}"
        listed = Set("it", near) | Set("it", None, said="null for a cut by FLOPs") if stages <= layers else Set("it", near)
        raise BadInput("pipeline.layers", got=list(given), needed=needed, fix=otherwise if near is None else listed)
    got = f"{list(given)}, which leaves rank {empty} of the pipeline without weights"
    needed = "a layer, the embedding (first stage) or the head (last stage) on every rank"
    raise BadInput("pipeline.layers", got=got, needed=needed, fix=Set("it", near) if near else otherwise)


def _some_list(run: Run, stages: int) -> list[int] | None:
    """Return the number of layers of each stage, as a value of pipeline.layers that an error message proposes: a cut by FLOPs. With one
    stage more than layers, the last stage has no layer, only the head. With two more, the first stage has no layer either, only the
    embedding. Return None with even more stages."""
    layers = run.model.num_layers
    if stages <= layers:
        return list(cut(layer_flops(run), stages))
    return {1: [*[1] * layers, 0], 2: [0, *[1] * layers, 0]}.get(stages - layers)


def described(run: Run) -> str:
    """Return a line about the stages: layers, micro-batches, and the idle fraction of the ranks' time, which is simulated from FLOPs alone,
    without messages."""
    batches = run.pipeline.drain_every if continuous(run) else 1
    schedule = schedule_of(run, batches=batches)
    layers = layers_of(run, schedule)
    forward = stage_flops(run, layers)
    timeline = simulate(schedule, costs(forward, [2 * time for time in forward]))
    idle = 1 - sum(map(timeline.busy, range(schedule.num_ranks))) / (timeline.makespan * schedule.num_ranks)
    m, counts = run.pipeline.microbatches, ", ".join(str(len(held)) for held in layers)
    return f"{run.pipeline.schedule}: stages of {counts} layers, {counted(m, 'micro-batch')}, ranks idle {idle:.0%} by FLOPs"


@dataclass(frozen=True)
class Stage:
    """A stage, and the costs of one micro-batch on it. parameters: number of parameters. forward, backward: FLOPs of the two passes;
    `backward` includes recomputation. weights: the FLOPs in `backward` for gradients of weights (action W). held: bytes of activations kept
    until the backward pass. crossing: bytes of the output that is sent to the next stage; the output's gradient has equally many."""

    layers: range
    parameters: int
    forward: float
    backward: float
    weights: float
    held: float
    crossing: float


@dataclass(frozen=True)
class Device:
    """Speed that a rank reaches: TFLOP/s, and GB/s to another rank in each direction."""

    tflops: float
    link_gb_s: float

    def cost(self, stages: Sequence[Stage], replicas: int) -> Cost:
        """Return a function from (rank, action) to seconds. replicas: number of ranks that hold each stage, 2 in bidirectional pipelines.
        Action S is the all-reduce of a stage's fp32 gradients over these ranks. Action U, the update, takes no time."""

        def cost(rank: int, action: Action) -> float:
            stage = stages[action.stage]
            if action.op is Op.U:
                return 0.0
            if action.op is Op.S:
                return 2 * (replicas - 1) / replicas * 4 * stage.parameters / (self.link_gb_s * 1e9)
            flops = {Op.F: stage.forward, Op.B: stage.backward, Op.I: stage.backward - stage.weights, Op.W: stage.weights}
            return flops[action.op] / (self.tflops * 1e12)

        return cost


def micro_batch(run: Run, microbatches: int) -> int:
    """Return the number of sequences in a micro-batch of one replica. Raises BadInput if the batch is not divisible."""
    replicas = run.degrees.dp if isinstance(run.degrees.dp, int) else 1
    share = run.train.global_batch // replicas
    if run.train.global_batch % replicas or share % microbatches:
        near = min(divisors(share) if share else [1], key=lambda n: abs(n - microbatches))
        got = f"{microbatches} of a batch of {counted(run.train.global_batch, 'sequence')} on {counted(replicas, 'data-parallel rank')}"
        fix = f"--microbatches {near}, or --train.global_batch {max(1, share // microbatches) * microbatches * replicas}"
        raise BadInput("--microbatches", got=got, needed="equal numbers of sequences in all micro-batches", fix=fix)
    return share // microbatches


def stages_of(run: Run, layers: Sequence[range], *, sequences: int) -> tuple[Stage, ...]:
    """Return the stages with these layers, with the costs of micro-batches of `sequences` sequences."""
    network = network_of(run)
    plan = Plan(  # each stage is on one device
        pp=len(layers),
        ep=run.degrees.ep if isinstance(run.degrees.ep, int) else 1,
        microbatch=sequences,
        recompute=run.recompute.kind,
        recompute_every=run.recompute.every,
        loss_chunks=run.recompute.loss_chunks,
        compute_bytes=compute_bytes(run),
        storage=storage_of(run),
    )
    sizes, last = Stages(network, plan, OURS, layers, casts_kept(plan, OURS)), len(layers) - 1
    return tuple(_stage(run, held, sizes.stage(stage), plan, first=stage == 0, last=stage == last) for stage, held in enumerate(layers))


def _stage(run: Run, layers: range, size: StageBytes, plan: Plan, *, first: bool, last: bool) -> Stage:
    """Return a stage with its costs. size: bytes of its activations. first, last: whether it is the first stage, and whether it is the
    last."""
    model, tokens = run.model, plan.microbatch * run.model.read_length
    flops = end_flops(run) if last else 0.0
    heads = head_forward(run) * (1 + model.ahead) if last else 0.0
    again = heads if run.recompute.loss_chunks > 1 else 0.0
    core = sum(core_forward(model, layer=layer) for layer in layers)
    forward = flops + sum(block_size(run, layer=layer).forward for layer in layers)
    again += sum(_recomputed(run, layer) for layer in layers)
    return Stage(
        layers=layers,
        parameters=_ends(run, first=first, last=last) + sum(_parameters(run, layer) for layer in layers),
        forward=tokens * forward,
        backward=tokens * (2 * forward + again),
        weights=tokens * (forward - core),
        held=size.kept + size.ends_kept,
        crossing=tokens * model.d_model * plan.compute_bytes,
    )


def _ends(run: Run, *, first: bool, last: bool) -> int:
    """Return the number of a stage's parameters outside layers: embedding and head, last norm, multi-token prediction."""
    m = run.model
    tables = first + (last and not (first and m.tied_embeddings)) + (last and not first and m.ahead > 0 and not m.tied_embeddings)
    ahead, _ = multi_token_size(run)
    return tables * run.vocab_size * m.d_model + (m.d_model + ahead if last else 0)


def _recomputed(run: Run, layer: int) -> float:
    """Return the forward FLOPs per token that the backward pass of a layer computes again."""
    whole = block_size(run, layer=layer).forward
    attention = 2.0 * attention_products(run.model) + core_forward(run.model, layer=layer)
    return {"none": 0.0, "full": whole, "selective": whole - attention}[run.recompute.of_layer(layer)]


def _parameters(run: Run, layer: int) -> int:
    """Return the number of a layer's parameters on one rank, which holds 1 / ep of the experts."""
    total = block_size(run, layer=layer).total
    sparse, ep = run.model.layers_with_experts(), run.degrees.ep
    if layer not in sparse or not isinstance(ep, int):
        return total
    experts = expert_size(run.model, run.experts) * run.experts.of_layer(sparse.index(layer))
    return total - experts + experts // ep
