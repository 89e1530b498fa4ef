"""The expected result of a case, and how far its numbers may deviate from it.

    fp32           Expected: the plain twin, which computes in float64. Tolerance: 1e-5 for each number.
    bf16, fp16     Expected: one process in that precision. Tolerance: twice the largest deviation that other orders of the same sums cause,
                   measured here (`reorderings`). Before a row fails, its own order of all sums is tried.
                   In addition, each number and each parameter's gradient is compared with the plain twin, within a bound that follows
                   from the dtype's unit roundoff. Otherwise an error that one process shares would not be seen.

In fp32, experts' products that round (moe/kernels/products.py) are compared as in 16 bits.

The bound is measured too (Monte Carlo arithmetic, Parker 1997). The twin runs in fp32, and every number that a 16-bit run would round
(moe/verify/plain/model.py, Rounding) is changed at random by up to the unit roundoff of the dtype, 2^-8 or 2^-11 of its value, forward and
backward. The results differ by as much as rounding may change them: errors that grow, and nearly tied tokens that go to another expert.
The bound is twice the largest deviation in MOST_DRAWS such runs, as a near tie shows in some of them only. A row within the bound of the
first few runs is within the bound of all, so only other rows need the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from moe.kernels.products import PRODUCTS
from moe.verify.cases import LINES, Case
from moe.verify.compare import NUMBERS, compare, gradient_deviations
from moe.verify.layouts import compute
from moe.verify.plain.model import Rounding
from moe.verify.small import known
from moe.verify.twin import Result, reference
from parallel.data.kinds.catalog import PLAIN
from parallel.numerics.precision import DTYPES
from parallel.process.fork import each_on_ranks

FP32_TOLERANCE = 1e-5
CUTS = (2, 3, 4, 6, 12)  # numbers of micro-batches of the runs that measure other orders of sums
SLICES = (2, 3, 4)  # numbers of slices of a sequence in the runs that measure other orders of sums
LIMIT_S = 1800.0  # time limit for one reference in all orders of sums: in 16 bits it takes 30 s, on a busy machine far more
DRAWS, MOST_DRAWS = 5, 32  # number of runs with random rounding: for every bound, and at most, before a row fails


def twin_of(case: Case) -> Case:
    """Return the reference of `case`: the same model and precision on one process. In 16 bits it also keeps how `case` splits the head, the
    loss, layers and sequences. These splits do not change its result, only the tolerance (see `reorderings`).
    """
    twin = Case(case.model, PLAIN, 1, 1, 1, case.precision, experts=case.experts, layers=case.layers)
    twin = replace(twin, padded=case.padded, overflow=case.overflow, length=case.length, batch=case.batch, recipe=case.recipe)
    if case.precision != "fp32":
        parts = case.tp if case.tensor in LINES else 1
        twin = replace(twin, head_tiles=case.head_tiles * parts, chunks=case.chunks, slices=int(case.sp > 1))
        twin = replace(twin, parts=parts, blocks=case.grid.columns)
    if case.delayed:
        return replace(twin, pp=case.pp, schedule=case.schedule, microbatches=case.microbatches, stages=case.stages)
    own = case.dp * case.microbatches
    return replace(twin, microbatches=own) if case.precision != "fp32" and own not in (1, *CUTS) else twin


def rounds(case: Case) -> bool:
    """Whether a case computes with less precision than fp32: everywhere, or only in the experts' matrix products."""
    return case.precision != "fp32" or PRODUCTS[case.run().experts.products].rounds


def alone(twin: Case) -> Case:
    """Return `twin` as one process computes it: one micro-batch, no pipeline, nothing split into tiles, chunks, parts, blocks or slices."""
    return replace(twin, pp=1, stages=None, microbatches=1, head_tiles=1, chunks=1, parts=1, blocks=1, slices=0)


def reorderings(twin: Case) -> Iterator[tuple[Case, str]]:
    """Yield (case, kernels): runs on one process that compute the same as `alone(twin)`, with sums in the other orders that layouts have.

    Other micro-batches also stand for data-parallel replicas, which sum the same partial results over ranks. The reference kernels multiply
    by the gate at another point. Both are combined, because a nearly tied token may be routed differently only if both change. Cuts of the
    head, of layers (partial results over heads and hidden units, products in blocks) and of attention (slices) round partial results. A
    tiled head alone moves the gradient norm more than any cut of the batch, so each cut is measured only for rows that have it.
    """
    one = alone(twin)
    own = () if twin.delayed or twin.microbatches == 1 else (twin.microbatches,)  # the row's own number of micro-batches, if CUTS lacks it
    yield one, "reference"
    yield from ((replace(one, microbatches=m), kernels) for m in (*CUTS, *own) for kernels in ("cpu", "reference"))
    cut = replace(one, head_tiles=twin.head_tiles, chunks=twin.chunks, parts=twin.parts, blocks=twin.blocks)
    if cut != one:
        yield from ((replace(cut, microbatches=m), "cpu") for m in (1, *CUTS, *own))
        yield from ((replace(cut, first_part=part), "cpu") for part in range(1, cut.parts if cut.parts > 2 else 1))  # as a + b = b + a
    if twin.slices:
        yield replace(one, slices=1, attention="colossal"), "cpu"  # attention with whole rows of scores, as in Colossal-AI
        yield from ((replace(one, slices=slices, attention="contiguous"), "cpu") for slices in SLICES)


