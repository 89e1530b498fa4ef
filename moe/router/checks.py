"""Combinations of router settings that are refused before a run begins, each with its reason. No torch is imported here.

Some of them would run and be silently wrong: a top-1 gate normalised to sum to 1 is always 1, so the router has no gradient; a balance
loss for a selection that is not learned; a router that sees future tokens in a causal model; a value that nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe.router.methods.catalog import METHODS, method_of
from moe.router.slots.causal import drops
from moe.router.slots.slots import slots_of
from parallel.errors import BadInput
from parallel.fixes import Fix, Set, written

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

_LEAST_FACTOR = 0.001  # of a capacity: below it rounding decides, and each expert has one slot, or none


def check_spec(spec: RouterSpec, num_experts: int) -> None:
    """Refuse a router that cannot work, or would not do what its spec says. Raises BadInput for the first reason found."""
    _check_gates(spec)
    _check_selection(spec, num_experts)
    _check_losses(spec, num_experts)


def check_read(spec: RouterSpec, own: Mapping[str, Any]) -> None:
    """Refuse a value in `own`, the recipe's own values, that nothing reads given the spec's other choices. Raises BadInput for the first.

    Values of a preset are not refused, so that one choice can be replaced without removing the others. Nor are values equal
    to RouterSpec's defaults, which ask for nothing.
    """
    from moe.recipe.router_spec import RouterSpec  # with pydantic, which a router in a program of its own does not need

    idle = {key: field.default for key, field in RouterSpec.model_fields.items()}
    for key, (beside, reason, instead) in unread(spec).items():
        if key not in own or own[key] == idle[key]:
            continue
        raise BadInput(
            f"router.{key}",
            got=f"{written(own[key])} with {beside}",
            needed=f"{written(idle[key])}: {reason}",
            fix=Set(f"router.{key}", idle[key]) | instead,
        )


def unread(s: RouterSpec) -> Mapping[str, tuple[str, str, Fix]]:
    """Return the fields without effect under the other fields' values: field -> (the setting to blame, the reason, the change that
    helps).
    """
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
        beside = f"capacity_factor null and balance_scope {s.balance_scope}"
        found["group"] = (beside, "nothing is counted over groups", Set("router.balance_scope", "sequence"))
    if s.balance_counts == "unbiased" and method.is_top_k and s.bias_rate is None and s.noise != "gumbel":
        why = ("select top_k and bias_rate null", "the choices are the top k of the scores already", Set("router.bias_rate", 0.001))
        found["balance_counts"] = why
    return found


def _check_gates(s: RouterSpec) -> None:
    if s.num_choices == 1 and method_of(s).reads_scores and (s.gates != "as_is" or s.softmax_over == "chosen"):
        key, value = ("softmax_over", "chosen") if s.softmax_over == "chosen" else ("gates", s.gates)
        raise BadInput(
            f"router.{key}",
            got=f"{value} with one choice",
            needed=f"{'all' if key == 'softmax_over' else 'as_is'}: a gate that sums to 1 is always 1, and the router learns nothing",
            fix=Set(f"router.{key}", "all" if key == "softmax_over" else "as_is") | Set("router.num_choices", 2),
        )
    if s.softmax_over == "chosen" and s.score != "softmax":
        raise BadInput(
            "router.softmax_over", got=f"chosen with score {s.score}", needed="score softmax", fix=Set("router.softmax_over", "all")
        )
    if s.softmax_over == "chosen" and s.gates == "before_drop":
        raise BadInput(
            "router.gates", got="before_drop with softmax_over chosen", needed="as_is: their sum is 1", fix=Set("router.gates", "as_is")
        )
    if s.second == "random" and s.num_choices != 2:
        raise BadInput(
            "router.second",
            got=f"random with {s.num_choices} choices",
            needed="a top-2 preset or num_choices 2",
            fix=Set("router.preset", "gshard") | Set("router.second", "always"),
        )


def _check_selection(s: RouterSpec, num_experts: int) -> None:
    if s.num_choices > num_experts:
        raise BadInput(
            "experts.num_experts",
            got=num_experts,
            needed=f"at least the {s.num_choices} choices of a token",
            fix=Set("it", max(s.num_choices, 8)) | Set("router.preset", "switch"),
        )
    method = method_of(s)
    method.check(s, num_experts)
    if s.bias_rate is not None and not method.uses_bias:
        raise BadInput(
            "router.bias_rate",
            got=f"{s.bias_rate} with select {s.select}",
            needed="null: nothing is chosen by the biased scores",
            fix=Set("router.bias_rate", None),
        )
    if s.noise not in method.noises:
        raise BadInput(
            "router.noise",
            got=f"{s.noise} with select {s.select}",
            needed="none: nothing is chosen by noisy scores",
            fix=Set("router.noise", "none") | Set("router.select", "top_k"),
        )


def check_slots(s: RouterSpec, *, group_tokens: int, num_experts: int) -> None:
    """Refuse capacity factors that give experts no slot: rounded down, a small factor would route nothing in a whole run. Raises
    BadInput.
    """
    for key, factor, training in (("capacity_factor", s.capacity_factor, True), ("eval_capacity_factor", s.eval_capacity_factor, False)):
        if factor is None or s.min_capacity:
            continue
        if factor < _LEAST_FACTOR:
            needed = f"{_LEAST_FACTOR} or more, or slots by router.min_capacity alone"
            raise BadInput(f"router.{key}", got=f"{factor:g} with min_capacity 0", needed=needed, fix=Set(f"router.{key}", 1.0))
        if slots_of(s, group_tokens, num_experts=num_experts, training=training) == 0:
            got = f"{factor:g}, which gives an expert of {num_experts} no slot for {group_tokens} tokens ({s.capacity_rounding})"
            raise BadInput(f"router.{key}", got=got, needed="at least 1 slot", fix=Set("router.min_capacity", 1))


def _check_losses(s: RouterSpec, num_experts: int) -> None:
    method = method_of(s)
    if s.load_weight and not (s.noise == "noisy_top_k" and method.is_top_k):
        raise BadInput(
            "router.load_weight",
            got=f"{s.load_weight} with noise {s.noise} and select {s.select}",
            needed="noisy_top_k and top_k: it is of how likely the noise makes each choice",
            fix=Set("router.noise", "noisy_top_k") | Set("router.load_weight", 0),
        )
    if s.load_weight and (s.num_choices == num_experts or s.bias_rate is not None):
        got = f"{s.num_choices} choices of {num_experts} experts" if s.bias_rate is None else f"bias_rate {s.bias_rate}"
        needed = "fewer choices than experts, and no selection bias: otherwise noise does not decide the choice"
        raise BadInput("router.load_weight", got=f"{s.load_weight} with {got}", needed=needed, fix=Set("router.load_weight", 0))
    for key, weight in (("balance_weight", s.balance_weight), ("importance_weight", s.importance_weight)):
        if weight and method.is_balanced is not None:
            raise BadInput(
                f"router.{key}", got=f"{weight} with select {s.select}", needed=f"0: {method.is_balanced}", fix=Set(f"router.{key}", 0)
            )
