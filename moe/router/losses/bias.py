"""Balancing without a loss: a bias on each expert's score, used for selection only and moved against the expert's load once a step.

    b_e <- b_e + rate * sign(mean load - load_e)            load: choices of the global batch, before dropping

Source: Wang et al. (arXiv 2408.15664), as in DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from torch import Tensor


def updated_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """Return the bias [E] after one step in which experts were chosen load_E times (whole numbers). At the mean load a bias stays
    unchanged.
    """
    return bias_E + rate * (load_E.sum() - load_E * len(load_E)).sign().to(bias_E.dtype)
