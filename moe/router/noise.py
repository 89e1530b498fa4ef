"""Noise that lets a router explore, from keyed uniform numbers: equal on every layout (parallel/numerics/random.py). Training only.

jitter         x' = x * uniform(1 - e, 1 + e)           on a copy: experts get x             Switch (arXiv 2101.03961, app. C)
gumbel         the highest of l_e + G_e is expert e     G = -log(-log u)                     "RSample" of DeepSpeed
               with its softmax probability
noisy_top_k    l_e + N_e softplus((W_noise x)_e)        N normal, size learned               Shazeer et al. (arXiv 1701.06538, eq. 4)

With noisy_top_k the probability that an expert is chosen has a formula, and so does its expected load (appendix A, eq. 8-10).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# T tokens, D model, E experts

_LEAST = 1e-6  # lower bound of the noise's size, which is a divisor
_EDGE = 2.0**-24  # keeps u off 0 and 1, where the logarithms are infinite


def jittered(x_TD: Tensor, uniform_TD: Tensor, size: float) -> Tensor:
    return x_TD * uniform_TD.mul_(2 * size).add_(1 - size)


def gumbel(uniform_TE: Tensor) -> Tensor:
    return -(-uniform_TE.clamp(_EDGE, 1 - _EDGE).log()).log()


def normal(uniform_TE: Tensor) -> Tensor:
    return (2 * uniform_TE.clamp(_EDGE, 1 - _EDGE) - 1).erfinv() * math.sqrt(2)


def noise_size(x_TD: Tensor, noise_weight: Tensor) -> Tensor:
    """Return the learned size of the noise [T, E], with gradient to `noise_weight` [E, D]."""
    return F.softplus(F.linear(x_TD, noise_weight.to(x_TD.dtype)))


def noisy_logits(logits_TE: Tensor, size_TE: Tensor, uniform_TE: Tensor) -> Tensor:
    """Return the logits [T, E] plus normal noise of size `size_TE`."""
    return logits_TE + normal(uniform_TE) * size_TE


def chance_of_choice(logits_TE: Tensor, noisy_TE: Tensor, size_TE: Tensor, k: int) -> Tensor:
    """Return the probability that each expert is among a token's k if only its own noise is drawn again: [T, E], with gradient (eq. 8, 9).

    It is Phi((l_e - the k-th highest noisy logit of the other experts) / size_e). k must be less than the number of experts.
    """
    best_TK = noisy_TE.topk(k + 1).values
    chosen_TE = noisy_TE > best_TK[:, k:]
    threshold_TE = torch.where(chosen_TE, best_TK[:, k:], best_TK[:, k - 1 : k])
    chance_TE: Tensor = torch.special.ndtr((logits_TE - threshold_TE) / size_TE.clamp(min=_LEAST))
    return chance_TE
