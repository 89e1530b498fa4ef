"""Finds the part of the single process's tensor (`one`) to which a rank's tensor (`here`) corresponds. Both are from recordings of one
step.

samples     the sequences and tokens that a rank reads are found by searching for its first input in the single process's first input
parameters  a DTensor states its part. For other tensors, all possible parts are tried: the whole, or chunk j of n along a dim, or this
            chunk of each of 2 or 3 blocks (fused q, k, v)
names       `experts.0` of a rank may be `experts.2` of the single process, and `layers.0` of a stage `layers.4`. The shift with which
            weights differ least is taken
rows        an expert's input has tokens of all ranks in any order; each row is paired with the nearest row of the single process
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from moe.verify.yours.values import PERIOD, Piece, Recorded

# one tensor for each dim: entry i is the index in the single process's tensor that corresponds to index i of the rank's tensor. If the
# rank's tensor is a DTensor, i is an index of the global tensor, not of the rank's shard
Maps = list[Tensor]
_NEAREST = 4096  # largest number of rows that are paired by distance: the matrix of distances grows with its square


@dataclass(frozen=True)
class Samples:
    """Part of the single process's batch [B, L, ...] that a rank reads. rows: indices of the sequences. cols: indices of the tokens in each
    of these sequences. batch, length: B, L. found: False if the search found no such part, and rows and cols are a guess."""

    rows: Tensor
    cols: Tensor
    batch: int
    length: int
    found: bool = True


@dataclass(frozen=True)
class Part:
    """A possible alignment of a rank's tensor with the single process's. cut: (dim, chunks, index, blocks): the dim consists of `blocks`
    blocks, for example the weights of q, k and v; each block is split into `chunks` chunks, and the rank has chunk `index` of every block.
    None: no dim is split into chunks. by_samples: whether a dim is indexed by sequences or tokens, so that the rank holds only the entries
    of its samples."""

    maps: Maps
    cut: tuple[int, int, int, int] | None = None
    by_samples: bool = False


@dataclass(frozen=True)
class Seen:
    """Compared elements of a value: `one` from the single process, `here` from `rank` or from several ranks together. part: how they were
    aligned; None: without a Part, for example losses, and rows paired by distance. deviation: largest difference, relative to the
    largest element."""

    rank: int
    one: Tensor
    here: Tensor
    part: Part | None
    deviation: float


def joined(pieces: list[Piece], kind: str = "", whole: list[Piece] | None = None) -> Piece | None:
    """Join the tensors of a module's calls, for example of micro-batches, along dim 0. Return None if their shapes do not allow it. For the
    calls of a rank, also give `kind`, the kind of value (Key.kind), and `whole`, the single process's calls of the same module, with which
    the rank's calls are matched."""
    pieces = pieces if not whole else _calls(pieces, kind, whole)
    first = pieces[0]
    if len(pieces) == 1:
        return first
    alike = all(p.shape[1:] == first.shape[1:] and p.kept == first.kept and p.whole == p.shape for p in pieces)
    if not first.shape or not alike or first.kept[0] < PERIOD:
        return None
    shape = (sum(p.shape[0] for p in pieces), *first.shape[1:])
    rows = tuple(row for p in pieces for row in p.rows)
    return replace(first, values=torch.cat([p.values for p in pieces]), shape=shape, whole=shape, rows=rows)


def _calls(calls: list[Piece], kind: str, whole: list[Piece]) -> list[Piece]:
    """Merge a rank's calls of a module, one for each micro-batch, into one call. Output gradients are added up. Other values are merged
    only if they are equal in all calls. Return the calls unchanged if values differ, if the single process calls the module at least as
    often, or if its values have another shape, as when each micro-batch has fewer samples."""
    alike = all(p.whole == whole[0].whole and p.values.shape == calls[0].values.shape for p in calls)
    if len(calls) <= len(whole) or not alike:
        return calls
    if kind == "output gradient":
        return [replace(calls[0], values=torch.stack([p.values for p in calls]).sum(0))]
    return calls[:1] if all(torch.equal(p.values, calls[0].values) for p in calls) else calls


