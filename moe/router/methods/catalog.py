"""The methods of selection by their names in a recipe (`router.select`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.recipe.plugin import is_plugin
from moe.router.methods.expert_choice import ExpertChoice
from moe.router.methods.group_limited import GroupLimited
from moe.router.methods.hashed import Hash
from moe.router.methods.method import Method
from moe.router.methods.own import Own
from moe.router.methods.sinkhorn import Sinkhorn
from moe.router.methods.sparsemixer import SparseMixer
from moe.router.methods.top_k import TopK

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

METHODS: dict[str, Method] = {m.name: m for m in (TopK(), GroupLimited(), ExpertChoice(), Hash(), Sinkhorn(), SparseMixer())}
_OWN = Own()


def method_of(spec: RouterSpec) -> Method:
    """The method that the spec selects experts by."""
    return _OWN if is_plugin(spec.select) else METHODS[spec.select]
