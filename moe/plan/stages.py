"""The cost of each stage of a recipe's model, computed without the model, for cutting and simulating pipelines.

    stages_of(run, layers)    FLOPs and bytes of one micro-batch on each stage that has these layers
    Device.cost(stages)       seconds: FLOPs over a speed, bytes over a link's bandwidth

For each forward product, the backward pass has two: the weights' gradient (action W) and the input's gradient. Attention between q, k
and v has no weights, so both of its products belong to the input's gradient. Recomputed parts run forward again with the input's
gradient. An embedding lookup is no product: it adds parameters to the first stage but no FLOPs. Not counted as time: norms, the
optimizer's step, memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe.plan.job.flops import (
    attention_products,
    block_size,
    core_forward,
    end_flops,
    expert_size,
    head_forward,
    multi_token_size,
)
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import compute_bytes, network_of, storage_of
from moe.plan.memory.kept import stage_kept
from moe.plan.memory.stack import OURS
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Op
from parallel.pipeline.simulator.simulate import Cost

STATE_BYTES = 16  # per parameter, on every rank that holds it: fp32 weight and gradient, and AdamW's two moments
WEIGHT_BYTES = 4  # per parameter, for each older weight version that is kept


@dataclass(frozen=True)
class Stage:
    """One micro-batch on one stage. FLOPs: `forward`; `backward`, including recomputation; `weights`, the part of `backward` in W.

    Bytes: `held` from F until the backward pass; `crossing`, of the output sent on and of the gradient that comes back.
    """

    layers: range
    parameters: int
    forward: float
    backward: float
    weights: float
    held: float
    crossing: float


@dataclass(frozen=True)
class Device:
    """The speed that a rank reaches: FLOP/s, and bytes per second to another rank, in each direction."""

    tflops: float
    link_gb_s: float

    def cost(self, stages: Sequence[Stage], replicas: int) -> Cost:
        """Seconds of each action. S sends and receives 2 (n - 1) / n of a stage's fp32 gradients between n replicas."""

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
    """Number of sequences in one micro-batch of one replica. Raises BadInput if the batch cannot be cut into `microbatches`."""
    replicas = run.degrees.dp if isinstance(run.degrees.dp, int) else 1
    share = run.train.global_batch // replicas
    if run.train.global_batch % replicas or share % microbatches:
        near = min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: abs(n - microbatches), default=1)
        raise BadInput(
            "--microbatches",
            got=f"{microbatches} of a batch of {run.train.global_batch} sequences on {replicas} data-parallel ranks",
            needed="as many sequences in each micro-batch",
            fix=f"--microbatches {near}, or --train.global_batch {max(1, share // microbatches) * microbatches * replicas}",
        )
    return share // microbatches


def stages_of(run: Run, layers: Sequence[range], *, sequences: int) -> tuple[Stage, ...]:
    """Return the stages with these layers (moe/plan/pipeline.py), with the costs of micro-batches of `sequences` sequences."""
    network, last = network_of(run), len(layers) - 1
    plan = Plan(  # each stage is one device's, whole
        pp=len(layers),
        ep=run.degrees.ep if isinstance(run.degrees.ep, int) else 1,
        microbatch=sequences,
        recompute=run.recompute.kind,
        recompute_every=run.recompute.every,
        loss_chunks=run.recompute.loss_chunks,
        compute_bytes=compute_bytes(run),
        storage=storage_of(run),
    )
    return tuple(_stage(run, held, network, plan, first=stage == 0, last=stage == last) for stage, held in enumerate(layers))


def _stage(run: Run, layers: range, network: Network, plan: Plan, *, first: bool, last: bool) -> Stage:
    model, tokens = run.model, plan.microbatch * run.model.max_length
    flops = end_flops(run) if last else 0.0
    heads = head_forward(model, vocab_size=run.vocab_size) * (1 + model.ahead) if last else 0.0
    again = heads if run.recompute.loss_chunks > 1 else 0.0
    core = sum(core_forward(model, layer=layer) for layer in layers)
    forward = flops + sum(block_size(model, run.experts, run.router, layer=layer).forward for layer in layers)
    again += sum(_recomputed(run, layer) for layer in layers)
    return Stage(
        layers=layers,
        parameters=_ends(run, first=first, last=last) + sum(_parameters(run, layer) for layer in layers),
        forward=tokens * forward,
        backward=tokens * (2 * forward + again),
        weights=tokens * (forward - core),
        held=stage_kept(network, plan, OURS, layers, first=first, last=last),
        crossing=tokens * model.d_model * plan.compute_bytes,
    )


def _ends(run: Run, *, first: bool, last: bool) -> int:
    """Number of parameters outside the layers: tables, the last norm, and multi-token prediction."""
    m = run.model
    tables = first + (last and not (first and m.tied_embeddings)) + (last and not first and m.ahead > 0 and not m.tied_embeddings)
    ahead, _ = multi_token_size(m, run.experts, run.router, vocab_size=run.vocab_size)
    return tables * run.vocab_size * m.d_model + (m.d_model + ahead if last else 0)


def _recomputed(run: Run, layer: int) -> float:
    whole = block_size(run.model, run.experts, run.router, layer=layer).forward
    attention = 2.0 * attention_products(run.model) + core_forward(run.model, layer=layer)
    return {"none": 0.0, "full": whole, "selective": whole - attention}[run.recompute.of_layer(layer)]


def _parameters(run: Run, layer: int) -> int:
    """Number of parameters of a block on one rank; of the experts, that is a share of 1 / ep."""
    total = block_size(run.model, run.experts, run.router, layer=layer).total
    sparse, ep = run.model.layers_with_experts(), run.degrees.ep
    if layer not in sparse or not isinstance(ep, int):
        return total
    experts = expert_size(run.model, run.experts) * run.experts.of_layer(sparse.index(layer))
    return total - experts + experts // ep
