"""Which keys of `router` have an effect with each method of selection: the table READ, a layer's results and the recipe checks agree.

A layer is computed with a key's plain value and with another value. If results differ, the key is read. If they are equal, a recipe that
sets it is refused, but a preset that sets it is not. Some combinations are always refused.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.recipe.load import load
from moe.recipe.presets import PRESETS
from moe.recipe.router_spec import RouterSpec
from moe.recipe.sections import Router
from moe.router.checks import check_read, check_spec, unread
from parallel.errors import BadInput
from tests.support.routed import B, D, E, L, context, layer_of, random

# key -> a value other than PLAIN's
OTHER: dict[str, Any] = {
    "num_choices": 3,
    "input_norm": "rmsnorm",
    "logits": "affine",
    "logit_cap": 0.7,
    "score": "sigmoid",
    "softmax_over": "chosen",
    "jitter": 0.3,
    "noise": "noisy_top_k",
    "mixer_margin": 0.4,
    "expert_groups": 2,
    "top_groups": 3,
    "group_score": "best",
    "second": "random",
    "bias_rate": 0.1,
    "gates": "before_drop",
    "gate_scale": 2.0,
    "expert_scale": "learned",
    "gate_on": "input",
    "group": 3,
    "capacity_factor": 0.6,
    "eval_capacity_factor": 0.6,
    "min_capacity": 9,
    "capacity_counts": "tokens",
    "capacity_rounding": "floor",
    "capacity_multiple": 3,
    "drop": "lowest_gate",
    "queue": "tokens_first",
    "balance_loss": "moe.verify.telling:squared",
    "balance_weight": 0.5,
    "balance_counts": "first",
    "balance_scope": "micro_batch",
    "importance_weight": 0.5,
    "load_weight": 0.5,
    "z_weight": 0.5,
}
PLAIN: dict[str, Any] = {"preset": "switch", "num_choices": 2, "capacity_factor": 0.8, "eval_capacity_factor": 0.8, "min_capacity": 0}
DROPLESS: dict[str, Any] = {"capacity_factor": None, "eval_capacity_factor": None}
GROUPS = {"expert_groups", "top_groups", "group_score"}
NOT_MIXED = {"score", "softmax_over", "noise", "second", "bias_rate", "gates"}
CAPACITY = {"min_capacity", "capacity_counts", "capacity_rounding", "capacity_multiple", "drop", "queue"}
LOSSES = {"balance_loss", "balance_weight", "importance_weight"}  # EVEN gives the first no weight
EVEN: dict[str, Any] = {"balance_weight": 0.0}  # required by methods that reject a balance loss

# method of selection -> (other keys to set, keys without effect, keys that are always refused)
READ: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "top_k": ({}, GROUPS, set()),
    "group_limited": ({"expert_groups": 3, "top_groups": 2}, set(), set()),
    "hash": (EVEN, GROUPS, {"noise", "bias_rate"} | LOSSES),
    "sinkhorn": (EVEN, GROUPS, {"bias_rate"} | LOSSES),
    "expert_choice": (EVEN, GROUPS | {"drop", "queue"}, {"softmax_over", "second", "bias_rate"} | LOSSES),
    "top_k, dropless": (DROPLESS, GROUPS | CAPACITY, set()),
    "hash, dropless": (EVEN | DROPLESS, GROUPS | CAPACITY, {"noise", "bias_rate"} | LOSSES),
    "top_k, dropless, over a micro-batch": (DROPLESS | {"balance_scope": "micro_batch"}, GROUPS | CAPACITY | {"group"}, set()),
    "expert_choice, k no factor": (
        EVEN | {"capacity_counts": "tokens", "capacity_factor": 1.6, "eval_capacity_factor": 1.6},
        GROUPS | {"drop", "queue", "num_choices"},
        {"softmax_over", "second", "bias_rate"} | LOSSES,
    ),
}
READ["sparsemixer"] = ({}, GROUPS, NOT_MIXED | {"drop"})
READ["sparsemixer, dropless"] = (DROPLESS, GROUPS | CAPACITY, NOT_MIXED)
READ = {
    name: (options, idle if name.startswith("sparsemixer") else idle | {"mixer_margin"}, refused)
    for name, (options, idle, refused) in READ.items()
}
# load_weight is refused unless router.noise is noisy_top_k
READ = {name: (options, idle, refused | {"load_weight"}) for name, (options, idle, refused) in READ.items()}


def computed(options: dict[str, Any]) -> list[Tensor]:
    """Return outputs, gradients and reports of a layer in training, then outputs and reports in evaluation."""
    layer = layer_of(**options)
    if layer.router.bias_E is not None:
        layer.router.bias_E.copy_(random(E, seed=8))
    found: list[Tensor] = []
    for training in (True, False):
        y_BLD, report = layer.train(training)(random(B, L, D, seed=5), context(seed=3))
        found += [y_BLD.detach(), report.balance_loss, report.importance_loss, report.z_loss, report.load_E, report.kept]
        if training:
            y_BLD.square().sum().backward()
            found += [p.grad for p in (*layer.experts.parameters(), layer.router.weight) if p.grad is not None]
    return found


def cases() -> list[tuple[str, str]]:
    return [(name, field) for name, (options, *_) in READ.items() for field in OTHER if options.get(field, "") != OTHER[field]]


def test_the_table_has_every_field() -> None:
    # hash_table needs a file: tests/moe/recipe/test_hash_table.py
    assert set(OTHER) == set(RouterSpec.model_fields) - {"select", "hash_table"}
    select: Any = Router.model_fields["select"].annotation
    names = next(get_args(choice) for choice in get_args(select) if get_origin(choice) is Literal and "top_k" in get_args(choice))
    assert {name.split(",")[0] for name in READ} == set(names) - {"preset"}


@pytest.mark.parametrize(("name", "field"), cases())
def test_a_recipes_key_without_effect_is_refused(name: str, field: str) -> None:
    options, idle, refused = READ[name]
    plain = PLAIN | {"select": name.split(",")[0]} | options
    other = plain | {field: OTHER[field]}
    spec = Router(**other)
    if field in refused:
        with pytest.raises(BadInput):
            check_spec(spec, E)
        return
    check_spec(Router(**plain), E)
    check_spec(spec, E)
    same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(computed(plain), computed(other), strict=True))
    assert same == (field in idle) == (field in unread(spec)), f"{field} of {name} changes {'nothing' if same else 'something'}"
    check_read(spec, own={})  # not refused if only a preset sets it
    if field in idle:
        with pytest.raises(BadInput, match=f"router.{field}: got {OTHER[field]} with "):
            check_read(spec, own={field: OTHER[field]})
    else:
        check_read(spec, own={field: OTHER[field]})


def test_a_group_of_all_experts_limits_nothing() -> None:
    plain = PLAIN | {"select": "top_k"}
    limited = PLAIN | {"select": "group_limited"}
    assert all(torch.equal(a, b) for a, b in zip(computed(plain), computed(limited), strict=True))
    with pytest.raises(BadInput, match="router.select: got group_limited with expert_groups 1, needed top_k: one group of all experts"):
        check_read(Router(**limited), own={"select": "group_limited"})


def test_random_drops_in_evaluation_alone_are_refused() -> None:
    spec = Router(**PLAIN | {"capacity_factor": None, "drop": "random"})
    with pytest.raises(BadInput, match="router.drop: got random with capacity_factor null, needed position: evaluation drops by position"):
        check_read(spec, own={"drop": "random"})


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_and_default_values_are_not_refused(preset: str) -> None:
    """No preset is refused, nor a recipe that sets keys to their defaults, nor one that replaces choices of a preset."""
    check_read(PRESETS[preset], own={})
    given = {key: RouterSpec.model_fields[key].default for key in GROUPS | CAPACITY | {"second", "group"}}
    check_read(Router(preset=preset, **given), own=given)
    overrides = {"router.preset": preset, "router.num_choices": "1", "router.second": "always", "router.allow_noncausal": "true"}
    overrides |= {"router.gates": "as_is", "router.softmax_over": "all", "router.select": "top_k", "router.capacity_factor": "null"}
    assert check_run(load("switch_tiny", overrides)[0], 1).router.second == "always"