def own_order(case: Case) -> Case:
    """Return a case on one process that takes its sums in the order of `case`: with its number of batch parts, tiles, chunks and slices."""
    one = alone(twin_of(case))
    replicas = case.replicas if case.engine.threads else 1
    batches = case.dp * case.microbatches * replicas * case.grid.sequences
    cut = replace(one, microbatches=batches, head_tiles=case.head_tiles, chunks=case.chunks)
    if case.tensor in LINES:
        cut = replace(cut, parts=case.tp, head_tiles=case.head_tiles * case.tp)
    cut = replace(cut, blocks=case.grid.columns)
    return replace(cut, slices=case.sp, attention=case.attention) if case.sp > 1 else cut


@dataclass
class Expected:
    """The expected numbers of a case: `result` of the reference `twin`, up to `tolerance` (relative, by name of NUMBERS). In 16 bits the
    deviation from the float64 reference is also limited, by `bound`.
    """

    twin: Case
    result: Result
    tolerance: dict[str, float]
    bound: Bound | None = None

    @staticmethod
    def of(twin: Case) -> Expected:
        plain = twin.recipe is None or known(twin.run())
        if plain and not rounds(twin):
            return Expected(twin, reference(twin), dict.fromkeys(NUMBERS, FP32_TOLERANCE))
        result = compute(alone(twin), delayed_as=twin)
        tolerance = {number: max(FP32_TOLERANCE, 2 * value) for number, value in _spread(twin, result).items()}
        return Expected(twin, result, tolerance, Bound(twin, reference(replace(twin, precision="fp32"))) if plain else None)

    def in_the_order_of(self, case: Case) -> Expected:
        """Return a copy with the `result` of one process that sums in the order of `case`'s ranks. Tolerances stay as they are."""
        return replace(self, result=compute(own_order(case), delayed_as=self.twin))


def computed_in_background(twins: list[Case]) -> Iterator[Expected]:
    """Yield Expected for each reference case of `twins`, in order. A background process computes them before they are needed."""
    for (found,) in each_on_ranks(_each_as_dict, 1, twins, timeout_s=LIMIT_S):
        twin, bound = Case(**found["twin"]), found["bound"]
        if bound is not None:
            bound = Bound(twin, Result(**bound["exact"]), bound["drawn"], bound["largest"])
        yield Expected(twin, Result(**found["result"]), found["tolerance"], bound)


def _each_as_dict(rank: int, twins: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield Expected for each of `twins` as nested dicts, which processes can exchange; each bound already has DRAWS runs."""
    for twin in twins:
        found = Expected.of(twin)
        while found.bound is not None and found.bound.drawn < DRAWS:
            found.bound.draw()
        yield asdict(found)


def _spread(twin: Case, baseline: Result) -> dict[str, float]:
    """For each name of NUMBERS, the largest relative deviation from `baseline` among runs with other orders of the sums (`reorderings`)."""
    found = [compare(compute(case, kernels=kernels, delayed_as=twin), baseline) for case, kernels in reorderings(twin)]
    return {number: max(f[number] for f in found) for number in NUMBERS}


@dataclass
class Bound:
    """Limits on the deviation of a run below fp32 precision from `exact`, the float64 reference. drawn: number of runs with random rounding
    so far. largest: the limit that follows from them, by name of NUMBERS and by parameter (for its gradient).
    """

    twin: Case
    exact: Result
    drawn: int = 0
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def unit(self) -> float:
        return torch.finfo(DTYPES[self.twin.precision]).eps / 2

    def draw(self) -> None:
        """Run the reference with random rounding once more, and raise each limit to twice the deviation seen, if that is larger."""
        rounding = Rounding(unit=self.unit, seed=self.drawn)
        found = _deviations(reference(replace(self.twin, precision="fp32"), rounding=rounding), self.exact)
        self.largest = {name: max(self.unit, 2 * value, self.largest.get(name, 0.0)) for name, value in found.items()}
        self.drawn += 1

    def share(self, got: Result) -> tuple[float, str]:
        """Return (largest deviation / limit, name of its number or parameter). Draws up to MOST_DRAWS runs while that ratio exceeds 1."""
        if got.gradients.keys() != self.exact.gradients.keys():
            return float("inf"), "gradient"
        found = _deviations(got, self.exact)
        while True:
            if self.drawn >= DRAWS:
                share, name = max((found[name] / self.largest[name], name) for name in found)
                if share <= 1 or self.drawn >= MOST_DRAWS:
                    return share, name
            self.draw()


def _deviations(got: Result, exact: Result) -> dict[str, float]:
    return compare(got, exact) | gradient_deviations(got.gradients, exact.gradients)
