"""What a changed key alters (`Key.alters`) is compared with the logits of a model that is built with and without the change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.model.transformer import Transformer, extra_state
from moe.parallelize.build import build
from moe.recipe.changes import changes, check_allowed, check_function, function_changes
from moe.recipe.keys import facts, keys_of, known_keys
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.recipe.shapes import SEPARATOR
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh

BASE: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_length": 12, "moe_every": 2, "ffn": "gelu"},
    "experts": {"num_experts": 4},
    "router": {"preset": "switch", "num_choices": 2, "capacity_factor": 1.0, "eval_capacity_factor": 0.7, "min_capacity": 0},
    "degrees": {"dp": 1, "ep": 1},
}
GROUPED = {"num_choices": 1, "select": "group_limited", "expert_groups": 2, "top_groups": 1}
MASKED = {"document_mask": True}
STRETCHED = {"rope": {"scaling": "llama3", "factor": 4.0, "trained_length": 30, "low": 0.1, "high": 2.0}}
GATED = {"ffn": "swiglu"}
YARN = {"rope": {"scaling": "yarn", "factor": 4.0, "trained_length": 300}}
WINDOWS = {"sliding_window": 5}
LATENT = YARN | {"latent": {"key_rank": 6}}
OF_MODEL = (STRETCHED, GATED, YARN, LATENT, WINDOWS, MASKED)
# key that alters "function" -> (another value, values that both recipes need)
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.num_heads": (4, {}),
    "model.ffn": ("relu", {}),
    "model.norm": ("layernorm", {}),
    "model.norm_eps": (0.1, {}),
    "model.positions": ("t5", {}),
    "model.document_mask": (True, {}),
    "model.document_separator": (7, MASKED),
    "model.sliding_window": (4, WINDOWS),
    "model.sliding_layers": ([1], WINDOWS),
    "model.clip_qkv": (0.1, {}),
    "model.logit_cap": (0.1, {}),
    "model.swiglu.alpha": (2.0, GATED),
    "model.swiglu.limit": (0.01, GATED),
    "model.swiglu.offset": (1.0, GATED),
    "model.rope.base": (100.0, {}),
    "model.rope.scaling": ("linear", STRETCHED),
    "model.rope.factor": (8.0, STRETCHED),
    "model.rope.trained_length": (50, STRETCHED),
    "model.rope.low": (0.05, STRETCHED),
    "model.rope.high": (0.9, STRETCHED),
    "model.rope.whole_pairs": (False, YARN),
    "model.rope.mscale": (0.5, YARN),
    "model.rope.mscale_all": (1.2, LATENT),
    "model.rope.pairs": ("neighbours", {}),
    "model.rope.fraction": (0.5, {}),
    "model.scales.embedding": (2.0, {}),
    "model.scales.residual": (0.5, {}),
    "model.scales.attention": (0.1, {}),
    "model.scales.head": (3.0, {}),
    "experts.ffn": ("relu", {}),
    "experts.skip": (1, {}),
    "experts.zero": (1, {}),
    "router.num_choices": (1, {}),
    "router.logit_cap": (0.1, {}),
    "router.score": ("sigmoid", {}),
    "router.softmax_over": ("chosen", {}),
    "router.select": ("hash", {"balance_weight": 0.0}),
    "router.mixer_margin": (0.9, {"select": "sparsemixer"}),
    "router.expert_groups": (4, GROUPED),
    "router.top_groups": (2, GROUPED),
    "router.group_score": ("best", GROUPED),
    "router.bias_rate": (None, {"bias_rate": 0.001}),
    "router.gates": ("before_drop", {}),
    "router.gate_scale": (2.0, {}),
    "router.gate_on": ("input", {}),
    "router.group": (2, {}),
    "router.eval_capacity_factor": (2.0, {}),
    "router.min_capacity": (9, {}),
    "router.capacity_counts": ("tokens", {}),
    "router.capacity_rounding": ("floor", {"eval_capacity_factor": 0.75}),
    "router.capacity_multiple": (8, {}),
    "router.drop": ("lowest_gate", {}),
    "router.queue": ("tokens_first", {}),
}
# key of model, experts or router that alters "training" -> another value
TRAINING: dict[str, Any] = {
    "model.max_length": 24,
    "model.ahead_weight": 0.1,
    "model.dropout": 0.5,
    "model.init_scale": 0.1,
    "experts.dropout": 0.5,
    "router.jitter": 0.1,
    "router.noise": "gumbel",
    "router.second": "random",
    "router.capacity_factor": 0.5,
    "router.balance_loss": "moe.verify.telling:squared",
    "router.balance_weight": 0.5,
    "router.balance_counts": "first",
    "router.balance_scope": "global_batch",
    "router.importance_weight": 0.5,
    "router.load_weight": 0.5,
    "router.z_weight": 0.5,
    "router.allow_noncausal": True,
}


def changed(values: dict[str, dict[str, Any]], key: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, rest = key.partition(".")
    inside = values.get(section, {})
    return values | {section: changed(inside, rest, value) if "." in rest else inside | {rest: value}}


def logits(run: Run, like: Transformer | None = None) -> tuple[Tensor | None, Transformer]:
    """Return (a recipe's logits for some tokens with the weights and selection biases of model `like`, the recipe's model). The logits are
    None if the parameters' shapes differ."""
    model, _ = build(run, Mesh.of(Degrees()), device=torch.device("cpu"))
    if like is None:
        for bias_E in extra_state(model).values():
            bias_E.copy_(torch.linspace(0, 0.5, len(bias_E)))
    else:
        if {n: p.shape for n, p in model.named_parameters()} != {n: p.shape for n, p in like.named_parameters()}:
            return None, model
        model.load_state_dict(like.state_dict(), strict=False)
        for name, bias_E in extra_state(model).items():
            bias_E.copy_(extra_state(like)[name])
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(1, 256, (4, 12), generator=generator)
    tokens_BL[:, 5] = SEPARATOR  # so that each sequence has two documents
    with torch.no_grad():
        return model.eval()(tokens_BL).logits_BLV, model


