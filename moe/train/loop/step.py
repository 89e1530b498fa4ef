"""One training step, the same code for every engine, layout and precision; `moe verify` runs this code too.

    each micro-batch   forward, loss * (its share of the global batch) * loss scale, backward: gradients add up
    then               global gradient norm; if finite: unscale, clip, update; if not: drop the gradients and count a skipped step
    after an update    each router's selection bias changes by the step's load

For any sharding, the loss is the mean over the predicted tokens of the *global* batch (a user's own loss: over its sequences), and
auxiliary losses are means over the routed tokens of the global batch. Padding is neither predicted nor routed.

Several steps without draining the pipeline between them (PipeDream, 2BW): a stage updates as soon as it has its own gradients.

    rank 0   F0 F1 F2 F3 B0 U F4 B1 U ...      F, B: forward and backward pass of a batch; U: update
    rank 3            F0 B0 U F1 B1 U ...      a gradient was computed with older weights than the ones it updates (delayed gradients)

No update waits for the gradient norm of the whole model, so nothing is clipped and no step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moe.data.token_shard import TokenShard
from moe.model.transformer import Output, divided_over, moe_layers
from moe.parallelize.plan import FAMILIES
from moe.router.losses import updated_bias
from moe.train.parts.batch_counts import with_whole_step
from moe.train.parts.executor import Executor, Pipelined
from moe.train.parts.numbers import Numbers, Sums
from moe.train.parts.passes import Pass, Tokens, count_tokens, num_losses, passes_of
from parallel.data.engine import Engine
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.host import on_device
from parallel.mesh.mesh import Axis
from parallel.mesh.regions import in_region
from parallel.numerics.clip import GradientNorm, clip_factor, gradient_norm, norms_of, squares
from parallel.numerics.precision import LossScale
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.weights import Versions
from parallel.watch import watchdog

# N sequences of this rank, B sequences of a micro-batch, L tokens of a sequence, E experts


def accumulate(
    executor: Executor,
    sequences_NL: Tensor,
    *,
    shard: TokenShard,
    microbatches: int,
    seed: int,
    step: int,
    loss_scale: float = 1.0,
    flag: Tensor | None = None,
) -> Numbers:
    """Run forward and backward passes of one step. The engine then has the gradients, summed over ranks. Return the step's numbers, summed
    over all ranks. Collective. sequences_NL: this rank's token ids, int64, of shape `shard.shape`, equal on all pipeline stages; PADDING
    may only be at the end of a sequence. shard: which sequences and positions of the global batch these are. microbatches: number of
    micro-batches into which the sequences are cut. seed, step: determine random numbers (router noise, dropout). loss_scale: factor on the
    loss, and thus on the gradients. flag: float64 [1], whose sum over ranks is `Numbers.flags` (number of ranks that are asked to stop)."""
    tokens = count_tokens(sequences_NL, shard)
    losses = num_losses(executor.model, tokens, shard)
    passes = passes_of(sequences_NL.chunk(microbatches), tokens, shard, seed=seed, step=step, loss_scale=loss_scale)
    passes = with_whole_step(executor, passes, shard)
    found = Sums(executor.model.expert_counts, sequences_NL.device, tokens.inputs, divided=divided_over(executor.model))
    found.keep_biases(executor.model)

    def each(number: int, output: Output) -> Tensor | None:
        loss = output.loss / losses if output.hidden_BLD is None else None
        found.add(loss, output.layers, passes[number].share)
        return None if loss is None else loss * loss_scale

    executor.run(passes, each)
    return found.total((*shard.axes, executor.pp_axis), flag)


@in_region("optimizer")
def finish(
    engine: Engine, numbers: Numbers, *, world: Axis, scale: LossScale, lr: float, clip_norm: float | None, device: torch.device
) -> GradientNorm:
    """Clip gradients and update weights and routers' biases, or drop the gradients if any is not finite on any rank; then update the loss
    scale. Return the gradient norm before clipping. Collective. numbers: from `accumulate`. world: axis of all ranks. scale: the loss scale
    by which the gradients are multiplied. lr: learning rate. clip_norm: largest gradient norm; None: no clipping."""
    norm = gradient_norm(engine.owned_gradients(), families=FAMILIES, world=world, device=device).divided_by(scale.value)
    if norm.finite:
        watchdog.enter("the optimizer's step")
        engine.step(lr, factor=clip_factor(norm.total, clip_norm) / scale.value)
        move_biases(engine.module, {layer.layer: on_device(torch.tensor(layer.choices), device) for layer in numbers.layers})
    else:
        engine.drop_gradients()
    scale.update(norm.finite)
    return norm


@torch.no_grad()
def move_biases(model: nn.Module, load: dict[int, Tensor]) -> None:
    """Update every router's selection bias. load: layer -> number of choices of each expert before dropping, over all ranks, [E]."""
    for layer in moe_layers(model):
        bias_E, rate = layer.router.bias_E, layer.router.spec.bias_rate
        if bias_E is not None and rate is not None:
            bias_E.copy_(updated_bias(bias_E, load[layer.layer], rate))


