"""What a router's choices do not allow together, each refused with its reason, before anything runs (no torch here).

Some would run and be wrong in silence: a top-1 gate made to sum to 1 is always 1, so the router has no gradient; a balance loss
where nothing that is learned chooses; a router that sees the future in a model that must not.
"""

from __future__ import annotations

from moe.spec import RouterSpec
from parallel.errors import BadInput


def check_spec(spec: RouterSpec, num_experts: int) -> None:
    """Refuse a router that cannot work, or would do something else than it says. Raises BadInput for the first reason found."""
    _check_gates(spec)
    _check_selection(spec, num_experts)
    _check_capacity(spec)
    _check_losses(spec)


def check_causal(spec: RouterSpec, *, allowed: bool) -> None:
    """Refuse a router that looks ahead for a decoder, which predicts the next token, unless the recipe says that it knows."""
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
    if s.bias_rate is not None and s.select not in ("top_k", "group_limited"):
        raise BadInput(
            "router.bias_rate",
            got=f"{s.bias_rate} with select {s.select}",
            needed="null: nothing is chosen by the biased scores",
            fix="set router.bias_rate to null",
        )
    if s.noise == "gumbel" and s.select in ("hash", "sinkhorn"):
        raise BadInput("router.noise", got=f"gumbel with select {s.select}", needed="a selection by scores", fix="set router.noise to none")
    if s.select == "expert_choice" and (s.second == "random" or s.gates == "after_drop" or s.softmax_over == "chosen"):
        raise BadInput(
            "router.select",
            got="expert_choice",
            needed="second always, gates as_is or before_drop, softmax_over all: no token chooses, and nothing is dropped",
            fix="start from router.preset expert_choice",
        )


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


def _check_losses(s: RouterSpec) -> None:
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
