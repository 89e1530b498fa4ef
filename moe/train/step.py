"""One training step, the same for every engine, layout and precision; `moe verify` runs exactly this.

    micro-batch: forward, loss * (its share of the global batch) * loss scale, backward       -> gradients add up
    after the last: global norm by ownership -> all finite? -> unscale, clip, step            -> or drop and count a skip
    after a step: routers' selection biases move by the step's load

The loss is the mean over the predicted tokens of the *global* batch, whatever each rank holds; auxiliary losses are means
over its routed tokens. Padding is neither.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from moe.model.transformer import Output, Transformer, moe_layers
from moe.parallelize.build import FAMILIES
from moe.router.bias import updated_bias
from moe.train.batch_counts import whole_step
from moe.train.numbers import Numbers, Sums
from moe.train.passes import Pass, Tokens, count_tokens, passes_of
from moe.train.staged import Staged, forward_all
from parallel.clip import GradientNorm, clip_factor, gradient_norm
from parallel.collectives import sum_over
from parallel.data.engine import Engine
from parallel.mesh import Axis, Mesh
from parallel.precision import LossScale

# N sequences held by this rank, B of a micro-batch, L length, E experts


def accumulate(
    engine: Engine,
    sequences_NL: Tensor,
    *,
    mesh: Mesh,
    microbatches: int,
    seed: int,
    step: int,
    loss_scale: float = 1.0,
    flag: int = 0,
) -> Numbers:
    """Forward and backward over this rank's sequences (int64 [N, length + 1]); afterwards the engine holds summed gradients.

    PADDING at the end of a sequence is neither predicted nor routed. Every rank holds equally many sequences, those of one pipeline
    the same ones. Collective.
    """
    assert isinstance(engine.module, Transformer)
    dp = mesh.axis("dp")
    tokens = count_tokens(sequences_NL, dp)
    first = dp.index * len(sequences_NL)
    passes = passes_of(sequences_NL.chunk(microbatches), tokens, seed=seed, step=step, first_sequence=first, loss_scale=loss_scale)
    sums = whole_step(engine, passes, mesh=mesh)
    passes = [replace(p, context=p.context.with_whole_step(sums)) for p in passes]
    found = Sums(engine.module.expert_counts, sequences_NL.device)
    (_one_stage if engine.pipeline is None else _all_stages)(engine, passes, tokens, loss_scale, found)
    return found.total((dp, mesh.axis("pp")), flag)


def _one_stage(engine: Engine, passes: list[Pass], tokens: Tokens, loss_scale: float, found: Sums) -> None:
    for p in passes:
        last = p is passes[-1]
        output: Output = engine.forward(p.inputs_BL, p.context, p.targets_BL, last=last)
        loss = output.loss / tokens.targets
        engine.backward(loss * loss_scale, last=last)
        found.add(loss.detach(), output.layers, p.share)


def _all_stages(engine: Engine, passes: list[Pass], tokens: Tokens, loss_scale: float, found: Sums) -> None:
    def each(number: int, output: Output) -> Tensor | None:
        loss = output.loss / tokens.targets if output.hidden_BLD is None else None
        found.add(loss, output.layers, passes[number].share)
        return None if loss is None else loss * loss_scale

    assert engine.pipeline is not None
    engine.pipeline.run(Staged(engine, passes, each))
    engine.reduce()


def finish(
    engine: Engine, numbers: Numbers, *, world: Axis, scale: LossScale, lr: float, clip_norm: float | None, device: torch.device
) -> GradientNorm:
    """Clip and step, or drop the gradients where any is not finite on any rank; the loss scale learns of it.

    `numbers` are what `accumulate` gave: with a finished step, and only then, each router's bias moves by the step's load.
    """
    norm = gradient_norm(engine.owned_gradients(), families=FAMILIES, world=world, device=device).divided_by(scale.value)
    if norm.finite:
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
    """Every router with a selection bias learns the global batch's load before dropping: the same on all ranks, once a step."""
    move_biases(model, {seen.layer: torch.tensor(seen.choices) for seen in numbers.layers})


@torch.no_grad()
def move_biases(model: nn.Module, load: dict[int, Tensor]) -> None:
    """By the load of each layer [E], summed over all ranks."""
    for layer in moe_layers(model):
        bias_E, rate = layer.router.bias_E, layer.router.spec.bias_rate
        if bias_E is not None and rate is not None:
            bias_E.copy_(updated_bias(bias_E, load[layer.layer].to(bias_E.device), rate))


@torch.no_grad()
def validation_loss(engine: Engine, sequences_NL: Tensor, *, mesh: Mesh, at_once: int) -> float:
    """Mean loss in nats a token over all ranks' sequences; deterministic, with the recipe's evaluation capacity."""
    dp = mesh.axis("dp")
    tokens = count_tokens(sequences_NL, dp)
    total = torch.zeros((), dtype=torch.float64, device=sequences_NL.device)

    def each(_: int, output: Output) -> None:
        if output.hidden_BLD is None:
            total.add_(output.loss.double())

    engine.module.eval()
    forward_all(engine, passes_of(sequences_NL.split(at_once), tokens), each)
    engine.module.train()
    return sum_over(sum_over(total, dp), mesh.axis("pp")).item() / tokens.targets
