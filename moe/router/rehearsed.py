"""The routing of a rehearsal (parallel/numerics/supposed.py), in which logits have no values: every expert is chosen equally often.

token   0     1     2     3          E 6, K 2: token t chooses K experts in a row, from expert t K (modulo E)
experts 0 1   2 3   4 5   0 1        each expert gets T K / E choices; if this is no whole number, the first ones get one more
"""

from __future__ import annotations

import torch
from torch import Tensor

# T tokens, E experts, K choices

CHOSEN = 20.0  # far above the size of noise; experts that are not chosen get -CHOSEN


def balanced_logits(tokens: int, *, num_experts: int, num_choices: int) -> Tensor:
    """Return logits [T, E] in fp32 on the CPU. A token's first choice has the highest logit, the next ones slightly lower logits."""
    choice_K = torch.arange(num_choices)
    expert_TK = (torch.arange(tokens).unsqueeze(1) * num_choices + choice_K) % num_experts
    return torch.full((tokens, num_experts), -CHOSEN).scatter_(1, expert_TK, (CHOSEN - choice_K / num_choices).expand(tokens, -1))
