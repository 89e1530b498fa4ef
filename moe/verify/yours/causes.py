"""Explains a deviation: the factor by which a value is wrong, if one factor explains it, and the likely cause in words.

Arguments of several functions: of: the comparison. key: names the value. bound: its largest allowed deviation. bad: for each rank that
deviates, its elements and those of the single process. factor: f, if each rank in `bad` has f times the single process's values; else None.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from moe.verify.yours.align import Seen, factor_of, nearest, parts
from moe.verify.yours.judge import OF_PARAMETERS, Comparison
from moe.verify.yours.rows import of_experts
from moe.verify.yours.values import MASTER, Key


def explain(of: Comparison, key: Key, seen: list[Seen], bound: float) -> tuple[float | None, str]:
    """Return (factor, cause) of a deviation. factor: f, if every rank that deviates has f times the single process's values; None if no
    factor explains the deviation. seen: the compared elements of each rank."""
    bad = [s for s in seen if s.deviation > bound]
    if key.kind in OF_PARAMETERS and any(s.part for s in seen):
        bad = [s for s in bad if s.part]
        if not bad:
            return None, "in elements that the sample leaves out, because the norm of all elements differs"
    where = "" if len(bad) == len(seen) else f" on {_ranks(bad)}"
    if any(not bool(s.here.isfinite().all()) and bool(s.one.isfinite().all()) for s in bad):
        return None, f"not finite{where}"
    factors = [_factor(of, key, s, bound) for s in bad]
    common = factors[0] if factors and all(f is not None and abs(f - (factors[0] or 0)) < 1e-3 * abs(f) + 1e-9 for f in factors) else None
    if key.kind in ("weight", "weight after"):
        return common, (_of_weight if key.kind == "weight" else _of_update)(of, key, bad, bound, common) + where
    if key.kind == "gradient":
        return common, _of_gradient(of, key, bad, bound, common) + where
    if key.kind in ("note", "norm"):
        return common, _of_number(of, bad, bound, common) + where
    return common, _of_activation(of, key, bad, bound, common) + where


def _of_number(of: Comparison, bad: list[Seen], bound: float, factor: float | None) -> str:
    for k in range(2, 65):
        if all(of.deviation("note", s.one + math.log(k), s.here) <= bound for s in bad):
            return f"log {k} too large: each of {k} ranks counts all logits of the loss"
    return "" if factor is None else _times(factor)


def _ranks(seen: list[Seen]) -> str:
    ranks = sorted({s.rank for s in seen})
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} only"


def _factor(of: Comparison, key: Key, seen: Seen, bound: float) -> float | None:
    factor = factor_of(seen.one, seen.here)
    rest = float("inf") if factor is None else of.deviation(key.kind, seen.one * factor, seen.here)
    if factor is not None and abs(factor - 1) < 1e-3:
        return None
    return factor if rest <= 10 * bound or (factor is not None and rest * abs(factor) <= 10 * bound) else None


def _times(factor: float) -> str:
    if abs(factor) < 1e-6:
        return "zero: no gradient arrives (detached, masked, or no sum over ranks)"
    for k in range(2, 65):
        if abs(factor / k - 1) < 1e-3:
            return f"{k} x: summed over an extra axis of {k} ranks, or a mean is missing"
        if abs(factor * k - 1) < 1e-3:
            return f"1/{k}: averaged twice, or not summed over {k} ranks"
    return f"{factor:.4g} x: another divisor, coefficient or number of tokens"


def _of_weight(of: Comparison, key: Key, bad: list[Seen], bound: float, factor: float | None) -> str:
    for s in bad:
        piece, whole = of.ranks[s.rank].pieces[key][0], of.one.pieces[key][0]
        for part, deviation in of.tried(key.name, s.rank):
            if deviation <= bound and part.cut and s.part and s.part.cut:
                dim, _, chunk, _ = part.cut
                return f"wrong slice: rank {s.rank} holds chunk {chunk} of dim {dim} instead of chunk {s.part.cut[2]}"
        if s.one.dim() > 0 and (order := _order(s.one, s.here)) is not None:
            return f"order: equal up to a permutation along dim 0 (here {order[:8]})"
        if not parts(whole.shape, piece.whole, None):
            return "another shape"
    if all(float(s.here.abs().max()) == 0 for s in bad):
        return "zero before the step: not loaded, or lost"
    if order_of_shards := _order_of_shards(of, key, bad):
        return order_of_shards
    return (_times(factor) + "; " if factor is not None else "") + "other values before the step: other seed, not loaded, or stale"


def _order_of_shards(of: Comparison, key: Key, bad: list[Seen]) -> str:
    """Return text if the shards of all ranks together have the single process's rows in another order; "" otherwise."""
    held = [of.ranks[s.rank].pieces[key][0] for s in bad]
    dim = next((d for d, (own, whole) in enumerate(zip(held[0].shape, held[0].whole, strict=True)) if own < whole), None)
    if dim is None or len(bad) < len(of.ranks):
        return ""
    one, here = (torch.cat([getattr(s, side).movedim(dim, 0) for s in bad]) for side in ("one", "here"))
    if (order := _order(one, here)) is None:
        return ""
    for blocks in range(2, 9):
        if len(one) % (blocks * len(bad)) == 0:
            rows = torch.arange(len(one)).reshape(blocks, len(bad), -1).transpose(0, 1).flatten()
            if order == rows.argsort().tolist():
                return f"order: {blocks} blocks (such as q, k, v) were each cut over ranks before they were joined along dim {dim}"
    return f"order: the shards together are equal up to a permutation along dim {dim} (here {order[:8]})"


