"""Results of a step over all micro-batches and ranks: loss; load, drops and losses of each MoE layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from moe.experts.layer import LayerReport
from moe.model.transformer import moe_layers
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.host import read_later
from parallel.mesh.mesh import Axis

ALONE = Axis("tp")  # an axis of one rank
_MEANS = 7  # number of a layer's packed numbers before each expert's choices: kept, dropped, four mean losses, mean entropy
# number of a layer's packed numbers after the choices. The first counts the ranks that hold the router's bias; the others are sums over
# these ranks of the bias's minimum, maximum and mean absolute value
_BIAS = 4


@dataclass(frozen=True)
class LayerNumbers:
    """Results of one MoE layer in a step, over all ranks. choices: number of tokens that chose each expert, before dropping. kept, dropped:
    numbers of choices, which are pairs of token and expert. Losses and entropy are means over tokens, without padding. bias_min, bias_max,
    bias_mean_abs: summary of the router's selection bias before the update; None without one."""

    layer: int
    choices: list[int]
    kept: int
    dropped: int
    balance_loss: float
    importance_loss: float
    load_loss: float
    z_loss: float
    entropy: float
    bias_min: float | None = None
    bias_max: float | None = None
    bias_mean_abs: float | None = None

    @property
    def load(self) -> list[float]:
        """Each expert's share of all choices."""
        return [n / max(1, sum(self.choices)) for n in self.choices]


class Numbers:
    """Results of one step over all ranks. On a GPU they are copied to the host asynchronously; reading the first of them waits for the
    copy.

    packed: from `Sums.packed`, summed over ranks. expert_counts: layer -> number of experts. tokens: number of tokens in the global batch,
    without padding."""

    def __init__(self, packed: Tensor, expert_counts: dict[int, int], tokens: int) -> None:
        self._read, self._expert_counts, self.tokens = read_later(packed), expert_counts, tokens

    def __repr__(self) -> str:
        return f"Numbers(loss={self.loss}, layers={self.layers}, flags={self.flags})"

    @cached_property
    def _row(self) -> list[float]:
        row: list[float] = self._read()[0]
        return row

    @property
    def loss(self) -> float:
        """The mean loss over the global batch."""
        return self._row[1]

    @property
    def flags(self) -> int:
        """The sum of the ranks' flags: the number of ranks that are asked to stop."""
        return int(self._row[0])

    @cached_property
    def layers(self) -> list[LayerNumbers]:
        layers, at = [], 2
        for layer, count in self._expert_counts.items():
            kept, dropped, *means = self._row[at : at + _MEANS]
            choices = self._row[at + _MEANS : at + _MEANS + count]
            at += _MEANS + count + _BIAS
            holders, *bias = self._row[at - _BIAS : at]
            summary = [total / holders for total in bias] if holders else []
            layers.append(LayerNumbers(layer, [int(n) for n in choices], int(kept), int(dropped), *means, *summary))
        return layers

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


class Sums:
    """One step's numbers on this rank, summed over its micro-batches. expert_counts: MoE layer of the whole model -> number of experts.
    tokens: number of tokens in the global batch, without padding. divided: axis whose ranks compute different tokens in MoE layers and the
    same tokens elsewhere, so they have equal losses but different numbers for an MoE layer."""

    def __init__(self, expert_counts: dict[int, int], device: torch.device, tokens: int, *, divided: Axis = ALONE) -> None:
        self.expert_counts, self.tokens, self.divided = expert_counts, tokens, divided
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.rows: dict[tuple[int, ...], Tensor] = {}  # indices of a forward pass's MoE layers -> sums of their numbers (`_row`)
        # layer -> 1, then minimum, maximum and mean absolute value of its router's bias; the 1s, summed over ranks, count the ranks
        self.biases: dict[int, Tensor] = {}

    def add(self, loss: Tensor | None, layers: Sequence[LayerReport], share: float) -> None:
        """Add the results of a forward pass. loss: the pass's part of the global mean loss; None before the last stage. layers: reports of
        the MoE layers in this pass. share: number of the pass's tokens, divided by the global batch's."""
        if loss is not None:
            self.loss += loss.detach()
        if layers:
            key, row = tuple(r.layer for r in layers), torch.cat([_row(r, r.share * share) for r in layers])
            self.rows[key] = self.rows[key] + row if key in self.rows else row

    @torch.no_grad()
    def keep_biases(self, model: nn.Module) -> None:
        """Keep a summary of the selection biases of this rank's routers. Call this once a step, before they are updated."""
        for layer in moe_layers(model):
            if layer.router.bias_E is not None:
                bias_E = layer.router.bias_E.double()
                found = (bias_E.new_ones(()), bias_E.amin(), bias_E.amax(), bias_E.abs().mean())
                self.biases[layer.layer] = torch.stack(found)

    def loads(self) -> dict[int, Tensor]:
        """Return layer -> number of choices of each expert on this rank so far, float64 [E], as copies."""
        return {layer: row[_MEANS:].clone() for layer, row in self._by_layer().items()}

    def _by_layer(self) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for layers, row in self.rows.items():
            parts = row.split([_MEANS + self.expert_counts[layer] for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                found[layer] = found[layer] + part if layer in found else part
        return found

    def packed(self, flag: Tensor | None = None) -> Tensor:
        """Return one float64 tensor: flag [1] (None: 0), loss [1], then the numbers of each MoE layer (zeros for layers of other
        stages). All ranks of `divided` have the same flag and loss: all but the first put 0, so that a sum over ranks counts them once."""
        mine, none = self._by_layer(), self.loss.new_zeros(1)
        parts: list[Tensor] = []
        for layer, count in self.expert_counts.items():
            parts += (mine.get(layer, self.loss.new_zeros(_MEANS + count)), self.biases.get(layer, self.loss.new_zeros(_BIAS)))
        of_pass = (none if flag is None else flag, self.loss.reshape(1)) if self.divided.index == 0 else (none, none)
        return torch.cat((*of_pass, *parts))

    def total(self, axes: Sequence[Axis], flag: Tensor | None = None) -> Numbers:
        """Return the numbers summed over all ranks: over the axis `self.divided`, and over `axes`, along which tokens or stages differ.
        flag: float64 [1], whose sum over ranks is `Numbers.flags`. Collective."""
        return Numbers(sum_over_all(self.packed(flag), (self.divided, *axes)), self.expert_counts, self.tokens)


def _row(r: LayerReport, share: float | Tensor) -> Tensor:
    means = torch.stack((r.balance_loss, r.importance_loss, r.load_loss, r.z_loss, r.entropy)).double() * share
    return torch.cat((torch.stack((r.kept, r.dropped)).double(), means, r.load_E.double()))
