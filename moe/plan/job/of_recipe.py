"""Converts a recipe to the planner's input: network_of(run) is the model, plan_of(run) the parallel plan. The model is not built.

Optimizer states are fp32, and take these bytes for each parameter. `optimizer_bytes` returns the means over parameters.

    adamw, kfac   8     first and second moment, also for a user's own optimizer. K-FAC's factors do not count (docs/parallel/kfac.md)
    sgd           4     a momentum
    muon          4     in matrices; 8 in embedding, head, gates, and vectors such as norms
    adafactor     4 (n + m) / (n m)     in an n x m matrix; 4 in a vector

Muon also needs matrix products: 5 (4 m + 2 m m / n) floating-point operations per parameter of an n x m matrix, m at most n. The bytes that
an update moves, and the dtype of these products, depend on the program (moe/plan/machine/program.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from moe.experts.dispatch import dispatcher_of
from moe.kernels import UNFUSED
from moe.kernels.products import PRODUCTS
from moe.plan.job.counts import held
from moe.plan.job.cut import cut
from moe.plan.job.flops import (
    attention_matrices,
    core_work,
    expert_size,
    in_chunks,
    in_mask,
    latent_of,
    layer_flops,
    rows_of_token,
    size,
    slots_of_token,
)
from moe.plan.job.network import Adapters, Experts, Network, Plan, Router
from moe.plan.job.states import BF16, FP32, FP32_AND_COPY, MIXED, MIXED_FP32_GRADIENTS, Storage, Update
from moe.recipe.frozen import PARTS, layers_of
from moe.recipe.router_spec import RouterSpec
from moe.recipe.sections import Run
from moe.recipe.shapes import BLOCK_BYTES, GATED, T5_BUCKETS
from moe.router.checks import fuses, group_size
from moe.router.methods import method_of
from parallel.pipeline.schedules import SCHEDULES, placed
from parallel.pipeline.schedules.kind import DEFAULT_CHUNKS


def compute_bytes(run: Run) -> int:
    """Return the bytes of an element of the compute dtype; `auto` counts as bf16."""
    return 4 if run.precision.compute == "fp32" else 2


def network_of(run: Run) -> Network:
    """Return the recipe's model. If layers differ in their number of experts, each layer with experts gets the mean number."""
    m = run.model
    decoder = _decoder(run)
    if m.kind == "decoder":
        return decoder
    begins, sparse = m.decoder_begins, m.layers_with_experts()
    before, after = tuple(n for n in sparse if n < begins), tuple(n - begins for n in sparse if n >= begins)
    encoder = replace(decoder, layers=begins, shared_buckets=True, sees="all", sparse_layers=before, frozen_layers=())
    layers, length = m.num_layers - begins, m.target_length
    return replace(decoder, layers=layers, length=length, shared_buckets=True, sparse_layers=after, encoder=encoder)


def _decoder(run: Run) -> Network:
    """Return the model as one decoder with all layers of the recipe, even if it is an encoder-decoder."""
    m = run.model.model_copy(update={"document_mask": run.model.document_mask or run.data.packing})
    return Network(
        layers=m.num_layers,
        width=m.d_model,
        heads=m.num_heads,
        hidden=m.d_ff,
        vocab=run.vocab_size,
        length=m.max_length,
        kv_heads=m.num_kv_heads,
        head_size=m.head_size,
        gated=m.ffn in GATED,
        activation="relu" if m.ffn == "relu" else "gelu",
        tied=m.tied_embeddings,
        norm=m.norm,
        qk_norm=m.qk_norm,
        qkv_biases=m.qkv_bias,
        out_bias=m.out_bias,
        buckets=T5_BUCKETS if m.positions == "t5" else 0,
        sinks=m.attention_sinks,
        clipped=m.clip_qkv is not None,
        logit_cap=m.logit_cap is not None,
        dropout=m.dropout > 0,
        ahead=m.ahead,
        core_work=sum(core_work(m, layer=layer) for layer in range(m.num_layers)) / m.num_layers,
        windows_in_chunks=sum(in_chunks(m, layer=layer) for layer in range(m.num_layers)) / m.num_layers,
        windows_masked=sum(in_mask(m, layer=layer) for layer in range(m.num_layers)) / m.num_layers,
        documents=m.document_mask,
        experts=_experts(run),
        latent=latent_of(m),
        adapters=Adapters(run.lora.rank, run.lora.targets, run.lora.in_blocks, run.lora.blocks_of) if run.lora.rank else None,
        frozen=tuple(part for part in run.train.freeze if part in PARTS),
        frozen_layers=tuple(sorted({layer for part in run.train.freeze for layer in layers_of(part) or ()})),
        sparse_layers=m.layers_with_experts(),
    )


