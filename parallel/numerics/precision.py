"""One precision policy for dense and sparse models and for all engines.

    parameters, gradients, Adam moments    master dtype (fp32; bf16 saves memory, but loses updates below 2^-9 of the parameter)
    matrix products                        compute dtype: weights are cast at each use, and their gradients
                                           are cast back to the master dtype and accumulated in it
    router, softmax, norm statistics,
    losses, reductions                     fp32, whatever the compute dtype is

fp16 has 5 exponent bits: gradients below 6e-8 vanish. So the loss is multiplied by a scale that grows while all gradients are finite, and
halves if one is not; that step is skipped on all ranks (Micikevicius et al., arXiv 1710.03740).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.machine import MATRIX_INSTRUCTIONS, matrix_instructions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a weight's gradient: wider than the weight if the weight is a 16-bit copy of a master weight."""
    return (weight.grad_dtype or weight.dtype) if weight.is_leaf else weight.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics of values with this dtype: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device has matrix instructions for a 16-bit dtype. A CPU without them computes far more slowly than in fp32."""
    if device.type == "cuda":
        return dtype == torch.float16 or bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return any(DTYPES[MATRIX_INSTRUCTIONS[flag]] == dtype for flag in matrix_instructions())


@dataclass
class LossScale:
    """Factor `value` of the loss in the backward pass; dynamic if `growth_interval` is above 0.
    Call `update(finite)` after each step. It halves the scale on overflow, never below `floor`, and doubles it after
    `growth_interval` good steps (without overflow) in a row. `at_floor` is True after an overflow at the floor: then scaling cannot
    help."""

    value: float = 1.0
    growth_interval: int = 0
    floor: float = 1.0
    good_steps: int = 0
    at_floor: bool = False

    @staticmethod
    def of(kind: str | float) -> LossScale:
        """Make a scale: 'none', 'dynamic' (starts at 2^16, doubles after 1,000 good steps) or a fixed number."""
        if kind == "dynamic":
            return LossScale(2.0**16, growth_interval=1000)
        return LossScale(1.0 if kind == "none" else float(kind))

    def update(self, finite: bool) -> None:
        if not self.growth_interval:
            return
        if not finite:
            self.at_floor = self.value <= self.floor
            self.value = max(self.floor, self.value / 2)
            self.good_steps = 0
            return
        self.at_floor = False
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value *= 2
            self.good_steps = 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