def _order(one: Tensor, here: Tensor) -> list[int] | None:
    """Return a permutation of dim 0 that makes `here` equal to `one`; None if there is none, or if it changes nothing."""
    if one.dim() == 0 or one.shape != here.shape or not 2 <= len(one) <= 1024:
        return None
    order = nearest(one.reshape(len(one), -1), here.reshape(len(one), -1))
    if order is None or order.tolist() == list(range(len(one))) or not torch.allclose(here[order], one, rtol=1e-3, atol=0):
        return None
    return order.tolist()


def _of_update(of: Comparison, key: Key, bad: list[Seen], bound: float, factor: float | None) -> str:
    gradients = [d for d, _ in of.found if d.kind == "gradient" and d.name == key.name]
    if gradients and not gradients[0].passed:
        return "follows from its gradient"
    for kind, said in (
        ("weight", "stale master weights: before the step they differ from the weights that the model reads"),
        ("weight after", "the master weights are updated, but the model's weights are not refreshed from them"),
    ):
        if any(_apart(of, key._replace(kind=kind), s.rank) for s in bad):
            return said
    before = of.one.pieces.get(key._replace(kind="weight"))
    if before and all(bool((s.here - s.one).any()) for s in bad):
        steps = []
        for s in bad:
            here = of.ranks[s.rank].pieces[key._replace(kind="weight")][0].values.double()
            if here.shape == s.here.shape:
                steps.append(float((s.here - here).abs().sum() / (s.one - here).abs().sum().clamp_min(1e-30)))
        if steps and max(steps) < 1e-3:
            return "not updated: the optimizer does not have it"
        if steps and max(steps) - min(steps) < 1e-3 * max(steps):
            return f"the update is {steps[0]:.4g} x: learning rate, weight decay or clipping"
    return "the gradient is right: optimizer, its states, weight decay or clipping"


def _apart(of: Comparison, key: Key, rank: int) -> bool:
    """Return whether the rank has a master weight that differs from the weight `key` by more than the rounding to its dtype."""
    pieces = of.ranks[rank].pieces
    model, master = (pieces.get(k) for k in (key, key._replace(slot=MASTER)))
    return model is not None and master is not None and not torch.equal(model[0].values, master[0].values.to(model[0].values.dtype))


