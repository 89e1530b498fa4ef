"""One training step, the same for every engine, layout and precision; `moe verify` runs exactly this.

    micro-batch: forward, loss * (its share of the global batch) * loss scale, backward       -> gradients add up
    after the last: global norm by ownership -> all finite? -> unscale, clip, step            -> or drop and count a skip
    after a step: routers' selection biases move by the step's load

The loss is the mean over the predicted tokens of the *global* batch, whatever each rank holds; auxiliary losses are means
over its routed tokens. Padding is neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.bias import updated_bias
from moe.context import Context
from moe.layer import LayerReport
from moe.model.transformer import Output, moe_layers
from moe.model.vocabulary import PADDING as PADDING
from moe.parallelize import FAMILIES
from moe.train.whole_step import whole_step
from parallel.clip import GradientNorm, clip_factor, gradient_norm
from parallel.collectives import sum_over
from parallel.data.engine import Engine
from parallel.errors import BadInput
from parallel.mesh import Axis, Mesh
from parallel.precision import LossScale

# N sequences held by this rank, B of a micro-batch, L length, E experts


@dataclass(frozen=True)
class LayerNumbers:
    """One MoE layer's step over all ranks: `choices` of each expert, before dropping; the losses are means over valid tokens."""

    layer: int
    choices: list[int]
    kept: int
    dropped: int
    balance_loss: float
    importance_loss: float
    z_loss: float
    entropy: float

    @property
    def load(self) -> list[float]:
        """Shares of the choices, summing to 1."""
        return [n / max(1, sum(self.choices)) for n in self.choices]


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
    seed: int,
    step: int,
    loss_scale: float = 1.0,
    flag: int = 0,
) -> Numbers:
    """Forward and backward over this rank's sequences (int64 [N, length + 1]); afterwards the engine holds summed gradients.

    PADDING at the end of a sequence is neither predicted nor routed. Every rank holds equally many sequences. Collective.
    """
    dp = mesh.axis("dp")
    tokens = _count_tokens(sequences_NL, dp)
    first = dp.index * len(sequences_NL)
    parts = sequences_NL.chunk(microbatches)
    passes = _passes(parts, tokens, seed=seed, step=step, first_sequence=first, loss_scale=loss_scale)
    sums = whole_step(engine.module, ((p.inputs_BL, p.context, p.targets_BL) for p in passes), axis=dp)
    rows: list[Tensor] = []
    layers: tuple[LayerReport, ...] = ()
    for p in passes:
        last = p is passes[-1]
        output: Output = engine.forward(p.inputs_BL, p.context.with_whole_step(sums), p.targets_BL, last=last)
        loss = output.loss / tokens.targets
        engine.backward(loss * loss_scale, last=last)
        rows.append(_pack(loss.detach(), output.layers, p.share))
        layers = output.layers
    total = torch.stack(rows).sum(0)
    total[0] = flag
    return _unpack(sum_over(total, dp).tolist(), layers)


@dataclass(frozen=True)
class _Tokens:
    """Of the global batch: tokens that are read, tokens that are predicted (at least 1 each), and whether any place is padding."""

    inputs: int
    targets: int
    padded: bool


def _count_tokens(sequences_NL: Tensor, dp: Axis) -> _Tokens:
    """Agreed over the data ranks, so that every rank divides by the same numbers. Raises BadInput on all of them alike."""
    valid_NL = sequences_NL != PADDING
    gaps = (valid_NL[:, 1:] & ~valid_NL[:, :-1]).sum()
    inputs, targets, gaps = sum_over(torch.stack((valid_NL[:, :-1].sum(), valid_NL[:, 1:].sum(), gaps)), dp).tolist()
    if gaps:
        raise BadInput(
            "sequences",
            got=f"a token after padding ({PADDING}) in {gaps} place{'s' if gaps > 1 else ''}",
            needed="padding at the end alone: attention would read it",
            fix="move the padding behind the tokens",
        )
    return _Tokens(max(1, inputs), max(1, targets), padded=inputs < dp.size * valid_NL[:, :-1].numel())


@dataclass(frozen=True)
class _Pass:
    """One micro-batch of this rank; `share` of the global batch's tokens."""

    inputs_BL: Tensor
    targets_BL: Tensor
    context: Context
    share: float


def _passes(
    parts: Iterable[Tensor], tokens: _Tokens, *, seed: int = 0, step: int = 0, first_sequence: int = 0, loss_scale: float = 1.0
) -> list[_Pass]:
    passes = []
    for part in parts:
        inputs_BL, valid_BL = part[:, :-1], None
        held = inputs_BL.numel()
        if tokens.padded:
            inputs_BL, valid_BL = without_padding(inputs_BL)
            held = int(valid_BL.sum())
        share = held / tokens.inputs
        context = Context.of(
            inputs_BL, seed=seed, step=step, first_sequence=first_sequence, auxiliary_scale=share * loss_scale, valid_BL=valid_BL
        )
        passes.append(_Pass(inputs_BL, part[:, 1:], context, share))
        first_sequence += len(part)
    return passes


def without_padding(inputs_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens with 0 where padding stood, and which ones are valid."""
    valid_BL = inputs_BL != PADDING
    return inputs_BL.masked_fill(~valid_BL, 0), valid_BL


def _pack(loss: Tensor, layers: tuple[LayerReport, ...], share: float) -> Tensor:
    """One float64 row that adds up over micro-batches and ranks; element 0 is kept for the flag."""
    row = [loss.new_zeros(1).double(), loss.double().reshape(1)]
    for r in layers:
        means = torch.stack((r.balance_loss, r.importance_loss, r.z_loss, r.entropy)).double() * share
        row += [torch.stack((r.kept, r.dropped)).double(), means, r.load_E.double()]
    return torch.cat(row)


def _unpack(row: list[float], reports: tuple[LayerReport, ...]) -> Numbers:
    layers, at = [], 2
    for r in reports:
        end = at + 6 + len(r.load_E)
        kept, dropped, balance, importance, z, entropy, *choices = row[at:end]
        layers.append(LayerNumbers(r.layer, [int(n) for n in choices], int(kept), int(dropped), balance, importance, z, entropy))
        at = end
    return Numbers(row[1], layers, int(row[0]))


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


@torch.no_grad()
def update_biases(model: nn.Module, numbers: Numbers) -> None:
    """Every router with a selection bias learns the global batch's load before dropping: the same on all ranks, once a step."""
    for layer, seen in zip(moe_layers(model), numbers.layers, strict=True):
        bias_E, rate = layer.router.bias_E, layer.router.settings.bias_rate
        if bias_E is not None and rate is not None:
            bias_E.copy_(updated_bias(bias_E, torch.tensor(seen.choices, device=bias_E.device), rate))


@torch.no_grad()
def validation_loss(engine: Engine, sequences_NL: Tensor, *, mesh: Mesh, at_once: int) -> float:
    """Mean loss in nats a token over all ranks' sequences; deterministic, with the recipe's evaluation capacity."""
    dp = mesh.axis("dp")
    tokens = _count_tokens(sequences_NL, dp)
    engine.module.eval()
    total = torch.zeros((), dtype=torch.float64, device=sequences_NL.device)
    for p in _passes(sequences_NL.split(at_once), tokens):
        output: Output = engine.module(p.inputs_BL, p.context, p.targets_BL)
        total += output.loss.double()
    engine.module.train()
    return sum_over(total, dp).item() / tokens.targets
