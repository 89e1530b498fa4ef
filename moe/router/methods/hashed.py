"""Hash layers: a fixed map from the token's id to its experts, so no choice is learned (arXiv 2106.04426).

The map is a random hash, different in each layer, or a table that the recipe names (`hash_table`, made by `moe hash-table`).
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from moe.router.methods.method import Method, RoutingRequest
from parallel.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

# T tokens, K choices


class Hash(Method):
    name = "hash"
    example = {"preset": "switch", "select": "hash", "balance_weight": 0.0}
    reads = {"hash_table": "only hash reads a table"}
    reads_scores = False
    uses_bias = False
    noises = ("none",)
    is_balanced = "a hash chooses the experts, and no loss changes it"

    def select(self, request: RoutingRequest) -> Tensor:
        tokens_T = request.context.tokens_T
        if request.table_VK is not None:
            return request.table_VK[tokens_T.long()]
        if request.spec.hash_table is not None:
            name, fix = request.spec.hash_table, "make the model with moe.parallelize.build, which reads the table"
            raise BadInput(
                "router.hash_table", got=f"a router without the table of {name}", needed=f"one with the table of {name}", fix=fix
            )
        return hashed(tokens_T, request.spec.num_choices, num_experts=request.num_experts, name=request.name, kernels=request.kernels)


def hashed(tokens_T: Tensor, k: int, *, num_experts: int, name: str, kernels: ModuleType) -> Tensor:
    """Return the experts [T, k] of each token: the k experts with the highest random numbers, which depend on the token's id and on `name`,
    the layer's name."""
    from parallel.numerics.random import key_of, uniform

    expert_TK: Tensor = kernels.top_k(uniform(key_of("hash", name), tokens_T.long(), num_experts), k)
    return expert_TK
