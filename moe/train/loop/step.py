"""One training step, the same for every engine, layout and precision; `moe verify` runs exactly this.

    micro-batch: forward, loss * (its share of the global batch) * loss scale, backward       -> gradients add up
    after the last: global norm by ownership -> all finite? -> unscale, clip, step            -> or drop and count a skip
    after a step: routers' selection biases move by the step's load

The loss is the mean over the predicted tokens of the *global* batch, for any sharding; auxiliary losses are means over its routed tokens.
Padding is neither predicted nor routed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from moe.data.token_shard import TokenShard
from moe.model.transformer import Output, moe_layers
from moe.parallelize.plan import FAMILIES
from moe.router.losses import updated_bias
from moe.train.parts.batch_counts import whole_step
from moe.train.parts.executor import Executor
from moe.train.parts.numbers import Numbers, Sums
from moe.train.parts.passes import count_tokens, passes_of
from parallel.data.engine import Engine
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.mesh import Axis
from parallel.mesh.regions import in_region
from parallel.numerics.clip import GradientNorm, clip_factor, gradient_norm
from parallel.numerics.precision import LossScale
from parallel.watch import watchdog

# N sequences held by this rank, B of a micro-batch, L tokens of each, E experts


def accumulate(
    executor: Executor,
    sequences_NL: Tensor,
    *,
    shard: TokenShard,
    microbatches: int,
    seed: int,
    step: int,
    loss_scale: float = 1.0,
    flag: int = 0,
) -> Numbers:
    """Run forward and backward over this rank's tokens (int64, of the shard's shape). Afterwards the engine holds summed gradients.

    PADDING at the end of a sequence is neither predicted nor routed; a marked token is read and not predicted. The ranks of one pipeline
    hold the same tokens. Collective.
    """
    tokens = count_tokens(sequences_NL, shard)
    passes = passes_of(sequences_NL.chunk(microbatches), tokens, shard, seed=seed, step=step, loss_scale=loss_scale)
    sums = whole_step(executor, passes, shard)
    passes = [replace(p, context=p.context.with_whole_step(sums)) for p in passes]
    found = Sums(executor.model.expert_counts, sequences_NL.device)

    def each(number: int, output: Output) -> Tensor | None:
        loss = output.loss / tokens.targets if output.hidden_BLD is None else None
        found.add(loss, output.layers, passes[number].share)
        return None if loss is None else loss * loss_scale

    executor.run(passes, each)
    return found.total((*shard.axes, executor.pp_axis), flag)


@in_region("optimizer")
def finish(
    engine: Engine, numbers: Numbers, *, world: Axis, scale: LossScale, lr: float, clip_norm: float | None, device: torch.device
) -> GradientNorm:
    """Clip and step, or drop the gradients if any is not finite on any rank; update the loss scale. Collective.

    `numbers`: the result of `accumulate`. After a finished step, and only then, each router's bias moves by the step's load.
    """
    norm = gradient_norm(engine.owned_gradients(), families=FAMILIES, world=world, device=device).divided_by(scale.value)
    if norm.finite:
        watchdog.enter("the optimizer's step")
        factor = clip_factor(norm.total, clip_norm) / scale.value
        if factor != 1.0:
            engine.scale_gradients(factor)
        engine.step(lr)
        update_biases(engine.module, numbers)
    else:
        engine.drop_gradients()
    scale.update(norm.finite)
    return norm


def update_biases(model: nn.Module, numbers: Numbers) -> None:
    """Update every router's selection bias by the global batch's load before dropping: the same on all ranks, once a step."""
    move_biases(model, {seen.layer: torch.tensor(seen.choices) for seen in numbers.layers})


@torch.no_grad()
def move_biases(model: nn.Module, load: dict[int, Tensor]) -> None:
    """Move biases by the load of each layer [E], summed over all ranks."""
    for layer in moe_layers(model):
        bias_E, rate = layer.router.bias_E, layer.router.spec.bias_rate
        if bias_E is not None and rate is not None:
            bias_E.copy_(updated_bias(bias_E, load[layer.layer].to(bias_E.device), rate))


@torch.no_grad()
def validation_loss(executor: Executor, sequences_NL: Tensor, *, shard: TokenShard, at_once: int) -> float:
    """Return the mean loss in nats a token over all ranks' tokens; deterministic, with the recipe's evaluation capacity."""
    tokens = count_tokens(sequences_NL, shard)
    total = torch.zeros((), dtype=torch.float64, device=sequences_NL.device)

    def each(_: int, output: Output) -> None:
        if output.hidden_BLD is None:
            total.add_(output.loss.double())

    executor.model.eval()
    executor.forward(passes_of(sequences_NL.split(at_once), tokens, shard), each)
    executor.model.train()
    return sum_over_all(total, (*shard.axes, executor.pp_axis)).item() / tokens.targets