def samples(one: Piece, here: Piece, rank: int) -> Samples:
    """Find the part of the single process's first input `one` that equals the rank's first input `here`. If there is none, the result is a
    guess from the number `rank`."""
    if (one.sampled or here.sampled) and one.rows and one.shape[1:] == here.shape[1:] and (known := _by_hash(one.rows, here.rows)):
        length = one.shape[1] if len(one.shape) > 1 else 1
        return Samples(torch.tensor(known), torch.arange(length), len(one.rows), length)
    whole, part = one.values, here.values
    batch, length = whole.shape[0], (whole.shape[1] if whole.dim() > 1 else 1)
    width = part.shape[1] if part.dim() > 1 else 1
    for cols in _columns(length, width) if part.dim() == whole.dim() else ():
        seen = whole if whole.dim() == 1 else whole[:, cols]
        if seen.shape[1:] != part.shape[1:]:
            continue
        for start in range(0, batch - len(part) + 1, len(part) or 1):
            if torch.equal(seen[start : start + len(part)], part):
                return Samples(torch.arange(start, start + len(part)), cols, batch, length)
        found, free = [], [True] * batch
        same = (part.flatten(1)[:, None] == seen.flatten(1)[None]).all(-1) if part.dim() > 1 else torch.zeros(1, 0, dtype=torch.bool)
        for fits in same.tolist():
            row = next((b for b, fit in enumerate(fits) if fit and free[b]), None)
            if row is not None:
                found.append(row)
                free[row] = False
        if len(found) == len(part):
            return Samples(torch.tensor(found), cols, batch, length)
    rows = (torch.arange(len(part)) + rank * len(part)) % batch
    return Samples(rows, torch.arange(min(width, length)), batch, length, found=False)


def _by_hash(one: tuple[str, ...], here: tuple[str, ...]) -> list[int] | None:
    """Return the index in `one` of each hash in `here`; None if `one` lacks a hash. A hash stands for a sequence of the first input. Tries
    a contiguous part, every n-th, then any order."""
    if not here or len(here) > len(one):
        return None
    number, size = len(one) // len(here), len(here)
    orders = [range(start, start + size) for start in range(0, len(one) - size + 1, size)]
    orders += [range(start, start + size * number, number) for start in range(number)]
    for order in orders:
        if order[-1] < len(one) and tuple(one[row] for row in order) == here:
            return list(order)
    free: dict[str, list[int]] = {}
    for row, sample in enumerate(one):
        free.setdefault(sample, []).append(row)
    found = [free[sample].pop(0) for sample in here if free.get(sample)]
    return found if len(found) == size else None


def _columns(length: int, width: int) -> Iterator[Tensor]:
    """Yield possible sets of token positions that a rank holds: all, a contiguous chunk, every n-th, or two chunks as in zigzag ring
    attention. length: positions of a sequence. width: number of positions that the rank holds."""
    if width == length:
        yield torch.arange(length)
    elif width and length % width == 0:
        chunks = length // width
        yield from torch.arange(length).chunk(chunks)
        yield from (torch.arange(start, length, chunks) for start in range(chunks))
        if width % 2 == 0:
            half = torch.arange(length).chunk(2 * chunks)
            yield from (torch.cat((half[i], half[-1 - i])) for i in range(chunks))


def parts(one: tuple[int, ...], here: tuple[int, ...], of: Samples | None) -> Iterator[Part]:
    """Yield the possible alignments of a rank's tensor of shape `here` with the single process's of shape `one`. of: for activations, the
    rank's samples; None for others."""
    if len(one) != len(here):
        return
    for fixed in _by_samples(one, here, of) if of is not None else ({},):
        options: list[list[tuple[Tensor, tuple[int, int, int, int] | None]]] = []
        for dim, (whole, own) in enumerate(zip(one, here, strict=True)):
            if dim in fixed:
                options.append([(fixed[dim], None)])
            elif whole == own:
                options.append([(torch.arange(whole), None)])
            else:
                options.append([(at, (dim, *cut)) for at, cut in _chunks(whole, own)])
        for chosen in product(*options):
            yield Part([at for at, _ in chosen], next((cut for _, cut in chosen if cut), None), bool(fixed))