def _of_gradient(of: Comparison, key: Key, bad: list[Seen], bound: float, factor: float | None) -> str:
    missing = [s.rank for s in bad if s.part and key not in of.ranks[s.rank].pieces]
    if missing:
        return f"missing on rank {', '.join(map(str, missing))}: unused, frozen or not reduced"
    local = {r: rank.pieces[k][0] for r, rank in enumerate(of.ranks) if (k := key._replace(kind="local gradient")) in rank.pieces}
    if (total := _summed(bad)) is not None and of.deviation("gradient", bad[0].one, total) <= bound:
        return "not summed: each rank has a term of the sum"
    own = {r: p for r, p in local.items() if p.shape == p.whole}  # without DTensors' shards: these gradients are already reduced
    same = [s for s in bad if s.rank in own and own[s.rank].values.shape == s.here.shape]
    values = {r: p.values.double() for r, p in local.items() if p.values.shape == next(iter(local.values())).values.shape}
    differ = len(values) > 1 and any(not torch.equal(v, next(iter(values.values()))) for v in values.values())
    replicas = len({tuple(map(int, m[:1])) for s in bad if s.part for m in s.part.maps}) <= 1
    if same and differ and replicas and all(of.deviation("gradient", local[s.rank].values.double(), s.here) <= bound for s in same):
        shared = any(len(ranks) > 1 for ranks in of.readers)
        return "not reduced: each rank has " + (
            "terms of its own, though ranks share samples" if shared else "the gradient of its own samples"
        )
    least, most = min(of.scales), max(of.scales)
    if differ and most - least > max(1e-3, 10 * bound) * abs(most):
        return f"ranks weigh their tokens differently (x {least:.4g} to {most:.4g}): each divides by its own number of tokens"
    if factor is not None:
        forward = [d for d, _ in of.found if d.kind == "gradient" and d.factor is not None and abs(d.factor - factor) < 1e-3 * abs(factor)]
        return _times(factor) + (f" (so far {len(forward) + 1} parameters have this factor)" if forward else "")
    if differ and replicas and len(values) <= 8:
        for size in range(1, len(values)):
            for ranks in combinations(sorted(values), size):
                total = torch.stack([values[r] for r in ranks]).sum(0)
                if all(_proportional(of, total, s.here, bound) for s in bad if s.here.shape == total.shape):
                    return f"reduced over ranks {', '.join(map(str, ranks))} only"
    if (order := _order(bad[0].one, bad[0].here)) is not None:
        return f"order: equal up to a permutation along dim 0 (here {order[:8]})"
    return _precision(of, key, bad) or _rows(bad, bound, "gradient") or "the computation of this gradient differs (not its reduction)"


def _summed(bad: list[Seen]) -> Tensor | None:
    """Return the sum of the ranks' values if the ranks have different values of the same elements; None otherwise."""
    alike = len(bad) > 1 and all(s.one.shape == bad[0].one.shape and torch.equal(s.one, bad[0].one) for s in bad)
    return torch.stack([s.here for s in bad]).sum(0) if alike and any(not torch.equal(s.here, bad[0].here) for s in bad) else None


def _proportional(of: Comparison, one: Tensor, here: Tensor, bound: float) -> bool:
    factor = factor_of(one, here)
    return factor is not None and of.deviation("gradient", one * factor, here) <= bound


def _rows(bad: list[Seen], bound: float, noun: str) -> str:
    """Return text about the rows along dim 0 that deviate; "" if all deviate or none."""
    if not all(s.one.dim() for s in bad):
        return ""
    one, here = (torch.cat([getattr(s, side).reshape(len(s.one), -1) for s in bad]) for side in ("one", "here"))
    rows = ((one - here).abs().amax(-1) > bound * float(one.abs().max())).nonzero().flatten()
    if 0 < len(rows) < len(one):
        zero = bool((here[rows].abs().amax(-1) == 0).all())
        return f"only {len(rows)} of {len(one)} rows of the {noun}" + (" (zero here)" if zero else "")
    return ""


