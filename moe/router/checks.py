"""Combinations of router settings that are refused, each with its reason, before anything runs (no torch here).

Some of them would run and be silently wrong: a top-1 gate normalised to sum to 1 is always 1, so the router has no gradient; a balance
loss where selection is not learned; a router that sees future tokens in a causal model; a value that nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from moe.recipe.plugin import is_plugin
from moe.recipe.router_spec import RouterSpec
from moe.router.slots import slots_of
from parallel.errors import BadInput

_LEAST_FACTOR = 0.001  # of a capacity: with less, rounding decides, and each expert has one slot, or none


def check_spec(spec: RouterSpec, num_experts: int) -> None:
    """Refuse a router that cannot work, or would not do what its spec says. Raises BadInput for the first reason found."""
    _check_gates(spec)
    _check_selection(spec, num_experts)
    _check_capacity(spec)
    _check_losses(spec, num_experts)


def check_read(spec: RouterSpec, own: Mapping[str, Any]) -> None:
    """Refuse a value in `own`, the recipe's own values, that nothing reads given the spec's other choices. Raises BadInput for the first.

    Values of a preset are not refused, so that one choice can be replaced without removing the others. Nor are values equal
    to RouterSpec's defaults, which ask for nothing.
    """
    idle = {f.name: f.default for f in fields(RouterSpec)}
    for key, (beside, reason, instead) in unread(spec).items():
        if key not in own or own[key] == idle[key]:
            continue
        nothing = "preset" if idle[key] is MISSING else "null" if idle[key] is None else idle[key]
        raise BadInput(
            f"router.{key}",
            got=f"{own[key]} with {beside}",
            needed=f"{nothing}: {reason}",
            fix=f"set router.{key} to {nothing}, or {instead}",
        )


def unread(s: RouterSpec) -> dict[str, tuple[str, str, str]]:
    """The fields that have no effect beside the other fields' values: field -> (the setting to blame, why, what would change that)."""
    found: dict[str, tuple[str, str, str]] = {}
    if s.select != "group_limited":
        why = (f"select {s.select}", "only group_limited knows groups of experts", "router.select to group_limited")
        found |= dict.fromkeys(("expert_groups", "top_groups", "group_score"), why)
    elif s.expert_groups == 1:
        found["select"] = ("expert_groups 1", "one group of all experts limits nothing", "router.expert_groups to 2 or more")
    if s.select != "hash":
        found["hash_table"] = (f"select {s.select}", "only hash reads a table", "router.select to hash")
    if s.select != "sparsemixer":
        found["mixer_margin"] = (f"select {s.select}", "only sparsemixer draws experts near the best", "router.select to sparsemixer")
    if s.select == "expert_choice":
        why = ("select expert_choice", "experts take their best tokens, and no choice queues or is dropped", "router.select to top_k")
        found |= dict.fromkeys(("drop", "queue"), why)
        if s.capacity_counts == "tokens":
            reason = "there k is a factor of the capacity and nothing else"
            found["num_choices"] = ("select expert_choice and capacity_counts tokens", reason, "router.capacity_counts to choices")
    elif not s.drops:
        why = ("capacity_factor null", "without a capacity no choice is dropped", "router.capacity_factor to 1.25")
        found |= dict.fromkeys(("min_capacity", "capacity_counts", "capacity_rounding", "capacity_multiple", "drop", "queue"), why)
    elif s.capacity_factor is None and s.drop == "random":
        found["drop"] = ("capacity_factor null", "evaluation drops by position", "router.capacity_factor to 1.25")
    if not s.drops and s.select not in ("expert_choice", "sinkhorn") and s.balance_scope != "sequence":
        beside = f"capacity_factor null and balance_scope {s.balance_scope}"
        found["group"] = (beside, "nothing is counted over groups", "router.balance_scope to sequence")
    if s.balance_counts == "unbiased" and s.select == "top_k" and s.bias_rate is None and s.noise != "gumbel":
        why = ("select top_k and bias_rate null", "the choices are the top k of the scores already", "router.bias_rate to 0.001")
        found["balance_counts"] = why
    return found


