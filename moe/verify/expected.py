"""Computes the expected result of a case (one model in one parallel layout), by how much the case may deviate from this
result, and the five deviations in its table row: how far its losses, gradients and weights are from the reference's.

    fp32           the plain twin in float64: a second implementation of training (twin.py). Tolerance 1e-5 for each number. Adam divides a
                   gradient near 0 by its own size, so it magnifies the rounding of gradients. So if a case fails, its weights are compared
                   again, with an update from gradients that one process sums in the order of the case's ranks. The case's gradients
                   are still compared with the float64 twin. With sp: `Expected.in_the_order_of`
    bf16, fp16     the trainer on one process in that precision. Tolerance: twice the largest deviation between such runs that add the terms
                   of sums in different orders (`reorderings`). If a case fails, it is compared with one process that sums in the order of
                   the case's ranks. Each number and gradient must also be near the float64 twin (`Bound`). Only this comparison finds an
                   error that all 16-bit runs share

Cases in fp32 whose experts multiply matrices in fewer bits (moe/kernels/products.py) are compared like 16-bit cases.

A Bound is measured by Monte Carlo arithmetic (Parker 1997). The twin runs in fp32. Forward and backward, each number that a 16-bit run
would round is multiplied by a random factor. The factor differs from 1 by at most the unit roundoff: 2^-8 in bf16, 2^-11 in fp16. The bound
is twice the largest deviation in DRAWS such runs. More runs, up to MOST_DRAWS, are made only if a case exceeds the bound so far: a token
that is nearly tied between two experts changes its expert only in some runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe.kernels.products import PRODUCTS
from moe.verify.cases import LINES, Case
from moe.verify.layouts import compute
from moe.verify.plain.model import Rounding
from moe.verify.small import known
from moe.verify.twin import Result, reference, updated
from parallel.data.kinds import PLAIN
from parallel.numerics.precision import DTYPES
from parallel.process.fork import each_on_ranks

NUMBERS = ("loss", "gradient", "norm", "update", "ten_step")


def deviation(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return max |a - b| / max(max |b|, floor). It is 0 for equal tensors, and inf if shapes differ or a is not finite."""
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    difference, scale = (a.double() - b.double()).abs().max().item(), max(b.abs().max().item(), floor)
    return 0.0 if not difference else difference / scale if scale else math.inf


def _relative(a: float, b: float) -> float:
    if not math.isfinite(a):  # Python's max() would ignore a NaN
        return math.inf
    return 0.0 if a == b else abs(a - b) / abs(b) if b else math.inf


