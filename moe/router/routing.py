"""The results of a router: the choices, and the tensors that the MoE layer and the balance losses read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from moe.router.methods.method import Chosen

if TYPE_CHECKING:
    from moe.kernels.triton.router import Fused

# T tokens, E experts, K choices, G groups of tokens that share capacity or a balance loss


@dataclass(frozen=True)
class Decision:
    """The router's choices, without gradient. `chosen`: the experts. `kept_TK` bool: True if the choice got a slot.
    `capacity`: slots of an expert in a group, None if dropless. `num_groups`: number of groups of consecutive tokens, which
    have equal sizes. `load_TK` int64: experts that the balance loss counts; None: it counts the chosen ones.
    `counted_GE`: how often the tokens of each group choose each expert, summed over ranks; None: not known.
    """

    chosen: Chosen
    kept_TK: Tensor
    capacity: int | None
    num_groups: int
    load_TK: Tensor | None = None
    counted_GE: Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """One layer's routing of T tokens. Fields that are not described here are as in Decision. `expert_TK` int64: the chosen experts.
    `gate_TK` fp32; `probs_TE` fp32, rows sum to 1; `logits_TE` fp32, before noise. `valid_T` bool: False for padding, whose choices
    are neither kept nor counted; None: no padding. `counted_TK` bool: False for unused entries, if a token has fewer
    than K choices. `chance_TE` fp32: each expert's probability of being chosen, None without a load loss. `fused`: results of the fused
    router kernel, with losses and counts (probs_TE then has no gradient); None: no fused kernel was used.
    """

    expert_TK: Tensor
    gate_TK: Tensor
    kept_TK: Tensor
    probs_TE: Tensor
    logits_TE: Tensor
    capacity: int | None
    num_groups: int
    valid_T: Tensor | None = None
    counted_TK: Tensor | None = None
    load_TK: Tensor | None = None
    chance_TE: Tensor | None = None
    fused: Fused | None = None
