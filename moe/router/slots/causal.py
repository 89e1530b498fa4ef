"""Facts of a router's spec: does a token's output depend on later tokens, and are choices dropped? No torch is imported here.

A decoder that predicts the next token must not see later ones. A method of selection can look ahead (moe/router/methods/), and so can
a queue for slots in which a later choice comes before an earlier one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.router.methods.catalog import method_of
from parallel.errors import BadInput
from parallel.fixes import Set

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

_SECOND_CHOICES = "a later token's first choice takes the slot of an earlier one's second choice"


def drops(spec: RouterSpec) -> bool:
    """Return whether a choice may get no slot, in training or in evaluation."""
    return method_of(spec).tokens_choose and (spec.capacity_factor is not None or spec.eval_capacity_factor is not None)


def looks_ahead(spec: RouterSpec) -> str | None:
    """Return why a token's experts may depend on later tokens, in training or in evaluation; None if they never do."""
    method = method_of(spec)
    if method.looks_ahead is not None:
        return method.looks_ahead
    if not drops(spec):
        return None
    if spec.drop == "lowest_gate":
        return "a later token with a higher gate takes an earlier one's slot"
    if spec.drop == "random" and spec.capacity_factor is not None:
        return "a later token may be drawn to take an earlier one's slot"
    if spec.queue == "choices_first" and spec.num_choices > 1:
        return _SECOND_CHOICES
    return None


def only_second_choices_look_ahead(spec: RouterSpec) -> bool:
    """Return whether the spec looks ahead through GShard's queue alone, never for first choices. A recipe may: GShard and GLaM do it."""
    return looks_ahead(spec) == _SECOND_CHOICES


def check_causal(spec: RouterSpec, *, allowed: bool) -> None:
    """Refuse a router that looks ahead in a decoder, unless the recipe allows it. Raises BadInput."""
    reason = looks_ahead(spec)
    if reason is None or only_second_choices_look_ahead(spec) or allowed:
        return
    if method_of(spec).looks_ahead:
        found, other = f"select {spec.select}", Set("router.select", "top_k")
    else:
        found, other = f"drop {spec.drop} with a capacity", Set("router.drop", "position")
    raise BadInput(
        "router.allow_noncausal",
        got=f"false with {found}",
        needed=f"true: {reason}, so the model would train on tokens that it cannot see when it generates",
        fix=other | Set("router.allow_noncausal", True),
    )
