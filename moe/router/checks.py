"""Combinations of router settings that are refused before a run begins, each with its reason. This file does not import torch.

Some of them would run and be silently wrong. Examples: a top-1 gate normalized to sum to 1 (it is always 1, so the router has no
gradient), a balance loss for a selection that is not learned, a value that nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe.router.capacity import slots_of
from moe.router.methods import METHODS, method_of
from parallel.errors import BadInput, counted
from parallel.fixes import Fix, Set, written

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

_SECOND_CHOICES = "a later token's first choice takes the slot of an earlier one's second choice"
# with a smaller capacity factor, an expert's capacity is below one slot, unless it gets more than 1000 choices on average
_LEAST_FACTOR = 0.001


def check_spec(spec: RouterSpec, num_experts: int) -> None:
    """Refuse a router that cannot work, or would not do what its spec says. Raises BadInput for the first reason found."""
    _check_gates(spec)
    _check_selection(spec, num_experts)
    _check_losses(spec, num_experts)


def check_read(spec: RouterSpec, own: Mapping[str, Any]) -> None:
    """Refuse a value that has no effect because of the spec's other values. Raises BadInput for the first one. `own`: the keys that the
    recipe itself sets, with their values. Values of a preset or equal to RouterSpec's defaults are not refused: a recipe may replace only
    some values of its preset.
    """
    # not at the top, because it imports pydantic, which a router outside a recipe does not need
    from moe.recipe.router_spec import RouterSpec

    defaults = {key: field.default for key, field in RouterSpec.model_fields.items()}
    for key, (setting, reason, instead) in unread(spec).items():
        if key not in own or own[key] == defaults[key]:
            continue
        got, needed = f"{written(own[key])} with {setting}", f"{written(defaults[key])}: {reason}"
        raise BadInput(f"router.{key}", got=got, needed=needed, fix=Set(f"router.{key}", defaults[key]) | instead)


def unread(s: RouterSpec) -> Mapping[str, tuple[str, str, Fix]]:
    """Return a dict: field without effect -> (the setting that causes this, the reason, a change that gives the field an effect)."""
    method = method_of(s)
    found: dict[str, tuple[str, str, Fix]] = {
        key: (f"select {s.select}", reason, Set("router.select", other.name))
        for other in METHODS.values()
        if other is not method
        for key, reason in other.reads.items()
    }
    found |= method.unread(s)
    if method.tokens_choose and not drops(s):
        why = ("capacity_factor null", "without a capacity no choice is dropped", Set("router.capacity_factor", 1.25))
        found |= dict.fromkeys(("min_capacity", "capacity_counts", "capacity_rounding", "capacity_multiple", "drop", "queue"), why)
    elif method.tokens_choose and s.capacity_factor is None and s.drop == "random":
        found["drop"] = ("capacity_factor null", "evaluation drops by position", Set("router.capacity_factor", 1.25))
    if not drops(s) and not method.needs_whole_groups and s.balance_scope != "sequence":
        setting = f"capacity_factor null and balance_scope {s.balance_scope}"
        found["group"] = (setting, "nothing is counted over groups", Set("router.balance_scope", "sequence"))
    if s.balance_counts == "unbiased" and method.is_top_k and s.bias_rate is None and s.noise != "gumbel":
        why = ("select top_k and bias_rate null", "the choices are the top k of the scores already", Set("router.bias_rate", 0.001))
        found["balance_counts"] = why
    return found


def _check_gates(s: RouterSpec) -> None:
    chosen = s.softmax_over == "chosen"
    if s.num_choices == 1 and method_of(s).reads_scores and (s.gates != "as_is" or chosen):
        key, value, other = ("softmax_over", "chosen", "all") if chosen else ("gates", s.gates, "as_is")
        needed = f"{other}: a gate that sums to 1 is always 1, and the router learns nothing"
        fix = Set(f"router.{key}", other) | Set("router.num_choices", 2)
        raise BadInput(f"router.{key}", got=f"{value} with one choice", needed=needed, fix=fix)
    if chosen and s.score != "softmax":
        fix = Set("router.softmax_over", "all")
        raise BadInput("router.softmax_over", got=f"chosen with score {s.score}", needed="score softmax", fix=fix)
    if chosen and s.gates == "before_drop":
        fix = Set("router.gates", "as_is")
        raise BadInput("router.gates", got="before_drop with softmax_over chosen", needed="as_is: those gates already sum to 1", fix=fix)
    if s.second == "random" and s.num_choices != 2:
        fix, needed = Set("router.preset", "gshard") | Set("router.second", "always"), "a top-2 preset or num_choices 2"
        raise BadInput("router.second", got=f"random with {counted(s.num_choices, 'choice')}", needed=needed, fix=fix)


def _check_selection(s: RouterSpec, num_experts: int) -> None:
    if s.num_choices > num_experts:
        fix = Set("it", max(s.num_choices, 8)) | Set("router.preset", "switch")
        raise BadInput("experts.num_experts", got=num_experts, needed=f"at least a token's {counted(s.num_choices, 'choice')}", fix=fix)
    method = method_of(s)
    method.check(s, num_experts)
    if s.bias_rate is not None and not method.uses_bias:
        got, needed = f"{s.bias_rate} with select {s.select}", "null: nothing is chosen by the biased scores"
        raise BadInput("router.bias_rate", got=got, needed=needed, fix=Set("router.bias_rate", None))
    if s.noise not in method.noises:
        got, needed = f"{s.noise} with select {s.select}", f"{' or '.join(method.noises)}: no other noise changes the choice"
        raise BadInput("router.noise", got=got, needed=needed, fix=Set("router.noise", "none") | Set("router.select", "top_k"))


def check_slots(s: RouterSpec, *, group_tokens: int, num_experts: int) -> None:
    """If min_capacity is 0, raise BadInput for a capacity factor that gives 0 slots for a group of `group_tokens` tokens, or that is below
    _LEAST_FACTOR: the run would route nothing."""
    for key, factor, training in (("capacity_factor", s.capacity_factor, True), ("eval_capacity_factor", s.eval_capacity_factor, False)):
        if factor is None or s.min_capacity:
            continue
        if factor < _LEAST_FACTOR:
            needed = f"{_LEAST_FACTOR} or more, or router.min_capacity above 0, which then gives the number of slots"
            raise BadInput(f"router.{key}", got=f"{factor:g} with min_capacity 0", needed=needed, fix=Set(f"router.{key}", 1.0))
        if slots_of(s, group_tokens, num_experts=num_experts, training=training) == 0:
            rounded = f"capacity_rounding {s.capacity_rounding}"
            each = counted(num_experts, "expert")
            got = f"{factor:g}, which gives each of {each} no slot for {counted(group_tokens, 'token')} ({rounded})"
            raise BadInput(f"router.{key}", got=got, needed="at least 1 slot", fix=Set("router.min_capacity", 1))


def _check_losses(s: RouterSpec, num_experts: int) -> None:
    method = method_of(s)
    if s.load_weight and not (s.noise == "noisy_top_k" and method.is_top_k):
        got = f"{s.load_weight} with noise {s.noise} and select {s.select}"
        needed = "noise noisy_top_k and select top_k: the loss is computed from how likely the noise makes each choice"
        raise BadInput("router.load_weight", got=got, needed=needed, fix=Set("router.noise", "noisy_top_k") | Set("router.load_weight", 0))
    if s.load_weight and (s.num_choices == num_experts or s.bias_rate is not None):
        chosen = f"{counted(s.num_choices, 'choice')} of {counted(num_experts, 'expert')}"
        got = chosen if s.bias_rate is None else f"bias_rate {s.bias_rate}"
        needed = "fewer choices than experts, and no selection bias: otherwise noise does not decide the choice"
        raise BadInput("router.load_weight", got=f"{s.load_weight} with {got}", needed=needed, fix=Set("router.load_weight", 0))
    if s.own_balance and not s.balance_weight:
        needed = f"switch: {method.is_balanced}" if method.is_balanced else "a weight above 0"
        fix = Set("router.balance_loss", "switch") if method.is_balanced else Set("router.balance_weight", 0.01)
        raise BadInput("router.balance_loss", got=f"{s.own_balance} with balance_weight 0", needed=needed, fix=fix)
    for key, weight in (("balance_weight", s.balance_weight), ("importance_weight", s.importance_weight)):
        if weight and method.is_balanced is not None:
            got, needed = f"{weight} with select {s.select}", f"0: {method.is_balanced}"
            raise BadInput(f"router.{key}", got=got, needed=needed, fix=Set(f"router.{key}", 0))


def drops(spec: RouterSpec) -> bool:
    """Return whether a token's choice of an expert may be dropped for lack of a slot, in training or in evaluation."""
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
    """Return whether only second choices depend on later tokens, because all first choices get slots before them. Recipes may do this,
    as GShard and GLaM do."""
    return looks_ahead(spec) == _SECOND_CHOICES


