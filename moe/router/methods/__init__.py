"""The methods that choose experts for tokens, each in a file of its own, by their names in a recipe (`router.select`). method.py has the
interface. T tokens, E experts, K choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.recipe.plugin import is_plugin, loaded
from moe.router.methods.expert_choice import ExpertChoice
from moe.router.methods.group_limited import GroupLimited
from moe.router.methods.hashed import Hash
from moe.router.methods.method import Method, RoutingRequest
from moe.router.methods.sinkhorn import Sinkhorn
from moe.router.methods.sparsemixer import SparseMixer
from moe.router.methods.top_k import TopK

if TYPE_CHECKING:
    from torch import Tensor

    from moe.recipe.router_spec import RouterSpec

METHODS: dict[str, Method] = {m.name: m for m in (TopK(), GroupLimited(), ExpertChoice(), Hash(), Sinkhorn(), SparseMixer())}


class Own(Method):
    """A user's function `module:name`. From scores `preferred_TE` and K, it returns experts' indices expert_TK. Before a run, it is tested
    on a few tokens (moe/router/own.py)."""

    name = "module:name"

    def select(self, request: RoutingRequest) -> Tensor:
        expert_TK: Tensor = loaded("router.select", request.spec.select, arguments=2)(request.preferred_TE, request.spec.num_choices)
        return expert_TK


_OWN = Own()


def method_of(spec: RouterSpec) -> Method:
    return _OWN if is_plugin(spec.select) else METHODS[spec.select]
