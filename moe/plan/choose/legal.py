"""Rules that a plan must obey to run, and reasons why a plan that can run is not recommended.

Each rule yields one message for each violation. The rules repeat the recipe's checks (moe/checks/) for the settings that the planner
varies; test_legal.py tests on many plans that rules and checks agree. The rules use only arithmetic and take a microsecond, so that the
planner can check a hundred thousand plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe.plan.job.cut import empty_rank
from moe.plan.job.network import Network, Plan
from moe.plan.time.pipeline_time import homes_of
from parallel.data.kinds import offloading
from parallel.errors import counted
from parallel.mesh.grids import GRIDS, grid
from parallel.pipeline.schedules import SCHEDULES
from parallel.pipeline.schedules.kind import ScheduleKind, Size

# name of a schedule's parameter in its errors -> key of the recipe
KEYS = {"stages": "degrees.pp"} | {key: f"pipeline.{key}" for key in ("microbatches", "chunks", "schedule", "vertical_sync", "pipelines")}


def refusal(network: Network, plan: Plan) -> str | None:
    """Return the first reason why the plan cannot run, such as `degrees.tp=3 does not divide model.num_heads=8`; None if it can run."""
    return next((reason for rule in RULES for reason in rule(network, plan)), None)


def advice(plan: Plan, *, devices_per_node: int | None = None) -> str | None:
    """Return the first reason why a plan that can run is not recommended; None if there is none. devices_per_node: devices in a node of the
    cluster; None: unknown."""
    return next(_advice(plan, devices_per_node), None)


def _advice(plan: Plan, devices_per_node: int | None) -> Iterator[str]:
    if plan.pp > 1 and plan.stage >= 2 and plan.reshard:
        yield f"degrees.pp={plan.pp} with {plan.engine}: gradients or weights would be communicated again for each micro-batch"
    if plan.tp > 1 and plan.tensor == "copied":
        yield "tensor.kind=copied saves neither memory nor time: it is only there to check engines"
    if devices_per_node is not None and plan.tp > devices_per_node:
        yield f"degrees.tp={plan.tp} is more than a node's {counted(devices_per_node, 'device')}: its all-reduces would cross the network"
    kind = SCHEDULES.get(plan.schedule)
    if plan.pp > 1 and kind is not None and kind.advice is not None:
        yield f"pipeline.schedule {plan.schedule}: {kind.advice}"
    if plan.pp > 1 and plan.microbatches < plan.pp:
        few = counted(plan.microbatches, "micro-batch")
        yield f"{few} on {plan.pp} stages: most ranks wait most of the time"


def _tensor(network: Network, plan: Plan) -> Iterator[str]:
    tp = plan.tp
    if tp == 1:
        if plan.tensor == "sliced":
            yield "tensor.sequence_parallel needs degrees.tp above 1"
        return
    if plan.tensor in GRIDS and network.latent is not None:
        yield f"tensor.kind={plan.tensor} does not go with model.latent.key_rank={network.latent.key_rank}"
    yield from _sizes(network, plan)


def _sizes(network: Network, plan: Plan) -> Iterator[str]:
    made, tp = grid(plan.tensor, plan.tp, plan.depth), plan.tp
    if made is None:
        yield f"degrees.tp={tp} ranks do not form a grid of tensor.kind={plan.tensor}"
        return
    n, on_grid = network, plan.tensor in GRIDS
    dense = n.hidden if len(n.with_experts) < n.depth or n.ahead > 0 else 0
    for what, size, ways in made.cuts(width=n.width, heads=n.heads, groups=n.groups, hidden=dense):
        if size % ways and on_grid:
            yield f"a side of tp's grid, {ways}, does not divide {what}={size}"
        elif size % ways and what == "model.num_kv_heads":
            yield f"degrees.tp={tp} is neither a divisor nor a multiple of {what}={size}"
        elif size % ways:
            yield f"degrees.tp={tp} does not divide {what}={size}"
    if n.vocab < made.units:
        ranks = f"a side of tp's grid, {made.units}," if on_grid else f"degrees.tp={tp}"
        yield f"{ranks} is more than the vocabulary's {n.vocab} ids"
    if plan.tensor == "sliced" and n.length % (tp * plan.sp):
        yield f"degrees.tp * degrees.sp={tp * plan.sp}, the ranks that share a sequence, do not divide {_length(n)}"


def _halves(network: Network, plan: Plan) -> Iterator[str]:
    if network.encoder is None:
        return
    if plan.pp > 1 and SCHEDULES[plan.schedule].continuous:
        yield f"pipeline.schedule={plan.schedule} does not go with model.kind=encoder_decoder"
    ways = plan.sp * (plan.tp if plan.tensor == "sliced" else 1)
    if network.encoder.length % ways:
        yield f"{ways} ranks that share a sequence do not divide model.max_length={network.encoder.length}"


def _ahead(network: Network, plan: Plan) -> Iterator[str]:
    if not network.ahead:
        return
    if plan.tensor in GRIDS:
        yield f"tensor.kind={plan.tensor} does not go with model.ahead={network.ahead}"


def _frozen(network: Network, plan: Plan) -> Iterator[str]:
    if plan.pp > 1 and plan.carrier.steps == "elements" and (network.frozen_layers or {"attention", "norms"} <= set(network.frozen)):
        yield f"degrees.pp={plan.pp} with {plan.engine} does not go with whole layers in train.freeze"


def _adapters(network: Network, plan: Plan) -> Iterator[str]:
    if network.adapters is None:
        return
    if plan.tiles != 1:
        yield f"tiling.ffn={plan.tiles} does not go with lora.rank={network.adapters.rank}"
    if plan.etp > 1 and network.adapters.blocks:
        yield f"degrees.etp={plan.etp} does not go with lora.base={network.adapters.blocks}"
    if plan.tp > 1 and network.blocks("attention"):
        yield f"degrees.tp={plan.tp} does not go with lora.base=fp8_all"
    if plan.pp == 1 or plan.carrier.steps != "elements":
        return
    if not all(network.adapts(layer) for layer in range(network.depth)):
        yield f"degrees.pp={plan.pp} with {plan.engine} needs LoRA adapters in every layer"
    if plan.schedule in SCHEDULES and plan.stage_layers and empty_rank(plan.stage_layers, homes_of(plan), ends=False) is not None:
        yield "pipeline.layers leaves a rank of the pipeline without layers, and so without adapters"


def _sequence(network: Network, plan: Plan) -> Iterator[str]:
    sp = plan.sp
    if sp == 1:
        return
    ways = 2 * sp if plan.method.orders[0] == "zigzag" else sp
    if network.length % ways:
        yield f"degrees.sp={sp} cuts sequences into {ways} chunks, which do not divide {_length(network)}"
    held = network.heads // plan.grid.units
    if plan.method.trades_heads and held % sp:
        yield f"degrees.sp={sp} does not divide a rank's {counted(held, 'head')}, which {plan.sequence} exchanges for tokens"


def _length(network: Network) -> str:
    return f"model.max_length={network.length}" if network.encoder is None else f"the decoder's {counted(network.length, 'token')}"


def _experts(network: Network, plan: Plan) -> Iterator[str]:
    ep, etp, of = plan.ep, plan.etp, network.experts
    if of is None:
        if ep * etp > 1:
            yield "degrees.ep and degrees.etp must be 1 for a dense model"
        return
    if of.count % ep:
        yield f"degrees.ep={ep} does not divide experts.num_experts={of.count}"
    if of.hidden % etp:
        yield f"degrees.etp={etp} does not divide the experts' hidden units, {of.hidden}"
    stage = plan.dp * plan.sp * plan.tp
    if stage % (ep * etp):
        yield f"degrees.ep * degrees.etp={ep * etp} does not divide the {counted(stage, 'rank')} of a stage"


def _batch(network: Network, plan: Plan) -> Iterator[str]:
    unit, words = plan.grid.sequences, f"the {plan.grid.sequences} rows of tp's grid"
    tokens = min(half.length for half in (network, network.encoder or network)) // plan.sp
    if network.experts is not None and tokens < plan.tp:
        yield f"degrees.tp={plan.tp} ranks share {counted(tokens, 'token')} of a sequence, and each must route at least one"
    if plan.microbatch % unit:
        yield f"a micro-batch of {counted(plan.microbatch, 'sequence')} is not a multiple of {words}"


def _stages(network: Network, plan: Plan) -> Iterator[str]:
    pp, name = plan.pp, plan.schedule
    if pp == 1:
        return
    kind = SCHEDULES.get(name)  # None if the schedule is a file of actions (parallel/pipeline/order_file.py)
    stages = pp * plan.chunks
    given = plan.stage_layers
    if given is None and stages > network.depth:
        yield f"{stages} stages are more than model.num_layers={network.depth}"
    if given is not None and (len(given) != stages or sum(given) != network.depth or min(given) < 0):
        yield f"pipeline.layers is not {stages} numbers that add up to model.num_layers={network.depth}"
    elif given is not None and kind is not None and (empty := empty_rank(given, homes_of(plan))) is not None:
        yield f"pipeline.layers leaves rank {empty} of the pipeline without weights"
    if kind is not None and kind.chunks not in (None, plan.chunks):
        yield f"{name} has {counted(kind.chunks, 'stage')} a rank, not {plan.chunks}"
    if kind is not None:
        yield from _schedule(kind, plan)
    if any(placed not in plan.carrier.offloads for placed in _offloaded(plan)):
        yield f"with degrees.pp={pp} only optimizer states can be offloaded, and only to cpu, because FSDP then runs ZeRO stages 2 and 3"


def _schedule(kind: ScheduleKind, plan: Plan) -> Iterator[str]:
    m, name = plan.microbatches, plan.schedule
    refused = kind.refusal(Size(plan.pp, m, plan.chunks))
    if refused is not None:
        yield f"{KEYS[refused.what]}={refused.got}: needed {refused.needed}"
    if kind.continuous and (every := kind.update_every or m) != m:
        yield f"pipeline.microbatches={m}: an update of {name} sums {counted(every, 'micro-batch')}, and a step is one update"
    if kind.continuous and not plan.kind.steps_by_stage:
        yield f"{name} updates stages at different times, which only ddp can do"


def _engine(network: Network, plan: Plan) -> Iterator[str]:
    for what, place in _offloaded(plan):
        if (what, place) not in plan.kind.offloads:
            yield f"offload of the {what} to {place} needs ZeRO stage {offloading(what, place).stage}, not {plan.engine}"


def _offloaded(plan: Plan) -> list[tuple[str, str]]:
    """Return the kinds of states that are offloaded, each as (`optimizer` or `parameters`, `cpu` or `nvme`)."""
    placed = ("optimizer", plan.offload_optimizer), ("parameters", plan.offload_parameters)
    return [(what, place) for what, place in placed if place != "none"]


Rule = Callable[[Network, Plan], Iterator[str]]
RULES: tuple[Rule, ...] = (_halves, _ahead, _frozen, _adapters, _tensor, _sequence, _experts, _stages, _batch, _engine)