def _experts(run: Run) -> Experts | None:
    m, e, spec = run.model, run.experts, run.router
    sparse = m.layers_with_experts()
    if not sparse:
        return None
    hidden = e.d_ff or m.d_ff
    count = round(sum(map(e.of_layer, range(len(sparse)))) / len(sparse))
    choices, products = min(spec.num_choices, count), PRODUCTS[e.products]
    return Experts(
        count=count,
        choices=choices,
        hidden=hidden,
        gated=(e.ffn or m.ffn) in GATED,
        shared_hidden=(e.shared_d_ff or hidden) * e.shared + (hidden if e.residual else 0),
        gates=e.shared_gate + 2 * e.residual,
        biases=e.biases,
        dropout=e.dropout > 0,
        free=e.free,
        products=products.kind,
        fused=products.fused and e.kernels not in UNFUSED and not (run.lora.rank and "experts" in (*run.lora.targets, *run.lora.blocks_of)),
        router=Router(
            vectors=spec.vectors,
            noise=spec.noise == "noisy_top_k",
            norm=spec.input_norm == "rmsnorm",
            jitter=spec.jitter > 0,
            capped=spec.logit_cap is not None,
            kept=method_of(spec).kept_bytes(num_choices=choices, num_experts=count + e.free),
            group=group_size(spec),
            **_exchanged(spec, choices=choices, num_experts=count + e.free),
        ),
        rows=None if spec.capacity_factor is None else rows_of_token(run.router, count) / choices,
        slots=None if spec.capacity_factor is None else min(slots_of_token(run.router), count) / choices,
        exchange=dispatcher_of(run.dispatch),
        open_groups=method_of(spec).open_groups(spec),
        apart=spec.gate_on == "input",
        busiest=run.dispatch.busiest,
        excess=method_of(spec).load_excess(spec),
    )


def _exchanged(spec: RouterSpec, *, choices: int, num_experts: int) -> dict[str, Any]:
    """Return the bytes that ranks exchange if they route a group of tokens together (moe/router/slices.py), as arguments of Router.

    decides: bytes per token. If the routing method needs whole groups of tokens: fp32 logits, position and token id. Otherwise, with a
    capacity, for each choice: expert, priority, and whether a random second choice is used. counts: bytes per group for the balance
    loss (each expert's number of choices; for a user's loss also probabilities, and the number of tokens). balances: bytes per token for
    the importance loss (gates) and the load loss (probabilities).
    gathered_counts: whether GPU kernels sort experts' queues (`Router._fused`) and count the gathered choices; then counts are not sent."""
    decides = 4 * num_experts + 8 + 8 if method_of(spec).needs_whole_groups else 0
    if not decides and spec.capacity_factor is not None:
        decides = choices * (8 + 4 * (spec.drop != "position") + spec.random_second)
    apart = spec.balance_scope != "global_batch"
    nonlinear = bool(spec.importance_weight) + bool(spec.load_weight)
    sorts = spec.drop == "position" and (spec.queue == "choices_first" or choices == 1) and spec.balance_counts != "unbiased"
    summed = 2 * num_experts + 1 if spec.own_balance else num_experts
    found = {"decides": decides, "counts": 4 * summed * apart, "balances": 4 * num_experts * nonlinear * apart}
    return found | {"gathered_counts": decides > 0 and sorts and fuses(spec, training=True)}


