"""One training step, the same for every engine, layout and precision; `moe verify` runs exactly this.

    micro-batch: forward, loss * (its share of the global batch) * loss scale, backward       -> gradients add up
    after the last: global norm by ownership -> all finite? -> unscale, clip, step            -> or drop and count a skip

The loss is the mean over the tokens of the *global* batch, whatever each rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.context import Context
from moe.layer import LayerReport
from moe.model.transformer import Output
from moe.parallelize import FAMILIES
from parallel.clip import GradientNorm, clip_factor, gradient_norm
from parallel.collectives import sum_over
from parallel.data.engine import Engine
from parallel.mesh import Axis, Mesh
from parallel.precision import LossScale

# N sequences held by this rank, L length, E experts


@dataclass(frozen=True)
class LayerNumbers:
    """One MoE layer's step over all ranks: `load` shares of the choices before dropping, summing to 1."""

    layer: int
    load: list[float]
    kept: int
    dropped: int
    balance_loss: float
    z_loss: float
    entropy: float


@dataclass(frozen=True)
class Numbers:
    """What all ranks together computed in one step: means over the global batch; `flags` is the sum of the ranks' flags."""

    loss: float
    layers: list[LayerNumbers]
    flags: int

    @property
    def balance_loss(self) -> float:
        return sum(layer.balance_loss for layer in self.layers)

    @property
    def z_loss(self) -> float:
        return sum(layer.z_loss for layer in self.layers)

    @property
    def dropped_share(self) -> float:
        choices = sum(layer.kept + layer.dropped for layer in self.layers)
        return sum(layer.dropped for layer in self.layers) / choices if choices else 0.0


def accumulate(
    engine: Engine,
    sequences_NL: Tensor,
    *,
    mesh: Mesh,
    microbatches: int,
    global_batch: int,
    seed: int,
    step: int,
    loss_scale: float = 1.0,
    flag: int = 0,
) -> Numbers:
    """Forward and backward over this rank's sequences (int64 [N, length + 1]); afterwards the engine holds summed gradients."""
    dp = mesh.axis("dp")
    parts = sequences_NL.chunk(microbatches)
    tokens = global_batch * (sequences_NL.shape[1] - 1)
    rows: list[Tensor] = []
    layers: tuple[LayerReport, ...] = ()
    first = dp.index * len(sequences_NL)
    for i, part in enumerate(parts):
        share = len(part) / global_batch
        inputs, targets = part[:, :-1], part[:, 1:]
        context = Context.of(inputs, seed=seed, step=step, first_sequence=first, auxiliary_scale=share * loss_scale)
        last = i == len(parts) - 1
        output: Output = engine.forward(inputs, context, last=last)
        loss = F.cross_entropy(output.logits_BLV.flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        engine.backward(loss * loss_scale, last=last)
        rows.append(_pack(loss.detach(), output.layers, share))
        layers = output.layers
        first += len(part)
    total = torch.stack(rows).sum(0)
    total[0] = flag
    return _unpack(sum_over(total, dp).tolist(), layers)


def _pack(loss: Tensor, layers: tuple[LayerReport, ...], share: float) -> Tensor:
    """One float64 row that adds up over micro-batches and ranks; element 0 is kept for the flag."""
    row = [loss.new_zeros(1).double(), loss.double().reshape(1)]
    for r in layers:
        means = torch.stack((r.balance_loss, r.z_loss, r.entropy)).double() * share
        row += [r.kept.double().reshape(1), r.dropped.double().reshape(1), means, r.load_E.double()]
    return torch.cat(row)


def _unpack(row: list[float], reports: tuple[LayerReport, ...]) -> Numbers:
    layers, at = [], 2
    for r in reports:
        experts = len(r.load_E)
        kept, dropped, balance, z, entropy, *load = row[at : at + 5 + experts]
        layers.append(LayerNumbers(r.layer, [c / (kept + dropped) for c in load], int(kept), int(dropped), balance, z, entropy))
        at += 5 + experts
    return Numbers(row[1], layers, int(row[0]))


def finish(engine: Engine, *, world: Axis, scale: LossScale, lr: float, clip_norm: float | None, device: torch.device) -> GradientNorm:
    """Clip and step, or drop the gradients where any is not finite on any rank; the loss scale learns of it."""
    norm = gradient_norm(engine.owned_gradients(), families=FAMILIES, world=world, device=device).divided_by(scale.value)
    if norm.finite:
        factor = clip_factor(norm.total, clip_norm) / scale.value
        if factor != 1.0:
            engine.scale_gradients(factor)
        engine.step(lr)
    else:
        engine.drop_gradients()
    scale.update(norm.finite)
    return norm


@torch.no_grad()
def validation_loss(engine: Engine, sequences_NL: Tensor, *, mesh: Mesh, at_once: int) -> float:
    """Mean loss in nats a token over all ranks' sequences; deterministic, with the recipe's evaluation capacity."""
    engine.module.eval()
    total = torch.zeros((), dtype=torch.float64, device=sequences_NL.device)
    for part in sequences_NL.split(at_once):
        output: Output = engine.module(part[:, :-1])
        total += F.cross_entropy(output.logits_BLV.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").double()
    engine.module.train()
    dp = mesh.axis("dp")
    return sum_over(total, dp).item() / (sequences_NL.shape[0] * dp.size * (sequences_NL.shape[1] - 1))
