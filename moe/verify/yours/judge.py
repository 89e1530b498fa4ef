"""Compares a recording of several ranks (`many`) with the recording of the same step in one process (`one`). Values are compared in the
order in which `one` recorded them.

    deviation   max |one - many| / max |one|; for gradients, the divisor is at least a thousandth of the largest element of all gradients
    bound       2 x the effect of rounding + the roundoff of the dtype. The effect of rounding is the largest deviation that other orders
                of sums cause in the single process (Recording.rounded), in this value or an earlier one. Exceptions:
      weight before the step   only the roundoff counts
      weight after the step    only the effect in this weight counts. The deviation leaves out what a gradient error within the gradient's
                               bound explains: Adam makes a full step from a tiny gradient, whose sign such an error can change
      gradient in parts        if ranks hold parts of it, the effect is also measured relative to each part's own largest element

A rank's activation gradients may be a multiple of the single process's, because a rank's loss is a mean over its own samples. This multiple
is measured at the first gradient of the backward pass. Gradients of parameters, after their reduction, must be equal without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from moe.verify.yours.align import Part, Samples, Seen, common, joined, multiple, parts, renamed, samples, shifted
from moe.verify.yours.rows import by_columns, by_rows, numbered, of_calls, sums
from moe.verify.yours.values import MASTER, Deviation, Key, Piece, Recorded, Recording, roundoff

_GRADIENTS = ("output gradient", "gradient", "local gradient")
OF_PARAMETERS = ("weight", "gradient", "weight after")
FORWARD = ("weight", "input", "output", "note")
# largest useful bound: a larger one could hide that one of four terms is missing from a sum, so a value within it counts as not compared.
# A bound is about twice the effect of rounding, so LOOSE corresponds to an effect of 12.5 %
LOOSE = 0.25
TOO_LOOSE = "rounding alone changes this value, or its gradient, by more than 12.5 %"


@dataclass
class Comparison:
    """Comparison of two recordings of a step. one: record of the single process. ranks: records of the ranks. rounded: records of the
    single process with its sums in other orders. refused: key of a value that is not compared -> reason. found: for each compared value,
    its deviation and the ranks' elements."""

    one: Recorded
    ranks: list[Recorded]
    rounded: list[Recorded]
    refused: dict[Key, str] = field(default_factory=dict)
    found: list[tuple[Deviation, list[Seen]]] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)  # parameter -> bound of its gradient
    # cache: arguments of `tried`, (parameter, rank) -> its result
    layouts: dict[tuple[str, int], list[tuple[Part, float]]] = field(default_factory=dict)
    shifts: list[dict[str, int]] = field(default_factory=list)  # for each rank: module prefix -> shift of layer numbers (`renamed`)
    # module -> result of `_order` in rows.py
    rows: dict[str, tuple[Tensor | None, list[Tensor]]] = field(default_factory=dict)

    @staticmethod
    def of(one: Recording, many: Recording) -> Comparison:
        ranks, all_shifts = [], [renamed(one.ranks[0], rank) for rank in many.ranks]
        for rank, shifts in zip(many.ranks, all_shifts, strict=True):
            ranks.append(replace(rank, pieces={k._replace(name=shifted(k.name, shifts)): v for k, v in rank.pieces.items()}))
        return Comparison(one.ranks[0], ranks, one.rounded, shifts=all_shifts)

    def run(self, explain: Callable[[Comparison, Key, list[Seen], float], tuple[float | None, str]]) -> None:
        """Compare every value. explain(comparison, key, seen, bound): called for a deviation above its bound, returns (factor, cause) as in
        causes.py. factor: ranks' value / single process's value; None if no single factor explains the deviation."""
        noise = 0.0
        for number, key in enumerate(self.order):
            mine, exact = self._noise(key), not self._whole(key)[0].dtype.startswith(("float", "bfloat"))
            if key.kind not in ("weight", "weight after") and not exact:
                noise = max(noise, mine)
            limit = mine if exact or key.kind == "weight after" else 0.0 if key.kind == "weight" else noise
            bound = 2 * limit + (0.0 if exact else roundoff([self._whole(key), *(r.pieces.get(key, []) for r in self.ranks)]))
            if (seen := self.seen(key, bound)) is None:
                continue
            if key.kind == "gradient":
                if any(s.deviation > bound for s in seen):
                    bound = max(bound, 2 * self._noise_of_parts(key, seen) + roundoff([self._whole(key)]))
                self.bounds[key.name] = bound
            seen = self._updates(key, seen) if key.kind == "weight after" else seen
            worst = max((s.deviation for s in seen), default=0.0)
            factor, cause = (None, "") if worst <= bound else explain(self, key, seen, bound)
            if (lacking := self._lacking(key, seen)) and worst <= bound:
                worst, cause = 1.0, lacking
            if worst <= bound and (bound > LOOSE or (key.kind == "weight after" and self.bounds.get(key.name, 0.0) > LOOSE)):
                self._refuse(key, TOO_LOOSE)
                continue
            self.found.append((Deviation(key.name, key.kind, number, worst, bound, factor, cause, worst <= bound), seen))
        known = {*self.order, *(k._replace(kind="local gradient") for k in self.order if k.kind == "gradient")}
        for key in (
            key for rank in self.ranks for key in rank.pieces if key not in known and key.kind != "local gradient" and key.slot != MASTER
        ):
            self.refused.setdefault(key, "the run on one process has no such value")

    @cached_property
    def order(self) -> list[Key]:
        """Keys of the single process in the order in which their values were computed: forward, then backward. A parameter's gradient has
        the position at which autograd accumulated it."""
        keys, gradients = [], [k for k in self.one.pieces if k.kind == "gradient"]
        for key in self.one.pieces:
            if key.kind == "local gradient" and key._replace(kind="gradient") in self.one.pieces:
                keys.append(key._replace(kind="gradient"))
            elif key.kind not in ("gradient", "local gradient") and key.slot != MASTER:
                keys.append(key)
        keys += [k for k in gradients if k not in set(keys)]
        phase = {**dict.fromkeys(FORWARD, 0), "output gradient": 1, "gradient": 1, "norm": 2, "weight after": 3}
        return sorted(keys, key=lambda k: phase[k.kind])

    def _whole(self, key: Key) -> list[Piece]:
        return self.one.pieces[key]

    def _noise(self, key: Key) -> float:
        """Return the largest deviation of this value that other orders of sums cause in the single process."""
        most = 0.0
        for other in self.rounded:
            for a, b in zip(self._whole(key), other.pieces.get(key, []), strict=False):
                if a.values.shape == b.values.shape:
                    here = b.values.double()
                    if key.kind == "weight after" and all(k in of.pieces for k in _of_update(key) for of in (self.one, other)):
                        sides = ([of.pieces[k][0].values.double() for k in _of_update(key)] for of in (self.one, other))
                        here = self._settled(key.name, *sides)
                    most = max(most, self.deviation(key.kind, a.values.double(), here))
        return most

    def _noise_of_parts(self, key: Key, seen: list[Seen]) -> float:
        """Return the largest deviation that rounding causes in a rank's part of the value, relative to the part's largest element."""
        held = [(s, s.part, self.ranks[s.rank].pieces[key][0]) for s in seen if s.part and key in self.ranks[s.rank].pieces]
        both = [(s, common(other.pieces[key][0], piece, part.maps)) for s, part, piece in held for other in self.rounded]
        return max((self.deviation(key.kind, s.one, b[0]) for s, b in both if b and b[0].shape == s.one.shape), default=0.0)

    def _updates(self, key: Key, seen: list[Seen]) -> list[Seen]:
        """Return `seen`, the weights after the step, without the differences that are explained by the allowed errors of their gradients.
        If only a sample of a weight is recorded, the last entry is the norm of all its elements. The part of its difference that is
        explained is (norm of the sample's explained differences / norm of the sample) times this norm."""
        others = [{s.rank: s for s in self.seen(k, 0.0) or [] if s.part} if k in self.one.pieces else {} for k in _of_update(key)[1:]]
        settled, moved, squares = [], 0.0, 0.0
        for s in seen:
            here, held = s.here, self.ranks[s.rank].pieces[key][0]
            if s.part is None:
                rest = s.here - s.one
                here = s.one + rest.sign() * (rest.abs() - s.one * (moved / squares) ** 0.5).clamp_min(0) if squares else here
            elif all(s.rank in other for other in others):
                mine = [replace(m, one=held.cut(m.one), here=held.cut(m.here)) for m in (other[s.rank] for other in others)]
                here = self._settled(key.name, [s.one, *(m.one for m in mine)], [s.here, *(m.here for m in mine)])
                moved, squares = moved + float((s.here - here).square().sum()), squares + float(s.one.square().sum())
            settled.append(replace(s, here=here, deviation=self.deviation(key.kind, s.one, here)))
        return settled

    def _settled(self, name: str, one: list[Tensor], here: list[Tensor]) -> Tensor:
        """Return the rank's weight after the step, without the part of its difference from the single process's weight that the allowed
        error of the gradient explains. The relative change of an update is at most its gradient's. A gradient within the allowed
        error may have either sign, so the whole difference is explained.

        one, here: (weight after the step, weight before it, gradient) of the single process and of the rank."""
        if len({t.shape for t in (*one, *here)}) > 1 or not one[0].numel():
            return here[0]
        limit = self.bounds.get(name, 0.0) * max(float(one[2].abs().max()), self.least["gradient"])
        update = torch.maximum((one[0] - one[1]).abs(), (here[0] - here[1]).abs())
        explained = update * limit / one[2].abs().clamp_min(1e-300)
        rest = here[0] - one[0]
        return one[0] + torch.where(one[2].abs() <= limit, 0.0, rest.sign() * (rest.abs() - explained).clamp_min(0))

    def deviation(self, kind: str, one: Tensor, here: Tensor) -> float:
        """Return the largest difference relative to the largest element; inf if an element is finite on one side but not on the other."""
        if one.shape != here.shape:
            return float("inf")
        difference = (one - here).abs().nan_to_num(torch.inf)
        difference[(one == here) | (one.isnan() & here.isnan())] = 0
        most = float(difference.max()) if one.numel() else 0.0
        scale = max(float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0, self.least.get(kind, 0.0))
        return most / scale if most and scale else (float("inf") if most else 0.0)

    @cached_property
    def least(self) -> dict[str, float]:
        """Kind of gradient -> lower limit of the scale that divides a deviation: a thousandth of the largest element of all gradients of
        this kind, so that tiny gradients have no large relative deviations."""
        largest = dict.fromkeys(_GRADIENTS, 0.0)
        for key, pieces in self.one.pieces.items():
            if key.kind in largest:
                largest[key.kind] = max(largest[key.kind], *(float(p.values.abs().max()) for p in pieces if p.values.numel()), 0.0)
        return {kind: value / 1000 for kind, value in largest.items()}

    @cached_property
    def _first(self) -> Key | None:
        """Key of the first integer input that all ranks have; if there is none, of the first input that all ranks have."""
        shared = [k for k in self.order if k.kind == "input" and all(k in r.pieces for r in self.ranks) and self._whole(k)[0].shape]
        return next((k for k in shared if "int" in self._whole(k)[0].dtype), shared[0] if shared else None)

    @cached_property
    def samples(self) -> list[Samples]:
        """Part of the batch that each rank reads."""
        first = self._first
        whole = None if first is None else joined(self._whole(first))
        own = [None if first is None else joined(r.pieces[first]) for r in self.ranks]
        if whole is None or any(o is None for o in own):
            return [Samples(torch.arange(1), torch.arange(1), 1, 1, found=False) for _ in self.ranks]
        return [samples(whole, o, rank) for rank, o in enumerate(own) if o is not None]

    @cached_property
    def readers(self) -> list[list[int]]:
        """Groups of ranks that read the same samples."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, of in enumerate(self.samples):
            groups.setdefault((*of.rows.tolist(), -1, *of.cols.tolist()), []).append(rank)
        return list(groups.values())

    @cached_property
    def scales(self) -> list[float]:
        """For each rank, the factor by which its activation gradients differ from the single process's."""
        shared = [k for k in self.order if k.kind == "output gradient" and all(k in r.pieces for r in self.ranks)]
        for key in shared:
            own = [piece for piece in self.pieces(key) if piece is not None]
            seen = [self.best(key, rank, piece, 0.0, scale=False) for rank, piece in enumerate(own)]
            placed = [piece.shape != piece.whole or bool(s and s.part and s.part.by_samples) for piece, s in zip(own, seen, strict=True)]
            if len(seen) == len(self.ranks) and all(placed) and None not in seen:
                return [multiple(s.one, s.here) for s in seen if s is not None]
        return [1.0 if shared else self._scale_of(rank) for rank in range(len(self.ranks))]

    def _scale_of(self, rank: int) -> float:
        """Return one rank's factor of `scales` if no module is on all ranks, as with pipeline stages. It is measured at the first output
        gradient of the single process's backward pass that this rank also has; 1 if there is none."""
        for key in (k for k in self.order if k.kind == "output gradient" and k in self.ranks[rank].pieces):
            piece = self.pieces(key)[rank]
            if piece is not None and (best := self.best(key, rank, piece, 0.0, scale=False)) is not None:
                return multiple(best.one, best.here)
        return 1.0

    def pieces(self, key: Key) -> list[Piece | None]:
        """Return for each rank the tensors of all its calls under this key, joined to one; None if there are none or they cannot be joined.
        Terms of a sum on several ranks (a DTensor with Partial) are added."""
        own = [joined(r.pieces[key], key.kind, self.one.pieces.get(key, [])) if key in r.pieces else None for r in self.ranks]
        summed = []
        for piece in own:
            terms = [own[r] for r in piece.summed_over] if piece is not None else []
            values = [t.values for t in terms if t is not None]
            summed.append(replace(piece, values=torch.stack(values).sum(0)) if piece is not None and values else piece)
        return summed

    def seen(self, key: Key, bound: float) -> list[Seen] | None:
        """Return each rank's elements of a value, aligned with the single process's; None if they cannot be aligned (reason: `refused`)."""
        whole, own = joined(self._whole(key)), self.pieces(key)
        if key.kind in OF_PARAMETERS:
            return self._parameter(key, own)
        alike = len({piece.values.squeeze().shape for piece in (whole, *own) if piece is not None}) == 1
        if whole is not None and alike and (key.kind in ("note", "norm") or not whole.shape):
            return self._numbers(key, whole, own, bound)
        if whole is None or not any(piece is not None for piece in own):
            gone = all(key not in r.pieces for r in self.ranks)
            return self._refuse(key, "no rank has such a value" if gone else "its calls have shapes that do not join along dim 0")
        each = [self.best(key, rank, piece, bound) for rank, piece in enumerate(own) if piece is not None]
        seen = [s for s in each if s is not None]
        if len(seen) == len(each) and all(s.deviation <= bound for s in seen):
            return seen
        if (
            joint := sums(self, key, own, bound)
            or by_columns(self, key, own, bound)
            or of_calls(self, key, bound)
            or numbered(self, key, seen)
        ):
            return joint
        if (rows := by_rows(self, key, whole, own, bound)) is not None and (not seen or rows[0].deviation < max(s.deviation for s in seen)):
            return rows
        copies = len(seen) == len(self.ranks) and all(piece is not None and piece.whole == whole.shape for piece in own)
        if len(seen) < len(each) or not (copies or all(s.part and s.part.by_samples for s in seen)):
            return rows or self._refuse(key, f"shapes {[p.shape for p in own if p is not None]} are not known parts of {whole.shape}")
        return seen

    def _lacking(self, key: Key, seen: list[Seen]) -> str:
        """Return text about elements of a parameter, or samples of the batch, that no rank has; "" if none are missing."""
        unread = set(range(self.samples[0].batch)) - {row for of in self.samples for row in of.rows.tolist()}
        if unread and key == self._first:
            return f"samples {sorted(unread)[:8]} of the batch are read by no rank"
        if not seen:
            return "wrong slice: no rank holds it, because ranks hold other slices twice"
        held = [s.part.maps for s in seen if s.part] if key.kind == "weight" else []
        for dim, size in enumerate(self._whole(key)[0].shape if held else ()):
            have = torch.cat([maps[dim] for maps in held]).unique()
            if len(have) < size:
                return f"wrong slice: no rank holds {size - len(have)} of {size} rows along dim {dim}"
        return ""

    def _refuse(self, key: Key, reason: str) -> list[Seen] | None:
        """Store the reason why a value is not compared. Returns None, so that callers can return the result."""
        self.refused[key] = reason
        return None

    def best(self, key: Key, rank: int, piece: Piece, bound: float, *, scale: bool = True) -> Seen | None:
        """Compare a rank's value with each Part of the single process's value that the rank may have. Return the best: prefer
        deviations within `bound`, then Parts by the rank's samples (`by_samples`), then the least deviation. None: no Part fits. piece: the
        rank's value. scale: whether to divide activation gradients by the rank's factor (`scales`)."""
        whole, found = joined(self._whole(key)), []
        for part in () if whole is None else parts(whole.shape, piece.whole, self.samples[rank]):
            if whole is not None and (both := common(whole, piece, part.maps)) is not None:
                here = both[1] / self.scales[rank] if scale and key.kind == "output gradient" else both[1]
                found.append(Seen(rank, both[0], here, part, self.deviation(key.kind, both[0], here)))
        return min(found, key=lambda s: (s.deviation > bound, not (s.part and s.part.by_samples), s.deviation), default=None)

    def _numbers(self, key: Key, whole: Piece, own: list[Piece | None], bound: float) -> list[Seen] | None:
        """Compare values that have the same shape on the ranks and in the single process, such as losses: their mean or sum over ranks if
        one of these is equal, otherwise each rank's value. whole, own: the single process's value, and each rank's."""
        values = {rank: piece.values.double().squeeze() for rank, piece in enumerate(own) if piece is not None}
        if not values:
            return self._refuse(key, "no rank has such a value")
        one, several = whole.values.double().squeeze(), torch.stack(list(values.values()))
        for joint in (several.mean(0), several.sum(0)) if key.kind != "norm" else ():
            if self.deviation(key.kind, one, joint) <= bound:
                return [Seen(0, one, joint, None, self.deviation(key.kind, one, joint))]
        return [Seen(rank, one, value, None, self.deviation(key.kind, one, value)) for rank, value in values.items()]

    def _parameter(self, key: Key, own: list[Piece | None]) -> list[Seen] | None:
        """Compare a weight or gradient: for each rank that holds a part of the parameter, return its elements with the same elements of the
        single process; None if a rank's part cannot be found. own: each rank's value."""
        weight = key._replace(kind="weight")
        holders = [rank for rank, r in enumerate(self.ranks) if weight in r.pieces and r.pieces[weight][0].values.numel()]
        if key.kind == "gradient" and not any(k.kind == "gradient" for r in self.ranks for k in r.pieces):
            return self._before_reduction(key)
        if not holders and key == weight and any(key.name.startswith(f"{prefix}.") for shifts in self.shifts for prefix in shifts):
            return []  # `_lacking` then reports that no rank holds it
        if not holders or weight not in self.one.pieces:
            return self._refuse(key, "no rank has this parameter, or all have an empty one")
        seen = []
        for rank in holders:
            part, piece, own_shape = self.layout(key.name, rank), own[rank], self.ranks[rank].pieces[weight][0].whole
            if part is None:
                return self._refuse(key, f"shape {own_shape} is no known part of {self._whole(key)[0].shape}")
            if piece is None or piece.whole != own_shape:
                one = self._whole(key)[0].values.double()
                seen.append(Seen(rank, one, torch.zeros_like(one), part, self.deviation(key.kind, one, torch.zeros_like(one))))
            elif (both := common(self._whole(key)[0], piece, part.maps)) is not None:
                seen.append(Seen(rank, *both, part, self.deviation(key.kind, *both)))
        if not seen:
            return self._refuse(key, "the recorded sample has no element of the ranks' parts")
        return [*seen, *self._norm(key, {rank: piece for rank in holders if (piece := own[rank]) is not None})]

    def _norm(self, key: Key, own: dict[int, Piece]) -> list[Seen]:
        """Compare the norm of all elements, if the single process recorded only a sample of them."""
        whole, squares = self._whole(key)[0], {}
        for rank, piece in own.items() if whole.norm is not None else ():
            part = self.layout(key.name, rank)
            if part is not None and piece.whole == tuple(len(m) for m in part.maps) and piece.values.numel():
                ends = ((m[at[0]], m[at[-1]]) for m, at in zip(part.maps, piece.places, strict=True))
                squares[tuple(int(end) for pair in ends for end in pair)] = (piece.norm or float(piece.values.double().norm())) ** 2
        if not squares:
            return []
        one, here = torch.tensor([whole.norm, sum(squares.values()) ** 0.5], dtype=torch.float64)
        return [Seen(0, one, here, None, self.deviation(key.kind, one, here))]

    def _before_reduction(self, key: Key) -> list[Seen] | None:
        """Compare the sum of all ranks' own gradients, if the engine (ZeRO) does not expose reduced gradients."""
        whole, local = self._whole(key)[0], [r.pieces.get(key._replace(kind="local gradient")) for r in self.ranks]
        reads = [(*of.rows.tolist(), -1, *of.cols.tolist()) for of in self.samples]
        terms = [p[0].values.double() / self.scales[r] / reads.count(reads[r]) for r, p in enumerate(local) if p]
        if len(terms) < len(self.ranks) or any(t.shape != whole.values.shape for t in terms):
            return self._refuse(key, "no rank has such a value")
        self._refuse(key, "only the sum of the ranks' gradients before the reduction is compared: no rank shows the reduced gradient")
        one, here = whole.values.double(), torch.stack(terms).sum(0)
        return [Seen(0, one, here, None, self.deviation(key.kind, one, here))]

    def layout(self, name: str, rank: int) -> Part | None:
        """Return the part of a parameter that the rank holds. If several chunks fit, prefer the chunk index that the rank has for most
        other parameters."""
        if not (tried := self.tried(name, rank)):
            return None
        best = min(tried, key=lambda pair: pair[1])[0]
        if best.cut is None:
            return best
        votes = self._chunks[rank].get(best.cut[1], Counter())
        usual = next(iter(votes.most_common(1)), (best.cut[2], 0))
        if 2 * usual[1] <= votes.total():
            return best
        of_usual = [pair for pair in tried if pair[0].cut and pair[0].cut[2] == usual[0]]
        return min(of_usual, key=lambda pair: pair[1])[0] if of_usual else best

    def tried(self, name: str, rank: int) -> list[tuple[Part, float]]:
        """Return the parts of the single process's parameter `name` that the rank's parameter may be, by its shape. Each comes with the
        deviation of the rank's values from that part."""
        if (name, rank) not in self.layouts:
            piece, whole = (of.pieces[Key("weight", name)][0] for of in (self.ranks[rank], self.one))
            both = ((part, common(whole, piece, part.maps)) for part in parts(whole.shape, piece.whole, None))
            self.layouts[name, rank] = [(part, self.deviation("weight", *b)) for part, b in both if b is not None]
        return self.layouts[name, rank]

    @cached_property
    def _chunks(self) -> list[dict[int, Counter[int]]]:
        """Number of parameters of which a rank holds a chunk: [rank][number of chunks][index of the chunk]. Parameters are left out if
        several indices fit equally well."""
        votes: list[dict[int, Counter[int]]] = [{} for _ in self.ranks]
        for rank, record in enumerate(self.ranks):
            for key in (k for k in record.pieces if k.kind == "weight" and k in self.one.pieces):
                tried = self.tried(key.name, rank) if record.pieces[key][0].values.numel() else []
                exact = [part for part, deviation in tried if deviation == min(d for _, d in tried) and part.cut]
                if len({part.cut[2] for part in exact if part.cut}) == 1 and exact[0].cut:
                    votes[rank].setdefault(exact[0].cut[1], Counter())[exact[0].cut[2]] += 1
        return votes


def _of_update(key: Key) -> tuple[Key, Key, Key]:
    """Return the keys (weight after the step, weight before it, gradient) of one parameter."""
    return key, key._replace(kind="weight"), key._replace(kind="gradient")
