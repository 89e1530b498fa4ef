"""Several steps without draining the pipeline between them (PipeDream, 2BW): a stage updates as soon as it has its own gradients.

    rank 0   F0 F1 F2 F3 B0 U F4 B1 U ...      F, B: forward and backward pass of a batch; U: update
    rank 3            F0 B0 U F1 B1 U ...      a gradient was computed with older weights than the ones it updates (delayed gradients)

No update waits for the gradient norm of the whole model, so nothing is clipped and no step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe.data.token_shard import TokenShard
from moe.model.transformer import Output, divided_over, moe_layers
from moe.parallelize.plan import FAMILIES
from moe.train.loop.step import move_biases
from moe.train.parts.batch_counts import with_whole_step
from moe.train.parts.executor import Executor, Pipelined
from moe.train.parts.numbers import Numbers, Sums
from moe.train.parts.passes import Pass, Tokens, count_tokens, num_losses, passes_of
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.mesh import Axis
from parallel.numerics.clip import GradientNorm, norms_of, squares
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.weights import Versions


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
