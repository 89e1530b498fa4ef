"""Finds the first tensor by which a layout deviates from its reference: the first in their recordings (Tapes) that differs by more than
rounding explains.

A line is one tensor of a Tape (moe/verify/tape.py). Lines are sorted so that a deviation comes before its effects: first the weights before
step 0. In each step, the phases are in this order: outputs of modules from embedding to head; losses and loads of MoE layers; loss;
recomputed outputs; gradients from head to embedding; gradient norms; Adam's first moments and the weights after the update. Only the first
TAPED steps are recorded; the losses of later steps come last.

A line may deviate by twice the largest effect that rounding has in its own or an earlier phase. The effect is measured by runs of the
reference:

    fp32        the twin (a plain second implementation, moe/verify/twin.py), with each weight and intermediate result changed at random by
                up to fp32's unit roundoff (`Rounding`). The allowed relative deviation is never above 1e-5
    bf16, fp16  the trainer on one process in that precision, with its sums in other orders (`reorderings`)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moe.verify.cases import Case
from moe.verify.expected import DRAWS, FP32_TOLERANCE, Expected, alone, deviation, reorderings, rounds
from moe.verify.layouts import LAST, compute
from moe.verify.plain.model import Rounding
from moe.verify.tape import AGAIN, TAPED, Step, Tape
from moe.verify.twin import Result, reference

FIRST = "weight before the first step"
ROUNDOFF = torch.finfo(torch.float32).eps / 2

# modules of a layer in the order in which the forward pass runs them; the last, empty name is the layer itself
_INSIDE = "attention_norm attention cross_norm cross ffn_norm router experts output_bias residual shared coefficient shared_gate moe ffn "
_DEPTHS = {name: number for number, name in enumerate(_INSIDE.split(" "))}


class Line(NamedTuple):
    """One tensor of a recorded run (a tape), to be compared. name: its module or parameter. floor: smallest divisor of a relative
    deviation."""

    step: int
    phase: str
    name: str
    value: Tensor
    floor: float = 0.0

    @property
    def key(self) -> tuple[int, str, str]:
        return self.step, self.phase, self.name


@dataclass(frozen=True)
class Deviation:
    """A tensor of a tape (`Line`) that deviates by `found`, which is more than `allowed`. place: text about the tokens that deviate. then:
    if the tensor is a gradient norm, the first parameter whose update is wrong."""

    name: str
    phase: str
    step: int
    found: float
    allowed: float
    place: str = ""
    then: str = ""

    def __str__(self) -> str:
        place, then = f", {self.place}" if self.place else "", f"; first updated wrongly: {self.then}" if self.then else ""
        when = self.phase if self.phase == FIRST else f"{self.phase} of step {self.step}"
        return f"{self.name} ({when}{place}: {self.found:.1e}, allowed {self.allowed:.0e}){then}"


def depth(name: str) -> tuple[float, ...]:
    """Return a sort key for names of modules and parameters, in the order in which the forward pass uses them."""
    found = re.match(r"layers\.(\d+)(?:\.(\w+))?", name)
    if found is None:
        return (-1,) if name.startswith("embedding") else (float("inf"), name.startswith("head"))
    late = name.endswith((".w2", ".w2.weight", ".out.weight"))
    return int(found[1]), _DEPTHS.get(found[2] or "", len(_DEPTHS)), late


def lines(tape: Tape) -> Iterator[Line]:
    """Yield the tensors of a recording, one Line each, sorted as described at the top of this file."""
    yield from (Line(0, FIRST, name, tape.first[name]) for name in sorted(tape.first, key=depth))
    for number, step in enumerate(tape.steps):
        names = sorted((name for at, name in tape.forward if at == number), key=depth)
        for name in names:
            if not name.endswith(AGAIN):
                yield from _forward(tape, number, name, "forward")
        yield from (Line(number, "losses and load", name, said) for name, said in sorted(step.reports.items()))
        yield Line(number, "loss", "head", torch.tensor(step.loss))
        for name in names:
            if name.endswith(AGAIN):
                yield from _forward(tape, number, name, "recomputed forward")
        yield from _update(number, step)


def _forward(tape: Tape, step: int, name: str, phase: str) -> Iterator[Line]:
    whole = tape.whole(step, name)
    if whole is not None:
        yield Line(step, phase, name.removesuffix(AGAIN), whole)


def _update(number: int, step: Step) -> Iterator[Line]:
    """Yield lines of step `number`: gradients from head to embedding, gradient norms, Adam's moments and weights from embedding to head."""
    floor = 1e-3 * max((g.abs().max().item() for g in step.gradients.values()), default=0.0)
    for name in sorted(step.gradients, key=depth, reverse=True):
        yield Line(number, "gradient", name, step.gradients[name], floor)
    for family, norm in step.norms.items():
        yield Line(number, "gradient norm", "all parameters" if family == "total" else f"{family} parameters", torch.tensor(norm))
    floor = 1e-3 * max((m.abs().max().item() for m in step.moments.values()), default=0.0)
    for name in sorted(step.weights, key=depth):
        if name in step.moments:
            yield Line(number, "moment after the update", name, step.moments[name], floor)
        yield Line(number, "weight after the update", name, step.weights[name])


