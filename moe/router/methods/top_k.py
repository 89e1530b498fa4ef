"""Top-k: each token takes the experts with its K highest scores (arXiv 1701.06538). Ties go to the lower index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.router.methods.method import Method, RoutingRequest

if TYPE_CHECKING:
    from torch import Tensor


class TopK(Method):
    name = "top_k"
    is_top_k = True
    fuses = True

    def select(self, request: RoutingRequest) -> Tensor:
        expert_TK: Tensor = request.kernels.top_k(request.preferred_TE, request.spec.num_choices)
        return expert_TK
