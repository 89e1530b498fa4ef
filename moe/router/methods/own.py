"""A user's own selection, named in the recipe as `module:name` (docs/use/plugins.md); moe/router/own.py tries it before a model has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.recipe.plugin import loaded
from moe.router.methods.method import Method, RoutingRequest

if TYPE_CHECKING:
    from torch import Tensor


class Own(Method):
    """The function `(preferred_TE, num_choices) -> expert_TK`; each token's experts depend on that token alone."""

    name = "module:name"

    def select(self, request: RoutingRequest) -> Tensor:
        return own_choices(request.preferred_TE, request.spec.num_choices, request.spec.select)


def own_choices(preferred_TE: Tensor, k: int, name: str) -> Tensor:
    """Return the experts [T, K] int64 by the function of this name."""
    expert_TK: Tensor = loaded("router.select", name, arguments=2)(preferred_TE, k)
    return expert_TK