def _of_activation(of: Comparison, key: Key, bad: list[Seen], bound: float, factor: float | None) -> str:
    one, here = torch.cat([s.one.flatten() for s in bad]), torch.cat([s.here.flatten() for s in bad])
    if key.kind == "input" and not of.samples[bad[0].rank].found:
        return "other samples: these are not in the batch of the run on one process"
    if key.kind == "output" and of.one.pieces[key][0].dtype.startswith("int"):
        return "other choices: a tie if their scores are equal (to exclude ties, record with pin or --pin-routing)"
    zeros = (one == 0) != (here == 0)
    ratio = (here / one)[(one != 0) & (here != 0)]
    if key.kind == "output" and int(zeros.sum()) > len(one) // 100 and len(ratio) and float((ratio - ratio.median()).abs().max()) < 1e-2:
        by_row = torch.cat([(t == 0).reshape(-1, t.shape[-1]).all(-1) for s in bad for t in (s.one, s.here)])
        if not bool(by_row.any()):
            return "dropout: other elements are zero, so its random numbers differ"
    width = bad[0].one.shape[-1] if bad[0].one.dim() else 1
    one_rows, here_rows = one.reshape(-1, width), here.reshape(-1, width)
    lost = (here_rows == 0).all(-1) & (one_rows != 0).any(-1)
    right = (one_rows - here_rows).abs().amax(-1) <= bound * float(one.abs().max())
    if bool(lost.any()) and bool((lost | right).all()):
        return f"{int(lost.sum())} of {len(lost)} tokens are zero: dropped (capacity) or masked"
    kept = (here_rows != 0).any(-1) & (one_rows == 0).all(-1)
    if bool(kept.any()) and bool((kept | right).all()):
        return f"{int(kept.sum())} of {len(kept)} tokens are not zero: a mask or capacity is not applied to them"
    if factor is not None:
        return _times(factor)
    total = _summed(bad)
    if total is not None and _same(total.reshape(-1, width) - one_rows[: len(one_rows) // len(bad)], bound * float(one.abs().max())):
        return "not summed: each rank has a term of the sum"
    if _same(here_rows - one_rows, bound * float(one.abs().max())):
        return _bias(of, key, bad[0])
    own = (one_rows * here_rows).sum(-1) / (one_rows * one_rows).sum(-1).clamp_min(1e-30)
    if width > 1 and float((here_rows - own[:, None] * one_rows).abs().max()) <= 10 * bound * float(one.abs().max()):
        return f"each token by a factor of its own ({float(own.min()):.3g} to {float(own.max()):.3g}): gates, weights or masks of tokens"
    if precision := _precision(of, key, bad):
        return precision
    if (order := _order(one_rows, here_rows)) is not None:
        return f"order: the same rows in another order (here {order[:8]})"
    partial = int((~right).sum())
    of_tokens = f"only {partial} of {len(right)} tokens: " if partial < len(right) else ""
    if key.kind == "output":
        return of_tokens + _inside(of, key, bound)
    if key.kind == "output gradient":
        chooses = any("int" in p[0].dtype for k, p in of.one.pieces.items() if k.kind == "output" and k.name == key.name)
        if chooses and len(bad) > 1 and all(torch.equal(s.here, bad[0].here) for s in bad):
            return of_tokens + "summed over ranks with a term too many or too few: experts that a rank does not hold must add none"
        return of_tokens + "backward of the operations that use this output (not summed over ranks, masked, or detached)"
    return _cut_in_one(of, key) or of_tokens + "the operations before this module"


def _cut_in_one(of: Comparison, key: Key) -> str:
    """Return a text if a fused weight (such as q, k and v) was cut over ranks in one piece instead of block by block; otherwise "".
    key: the wrong input of a module. The fused weight is found by its size: it is inside the same parent module, and has 2 or 3 times as
    many rows as the module's weight has columns."""
    cuts = {name: cut for name in _weights_in(of, key.name.rpartition(".")[0]) if (cut := _cut_of(of, name)) is not None}
    dim, size, _ = cuts.get(f"{key.name}.weight", (0, 0, 0))
    for name, (other, rows, blocks) in cuts.items() if dim else ():
        if other == 0 and blocks == 1 and rows in (2 * size, 3 * size):
            return f"fused weight cut in one piece: each of the {rows // size} blocks (such as q, k, v) of {name} must be cut over ranks"
    return ""


def _weights_in(of: Comparison, module: str) -> list[str]:
    """Return the names of the matrices in `module` that the single process and the first rank have."""
    pieces, first = of.one.pieces, of.ranks[0].pieces
    return [k.name for k in pieces if k in first and k.kind == "weight" and k.name.startswith(f"{module}.") and len(pieces[k][0].shape) > 1]


def _cut_of(of: Comparison, name: str) -> tuple[int, int, int] | None:
    """Return (dim, its whole size, number of blocks as in Part.cut) of the first rank's cut of a weight; None if the weight is not cut."""
    shape, held = of.one.pieces[Key("weight", name)][0].shape, of.ranks[0].pieces[Key("weight", name)][0]
    for dim, (own, whole) in enumerate(zip(held.shape, held.whole, strict=True)):
        if own < whole:  # a DTensor's shard
            return dim, whole, 2 if held.index else 1
    part = of.layout(name, 0)
    return None if part is None or part.cut is None else (part.cut[0], shape[part.cut[0]], part.cut[3])


def _inside(of: Comparison, key: Key, bound: float) -> str:
    """Return the likely cause of a wrong output if the module's inputs and weights are right."""
    given = [k for k in of.one.pieces if k.kind == "input" and k.name == key.name and "int" in of.one.pieces[k][0].dtype]
    ranks = [p[0].values for k in given for r in of.ranks if (p := r.pieces.get(k)) and p[0].shape == of.one.pieces[k][0].shape]
    if len(ranks) > 1 and not torch.equal(ranks[0], ranks[1]) and not of_experts(of, key.name):
        return "each rank numbers its own experts from 0, but holds all of them: they are not cut"
    if any(d.kind == "output" and d.name.startswith(f"{key.name}.") and d.passed for d, _ in of.found):
        return "the modules inside are right, but not what is done with their outputs (gates, order of rows, sums, masks, dropped rows)"
    weights, first = of.one.pieces.get(Key("weight", f"{key.name}.weight")), Key("input", key.name, "0.0")
    rows = [(r.pieces[first][0].values, r.pieces[key][0].values) for r in of.ranks if first in r.pieces and key in r.pieces]
    if weights and len(weights[0].shape) == 2 and rows and rows[0][0].dim() > 1:
        x, y = (torch.cat([pair[side].double().flatten(0, -2) for pair in rows]) for side in (0, 1))
        x = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), 1)
        if len(x) > x.shape[1] and len(x) == len(y) and x.shape[1] == weights[0].shape[1] + 1:
            rest = y - x @ torch.linalg.lstsq(x, y).solution
            if float(rest.abs().max()) <= 10 * bound * float(y.abs().max()):
                return "linear in its inputs, but with another weight than the module's: stale, a copy, or not loaded"
    return "its inputs and weights are right, its computation is not (order, scale, mask, lost term)"


