"""Who goes where: token x to the k experts of highest probability p = softmax(W x), each with a gate.

    switch        k = 1, gate = p_i as it is (renormalising would make it 1 and leave the router without a gradient)
    gshard, glam  k = 2, gates renormalised to sum 1 before dropping; gshard uses the second expert with probability 2 g_2

All inside is fp32. Jitter multiplies a copy of the router's input by uniform(1 - eps, 1 + eps) in training; experts get
the clean input. Evaluation draws nothing. Sources: Switch (arXiv 2101.03961, eq. 1-2, app. C), GShard (arXiv 2006.16668,
algorithm 1), GLaM (arXiv 2112.06905).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import config
from moe.balance import balance_loss, z_loss
from moe.capacity import capacity, kept_choices
from moe.context import Context
from moe.kernels import choose
from parallel.errors import BadInput

# T tokens, D model, E experts, K choices


@dataclass(frozen=True)
class Routing:
    """One layer's decision for T tokens.

    `expert_TK` int64, `gate_TK` fp32 (with gradient), `kept_TK` bool: the choice has a slot; `probs_TE`, `logits_TE` fp32;
    `capacity` slots per expert and group, None if dropless; `num_groups` groups of equal size, in token order.
    """

    expert_TK: Tensor
    gate_TK: Tensor
    kept_TK: Tensor
    probs_TE: Tensor
    logits_TE: Tensor
    capacity: int | None
    num_groups: int

    def balance_loss(self) -> Tensor:
        return balance_loss(self.probs_TE, self.expert_TK, num_groups=self.num_groups)

    def z_loss(self) -> Tensor:
        return z_loss(self.logits_TE)


class Router(nn.Module):
    """Linear router without bias; `weight` [E, D]. `name` keys its random numbers."""

    def __init__(self, settings: config.Router, *, num_experts: int, d_model: int, kernels: str = "auto", name: str = "router") -> None:
        super().__init__()
        self.settings, self.num_experts, self.name = settings, num_experts, name
        self.kernels = choose(kernels)
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))

    def forward(self, x_TD: Tensor, *, sequence_tokens: int, context: Context) -> Routing:
        """Route T tokens that stand sequence after sequence, `sequence_tokens` each."""
        s, k = self.settings, self.settings.num_choices
        noisy_TD = x_TD.float()
        if self.training and s.jitter:
            noise_TD = context.uniform(f"{self.name}.jitter", x_TD.shape[1])
            noisy_TD = noisy_TD * noise_TD.mul_(2 * s.jitter).add_(1 - s.jitter)
        logits_TE = F.linear(noisy_TD, self.weight.float())
        probs_TE = logits_TE.softmax(-1)
        expert_TK = self.kernels.top_k(probs_TE.detach(), k)
        gate_TK = probs_TE.gather(1, expert_TK)
        if k > 1:
            gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)
        active_TK = torch.ones_like(expert_TK, dtype=torch.bool)
        if self.training and s.random_second:
            active_TK[:, 1] = 2 * gate_TK[:, 1].detach() > context.uniform(f"{self.name}.second", 1)[:, 0]
        num_groups = self._num_groups(x_TD.shape[0], sequence_tokens)
        factor = s.capacity_factor if self.training else s.eval_capacity_factor
        slots = capacity(x_TD.shape[0] // num_groups, num_experts=self.num_experts, num_choices=k, factor=factor, minimum=s.min_capacity)
        kept_TK = kept_choices(
            expert_TK, active_TK, num_groups=num_groups, num_experts=self.num_experts, slots_each=slots, kernels=self.kernels
        )
        return Routing(expert_TK, gate_TK, kept_TK, probs_TE, logits_TE, slots, num_groups)

    def _num_groups(self, tokens: int, sequence_tokens: int) -> int:
        if self.settings.group == "rank":
            return 1
        sequences = tokens // sequence_tokens
        each = 1 if self.settings.group == "sequence" else self.settings.group
        if sequences % each == 0:
            return sequences // each
        if self.training:
            raise BadInput(
                "router.group", got=f"{each} sequences", needed=f"a divisor of the {sequences} given", fix="set router.group to sequence"
            )
        return 1  # evaluation and generation may bring fewer sequences than a training group has
