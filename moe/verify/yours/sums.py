"""Aligns values of the single process with sums over ranks, if each rank holds a term of the sum.

Arguments of several functions: of: the comparison. key: key of the value. own: each rank's value. bound: largest deviation with which
values count as aligned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe.verify.yours.align import Seen
from moe.verify.yours.values import Key, Piece

Comparison = Any  # the class in judge.py, which cannot be imported here because judge.py imports this file


def sums(of: Comparison, key: Key, own: list[Piece | None], bound: float) -> list[Seen] | None:
    """Align the single process's value with the sum over each group of ranks that have the same samples. If such a sum deviates, align it
    with the sum over all ranks, as for gradients of tensors without a dim of samples. Return None if that deviates too."""
    for together in (groups := of.readers, [list(range(len(own)))]):
        seen = [_sum(of, key, [(rank, piece) for rank in ranks if (piece := own[rank]) is not None], bound) for ranks in together]
        # a sum of ranks with different samples must equal the whole value, not only the entries of one rank's samples
        mixed = len(groups) > 1 and len(together) == 1
        if all(s is not None and s.deviation <= bound and not (mixed and s.part and s.part.by_samples) for s in seen):
            return [s for s in seen if s is not None]
    return None


def by_columns(of: Comparison, key: Key, own: list[Piece | None], bound: float) -> list[Seen] | None:
    """Align output gradients in which each column (last dim) is a copy of the single process's column, or a term of it to be summed over
    the ranks with the same samples. Example: latent attention's projection with shared rotary keys. Return None for other values than
    output gradients, and if a column is neither a copy nor a term."""
    aligned = []
    for held in ([(rank, piece) for rank in ranks if (piece := own[rank]) is not None] for ranks in of.readers):
        total = _sum(of, key, held, bound) if key.kind == "output gradient" else None
        each = [of.best(key, rank, piece, bound) for rank, piece in held]
        if total is None or any(s is None or s.one.shape != total.one.shape or not s.one.shape for s in each):
            return None
        for s in (s for s in each if s is not None):
            scale = max(float(s.one.abs().max()), of.least[key.kind])
            apart = ((s.one - s.here).abs() > bound * scale).flatten(0, -2).any(0)
            here = torch.where(apart, total.here, s.here)
            aligned.append(replace(s, here=here, deviation=of.deviation(key.kind, s.one, here)))
    return aligned if aligned and all(s.deviation <= bound for s in aligned) else None


def of_calls(of: Comparison, key: Key, bound: float) -> list[Seen] | None:
    """Compare the single process's sum over its calls with the sum over all calls of all ranks. Only for integer outputs of equal shapes:
    counts, such as the number of tokens of each expert in each micro-batch. Return None for other values, and if the sums differ."""
    whole, calls = of.one.pieces[key], [piece for rank in of.ranks for piece in rank.pieces.get(key, [])]
    if key.kind != "output" or any(not p.dtype.startswith("int") or p.sampled or p.whole != whole[0].whole for p in (*whole, *calls)):
        return None
    one, here = (torch.stack([p.values.double() for p in side]).sum(0) for side in (whole, calls))
    deviation = of.deviation(key.kind, one, here)
    return [Seen(0, one, here, None, deviation)] if deviation <= bound else None


def _sum(of: Comparison, key: Key, held: list[tuple[int, Piece]], bound: float) -> Seen | None:
    """Add the ranks' values in `held`, and compare the sum with the part of the single process's value that it fits best. Return None if
    they cannot be added, or if no part fits. held: (rank, value)."""
    if len(held) < 2 or any(p.values.shape != held[0][1].values.shape or p.dtype == "bool" for _, p in held):
        return None
    total = torch.stack([p.values.double() for _, p in held]).sum(0)
    found: Seen | None = of.best(key, held[0][0], replace(held[0][1], values=total), bound)
    return found