def _precision(of: Comparison, key: Key, bad: list[Seen]) -> str:
    """Return text if the elements of the ranks' fp32 or fp64 tensors are rounded to a 16-bit dtype, or are sums of a few numbers of such a
    dtype; "" otherwise."""
    here, one = (torch.cat([getattr(s, side).flatten() for s in bad]) for side in ("here", "one"))
    if int((here != 0).sum()) <= 8 or not all(p.dtype in ("float32", "float64") for s in bad for p in of.ranks[s.rank].pieces.get(key, [])):
        return ""
    found, expected = _significant_bits(here), _significant_bits(one)
    median = float(found.double().median())
    # least: smallest median of significant bits. fp16 has 11 bits; a median below 10 is typical of sums of bf16 numbers (8 bits each)
    for name, dtype, least in (("bf16", torch.bfloat16, 0), ("fp16", torch.float16, 10)):
        if torch.equal(here.to(dtype).double(), here) and median >= least:
            return f"rounded to {name}: every element is a number of that precision"
    if float((found <= 16).double().mean()) > 0.95 and float((expected <= 16).double().mean()) < 0.5:
        name = "bf16" if median <= 10 else "fp16"
        return f"sums of numbers that were rounded to {name}: nearly all elements have at most 16 significant bits"
    return ""


def _significant_bits(values: Tensor) -> Tensor:
    """Return how many bits the significand of each element that is not 0 needs in fp32."""
    fractions, _ = torch.frexp(values[values != 0].float())
    integers = (fractions.abs().double() * 2**24).long()
    return 24 - (integers & -integers).double().log2().long()


def _same(rows: Tensor, limit: float) -> bool:
    """Return whether all rows are equal, up to 10 x `limit`."""
    return len(rows) > 1 and float((rows - rows[:1]).abs().max()) <= 10 * limit


def _bias(of: Comparison, key: Key, seen: Seen) -> str:
    """Return the likely cause if all rows differ by the same vector, such as a bias that is added several times."""
    bias = of.one.pieces.get(Key("weight", f"{key.name}.bias"))
    if bias and seen.part:
        own = bias[0].values.double()[seen.part.maps[-1]]
        times = factor_of(own, (seen.here - seen.one).reshape(-1, seen.one.shape[-1])[0]) if len(own) == seen.one.shape[-1] else None
        if times is not None:
            return f"a bias counts {1 + round(times, 3):g} times"
    return "the same vector in each token: a bias is lost or added more than once"
