"""Group-limited top-k: experts form groups of equal size, and a token takes its experts from its best groups only.

    expert_groups 4, top_groups 2       | e0 e1 | e2 e3 | e4 e5 | e6 e7 |
                                          best            best            top-k among e0, e1, e4 and e5

A group's score is the sum of its two best scores, or its best score (group_score). If each group's experts are on one node, a token is
sent to at most top_groups nodes. Ties go to the lowest group and expert. Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2),
DeepSeek-V2 (arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from moe.router.methods.method import Method, RoutingRequest
from parallel.errors import BadInput, counted
from parallel.fixes import Fix, Set
from parallel.mesh.mesh import divisors

if TYPE_CHECKING:
    from torch import Tensor

    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices, N groups of experts


class GroupLimited(Method):
    name = "group_limited"
    fuses = True
    reads = dict.fromkeys(("expert_groups", "top_groups", "group_score"), "only group_limited knows groups of experts")

    def check(self, spec: RouterSpec, num_experts: int) -> None:
        if num_experts % spec.expert_groups:
            needed, fix = f"a divisor of experts.num_experts={num_experts}", Set("it", *divisors(num_experts))
            raise BadInput("router.expert_groups", got=spec.expert_groups, needed=needed, fix=fix)
        if spec.top_groups > spec.expert_groups:
            needed, fix = f"at most expert_groups={spec.expert_groups}", Set("it", spec.expert_groups)
            raise BadInput("router.top_groups", got=spec.top_groups, needed=needed, fix=fix)
        each = num_experts // spec.expert_groups
        if spec.num_choices > spec.top_groups * each:
            got = f"{counted(spec.top_groups, 'group')} of {counted(each, 'expert')}"
            needed = f"at least {counted(spec.num_choices, 'expert')}, one for each choice of a token"
            raise BadInput("router.top_groups", got=got, needed=needed, fix=Set("it", -(-spec.num_choices // each)))

    def unread(self, spec: RouterSpec) -> Mapping[str, tuple[str, str, Fix]]:
        if spec.expert_groups > 1:
            return {}
        return {"select": ("expert_groups 1", "one group of all experts limits nothing", Set("router.expert_groups", 2, said="2 or more"))}

    def experts_needed(self, spec: RouterSpec) -> int:
        return -(-spec.num_choices // spec.top_groups) * spec.expert_groups

    def open_groups(self, spec: RouterSpec) -> tuple[int, int]:
        return spec.top_groups, spec.expert_groups

    def select(self, request: RoutingRequest) -> Tensor:
        spec = request.spec
        groups = {"expert_groups": spec.expert_groups, "top_groups": spec.top_groups, "best": 1 if spec.group_score == "best" else 2}
        return group_limited(request.preferred_TE, spec.num_choices, **groups, kernels=request.kernels)


def group_limited(scores_TE: Tensor, k: int, *, expert_groups: int, top_groups: int, best: int, kernels: ModuleType) -> Tensor:
    """Return experts [T, k], highest score first, from a token's `top_groups` best groups. The experts form `expert_groups` groups of
    consecutive experts. A group's score is the sum of its `best` highest scores."""
    import torch
    from einops import rearrange

    scores_TNE = rearrange(scores_TE, "t (n e) -> t n e", n=expert_groups)
    group_TN = scores_TNE.topk(min(best, scores_TNE.shape[2]), dim=2).values.sum(2)
    open_TN = torch.zeros_like(group_TN, dtype=torch.bool).scatter_(1, kernels.top_k(group_TN, top_groups), True)
    limited_TNE = scores_TNE.masked_fill(~open_TN.unsqueeze(2), -torch.inf)
    expert_TK: Tensor = kernels.top_k(limited_TNE.flatten(1), k)
    return expert_TK
