"""How a router selects experts: one object a method, each in a file of its own; catalog.py lists them.

    router      logits, noise, scores, bias                 -> RoutingRequest
    method      choose(RoutingRequest)                               -> Chosen: the experts of each token
    router      slots, drops, then gates from the scores    -> Routing          (a method may have gates of its own)

Everything that other code must know of a method is asked of its object: checks, groups, the planner, text generation and `moe verify`
have no list of names. A new method is a file here, a line in catalog.py, and its name and keys in moe/recipe/router_spec.py.

Recipes are checked before torch is loaded, so these files import it inside the functions that compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from parallel.fixes import Fix

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from moe.nn.context import Context
    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices, V token ids


@dataclass(frozen=True)
class RoutingRequest:
    """One layer's question: which experts does each token get? All tensors are without gradient.

    `preferred_TE` fp32: scores with noise and bias, of which the highest are preferred. `scores_TE` and `logits_TE` fp32: without bias.
    `slots`: tokens that an expert takes from a group; None if dropless. `given_TK` int64: experts that a record gives instead, -1 where
    it gives none; None: no record. `table_VK` int64: the experts of each token id, None unless the recipe names a table. `name`: the
    layer's, which keys random numbers.
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
        """Random numbers [T, width] in (0, 1). They depend on the token, not on the layout."""
        return self.context.uniform(f"{self.name}.{label}", width)


@dataclass(frozen=True)
class Chosen:
    """The selected experts. `expert_TK` int64. `counted_TK` bool: False where an entry only fills the row; None if every row is full.

    A method with gates of its own adds the tensors that they need in a subclass; every tensor's first dim is T.
    """

    expert_TK: Tensor
    counted_TK: Tensor | None = None


class Method:
    """One way to select experts. The attributes are facts that other code asks for; a method overrides the ones that differ."""

    name: ClassVar[str]
    example: ClassVar[Mapping[str, Any]] = {}  # keys of `router` for a row of `moe verify`; none: its rows are listed there
    reads: ClassVar[Mapping[str, str]] = {}  # keys of `router` that no other method reads, each with the reason
    tokens_choose: ClassVar[bool] = True  # False: experts choose tokens, so no choice queues or is dropped
    reads_scores: ClassVar[bool] = True  # False: the choice does not depend on the router's weight
    uses_bias: ClassVar[bool] = True  # experts are selected by scores with the selection bias
    noises: ClassVar[tuple[str, ...]] = ("none", "gumbel", "noisy_top_k")  # values of router.noise that move the choice
    is_top_k: ClassVar[bool] = False  # the choices are the K highest scores, with nothing else between
    needs_whole_groups: ClassVar[bool] = False  # a token's experts depend on other tokens of its group
    looks_ahead: ClassVar[str | None] = None  # why a token's experts depend on later tokens; None: they do not
    is_balanced: ClassVar[str | None] = None  # why a balance loss would do nothing or harm; None: it helps

    def check(self, spec: RouterSpec, num_experts: int) -> None:
        """Refuse settings with which this method cannot work. Raises BadInput."""

    def unread(self, spec: RouterSpec) -> Mapping[str, tuple[str, str, Fix]]:
        """Keys without effect under this method: key -> (the setting to blame, the reason, the change that gives it an effect)."""
        return {}

    def experts_needed(self, spec: RouterSpec) -> int:
        """Least number of experts from which a token can get `num_choices`."""
        return spec.num_choices

    def kept_bytes(self, *, num_choices: int, num_experts: int) -> int:
        """Bytes that the method keeps for the backward pass, for each token, in addition to the scores."""
        return 0

    def select(self, request: RoutingRequest) -> Tensor:
        """Return the experts [T, K] int64, different ones for each token."""
        raise NotImplementedError

    def choose(self, request: RoutingRequest) -> Chosen:
        """Return the experts of `select`, or of a record if it names some."""
        expert_TK = self.select(request)
        if request.given_TK is not None:
            expert_TK = expert_TK.where(request.given_TK < 0, request.given_TK)
        return Chosen(expert_TK)

    def gates(self, logits_TE: Tensor, chosen: Chosen) -> Tensor | None:
        """Return gates [T, K] fp32 with gradient, before `gate_scale`; None: they are the scores of the chosen experts."""
        return None