def check_causal(spec: RouterSpec, *, allowed: bool) -> None:
    """Refuse a router that looks ahead in a decoder, which predicts the next token, unless the recipe allows it."""
    if spec.causal or spec.second_choices_only or allowed:
        return
    if spec.select in ("expert_choice", "sinkhorn"):
        method, other = f"select {spec.select}", "router.select to top_k"
    else:
        method, other = f"drop {spec.drop} with a capacity", "router.drop to position"
    raise BadInput(
        "router.allow_noncausal",
        got=f"false with {method}",
        needed=f"true: {spec.looks_ahead}, so the model would train on what it cannot know when it generates",
        fix=f"set {other}, or router.allow_noncausal to true",
    )


def _check_gates(s: RouterSpec) -> None:
    if s.num_choices == 1 and s.select != "hash" and (s.gates != "as_is" or s.softmax_over == "chosen"):
        key, value = ("softmax_over", "chosen") if s.softmax_over == "chosen" else ("gates", s.gates)
        raise BadInput(
            f"router.{key}",
            got=f"{value} with one choice",
            needed=f"{'all' if key == 'softmax_over' else 'as_is'}: a gate that sums to 1 is always 1, and the router learns nothing",
            fix=f"set router.{key} to {'all' if key == 'softmax_over' else 'as_is'}, or router.num_choices to 2",
        )
    if s.softmax_over == "chosen" and s.score != "softmax":
        raise BadInput(
            "router.softmax_over", got=f"chosen with score {s.score}", needed="score softmax", fix="set router.softmax_over to all"
        )
    if s.softmax_over == "chosen" and s.gates == "before_drop":
        raise BadInput(
            "router.gates",
            got="before_drop with softmax_over chosen",
            needed="as_is: their sum is 1",
            fix="set router.gates to as_is",
        )
    if s.second == "random" and s.num_choices != 2:
        raise BadInput(
            "router.second",
            got=f"random with {s.num_choices} choices",
            needed="a top-2 preset or num_choices 2",
            fix="set router.preset to gshard, or router.second to always",
        )


def _check_selection(s: RouterSpec, num_experts: int) -> None:
    if s.num_choices > num_experts:
        raise BadInput(
            "experts.num_experts",
            got=num_experts,
            needed=f"at least the {s.num_choices} choices of a token",
            fix=f"set it to {max(s.num_choices, 8)}, or router.preset to switch",
        )
    if s.select == "group_limited":
        _check_groups(s, num_experts)
    if s.select == "sparsemixer":
        _check_mixer(s)
    if s.bias_rate is not None and s.select not in ("top_k", "group_limited") and not is_plugin(s.select):
        raise BadInput(
            "router.bias_rate",
            got=f"{s.bias_rate} with select {s.select}",
            needed="null: nothing is chosen by the biased scores",
            fix="set router.bias_rate to null",
        )
    if s.select == "hash" and s.noise != "none" or s.select == "sinkhorn" and s.noise == "gumbel":
        raise BadInput(
            "router.noise",
            got=f"{s.noise} with select {s.select}",
            needed="none: nothing is chosen by noisy scores",
            fix="set router.noise to none, or router.select to top_k",
        )
    if s.select == "expert_choice" and (s.second == "random" or s.gates == "after_drop" or s.softmax_over == "chosen"):
        raise BadInput(
            "router.select",
            got="expert_choice",
            needed="second always, gates as_is or before_drop, softmax_over all: no token chooses, and nothing is dropped",
            fix="start from router.preset expert_choice",
        )


def _check_mixer(s: RouterSpec) -> None:
    """Settings that SparseMixer, which makes gates of its own, would not read."""
    wanted: dict[str, tuple[object, object]] = {
        "score": (s.score, "softmax"),
        "softmax_over": (s.softmax_over, "all"),
        "noise": (s.noise, "none"),
        "gates": (s.gates, "as_is"),
        "second": (s.second, "always"),
    }
    if s.drops:
        wanted["drop"] = (s.drop, "random" if s.drop == "random" else "position")
    for key, (got, needed) in wanted.items():
        if got != needed:
            why = f"{needed}: experts are drawn by their logits, and gates are the probabilities of the draws"
            fix = f"set router.{key} to {needed}, or router.select to top_k"
            raise BadInput(f"router.{key}", got=f"{got} with select sparsemixer", needed=why, fix=fix)