def gradient_deviations(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Return a dict: parameter -> deviation of its gradient. The divisor is the gradient's largest element, but at least 1/1000 of the
    largest element of all gradients. Otherwise rounding in a tiny gradient would be a large deviation. got, want: parameter -> gradient, of
    the tested run and of the reference."""
    largest = max(g.abs().max().item() for g in want.values())
    return {name: deviation(got[name], gradient, 1e-3 * largest) for name, gradient in want.items()}


def compare(got: Result, want: Result) -> dict[str, float]:
    """Return a dict: name in NUMBERS -> largest relative deviation. got, want: results of the tested run and of the reference. All
    deviations are inf if a gradient or a weight is missing.

    "loss", "gradient", "norm" and "update" are deviations in step 0: of the loss and the balance loss, of each parameter's gradient, of the
    gradient norm, and of each weight after the step. "ten_step" is the deviation of the losses of all steps.
    """
    if got.gradients.keys() != want.gradients.keys() or not want.weights.keys() <= got.weights.keys():
        return dict.fromkeys(NUMBERS, math.inf)
    return {
        "loss": max(_relative(got.losses[0], want.losses[0]), _relative(got.balance, want.balance)),
        "gradient": max(gradient_deviations(got.gradients, want.gradients).values()),
        "norm": _relative(got.norm, want.norm),
        "update": max(deviation(got.weights[n], w) for n, w in want.weights.items()),
        "ten_step": max(_relative(a, b) for a, b in zip(got.losses, want.losses, strict=True)),
    }


FP32_TOLERANCE = 1e-5
CUTS = (2, 3, 4, 6, 12)  # numbers of micro-batches into which `reorderings` splits a batch
SLICES = (2, 3, 4)  # numbers of slices into which `reorderings` splits a sequence
LIMIT_S = 1800.0  # time limit for one reference case with all its reorderings. In 16 bits they take 30 s, but more on a busy machine
# sections of a recipe that choose the layout, and so do not change the result
_LAYOUT = ("degrees", "sharding", "tensor", "sequence", "dispatch", "pipeline", "tiling", "recompute")
DRAWS, MOST_DRAWS = 5, 32  # smallest and largest number of runs with random rounding for a Bound


def twin_of(case: Case) -> Case:
    """Return the reference case, which one process computes. In 16 bits it keeps the splits of `case` (micro-batches, tp and sp ranks),
    because the tolerance depends on them. With PipeDream or 2BW it keeps the pipeline, which determines the age of the weights. If `case`
    has `values` (a recipe that runs unchanged), it keeps no split or, with PipeDream or 2BW, is `case` itself."""
    if case.values is not None:
        return case if case.delayed else alone(case)
    twin = Case(case.model, PLAIN, 1, 1, 1, case.precision, experts=case.experts, layers=case.layers)
    twin = replace(
        twin, padded=case.padded, packed=case.packed, overflow=case.overflow, length=case.length, batch=case.batch, recipe=case.recipe
    )
    if case.precision != "fp32":
        parts = case.tp if case.tensor in LINES else 1
        twin = replace(twin, head_tiles=case.head_tiles * parts, chunks=case.chunks, slices=int(case.sp > 1))
        twin = replace(twin, parts=parts, blocks=case.grid.columns)
    if case.delayed:
        return replace(twin, pp=case.pp, schedule=case.schedule, microbatches=case.microbatches, stages=case.stages)
    own = case.dp * case.microbatches
    return replace(twin, microbatches=own) if case.precision != "fp32" and own not in (1, *CUTS) else twin


def rounds(case: Case) -> bool:
    """Whether the case computes in a lower precision than fp32, in all layers or only in the experts' matrix products."""
    return case.precision != "fp32" or PRODUCTS[case.run().experts.products].rounds


def alone(twin: Case) -> Case:
    """Return the reference case without its splits (micro-batches, pipeline, tp and sp ranks): one process computes each batch and each
    sum in one piece."""
    if twin.values is not None:
        values = {section: keys for section, keys in json.loads(twin.values).items() if section not in _LAYOUT}
        one = Case(twin.model, PLAIN, 1, 1, 1, twin.precision, length=twin.length, batch=twin.batch, kernels=twin.kernels)
        return replace(one, layers=twin.layers, values=json.dumps(values), steps=twin.steps)
    return replace(twin, pp=1, stages=None, microbatches=1, head_tiles=1, chunks=1, parts=1, blocks=1, slices=0)


def reorderings(twin: Case) -> Iterator[tuple[Case, str]]:
    """Yield (case, value of experts.kernels) for runs on one process that compute the same sums as `alone(twin)` in other orders.
    Micro-batches also stand for data-parallel ranks, which split a batch in the same way. Matrices (in parts, tiles or chunks) and
    sequences are split only if `twin` splits them, because each further order of sums would widen the tolerance.
    """
    one = alone(twin)
    own = () if twin.delayed or twin.microbatches == 1 else (twin.microbatches,)  # `twin_of` sets this number only if CUTS lacks it
    yield one, "reference"
    yield from ((replace(one, microbatches=m), kernels) for m in (*CUTS, *own) for kernels in ("cpu", "reference"))
    cut = replace(one, head_tiles=twin.head_tiles, chunks=twin.chunks, parts=twin.parts, blocks=twin.blocks)
    if cut != one:
        yield from ((replace(cut, microbatches=m), "cpu") for m in (1, *CUTS, *own))
        # a sum of two parts (two tp ranks) does not depend on their order: a + b = b + a
        yield from ((replace(cut, first_part=part), "cpu") for part in range(1, cut.parts if cut.parts > 2 else 1))
    if twin.slices:
        yield replace(one, slices=1, attention="colossal"), "cpu"  # all scores of a query at once, as in Colossal-AI
        sizes = twin.run().model
        shared = math.gcd(sizes.source_length, sizes.read_length - sizes.source_length)  # lengths of encoder and decoder
        yield from ((replace(one, slices=slices, attention="contiguous"), "cpu") for slices in SLICES if shared % slices == 0)


def own_order(case: Case) -> Case:
    """Return a case on one process that takes all sums in the same order as the ranks of `case`."""
    one = alone(twin_of(case))
    replicas = case.replicas if case.engine.threads else 1
    batches = case.dp * case.microbatches * replicas * case.grid.sequences
    cut = replace(one, microbatches=batches, head_tiles=case.head_tiles, chunks=case.chunks)
    if case.tensor in LINES:
        whole = case.run().optimizer.kind == "adafactor"  # it refuses tiles
        cut = replace(cut, parts=case.tp, head_tiles=1 if whole else case.head_tiles * case.tp)
    cut = replace(cut, blocks=case.grid.columns)
    return replace(cut, slices=case.sp, attention=case.attention) if case.sp > 1 else cut


@dataclass
class Expected:
    """Expected result of all cases with the same reference case. twin: the reference case (`twin_of`). tolerance: name of a compared number
    (NUMBERS) -> largest allowed deviation; infinite if only `bound` limits it. bound: limit from runs with random rounding; None: the
    tolerance alone limits deviations."""

    twin: Case
    result: Result
    tolerance: dict[str, float]
    bound: Bound | None = None

    @property
    def limits(self) -> dict[str, float]:
        """A dict for printing: name in NUMBERS -> tolerance, or the Bound's limit if the tolerance is infinite."""
        largest = {} if self.bound is None else self.bound.largest
        return {name: largest.get(name, limit) if math.isinf(limit) else limit for name, limit in self.tolerance.items()}

    def by_rounding(self) -> Expected:
        """Return a copy in which a measured Bound replaces the tolerance. Needed for an fp32 recipe that magnifies rounding, for example
        by a norm over one channel."""
        free = NUMBERS if known(self.twin.run()) else ("loss", "gradient", "norm")
        tolerance = {number: math.inf if number in free else limit for number, limit in self.tolerance.items()}
        return replace(self, tolerance=tolerance, bound=Bound(self.twin, self.result))

    @staticmethod
    def of(twin: Case) -> Expected:
        """Compute the Expected of all cases that have the reference case `twin`."""
        plain = twin.recipe is None or known(twin.run())
        if twin.values is not None:
            return _of_values(twin)
        if plain and not rounds(twin):
            return Expected(twin, reference(twin), dict.fromkeys(NUMBERS, FP32_TOLERANCE))
        result = compute(alone(twin), delayed_as=twin)
        others = [compare(compute(case, kernels=kernels, delayed_as=twin), result) for case, kernels in reorderings(twin)]
        tolerance = {number: max(FP32_TOLERANCE, *(2 * other[number] for other in others)) for number in NUMBERS}
        return Expected(twin, result, tolerance, Bound(twin, reference(replace(twin, precision="fp32"))) if plain else None)

    def in_the_order_of(self, case: Case, gradients: dict[str, Tensor]) -> Iterator[Expected]:
        """Yield copies with which a case that fails is compared again; it must pass one. gradients: the case's own.

        The first has the result of one process that takes all sums in the same order as `case`. In fp32 only `result.weights` are replaced:
        by the twin's weights after an update with that process's gradients. The tolerance stays the same.

        That process cannot sum a weight's gradient in the order of sequence slices. So an fp32 case with sp gets a second copy, with the
        twin's weights after an update with `gradients`. In exchange, `gradients` may deviate by at most twice as much as that process's."""
        one = compute(own_order(case), delayed_as=self.twin)
        if rounds(case):
            yield replace(self, result=one)
            return
        yield self._updated(case, one.gradients)
        if case.sp > 1:
            limit = min(self.tolerance["gradient"], 2 * max(gradient_deviations(one.gradients, self.result.gradients).values()))
            yield replace(self._updated(case, gradients), tolerance=self.tolerance | {"gradient": limit})

    def _updated(self, case: Case, gradients: dict[str, Tensor]) -> Expected:
        """Return a copy with the twin's weights after an update with `gradients`."""
        return replace(self, result=replace(self.result, weights=self.result.weights | updated(case, gradients)))


def _of_values(twin: Case) -> Expected:
    """Return the Expected of a recipe that runs with its own sizes and layout. If the case rounds to less than fp32, all tolerances are
    infinite, and only a `Bound` limits deviations. If the twin lacks the recipe's optimizer, the expected update and all losses but the
    first come from the trainer on one process. Their tolerance is then twice the deviation between two such runs that differ in the order
    of sums, but at least FP32_TOLERANCE."""
    result, exact = reference(twin), dict.fromkeys(NUMBERS, FP32_TOLERANCE)
    if rounds(twin):
        return Expected(twin, result, dict.fromkeys(NUMBERS, math.inf), Bound(twin, result))
    if known(twin.run()):
        return Expected(twin, result, exact)
    one, other = (compute(alone(twin), kernels=kernels, delayed_as=twin) for kernels in ("cpu", "reference"))
    away = compare(other, one)
    exact |= {number: max(FP32_TOLERANCE, 2 * away[number]) for number in ("update", "ten_step")}
    return Expected(twin, replace(result, losses=[result.losses[0], *one.losses[1:]], weights=one.weights), exact)


def computed_in_background(twins: list[Case]) -> Iterator[Expected]:
    """Yield an Expected for each reference case in `twins`, in this order. A background process computes them ahead of time."""
    for (found,) in each_on_ranks(_each_as_dict, 1, twins, timeout_s=LIMIT_S):
        twin, bound = Case(**found["twin"]), found["bound"]
        if bound is not None:
            bound = Bound(twin, Result(**bound["exact"]), bound["drawn"], bound["largest"])
        yield Expected(twin, Result(**found["result"]), found["tolerance"], bound)


def _each_as_dict(rank: int, twins: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield the Expected of each of `twins` as nested dicts, which processes can exchange. A Bound comes with its first DRAWS runs done."""
    for twin in twins:
        found = Expected.of(twin)
        while found.bound is not None and found.bound.drawn < DRAWS:
            found.bound.draw()
        yield asdict(found)


@dataclass
class Bound:
    """Limits the deviation of runs from the float64 twin's result, `exact`. drawn: number of runs with random rounding so far.
    largest: name in NUMBERS, or of a parameter (for its gradient) -> largest relative deviation allowed.
    """

    twin: Case
    exact: Result
    drawn: int = 0
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def unit(self) -> float:
        return torch.finfo(DTYPES[self.twin.precision]).eps / 2

    def draw(self) -> None:
        """Run the twin once more with random rounding. A limit becomes twice this run's deviation (or the unit roundoff, if larger) plus
        the rounding of stored results, unless it is higher already. This rounding is FP32_TOLERANCE for an fp32 twin, otherwise fp32's
        unit roundoff."""
        rounding = Rounding(unit=self.unit, seed=self.drawn)
        stored = FP32_TOLERANCE if self.twin.precision == "fp32" else torch.finfo(torch.float32).eps / 2
        found = _deviations(reference(replace(self.twin, precision="fp32"), rounding=rounding), self.exact)
        self.largest = {name: max(stored + max(self.unit, 2 * value), self.largest.get(name, 0.0)) for name, value in found.items()}
        self.drawn += 1

    def share(self, got: Result) -> tuple[float, str]:
        """Return (largest ratio of deviation to limit, name of the number or parameter that has it). Makes more runs with random rounding
        while the ratio exceeds 1, up to MOST_DRAWS. got: result of the tested run."""
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