def _places(tape: Tape, step: int, name: str) -> set[int]:
    return {int(place) for places_T, *_ in tape.forward.get((step, name), ()) for place in places_T}


def _known_values(got: Line, want: Line) -> tuple[Tensor, Tensor]:
    """Return the values of both lines, with 0 for tokens that neither tape recorded (NaN), such as source tokens in lines of the
    decoder."""
    if got.value.shape != want.value.shape:
        return got.value, want.value
    neither = got.value.isnan() & want.value.isnan()
    return got.value.masked_fill(neither, 0), want.value.masked_fill(neither, 0)


def _deviation(got: Line, want: Line) -> float:
    if want.phase == "losses and load":  # relative to each single number, because counts are larger than losses
        if got.value.shape != want.value.shape or not bool(got.value.isfinite().all()):
            return float("inf")
        return ((got.value - want.value).abs() / want.value.abs().clamp(min=1e-3)).max().item()
    return deviation(*_known_values(got, want), want.floor)


class Standard:
    """The tape of a reference case, and the allowed deviations from it."""

    def __init__(self, expected: Expected) -> None:
        self.twin, self.expected = expected.twin, expected

    @cached_property
    def tape(self) -> Tape:
        if rounds(self.twin):
            return self._of_process(alone(self.twin), "cpu")
        return self._of_twin(None)

    @cached_property
    def allowed(self) -> dict[tuple[int, str], float]:
        """(step, phase) -> largest relative deviation that a line of this phase may have: twice the largest effect of rounding in
        this and earlier phases, and in fp32 at most FP32_TOLERANCE."""
        first, *others = [{line.key: line for line in lines(tape)} for tape in self._rounded()]
        found: dict[tuple[int, str], float] = {}
        most = 0.0
        for (step, phase, name), line in first.items():
            most = max(most, *(_deviation(other[step, phase, name], line) for other in others))
            found[step, phase] = 2 * most
        return found if rounds(self.twin) else {key: min(FP32_TOLERANCE, away) for key, away in found.items()}

    def _rounded(self) -> Iterator[Tape]:
        """Yield tapes that differ only by rounding: first the reference's, then those of runs with random rounding or with sums in other
        orders."""
        yield self.tape
        if rounds(self.twin):
            yield from (self._of_process(case, kernels) for case, kernels in reorderings(self.twin))
        else:
            yield from (self._of_twin(Rounding(unit=ROUNDOFF, seed=seed)) for seed in range(DRAWS))

    def _of_process(self, case: Case, kernels: str) -> Tape:
        tape = Tape.of(case)
        compute(case, kernels=kernels, tape=tape, delayed_as=self.twin)
        return tape

    def _of_twin(self, rounding: Rounding | None) -> Tape:
        tape = Tape.of(self.twin)
        reference(self.twin, rounding=rounding, tape=tape, steps=TAPED)
        return tape

    def first_deviation(self, got: Tape, result: Result, case: Case) -> Deviation | None:
        """Return the first tensor (`Line`) of the case's tape `got` that deviates too far. If none does, return the first loss in `result`
        that does, or None."""
        for (step, name), parts in got.forward.items():
            # outputs are compared by token index, so two tokens of a record must not have the same index
            if any(len(places_T.unique()) < len(places_T) for places_T, *_ in parts):
                return Deviation("positions", "forward", step, math.inf, 0.0, f"several tokens of {name} have the same")
            lost = _places(self.tape, step, name) - _places(got, step, name)
            # a rank may give its tokens the positions of another rank's; an encoder-decoder's twin records each half for itself
            if lost and name == "embedding" and case.run().model.kind == "decoder":
                return Deviation("positions", "forward", step, math.inf, 0.0, f"no rank has token {min(lost)} of the batch")
        held = {line.key: line for line in lines(got)}
        recomputed = [line for line in held.values() if line.phase == "recomputed forward"]
        for want in lines(self.tape):
            first = {line.key: line for line in recomputed if want.phase == "loss" and line.step == want.step}
            pairs = [(want, held.get(want.key))]
            # the twin recomputes nothing, so a recomputed output is compared with the output of this layout's own forward pass
            pairs += [(held[line.step, "forward", line.name], line) for line in first.values()]
            for right, line in pairs:
                found = self._judged(right, line, case)
                if found is not None:
                    return self._of_branch(self._with_parameter(found, held, case), held, case)
        for step, (a, b) in enumerate(zip(result.losses, self.expected.result.losses, strict=True)):
            if not abs(a - b) <= self.expected.tolerance["ten_step"] * abs(b):
                return Deviation("head", "loss", step, abs(a - b) / abs(b), self.expected.tolerance["ten_step"])
        return None

    def _with_parameter(self, found: Deviation, held: dict[tuple[int, str, str], Line], case: Case) -> Deviation:
        """Return `found`. If it is a gradient norm, add the first parameter whose update is wrong (`then`). held: key -> line of the case's
        tape."""
        if found.phase != "gradient norm":
            return found
        after = (line for line in lines(self.tape) if line.step == found.step and line.phase.endswith("after the update"))
        off = (self._judged(line, held.get(line.key), case) for line in after)
        return replace(found, then=next((where.name for where in off if where is not None), ""))

    def _of_branch(self, found: Deviation, held: dict[tuple[int, str, str], Line], case: Case) -> Deviation:
        """Return `found`. If it is the gradient of the head or embedding, both of which multi-token prediction reads too, and if the main
        branch's last norm has the right gradient but a weight of multi-token prediction does not, return the latter's deviation."""
        if found.phase != "gradient" or not found.name.startswith(("head", "embedding")):
            return found
        of = [line for line in lines(self.tape) if (line.step, line.phase) == (found.step, "gradient")]
        off = (self._judged(line, held.get(line.key), case) for line in of if line.name.startswith(("ahead.", "norm.")))
        wrong = [where for where in off if where is not None]
        return wrong[0] if wrong and not any(where.name.startswith("norm.") for where in wrong) else found

    def _judged(self, want: Line, line: Line | None, case: Case) -> Deviation | None:
        """Return the deviation of the case's `line` from the reference's line `want`; None if it is allowed. line: None if the case has no
        such line."""
        allowed = self.allowed[want.step, want.phase]
        if line is None:
            known = want.phase == FIRST or (want.name.endswith(".router.bias") and case.delayed)
            return None if known else Deviation(want.name, want.phase, want.step, float("inf"), allowed, "there is none")
        away = _deviation(line, want)
        if away <= allowed:
            return None
        return Deviation(want.name, line.phase, want.step, away, allowed, _place(line, want, allowed, case))


