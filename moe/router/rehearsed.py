"""The routing of a rehearsal (parallel/supposed.py), where logits have no values: every expert is chosen equally often.

token   0     1     2     3          E 6, K 2: token t chooses the K experts from t K on, in this order
experts 0 1   2 3   4 5   0 1        of T tokens each expert gets T K / E choices; with what is left over, the first get one more
"""

from __future__ import annotations

import torch
from torch import Tensor

# T tokens, E experts, K choices

CHOSEN = 20.0  # far above what noise adds; others have its negative


def balanced_logits(tokens: int, *, num_experts: int, num_choices: int) -> Tensor:
    """Float32 [T, E] on the CPU: a token's first choice has the highest, its next ones a little less."""
    choice_K = torch.arange(num_choices)
    expert_TK = (torch.arange(tokens).unsqueeze(1) * num_choices + choice_K) % num_experts
    return torch.full((tokens, num_experts), -CHOSEN).scatter_(1, expert_TK, (CHOSEN - choice_K / num_choices).expand(tokens, -1))
