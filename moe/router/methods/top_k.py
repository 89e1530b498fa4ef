"""Top-k: each token takes the experts with its K highest scores (arXiv 1701.06538). Equal scores: the lowest expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.router.methods.method import Asked, Method

if TYPE_CHECKING:
    from torch import Tensor


class TopK(Method):
    """The K highest scores of a token."""

    name = "top_k"
    is_top_k = True

    def select(self, asked: Asked) -> Tensor:
        expert_TK: Tensor = asked.kernels.top_k(asked.preferred_TE, asked.spec.num_choices)
        return expert_TK
