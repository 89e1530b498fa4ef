"""Balance without a loss: a bias on each expert's score, for selection only, moved against its load once a step.

    b_e <- b_e + rate * sign(mean load - load_e)            load: choices of the global batch, before dropping

Source: Wang et al. (arXiv 2408.15664), as in DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from torch import Tensor


def updated_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """The bias after one step whose experts were chosen load_E times (whole numbers); an expert at the mean keeps its own."""
    return bias_E + rate * (load_E.sum() - load_E * len(load_E)).sign().to(bias_E.dtype)