def _check_groups(s: RouterSpec, num_experts: int) -> None:
    if num_experts % s.expert_groups:
        raise BadInput(
            "router.expert_groups",
            got=s.expert_groups,
            needed=f"a divisor of experts.num_experts={num_experts}",
            fix=f"set it to one of {[n for n in range(1, num_experts + 1) if num_experts % n == 0]}",
        )
    if s.top_groups > s.expert_groups:
        raise BadInput(
            "router.top_groups", got=s.top_groups, needed=f"at most expert_groups={s.expert_groups}", fix=f"set it to {s.expert_groups}"
        )
    each = num_experts // s.expert_groups
    if s.num_choices > s.top_groups * each:
        raise BadInput(
            "router.top_groups",
            got=f"{s.top_groups} groups of {each} experts",
            needed=f"at least the {s.num_choices} choices of a token",
            fix=f"set it to {-(-s.num_choices // each)}",
        )


def _check_capacity(s: RouterSpec) -> None:
    if s.select != "expert_choice":
        return
    for key, factor in (("capacity_factor", s.capacity_factor), ("eval_capacity_factor", s.eval_capacity_factor)):
        if factor is None:
            raise BadInput(
                f"router.{key}",
                got="null with select expert_choice",
                needed="a number: it says how many tokens an expert takes",
                fix=f"set router.{key} to 1.0",
            )


def check_slots(s: RouterSpec, *, group_tokens: int, num_experts: int) -> None:
    """That experts take something at all: with a small factor, rounded down, a whole run would route nothing. Raises BadInput."""
    for key, factor, training in (("capacity_factor", s.capacity_factor, True), ("eval_capacity_factor", s.eval_capacity_factor, False)):
        if factor is None or s.min_capacity:
            continue
        if factor < _LEAST_FACTOR:
            needed = f"{_LEAST_FACTOR} or more, or slots by router.min_capacity alone"
            raise BadInput(f"router.{key}", got=f"{factor:g} with min_capacity 0", needed=needed, fix=f"set router.{key} to 1.0")
        if slots_of(s, group_tokens, num_experts=num_experts, training=training) == 0:
            got = f"{factor:g}, which gives an expert of {num_experts} no slot for {group_tokens} tokens ({s.capacity_rounding})"
            raise BadInput(f"router.{key}", got=got, needed="at least 1 slot", fix="set router.min_capacity to 1")


def _check_losses(s: RouterSpec, num_experts: int) -> None:
    if s.load_weight and (s.noise != "noisy_top_k" or s.select != "top_k"):
        raise BadInput(
            "router.load_weight",
            got=f"{s.load_weight} with noise {s.noise} and select {s.select}",
            needed="noisy_top_k and top_k: it is of how likely the noise makes each choice",
            fix="set router.noise to noisy_top_k, or router.load_weight to 0",
        )
    if s.load_weight and (s.num_choices == num_experts or s.bias_rate is not None):
        got = f"{s.num_choices} choices of {num_experts} experts" if s.bias_rate is None else f"bias_rate {s.bias_rate}"
        needed = "fewer choices than experts, and no selection bias: nobody is chosen by noise otherwise"
        raise BadInput("router.load_weight", got=f"{s.load_weight} with {got}", needed=needed, fix="set router.load_weight to 0")
    reasons = {
        "sinkhorn": "the plan already gives every expert its share, and the loss would pull against it",
        "hash": "a hash chooses, and no loss moves it",
        "expert_choice": "every expert takes equally many tokens",
    }
    for key, weight in (("balance_weight", s.balance_weight), ("importance_weight", s.importance_weight)):
        if weight and s.select in reasons:
            raise BadInput(
                f"router.{key}", got=f"{weight} with select {s.select}", needed=f"0: {reasons[s.select]}", fix=f"set router.{key} to 0"
            )
