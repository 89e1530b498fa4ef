"""No output of a token may depend on a later token. Tested for every router; routers that break this law are detected and refused.

One token of the first sequence is changed, and the first output that changes is found, in training and in evaluation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.recipe.load import load
from moe.recipe.presets import PRESETS
from moe.recipe.router_spec import RouterSpec
from moe.recipe.sections import Router
from moe.router.checks import check_causal, looks_ahead, only_second_choices_look_ahead
from parallel.errors import BadInput
from tests.support.routed import B, D, L, context, ids, layer_of, random

TIGHT: dict[str, Any] = {"capacity_factor": 0.5, "eval_capacity_factor": 0.5, "min_capacity": 1}
GROUPS: dict[str, Any] = {"num_choices": 3, "expert_groups": 3, "top_groups": 2}
SMALL: dict[str, Any] = {name: {"num_choices": 3} for name in ("olmoe", "qwen3_moe")} | dict.fromkeys(
    ("deepseek_v2", "deepseek_v3"), GROUPS
)
# all presets, some of them also dropless or with small capacity, and each router setting by which tokens affect each other
ROUTERS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} | SMALL.get(name, {}) for name in PRESETS},
    **{f"{name}, tight": {"preset": name} | SMALL.get(name, {}) | TIGHT for name in PRESETS if name != "expert_choice"},
    "top-2 in token order, tight": {"preset": "glam", "queue": "tokens_first"} | TIGHT,
    "renormalized after dropping in token order": {"preset": "deepspeed", "queue": "tokens_first", "group": "sequence"} | TIGHT,
    "noisy": {"preset": "mixtral", "noise": "noisy_top_k", "jitter": 0.2},
    "gumbel, tight": {"noise": "gumbel"} | TIGHT,
    "group-limited in token order, tight": {"preset": "deepseek_v3", "queue": "tokens_first"} | SMALL["deepseek_v3"] | TIGHT,
    "hash": {"select": "hash", "balance_weight": 0} | TIGHT,
    "batch-prioritized": {"drop": "lowest_gate"} | TIGHT,
    "by lot": {"drop": "random"} | TIGHT,
    "dropless with a drop policy": {"drop": "lowest_gate", "capacity_factor": None},
    "sinkhorn": {"select": "sinkhorn", "balance_weight": 0, "capacity_factor": None},
}
EVERY = pytest.mark.parametrize("name", ROUTERS)


def early_changes(options: dict[str, Any], *, training: bool) -> int:
    """Return how often the output of a token changed after a later token of the same sequence was changed. Outputs of other sequences
    must not change, because the router's group is the sequence."""
    layer = layer_of(**{"group": "sequence"} | options).train(training)
    x, early = 2 * random(B, L, D), 0
    x[..., 0] = 2.0  # a component that all tokens share makes two experts popular, so that tokens compete for their slots
    layer.router.weight.data[:2, 0] += torch.tensor([2.0, 1.5])
    before_BL = ids()
    y = layer(x, context(seed=3, tokens=before_BL))[0]
    for position in (2, 6, L - 1):
        for seed in range(8):
            changed, after_BL = x.clone(), before_BL.clone()
            changed[0, position] = 3 * random(D, seed=seed)
            after_BL[0, position] = seed
            differs = ((layer(changed, context(seed=3, tokens=after_BL))[0] - y).abs() > 1e-4).any(-1)
            early += int(differs[0, :position].sum())
            assert not differs[1:].any()
    return early


@EVERY
def test_a_causal_router_sees_no_later_token_and_another_is_seen_to(name: str) -> None:
    spec = Router(**ROUTERS[name])
    early = early_changes(ROUTERS[name], training=True) + early_changes(ROUTERS[name], training=False)
    assert (early == 0) == (looks_ahead(spec) is None), (early, looks_ahead(spec))


@EVERY
def test_what_looks_ahead_is_refused_unless_the_recipe_knows(name: str) -> None:
    """Routers that look ahead need `allowed=True`. The exception is GShard's queue, in which only second choices depend on later tokens:
    GShard and GLaM were trained with it."""
    spec = Router(**ROUTERS[name])
    check_causal(spec, allowed=True)
    if looks_ahead(spec) is None or only_second_choices_look_ahead(spec):
        check_causal(spec, allowed=False)
        return
    with pytest.raises(BadInput, match="needed true: .* so the model would train on tokens that it cannot see") as refused:
        check_causal(spec, allowed=False)
    assert str(looks_ahead(spec)) in str(refused.value)


def test_which_presets_look_ahead() -> None:
    ahead = {name: only_second_choices_look_ahead(s) for name, s in PRESETS.items() if looks_ahead(s)}
    assert ahead == {"gshard": True, "glam": True, "nllb": True, "deepspeed": True, "expert_choice": False}
    tight = PRESETS["megatron"].model_copy(update={"capacity_factor": 1.0})
    assert looks_ahead(tight) and not only_second_choices_look_ahead(tight)


def test_evaluation_counts_as_well() -> None:
    dropless = RouterSpec(num_choices=1, drop="lowest_gate")
    assert looks_ahead(dropless) is None and looks_ahead(dropless.model_copy(update={"eval_capacity_factor": 1.0}))
    assert looks_ahead(RouterSpec(num_choices=1, drop="random", eval_capacity_factor=1.0)) is None, "a lot is drawn in training only"
    assert only_second_choices_look_ahead(RouterSpec(num_choices=2, drop="random", eval_capacity_factor=1.0))


def test_second_choices_only_means_that_no_first_choice_is_lost_to_a_later_token() -> None:
    layer = layer_of(preset="glam", **TIGHT)
    x = 2 * random(B, L, D)
    route = lambda x_BLD: layer.router(x_BLD.flatten(0, 1), sequence_tokens=L, context=context()).kept_TK.view(B, L, 2)[0]  # noqa: E731
    before, seconds = route(x), 0
    for position in range(1, L):
        for seed in range(5):
            changed = x.clone()
            changed[0, position] = 3 * random(D, seed=seed)
            differs = route(changed)[:position] != before[:position]
            assert not differs[:, 0].any()
            seconds += int(differs[:, 1].sum())
    assert seconds > 0


def test_a_run_is_refused_and_allowed_by_its_key() -> None:
    flags = {"router.preset": "expert_choice", "router.balance_weight": "0", "router.eval_capacity_factor": "1.0"}
    run, _ = load("switch_tiny", flags)
    with pytest.raises(BadInput, match="router.allow_noncausal: got false with select expert_choice"):
        check_run(run, 1)
    check_run(load("switch_tiny", flags | {"router.allow_noncausal": "true"})[0], 1)


def test_causality_does_not_depend_on_torchs_generator() -> None:
    """Two seeds of torch's generator give equal counts, because routers draw keyed noise (parallel/numerics/random.py)."""
    torch.manual_seed(0)
    a = early_changes(ROUTERS["by lot"], training=True)
    torch.manual_seed(1)
    assert early_changes(ROUTERS["by lot"], training=True) == a