def last_module(errors: str) -> str:
    """Return text that names the step and the last module of the rank that failed first; "" if no rank raised an error. errors: the ranks'
    error messages, to which the tape (a recording of modules, tape.py) adds the last module. Other ranks fail only later, because they wait
    for this rank."""
    found = [(int(step or 0), depth(name), said) for said, name, step in re.findall(rf"{LAST}((\S+)(?:.* step (\d+))?.*)", errors)]
    return min(found, default=(0, (), ""))[2]


def _place(line: Line, want: Line, allowed: float, case: Case) -> str:
    """Return text about the deviating tokens of a module's output: the first micro-batch that has some, its data-parallel rank, and the
    number of these tokens in the batch. Return "" if `line` is not a module's output."""
    if line.phase not in ("forward", "recomputed forward") or line.value.shape != want.value.shape:
        return ""
    got, right = _known_values(line, want)
    off_T = ~((got - right).abs() <= allowed * right.abs().max().item()).all(1)  # [T]: whether the token deviates, also by NaN
    length = case.run().model.read_length
    sequences = sorted({int(t) // length for t in off_T.nonzero()[:, 0]})
    each, size = case.batch // case.dp, max(1, case.batch // case.dp // case.microbatches)
    first = min(((s % each) // size, s // each) for s in sequences)
    count = int(off_T.sum())
    return f"micro-batch {first[0]} of data rank {first[1]}, {count} of {len(off_T)} tokens"