def _chunks(whole: int, own: int) -> Iterator[tuple[Tensor, tuple[int, int, int]]]:
    if own and whole % own == 0:
        number = whole // own
        for blocks in (b for b in (1, 2, 3) if own % b == 0):
            for j in range(number):
                at = torch.arange(whole).reshape(blocks, number, own // blocks)[:, j].flatten()
                yield at, (number, j, blocks)


def _by_samples(one: tuple[int, ...], here: tuple[int, ...], of: Samples) -> Iterator[dict[int, Tensor]]:
    """Yield the possible dims of samples and tokens, each possibility as a dict: dim -> indices of the single process's tensor that this
    rank holds. one, here: shapes of the tensor in the single process and on this rank. The last possibility is {}: no dim has samples or
    tokens."""
    rows, cols, b, width = of.rows, of.cols, len(of.rows), len(of.cols)
    tokens = (rows[:, None] * of.length + cols).flatten()
    for batch_dim, token_dim in ((0, 1), (1, 0)):
        if len(one) > 1 and (one[batch_dim], here[batch_dim], one[token_dim], here[token_dim]) == (of.batch, b, of.length, width):
            yield {batch_dim: rows, token_dim: cols}
    if one and one[0] % (of.batch * of.length) == 0 and here[0] == one[0] // (of.batch * of.length) * b * width:
        each = here[0] // (b * width)
        yield {0: (tokens[:, None] * each + torch.arange(each)).flatten()}
    if one and len(cols) == of.length and one[0] % of.batch == 0 and here[0] == one[0] // of.batch * b:
        each = here[0] // b
        yield {0: (rows[:, None] * each + torch.arange(each)).flatten()}
    yield {}


def common(one: Piece, here: Piece, maps: Maps) -> tuple[Tensor, Tensor] | None:
    """Return the elements that both pieces have, as (values of the single process, values of the rank), in fp64; None if there are none."""
    ours, theirs = one.values, here.values
    if theirs.numel() == 0 or ours.numel() == 0:
        return None
    for dim, (at, has) in enumerate(zip(here.at, one.at, strict=True)):
        wanted = maps[dim][at]
        there = torch.isin(wanted, has)
        place = torch.searchsorted(has, wanted[there])
        if one.sampled or here.sampled or len(place) != len(has) or not torch.equal(place, torch.arange(len(has))):
            ours, theirs = ours.index_select(dim, place), theirs.index_select(dim, there.nonzero().flatten())
    return (ours.double(), theirs.double()) if ours.numel() else None


def nearest(one: Tensor, here: Tensor, *, spare: bool = False) -> Tensor | None:
    """Pair each row of `one` [rows, width] with a different row of `here`, so that the sum of distances is smallest. Return for each row of
    `one` the index in `here`. Rows of `here` that are left over must be equal to each other (padding), unless `spare` allows any. Return
    None if they differ, or if there are too few or too many rows."""
    if not 0 < len(one) <= len(here) <= _NEAREST or one.shape[1:] != here.shape[1:]:
        return None
    from scipy.optimize import linear_sum_assignment

    distances = torch.cdist(one, here, compute_mode="donot_use_mm_for_euclid_dist").nan_to_num(torch.inf)
    order = torch.from_numpy(linear_sum_assignment(distances.clamp(max=1e30).numpy())[1])
    left = here[~torch.isin(torch.arange(len(here)), order)]
    return order if spare or bool((left == left[:1]).all()) else None


def renamed(one: Recorded, here: Recorded) -> dict[str, int]:
    """Return a dict: prefix of module names -> shift. `PREFIX.0` of this rank is `PREFIX.<shift>` of the single process."""
    all_names, own_names = ({key.name for key in of.pieces if key.kind == "weight"} for of in (one, here))
    shifts = {}
    for prefix in sorted({".".join(words[:n]) for name in all_names for words in [name.split(".")] for n in range(len(words))}):
        number = re.compile(rf"{re.escape(prefix)}\.(\d+)(?=\.|$)")
        whole, own = ({int(m[1]) for n in of if (m := number.match(n))} for of in (all_names, own_names))
        if 0 < len(own) < len(whole) and len(whole) % len(own) == 0 and own == set(range(len(own))):
            in_order = here.rank % (len(whole) // len(own)) * len(own)
            tried = [in_order, *(shift for shift in range(0, len(whole), len(own)) if shift != in_order)]
            shifts[prefix] = min(tried, key=partial(_distance, one, here, prefix))
    return shifts


def _distance(one: Recorded, here: Recorded, prefix: str, shift: int) -> float:
    """Return the sum of absolute differences between this rank's weights below `prefix` and the weights that `shift` assigns to them."""
    total = 0.0
    for key, pieces in here.pieces.items():
        name = shifted(key.name, {prefix: shift})
        other = one.pieces.get(key._replace(name=name))
        if key.kind == "weight" and key.name.startswith(f"{prefix}.") and other and other[0].shape == pieces[0].whole:
            both = common(other[0], pieces[0], _whole(pieces[0]))
            total += float((both[0] - both[1]).abs().sum()) if both else 0.0
    return total


def _whole(piece: Piece) -> Maps:
    return [torch.arange(size) for size in piece.whole]


def shifted(name: str, shifts: dict[str, int]) -> str:
    """Return the single process's name of the module or parameter that a rank calls `name`: a pipeline stage may count its layers from 0.
    shifts: result of `renamed`, prefix -> number added to the index after it."""
    for prefix, shift in shifts.items():
        if match := re.match(re.escape(prefix) + r"\.(\d+)(?=\.|$)", name):
            name = f"{prefix}.{int(match[1]) + shift}{name[match.end() :]}"
    return name


def _full_width(whole: Piece, own: list[Piece | None], readers: list[list[int]]) -> list[Piece | None]:
    """Return `own`, each rank's piece, with joined chunks: if tensor parallelism has spread chunks of the last dim over ranks with the same
    samples, the first of these ranks gets the joined tensor, and the others get None. whole: the single process's tensor. readers: groups
    of ranks with the same samples."""
    full = list(own)
    for ranks in readers:
        held = [piece for rank in ranks if (piece := own[rank]) is not None and piece.whole == piece.shape and piece.shape]
        if len(held) > 1 and sum(p.shape[-1] for p in held) == whole.shape[-1] and len({p.values.shape for p in held}) == 1:
            shape = (*held[0].shape[:-1], whole.shape[-1])
            for rank in ranks:
                full[rank] = None
            full[ranks[0]] = replace(held[0], values=torch.cat([p.values for p in held], -1), shape=shape, whole=shape)
    return full


def stacked(
    pieces: list[Piece | None], scales: list[float], whole: Piece | None = None, readers: list[list[int]] | None = None
) -> Tensor | None:
    """Return the rows of all ranks' pieces as one tensor [rows, width], each divided by its rank's scale. A vector has rows of one number.
    Return None if there are no rows, or if the pieces are sampled, are terms of a sum over ranks, or have different widths. whole: the
    single process's tensor; readers: groups of ranks with the same samples. If both are given, ranks' chunks of the width are joined first
    (`_full_width`)."""
    if whole is not None and readers is not None:
        pieces = _full_width(whole, pieces, readers)
    held = [
        ((p.values[:, None] if p.values.dim() == 1 else p.values).double().flatten(0, -2) / (scales[r] if scales else 1.0), p)
        for r, p in enumerate(pieces)
        if p and p.values.dim()
    ]
    if not held or any(p.sampled or p.summed_over or v.shape[1] != held[0][0].shape[1] for v, p in held):
        return None
    return torch.cat([v for v, _ in held])


def factor_of(one: Tensor, here: Tensor) -> float | None:
    """Return the factor f for which |here - f one| is smallest; None if `one` is 0."""
    square = float((one * one).sum())
    return float((one * here).sum()) / square if square else None


def multiple(one: Tensor, here: Tensor) -> float:
    """Return the median of here / one over the elements of `one` above 1 % of the largest; 1 if the median is 0. A few masked
    tokens do not change a median."""
    large = one.abs() > 0.01 * one.abs().max()
    value = float((here[large] / one[large]).median()) if bool(large.any()) else 1.0
    return value if value else 1.0
