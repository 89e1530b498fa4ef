"""Faults of coefficients, schedules, scaled positions and moving experts, which are seen only where the coefficient has a telling value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe.verify.cases import SLICED, Case
from parallel.data.load import given
from tests.mutations.mutation import Edit, Mutation


def _sides_swapped(real: Any) -> Any:
    other = {"out_in": "in_out", "in_out": "out_in"}
    return lambda kind, shape, orientation: real(kind, shape, other[orientation])


def _decayed_last(real: Any) -> Any:
    def wrong(weight: Any, step: Any, *, lr: float, decay: float) -> None:
        real(weight, step, lr=lr, decay=0.0)
        weight.mul_(1 - lr * decay)

    return wrong


def _absolute_as_relative(real: Any) -> Any:
    return lambda self, *args, **named: real(replace(self, step="relative"), *args, **named)


def _one_update_late(real: Any) -> Any:
    return lambda update, settings, *, total: real(max(0, update - 1), settings, total=total)


def _states_stay(real: Any) -> Any:
    """Experts' weights move to other ranks, their optimizer states do not."""

    def wrong(self: Any, layer: Any, now: Any, then: Any, *, updates: int) -> None:
        names = self._names(layer)
        old = {name: {kind: t.clone() for kind, t in self.engine.state(name).items() if kind != "weight"} for name in names}
        real(self, layer, now, then, updates=updates)
        states = {name: dict(self.engine.state(name)) | old[name] for name in names}
        self.engine.load_state(names, given(states), steps=updates)

    return wrong


def _own_length(real: Any) -> Any:
    return lambda self, length: real(self, length // 2)


def _open_range_closed(real: Any) -> Any:
    return lambda rope, pair_C, half: real(rope.model_copy(update={"whole_pairs": True}), pair_C, half)


def _all_choices(real: Any) -> Any:
    return lambda spec, *args, **named: real(spec.model_copy(update={"capacity_counts": "choices"}), *args, **named)


def _bias_gradient_without_gates(real: Any) -> Any:
    return lambda grad_QF, gate_Q, out_EF, b: real(grad_QF, None, out_EF, b)


def _half_damping(real: Any) -> Any:
    return lambda factor_EWW, *, damping: real(factor_EWW, damping=damping / 2)


def _reasoned(name: str, fault: str, paper: str, kind: str, case: Case, target: str, make: Any) -> Mutation:
    return Mutation(name, fault, f"no public report known to us; reasoned from arXiv {paper}", kind, case, (Edit(target, make),))


_MUON = Case("spectral", "ddp", 1, 1, 3, "fp32")
_ALL = Case("coefficients", "ddp", 1, 1, 3, "fp32")
_SLICED = replace(_ALL, world=2, ep=2, microbatches=1, sp=2, length=SLICED)
_ADAFACTOR = Case("absolute", "ddp", 1, 1, 3, "fp32")

OF_UPDATES = (
    _reasoned(
        "spectral_scale_of_the_transpose",
        "Muon's spectral scale uses inputs / outputs instead of outputs / inputs",
        "2502.16982",
        "data",
        _MUON,
        "parallel.optim.muon:scale",
        _sides_swapped,
    ),
    _reasoned(
        "muon_decays_after_the_step",
        "Weight decay shrinks matrices after Muon's step, and so also the step",
        "1711.05101",
        "data",
        _MUON,
        "parallel.optim.muon:decay_and_subtract",
        _decayed_last,
    ),
    _reasoned(
        "absolute_step_times_rms",
        "Adafactor's absolute step is multiplied by the root mean square of the weights",
        "1804.04235",
        "data",
        _ADAFACTOR,
        "parallel.optim.adafactor:Adafactor._update",
        _absolute_as_relative,
    ),
    _reasoned(
        "warm_up_one_update_late",
        "The second update has the learning rate of the first",
        "1706.03762",
        "data",
        _ALL,
        "moe.verify.layouts:learning_rate",
        _one_update_late,
    ),
    _reasoned(
        "moved_experts_keep_others_momentum",
        "Experts' weights move to other ranks, but their optimizer states stay",
        "2401.06066",
        "data",
        Case("spectral", "ddp", 2, 2, 3, "fp32"),
        "moe.train.parts.rebalance:Rebalancer.move",
        _states_stay,
    ),
    _reasoned(
        "kfac_of_a_smaller_damping",
        "K-FAC's damping is half of what the recipe says",
        "1503.05671",
        "data",
        Case("kfac_t5", "ddp", 1, 1, 3, "fp32"),
        "parallel.kfac.kfac:damped_inverse",
        _half_damping,
    ),
)
OF_ROUTING = (
    _reasoned(
        "slots_count_choices",
        "Capacity counts all choices where router.capacity_counts asks for tokens",
        "2006.16668",
        "data",
        _ALL,
        "moe.router.router:slots_of",
        _all_choices,
    ),
    _reasoned(
        "bias_gradients_without_gates",
        "Gradients of the biases of relu experts are sums over rows that are not multiplied by gates",
        "2101.03961",
        "data",
        _ALL,
        "moe.kernels.grouped:_bias_gradient",
        _bias_gradient_without_gates,
    ),
)
OF_SEQUENCES = (
    _reasoned(
        "dynamic_scaling_by_the_ranks_length",
        "Dynamic scaling of rotary positions takes the number of tokens of the rank for the length of the sequence",
        "2309.00071",
        "sequence",
        _SLICED,
        "moe.recipe.sections.model:Rope.at",
        _own_length,
    ),
    _reasoned(
        "yarn_range_rounded",
        "YaRN's range of channel pairs is rounded to whole pairs in spite of whole_pairs false",
        "2309.00071",
        "sequence",
        replace(_ADAFACTOR, world=2, ep=2, microbatches=1, sp=2, attention="colossal", length=SLICED),
        "moe.nn.rotary:_kept_by_index",
        _open_range_closed,
    ),
)