def check_causal(spec: RouterSpec, *, allowed: bool) -> None:
    """Refuse a decoder's router that looks ahead, unless the recipe allows it (`allowed`) or only second choices look ahead. Raises
    BadInput."""
    reason = looks_ahead(spec)
    if reason is None or only_second_choices_look_ahead(spec) or allowed:
        return
    if method_of(spec).looks_ahead:
        found, other = f"select {spec.select}", Set("router.select", "top_k")
    else:
        found, other = f"drop {spec.drop} with a capacity", Set("router.drop", "position")
    needed = f"true: {reason}, so the model would train on tokens that it cannot see when it generates"
    raise BadInput("router.allow_noncausal", got=f"false with {found}", needed=needed, fix=other | Set("router.allow_noncausal", True))


def decides_together(spec: RouterSpec) -> bool:
    """Return whether the experts and slots of a token depend on the other tokens of its group."""
    return method_of(spec).needs_whole_groups or drops(spec)


def fuses(spec: RouterSpec, *, training: bool) -> bool:
    """Return whether the GPU kernels in moe/kernels/triton/router.py can compute this spec's gates, losses and routing statistics."""
    dropless = (spec.capacity_factor if training else spec.eval_capacity_factor) is None
    return (
        method_of(spec).fuses
        and spec.score in ("softmax", "sigmoid")
        and spec.gates != "after_drop"
        and not (spec.importance_weight or spec.own_balance)
        and not (training and (spec.noise != "none" or spec.random_second))
        and (spec.balance_scope == "sequence" or dropless or spec.group == "rank")
    )


def group_size(spec: RouterSpec) -> int | None:
    """Return the number of sequences whose tokens the router needs together, for a decision or a balance loss. 0: all sequences of a
    micro-batch. None: the router needs only one token at a time.
    """
    balances = spec.balance_scope != "global_batch" and spec.asks_balance
    if not balances and not decides_together(spec):
        return None
    if spec.group == "rank" or (balances and spec.balance_scope == "micro_batch"):
        return 0
    return 1 if spec.group == "sequence" else spec.group
