"""Noise that lets a router explore, from keyed uniform numbers: the same on every layout (parallel/random.py). Training only.

jitter         x' = x * uniform(1 - e, 1 + e)           on a copy: experts get x             Switch (arXiv 2101.03961, app. C)
gumbel         the highest of l_e + G_e is expert e     G = -log(-log u)                     "RSample" of DeepSpeed
               with its softmax probability
noisy_top_k    l_e + N_e softplus((W_noise x)_e)        N normal, size learned               Shazeer et al. (arXiv 1701.06538, eq. 4)
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

# T tokens, D model, E experts

_EDGE = 2.0**-24  # keeps u off 0 and 1, where the logarithms are infinite


def jittered(x_TD: Tensor, uniform_TD: Tensor, size: float) -> Tensor:
    return x_TD * uniform_TD.mul_(2 * size).add_(1 - size)


def gumbel(uniform_TE: Tensor) -> Tensor:
    return -(-uniform_TE.clamp(_EDGE, 1 - _EDGE).log()).log()


def normal(uniform_TE: Tensor) -> Tensor:
    return (2 * uniform_TE.clamp(_EDGE, 1 - _EDGE) - 1).erfinv() * math.sqrt(2)


def noisy_logits(logits_TE: Tensor, x_TD: Tensor, noise_weight: Tensor, uniform_TE: Tensor) -> Tensor:
    """The logits [T, E] with noise. The gradient reaches `noise_weight` [E, D], which learns the size of the noise."""
    return logits_TE + normal(uniform_TE) * F.softplus(F.linear(x_TD, noise_weight.float()))
