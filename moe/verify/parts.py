"""Defines functions that rows of `moe verify` name in their recipes, as a user names functions of his own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # recipes of cases are read without torch
    from torch import Tensor

# G groups of tokens, E experts


def squared(load_GE: Tensor, probs_GE: Tensor) -> Tensor:
    """A balance loss that is not linear in the mean probabilities: E^2 * sum_e f_e P_e^2, for each group [G]. It is 1 for even loads."""
    loss_G: Tensor = load_GE.shape[1] ** 2 * (load_GE * probs_GE.square()).sum(1)
    return loss_G
