"""How a router selects experts: one object for each method, in a file of its own; `METHODS` lists them.

    router      logits, noise, scores, bias                 -> RoutingRequest
    method      choose(RoutingRequest)                      -> Chosen: the experts of each token
    router      slots, drops, then gates from the scores    -> Routing          (a method may compute the gates itself)

A new method is a file here, a line in __init__.py, and its name and keys in moe/recipe/router_spec.py. Recipes are checked before torch is
loaded, so these files import it inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from parallel.fixes import Fix

if TYPE_CHECKING:
    from torch import Tensor

    from moe.nn.context import Context
    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices, V token ids

# Slope s of the planner's estimate (rows of the busiest rank of ep) / (mean rows of a rank) = 1 + s (ep - 1), for routers with a balance
# loss or selection bias, and for all others. Fitted to docs/benchmarks/busiest.json (`python -m tests.measured busiest`): 8 to 32 experts,
# ep 2, 4, 8.
BALANCED, UNBALANCED = 0.1, 0.27


@dataclass(frozen=True)
class RoutingRequest:
    """The input of one layer's selection of experts. Tensors have no gradient.

    `preferred_TE` fp32: scores with noise and bias; the highest are preferred. `scores_TE`, `logits_TE` fp32: without this noise and bias.
    `num_groups`: number of groups of tokens. `slots`: capacity, the most tokens that an expert takes from a group; None if dropless.
    `given_TK` int64: experts from a record, which replace the selected ones; -1 for tokens without a record. `table_VK` int64: the experts
    of each token id, if the recipe names a table. `name`: name of the router, part of the key of random numbers.
    """

    spec: RouterSpec
    preferred_TE: Tensor
    scores_TE: Tensor
    logits_TE: Tensor
    num_groups: int
    slots: int | None
    training: bool
    context: Context
    kernels: ModuleType
    name: str
    given_TK: Tensor | None = None
    table_VK: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return int(self.logits_TE.shape[1])

    def uniform(self, label: str, width: int) -> Tensor:
        """Return random numbers [T, width] from 0 to 1, for the use `label`. They depend on the token, not on the layout."""
        return self.context.uniform(f"{self.name}.{label}", width)


@dataclass(frozen=True)
class Chosen:
    """The selected experts, `expert_TK` int64. `counted_TK` bool: False for unused entries, if a token has fewer than K choices.
    A subclass adds the tensors with which a method computes gates itself; every tensor's first dim is T.
    """

    expert_TK: Tensor
    counted_TK: Tensor | None = None


class Method:
    """A method of selecting experts. Its attributes are facts that checks and planner read; a method overrides some of them."""

    name: ClassVar[str]
    example: ClassVar[Mapping[str, Any]] = {}  # keys of `router` for a test by `moe verify`, unless moe/verify/cases.py has the method
    reads: ClassVar[Mapping[str, str]] = {}  # keys of `router` that only this method reads -> why other methods do not
    tokens_choose: ClassVar[bool] = True  # False: experts choose tokens, so choices wait in no queue and none is dropped
    reads_scores: ClassVar[bool] = True  # False: the choice does not depend on the router's weight
    uses_bias: ClassVar[bool] = True  # True: the selection bias is added to the scores by which experts are selected
    noises: ClassVar[tuple[str, ...]] = ("none", "gumbel", "noisy_top_k")  # values of router.noise that this method accepts
    is_top_k: ClassVar[bool] = False  # True: the choices are always the K experts with the highest `preferred_TE`
    fuses: ClassVar[bool] = False  # True: a fused kernel can make the choices: the highest `preferred_TE` in `open_groups`
    needs_whole_groups: ClassVar[bool] = False  # True: a token's experts depend on other tokens of its group
    looks_ahead: ClassVar[str | None] = None  # reason why a token's experts depend on later tokens; None: they do not
    excess: ClassVar[float | None] = None  # slope s (see BALANCED above) of this method; None: it depends on the spec
    is_balanced: ClassVar[str | None] = None  # reason why a balance loss has no effect or a harmful one; None: it helps

    def check(self, spec: RouterSpec, num_experts: int) -> None:
        """Refuse settings with which this method cannot work. Raises BadInput."""

    def unread(self, spec: RouterSpec) -> Mapping[str, tuple[str, str, Fix]]:
        """Return key without effect -> (the setting that makes it so, the reason, a change of the recipe that gives the key an effect)."""
        return {}

    def experts_needed(self, spec: RouterSpec) -> int:
        """Return the smallest number of experts with which a token can get `num_choices` of them."""
        return spec.num_choices

    def kept_bytes(self, *, num_choices: int, num_experts: int) -> int:
        """Return the bytes per token that the method keeps for the backward pass, in addition to the scores."""
        return 0

    def load_excess(self, spec: RouterSpec) -> float:
        """Return the slope s of the planner's estimate (rows of the busiest rank of ep) / (mean rows of a rank) = 1 + s (ep - 1)."""
        if self.excess is not None:
            return self.excess
        return BALANCED if spec.asks_balance or spec.bias_rate else UNBALANCED

    def open_groups(self, spec: RouterSpec) -> tuple[int, int]:
        """Return (largest number of groups of experts from which a token chooses, number of all groups). Groups are equal and
        consecutive."""
        return 1, 1

    def select(self, request: RoutingRequest) -> Tensor:
        """Return the K experts of each token, without repetition: int64 [T, K]."""
        raise NotImplementedError

    def choose(self, request: RoutingRequest) -> Chosen:
        """Return the experts of `select`. Tokens that have recorded experts get these instead."""
        expert_TK = self.select(request)
        if request.given_TK is not None:
            expert_TK = expert_TK.where(request.given_TK < 0, request.given_TK)
        return Chosen(expert_TK)

    def gates(self, logits_TE: Tensor, chosen: Chosen) -> Tensor | None:
        """Return the gates [T, K] fp32 with gradient, before `gate_scale`, or None if they are the scores of the chosen experts."""
        return None