def test_every_key_of_a_recipe_says_what_a_change_alters() -> None:
    assert [key for key in known_keys() if facts(key).alters is None] == []


def test_the_tables_here_are_whole() -> None:
    ours = ("model.", "experts.", "router.")
    found = [key for key in keys_of("function") if not key.startswith(("data.", "lora.", "router.hash_table"))]  # tested elsewhere
    assert sorted(found) == sorted(OTHER)
    assert {key for key in keys_of("training") if key.startswith(ours)} == set(TRAINING)


@pytest.mark.parametrize("key", OTHER)
def test_a_change_of_function_changes_what_the_weights_compute(key: str) -> None:
    other, both = OTHER[key]
    section = "model" if both in OF_MODEL else "router"
    values = BASE | {section: BASE[section] | both}
    before, after = build_run(values), build_run(changed(values, key, other))
    base, like = logits(before)
    found, _ = logits(after, like)
    assert found is None or not torch.equal(found, base)
    assert [change.key for change in function_changes(before, after)] == [key]
    with pytest.raises(BadInput, match=f"^{key}: got .* with which step-7 was trained; fix: .* or --allow-change {key} if it is meant$"):
        check_function(before, after, allowed=["model.nothing"], where="step-7")
    check_function(before, after, allowed=[key], where="step-7")


def test_to_skip_in_place_of_a_zero_changes_what_the_weights_compute() -> None:
    """experts.skip returns the token and experts.zero returns nothing, with parameters of the same shapes."""
    before, after = (build_run(changed(changed(BASE, "experts.skip", skip), "experts.zero", 2 - skip)) for skip in (2, 0))
    base, like = logits(before)
    found, _ = logits(after, like)
    assert found is not None and not torch.equal(found, base)
    assert [change.key for change in function_changes(before, after)] == ["experts.skip", "experts.zero"]


@pytest.mark.parametrize("key", [key for key in TRAINING if key != "router.load_weight"])  # load_weight needs noise, which adds parameters
def test_a_change_of_training_leaves_what_the_weights_compute(key: str) -> None:
    before, after = build_run(BASE), build_run(changed(BASE, key, TRAINING[key]))
    base, like = logits(before)
    found, _ = logits(after, like)
    assert found is not None and torch.equal(found, base)
    assert [change.key for change in changes(before, after)] == [key] and not function_changes(before, after)


def test_the_same_function_in_other_words_is_no_change_of_it() -> None:
    dropless = changed(BASE, "router.eval_capacity_factor", None)
    same = [
        (BASE, {"experts": {"num_experts": 4, "ffn": "gelu"}}),
        (BASE, {"router": BASE["router"] | {"preset": "glam", "gates": "as_is"}}),  # other keys of GLaM alter only training
        (BASE, {"router": BASE["router"] | {"bias_rate": 0.01}}),  # a new selection bias starts at zero
        (dropless, {"router": dropless["router"] | {"drop": "lowest_gate"}}),  # without a capacity nothing is dropped in evaluation
        (changed(BASE, "model.moe_every", 0), {"router": {"num_choices": 1}}),
    ]
    for values, other in same:
        assert not function_changes(build_run(values), build_run(values | other)), other
    layernorm = changed(BASE, "model.norm", "layernorm")
    for key, value, differs in (("model.qk_norm", "none", 0), ("model.qk_norm", "heads", 1), ("router.input_norm", "rmsnorm", 1)):
        values = changed(layernorm, key, value)  # queries, keys and the router's input always have RMSNorms, whose default norm_eps differs
        assert len(function_changes(build_run(values), build_run(changed(values, "model.norm_eps", 1e-5)))) == differs


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.num_head", "did you mean --allow-change model.num_heads?"),
        ("model.d_ff", "parameters' shapes"),
        ("optimizer.lr", "needs no permission"),
        ("router.preset", "name the preset's keys instead"),
    ],
)
def test_a_permission_that_could_not_mean_anything_is_refused(key: str, said: str) -> None:
    with pytest.raises(BadInput, match="^--allow-change") as refused:
        check_allowed([key])
    assert said in str(refused.value)