@torch.no_grad()
def validation_loss(executor: Executor, sequences_NL: Tensor, *, shard: TokenShard, at_once: int) -> float:
    """Return the mean loss over all ranks' sequences: in nats a token, or with a user's train.loss the mean over sequences. MoE layers use
    router.eval_capacity_factor. Collective. at_once: number of this rank's sequences in a micro-batch."""
    tokens = count_tokens(sequences_NL, shard)
    total = torch.zeros((), dtype=torch.float64, device=sequences_NL.device)

    def each(_: int, output: Output) -> None:
        if output.hidden_BLD is None:
            total.add_(output.loss.double())

    executor.model.eval()
    executor.forward(passes_of(sequences_NL.split(at_once), tokens, shard), each)
    executor.model.train()
    return sum_over_all(total, (*shard.axes, executor.pp_axis)).item() / num_losses(executor.model, tokens, shard)


def stream(
    executor: Executor,
    batches: Sequence[Tensor],
    *,
    schedule: Schedule,
    shard: TokenShard,
    world: Axis,
    seed: int,
    step: int,
    rate: Callable[[int], float],
    flag: Tensor | None = None,
) -> list[tuple[Numbers, GradientNorm]]:
    """Make one step for each batch, then drain the pipeline. Return each step's numbers and gradient norm. Collective. batches: this rank's
    token ids, each int64 of shape `shard.shape`. schedule: pipeline schedule of all batches together. world: axis of all ranks. step:
    number of the first step. rate(n): learning rate for batches[n]. flag: float64 [1]; its sum over ranks, the number of ranks that are
    asked to stop, is `Numbers.flags` of each step."""
    assert isinstance(executor, Pipelined)
    engine, model, device = executor.engine, executor.model, batches[0].device
    passes: list[Pass] = []
    counts: list[Tokens] = []
    for number, sequences in enumerate(batches):
        tokens = count_tokens(sequences, shard)
        parts = sequences.chunk(schedule.microbatches_per_update)
        passes += with_whole_step(executor, passes_of(parts, tokens, shard, seed=seed, step=step + number), shard)
        counts.append(tokens)
    divided = divided_over(model)
    found = [Sums(model.expert_counts, device, tokens.inputs, divided=divided) for tokens in counts]
    norms = torch.zeros(len(batches), len(FAMILIES), dtype=torch.float64, device=device)
    order = schedule.orders[executor.pp_axis.index]
    biases = [layer.router.bias_E for layer in moe_layers(model) if layer.router.bias_E is not None]
    versions = {stage: Versions([*model.parameters(), *biases], order, stage) for stage in model.parts}

    def each(number: int, output: Output) -> Tensor | None:
        batch = number // schedule.microbatches_per_update
        loss = output.loss / num_losses(model, counts[batch], shard) if output.hidden_BLD is None else None
        found[batch].add(loss, output.layers, passes[number].share)
        return loss

    def update(stage: int, version: int) -> None:
        batch = version - 1
        engine.reduce()
        norms[batch] = squares(engine.owned_gradients(), families=FAMILIES, device=device)
        load = {layer: sum_over_all(mine, (divided, *shard.axes)) for layer, mine in found[batch].loads().items()}

        def change() -> None:
            found[batch].keep_biases(model)
            engine.step(rate(batch))
            move_biases(model, load)

        versions[stage].update(version, change)

    executor.stream(passes, each, schedule=schedule, versions=versions, update=update)
    packed = sum_over_all(torch.stack([sums.packed(flag) for sums in found]), (divided, *shard.axes, executor.pp_axis))
    rows = zip(packed, counts, norms_of(norms.flatten(), families=FAMILIES, world=world), strict=True)
    return [(Numbers(row, model.expert_counts, tokens.inputs), norm) for row, tokens, norm in rows]
