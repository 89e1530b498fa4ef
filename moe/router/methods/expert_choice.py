"""Expert choice: each expert takes its C best tokens of a group, so the load is even by construction (arXiv 2202.09368).

    group of 4 tokens, C = 2      e0 takes t0, t3      e1 takes t0, t1       t0 has two experts, t2 has none

The result is [T, K], with K the largest number of experts of any token; `counted_TK` is False for a token's unused entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moe.router.methods.method import Chosen, Method, RoutingRequest
from parallel.errors import BadInput
from parallel.fixes import Fix, Set

if TYPE_CHECKING:
    from torch import Tensor

    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices, G groups, S tokens of a group, C slots


class ExpertChoice(Method):
    name = "expert_choice"
    example = {"preset": "expert_choice", "allow_noncausal": True}
    tokens_choose = False
    uses_bias = False
    needs_whole_groups = True
    looks_ahead = "an expert chooses its tokens from the whole group"
    excess = 0.0
    is_balanced = "every expert takes equally many tokens"

    def check(self, spec: RouterSpec, num_experts: int) -> None:
        for key, value, other in (("second", "random", "always"), ("gates", "after_drop", "as_is"), ("softmax_over", "chosen", "all")):
            if getattr(spec, key) == value:
                got, needed = f"{value} with select expert_choice", f"{other}: no token chooses, and nothing is dropped"
                raise BadInput(f"router.{key}", got=got, needed=needed, fix=Set(f"router.{key}", other))
        for key, factor in (("capacity_factor", spec.capacity_factor), ("eval_capacity_factor", spec.eval_capacity_factor)):
            if factor is None:
                needed = "a number: it sets the number of tokens that an expert takes"
                raise BadInput(f"router.{key}", got="null with select expert_choice", needed=needed, fix=Set(f"router.{key}", 1.0))

    def unread(self, spec: RouterSpec) -> Mapping[str, tuple[str, str, Fix]]:
        why = ("select expert_choice", "experts take their best tokens, and no choice queues or is dropped", Set("router.select", "top_k"))
        found = dict.fromkeys(("drop", "queue"), why)
        if spec.capacity_counts == "tokens":
            reason = "for expert_choice k is only a factor of the capacity, and capacity_counts tokens leaves it out"
            found["num_choices"] = ("select expert_choice and capacity_counts tokens", reason, Set("router.capacity_counts", "choices"))
        return found

    def choose(self, request: RoutingRequest) -> Chosen:
        assert request.slots is not None, "`check` refuses expert choice without a capacity"
        return expert_choice(request.preferred_TE, slots=request.slots, num_groups=request.num_groups, valid_T=request.context.valid_T)


def expert_choice(scores_TE: Tensor, *, slots: int, num_groups: int, valid_T: Tensor | None) -> Chosen:
    """Return the experts that take each token, in ascending order. Each expert takes its `slots` best valid tokens of every group."""
    import torch
    from einops import rearrange

    if valid_T is not None:
        scores_TE = scores_TE.masked_fill(~valid_T.unsqueeze(1), -torch.inf)
    scores_GSE = rearrange(scores_TE, "(g s) e -> g s e", g=num_groups)
    best_GCE = scores_GSE.argsort(dim=1, descending=True, stable=True)[:, :slots]
    chosen_TE = rearrange(torch.zeros_like(scores_GSE, dtype=torch.bool).scatter_(1, best_GCE, True), "g s e -> (g s) e")
    if valid_T is not None:
        chosen_TE = chosen_TE & valid_T.unsqueeze(1)
    most = max(1, int(chosen_TE.sum(1).amax())) if len(chosen_TE) else 1
    expert_TK = chosen_TE.byte().argsort(dim=1, descending=True, stable=True)[:, :most].contiguous()
    return Chosen(expert_TK, chosen_TE.gather(1, expert_TK))
