"""Gradient norm and clipping. Each element of the whole model counts exactly once, with any layout.

Every rank sums the squares of the elements that it owns (Layout.is_owner; each ZeRO shard has one owner). One sum over all ranks then
gives the norms of all families (groups of parameters, such as experts). So the code never has to choose a process group for a parameter.
Other systems chose a wrong group by mistake, and so averaged the norms of ranks or left experts out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.mesh.collectives import sum_over
from parallel.mesh.host import on_device
from parallel.mesh.mesh import Axis
from parallel.mesh.record import MOST_RANKS
from parallel.watch.watchdog import check_tokens


@dataclass(frozen=True)
class GradientNorm:
    """2-norms of the whole model's gradient (total) and of the gradients of each family (group of parameters, such as experts): family ->
    norm. Equal on every rank."""

    total: float
    families: dict[str, float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.total)

    def divided_by(self, scale: float) -> GradientNorm:
        return GradientNorm(self.total / scale, {name: value / scale for name, value in self.families.items()})


def gradient_norm(owned: Iterable[tuple[str, Tensor]], *, families: tuple[str, ...], world: Axis, device: torch.device) -> GradientNorm:
    """Return the norms of the whole model's gradients. owned: a pair (family, gradient) for each shard that this rank owns. families: names
    of all families (groups of parameters, such as experts). world: the axis over all ranks. device: where the sums of squares are added
    over ranks. Collective."""
    return norms_of(squares(owned, families=families, device=device), families=families, world=world)[0]


def squares(owned: Iterable[tuple[str, Tensor]], *, families: tuple[str, ...], device: torch.device) -> Tensor:
    """Return for each of `families` (groups of parameters, such as experts) the sum of the squares of this rank's gradients: float64
    [len(families)] on `device`. owned: a pair (family, gradient) for each shard that this rank owns."""
    on_host: list[tuple[int, Tensor]] = []
    on_gpu: list[tuple[str, Tensor]] = []
    for family, grad in owned:
        if grad.is_cuda:
            on_gpu.append((family, grad))
        else:
            on_host.append((families.index(family), torch.linalg.vector_norm(grad, dtype=torch.float32)))
    found = torch.zeros(len(families), dtype=torch.float64, device=device)
    if on_host:
        norms, index = torch.stack([norm for _, norm in on_host]).double(), torch.tensor([family for family, _ in on_host])
        found += torch.zeros(len(families), dtype=torch.float64).index_add_(0, index, norms.square()).to(device)
    return found + squares_together(on_gpu, families) if on_gpu else found


def squares_together(owned: Sequence[tuple[str, Tensor]], families: tuple[str, ...]) -> Tensor:
    """Return the sum of the squares of the gradients of each family (group of parameters): float64 [len(families)]. owned: pairs (family,
    gradient); all gradients are on one GPU. Runs at most ten kernels, instead of five for each gradient."""
    norms = torch.stack(torch._foreach_norm([grad for _, grad in owned], 2, dtype=torch.float32))
    of_family = on_device(torch.tensor([[mine == family for mine, _ in owned] for family in families]), norms.device)
    return torch.where(of_family, norms.double().square(), 0.0).sum(1)


def norms_of(squares: Tensor, *, families: tuple[str, ...], world: Axis) -> list[GradientNorm]:
    """Return the norms of one or more steps. squares: this rank's results of the function `squares`, one a step, concatenated. Collective.
    The all-reduce of the squares also compares the collectives that ranks have run (Record.token). If these differ, all ranks raise
    Disagreement."""
    record, axis = world.communicator.record, replace(world, label="the gradient norm")
    record = record if 1 < world.size <= MOST_RANKS else None
    if record is not None:
        squares = torch.cat((squares, squares.new_full((1,), record.token())))
    totals: list[float] = sum_over(squares, axis).tolist()
    if record is not None:
        check_tokens(totals.pop())
    steps = (totals[start : start + len(families)] for start in range(0, len(totals), len(families)))
    return [GradientNorm(_root(sum(step)), dict(zip(families, map(_root, step), strict=True))) for step in steps]


def _root(total: float) -> float:
    return math.sqrt(total) if math.isfinite(total) else math.inf  # not NaN: max(0, nan) is 0 in Python, which would look finite


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor by which the gradient's norm becomes at most `limit`: 1 if it already is, or if `limit` is None."""
    return 1.0 if limit is None or norm <= limit else limit / norm
