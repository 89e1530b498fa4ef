"""Aligns values that no rank has as the single process has them: tensors that each rank orders or numbers in its own way (rows of experts'
inputs, indices of chosen experts), and sums of which each rank holds a term.

Arguments of several functions: of: the comparison. key: key of the value. own: each rank's value. bound: largest deviation with which
values count as aligned.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe.verify.yours.align import Seen, joined, nearest, stacked
from moe.verify.yours.values import Key, Piece

Comparison = Any  # the class in judge.py, which cannot be imported here because judge.py imports this file


def by_rows(of: Comparison, key: Key, whole: Piece, own: list[Piece | None], bound: float) -> list[Seen] | None:
    """Align rows that are spread over the ranks in any order, such as an expert's inputs. None if they cannot be aligned. whole: the single
    process's tensor."""
    of_gradient = key.kind == "output gradient"
    one, here = stacked([whole], [1.0]), stacked(own, of.scales if of_gradient else [], whole, of.readers)
    order, groups = (None, []) if one is None or here is None else _order(of, key.name, bound)
    if one is None or here is None or order is None or len(order) != len(one) or int(order.max()) >= len(here):
        return None
    here = here[order]
    for group in groups if of_gradient else ():
        pairs = nearest(one[group], here[group])
        here[group] = here[group] if pairs is None else here[group][pairs]
    return [Seen(0, one, here, None, of.deviation(key.kind, one, here))]


def _order(of: Comparison, module: str, bound: float) -> tuple[Tensor | None, list[Tensor]]:
    """Return for each row of the single process the index of the ranks' row with the nearest input, or None if inputs deviate by more than
    `bound`; and groups of rows with equal inputs and outputs, such as the first token of two sequences, which only gradients distinguish.
    A token with two choices has two rows with equal inputs, so outputs are compared too. In stacked experts, output gradients are compared
    as well, because a rank has none for rows of other ranks' experts."""
    if module not in of.rows:
        sides: list[tuple[Tensor, Tensor]] = []
        spare = of_experts(of, module.rpartition(".")[0])
        # kind of value -> divisor of its values: kinds with larger divisors count less in the distance between rows
        divisors = {"input": 1.0, "output": 1e3} | ({"output gradient": 1e6} if spare else {})
        for key in (k for k in of.order if k.name == module and k.kind in divisors):
            whole = joined(of.one.pieces[key])
            if whole is None or len(whole.shape) < 2:
                continue
            one, here = stacked([whole], [1.0]), stacked(of.pieces(key), [], whole, of.readers)
            if one is not None and here is not None and (not sides or [len(one), len(here)] == [len(side) for side in sides[0]]):
                size = divisors[key.kind] * (float(one.abs().max()) or 1.0)
                sides.append((one / size, here / size))
        pairs = [torch.cat(side, 1) for side in zip(*sides, strict=True)]
        order = nearest(pairs[0], pairs[1], spare=spare) if pairs else None
        right = order is not None and of.deviation("input", sides[0][0], sides[0][1][order]) <= bound
        of.rows[module] = (order, _equal(pairs[0], bound)) if right else (None, [])
    found: tuple[Tensor | None, list[Tensor]] = of.rows[module]
    return found


def _equal(rows: Tensor, bound: float) -> list[Tensor]:
    """Return the indices of each group of at least two rows whose elements differ by at most `bound`."""
    near, groups = torch.cdist(rows, rows, p=math.inf) <= bound, list[Tensor]()
    left = torch.ones(len(rows), dtype=torch.bool)
    for number in range(len(rows)):
        if left[number]:
            groups.append((near[number] & left).nonzero().flatten())
            left[groups[-1]] = False
    return [group for group in groups if len(group) > 1]


def of_experts(of: Comparison, module: str) -> bool:
    """Return whether the module has weights of stacked experts, [experts, in, out], and each rank holds only some of the experts. Rows of a
    rank's input that are for other experts then have no effect."""
    weights = [(k, p[0].shape) for k, p in of.one.pieces.items() if k.kind == "weight" and k.name.rpartition(".")[0] == module]
    return any(k in of.ranks[0].pieces and of.ranks[0].pieces[k][0].shape[0] < shape[0] for k, shape in weights if len(shape) == 3)


def numbered(of: Comparison, key: Key, seen: list[Seen]) -> list[Seen] | None:
    """Align the indices of chosen experts, if each of the ranks with the same samples numbers its own experts from 0. None if not."""
    groups = [[s for s in seen if s.rank in ranks] for ranks in of.readers]
    if "int" not in of.one.pieces[key][0].dtype or any(len(g) < 2 or any(s.one.shape != g[0].one.shape for s in g) for g in groups):
        return None
    found = [(g[0], here) for g in groups if (here := _global(g[0].one, torch.stack([s.here for s in g]))) is not None]
    return (
        [replace(s, here=here, deviation=of.deviation(key.kind, s.one, here)) for s, here in found] if len(found) == len(groups) else None
    )


def _global(one: Tensor, here: Tensor) -> Tensor | None:
    """Return the ranks' chosen experts `here` [ranks, ...] as one tensor, in the numbering of `one`, the experts that the single process
    chose. Each rank numbers its own experts from 0, and uses one number, its largest or smallest, for all experts of other ranks. None
    unless each choice is an expert of exactly one rank."""
    for rest in (here.max(), here.min()):
        own = here != rest
        shifts = [(one - rank)[held].unique() for rank, held in zip(here, own, strict=True)]  # empty: no token chose this rank's experts
        if bool((own.sum(0) == 1).all()) and all(len(shift) <= 1 for shift in shifts):
            return torch.stack([held * (rank + shift.sum()) for rank, held, shift in zip(here, own, shifts, strict=True)]).sum(0)
    return None


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