def plan_of(run: Run) -> Plan:
    """Return the plan of a recipe with resolved degrees (`run.resolve(world)`)."""
    d, engine = run.mesh_degrees(), run.sharding.named if run.is_flat else run.carrier
    replicas = d.dp * run.pipeline.microbatches
    return Plan(
        dp=d.dp,
        tp=d.tp,
        sp=d.sp,
        pp=d.pp,
        ep=d.ep,
        etp=d.etp,
        engine=engine.planned_as or engine.name,
        tensor="sliced" if run.tensor.sequence_parallel and run.tensor.kind == "1d" else run.tensor.kind,
        depth=d.tp_depth,
        sequence=run.sequence.kind,
        order=run.sequence.position_order,
        schedule=run.pipeline.schedule,
        chunks=_chunks(run),
        stage_layers=run.pipeline.layers or stage_layers(run),
        microbatch=max(1, run.train.global_batch // replicas),
        microbatches=run.pipeline.microbatches,
        recompute=run.recompute.kind,
        recompute_every=run.recompute.every,
        loss_chunks=run.recompute.loss_chunks,
        compute_bytes=compute_bytes(run),
        storage=storage_of(run),
        offload_optimizer=run.sharding.offload.optimizer,
        offload_parameters=run.sharding.offload.parameters,
        tiles=run.tiling.ffn,
        reshard=run.reshards,
    )


def stage_layers(run: Run) -> tuple[int, ...] | None:
    """Return the number of layers of each stage in the trainer's default cut, by FLOPs; None if pp is 1 or stages outnumber layers."""
    stages = run.mesh_degrees().pp * (1 if placed(run.pipeline.schedule) == "both_ways" else _chunks(run))
    if run.mesh_degrees().pp == 1 or stages > run.model.num_layers:
        return None
    return _cut(layer_flops(run), stages)


@lru_cache(maxsize=1_000)
def _cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    return cut(costs, stages)


def _chunks(run: Run) -> int:
    """Return the number of stages on each rank. For a schedule from a file: pipeline.chunks, or else the length of pipeline.layers / pp."""
    p, pp = run.pipeline, run.degrees.pp
    if pp == 1:
        return p.chunks or 1
    if p.schedule not in SCHEDULES:
        return p.chunks or (len(p.layers) // pp if p.layers and len(p.layers) % pp == 0 else 1)
    return SCHEDULES[p.schedule].chunks or p.chunks or DEFAULT_CHUNKS


def storage_of(run: Run) -> Storage:
    """Return the bytes of a parameter, its gradient and the states of the recipe's optimizer."""
    storage, (dense, expert) = _with_adam(run), optimizer_bytes(run)
    in_blocks = BLOCK_BYTES[run.lora.in_blocks] if run.lora.in_blocks else 0.0  # bytes of a frozen parameter that is quantized in blocks
    if run.optimizer.kind in ("adamw", "kfac"):
        return replace(storage, blocks=in_blocks)
    master = storage.optimizer - (4 if storage is BF16 else 8)  # bytes without AdamW's two moments
    return replace(storage, optimizer=master + dense, of_experts=master + expert, blocks=in_blocks, update=update_of(run))


def state_bytes(run: Run) -> float:
    """Return the bytes of the model's weights, gradients and optimizer states. Frozen weights have no gradients and optimizer states."""
    network, storage = network_of(run), storage_of(run)
    found = held(network, Plan(), (range(network.depth),), (0,))
    trained = storage.total * found.trained.dense + storage.expert.total * found.trained.expert
    return trained + storage.parameters * found.frozen.parameters + storage.blocks * found.blocks


def _with_adam(run: Run) -> Storage:
    """Return the bytes of a parameter, its gradient and its optimizer states if the optimizer is AdamW. Some engines store master
    parameters and a copy in the compute dtype."""
    carrier = run.carrier
    copied = carrier.master_copy or (run.precision.casts in carrier.casts[1:] and compute_bytes(run) == 2)
    if run.precision.master == "bf16":
        return MIXED if copied else BF16
    if copied and compute_bytes(run) == 2:
        return MIXED_FP32_GRADIENTS
    return FP32_AND_COPY if copied else FP32


# --- bytes of optimizer states ------------------------------------------------------------------------------------------


class Matrices(NamedTuple):
    """`num` matrices of the same shape. kind: `expert` (in experts), `outer` (embedding, head and gates), or `inner` (all others)."""

    kind: Literal["inner", "outer", "expert"]
    num: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.num * self.rows * self.columns


def optimizer_bytes(run: Run) -> tuple[float, float]:
    """Return the mean bytes of optimizer states of one parameter: (outside of experts, in experts)."""
    kind, found = run.optimizer.kind, list(_matrices(run))
    if kind in ("adamw", "kfac") or run.optimizer.is_own:
        return 8.0, 8.0
    if kind == "sgd":
        return 4.0, 4.0
    total = size(run).total
    experts = sum(m.elements for m in found if m.kind == "expert")
    dense = total - experts
    if kind == "muon":
        return 8.0 - 4.0 * sum(m.elements for m in found if m.kind == "inner") / dense, 4.0
    factored = {kind: sum(4.0 * m.num * (m.rows + m.columns) for m in found if (m.kind == "expert") == kind) for kind in (False, True)}
    vectors = dense - sum(m.elements for m in found if m.kind != "expert")
    return (factored[False] + 4.0 * vectors) / dense, factored[True] / experts if experts else 0.0


def update_of(run: Run) -> Update:
    """Return the work of the recipe's optimizer for one parameter, as means over parameters."""
    kind, decays = run.optimizer.kind, run.optimizer.weight_decay > 0
    if kind == "sgd":
        return Update("sgd", decays=decays)
    if kind == "adafactor":
        return Update("adafactor", decays=decays)
    if kind != "muon" or run.optimizer.is_own:
        return Update(decays=decays)
    found, total = list(_matrices(run)), size(run).total
    experts = [m for m in found if m.kind == "expert"]
    dense = total - sum(m.elements for m in experts)
    inner = [m for m in found if m.kind == "inner"]
    part = sum(m.elements for m in inner) / dense  # fraction of the dense parameters that Muon updates
    of_experts = sum(map(_iterated, experts)) / sum(m.elements for m in experts) if experts else 0.0
    return Update("muon", (part, 1.0), decays, (sum(map(_iterated, inner)) / dense, of_experts))


def _iterated(found: Matrices) -> float:
    """Return the floating-point operations of Muon's five Newton-Schulz iterations on these matrices."""
    m, n = sorted((found.rows, found.columns))
    return 5 * found.num * (4.0 * n * m**2 + 2.0 * m**3)


def _matrices(run: Run) -> Iterator[Matrices]:
    """Yield all matrices of the model. Matrices of the same kind and shape may share an entry."""
    m, x, width = run.model, run.experts, run.model.d_model
    yield Matrices("outer", 1 if m.tied_embeddings else 2, run.vocab_size, width)
    cross_attentions = 0 if m.kind == "decoder" else m.num_layers - m.decoder_begins
    for rows, columns in attention_matrices(m):
        yield Matrices("inner", m.num_layers + cross_attentions, rows, columns)
    if m.positions == "t5":
        yield Matrices("outer", m.num_layers if m.kind == "decoder" else 2, T5_BUCKETS, m.num_heads)
    sparse = m.layers_with_experts()
    yield _network("inner", m.num_layers - len(sparse), width, m.d_ff, m.ffn)
    ffn, hidden = x.ffn or m.ffn, x.d_ff or m.d_ff
    for nth in range(len(sparse)):
        yield _network("expert", x.of_layer(nth), width, hidden, ffn)
        yield Matrices("outer", 2 if run.router.noise == "noisy_top_k" else 1, x.of_layer(nth) + x.free, width)
        yield _network("inner", 1 if x.shared else 0, width, (x.shared_d_ff or hidden) * x.shared, ffn)
        yield Matrices("outer", int(x.shared_gate), 1, width)
        yield _network("inner", int(x.residual), width, expert_size(m, x) // (width * (3 if ffn in GATED else 2)), ffn)
        yield Matrices("outer", int(x.residual), 2, width)


def _network(kind: Literal["inner", "expert"], count: int, width: int, hidden: int, ffn: str) -> Matrices:
    return Matrices(kind, count * (3 if ffn in GATED else 2), hidden, width)
