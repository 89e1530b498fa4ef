"""The fix in an error message works: after the proposed change, the recipe is accepted. The last tests are a sample of
`python -m tests.campaigns recipes`, which puts mistakes of many kinds into the shipped recipes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe.checks.advice import applied, check_for_user, nproc, tried
from moe.checks.together import check_run
from moe.recipe.load import build_run, load, resolved_yaml
from parallel.errors import BadInput
from parallel.fixes import Set
from tests.campaigns import recipes


def refused(recipe: str, changed: dict[str, str], world: int) -> BadInput:
    with pytest.raises(BadInput) as found:
        check_for_user(load(recipe, changed)[0], world)
    return found.value


@pytest.mark.parametrize(
    ("changed", "world", "fix"),
    [
        ({"model.num_layers": "1"}, 1, "set it to 1, or to 0"),
        ({"degrees.etp": "2"}, 1, "set degrees.etp to 1"),
        ({"tensor.sequence_parallel": "true"}, 1, "set tensor.sequence_parallel to false"),
        ({"degrees.pp": "7"}, 2, "set degrees.pp to 2"),
        ({"degrees.dp": "9", "degrees.tp": "2"}, 4, "set degrees.dp to 2"),
        ({"router.top_groups": "3"}, 1, "set router.top_groups to 1"),
        ({"dispatch.node_size": "7"}, 4, "set dispatch.node_size to null"),
    ],
)
def test_advice_that_leads_to_another_refusal_is_left_out(changed: dict[str, str], world: int, fix: str) -> None:
    bad = refused("switch_tiny", changed, world)
    assert str(bad.fix).startswith(fix), bad
    values = load("switch_tiny", changed)[0].model_dump()
    assert bad.fix.ways(bad.what)
    for way in bad.fix.ways(bad.what):
        check_run(build_run(applied(way, values)), nproc(way, world))


@pytest.mark.parametrize(
    ("changed", "world", "fix"),
    [
        ({"degrees.sp": "3", "sequence.kind": "ulysses", "model.max_length": "30"}, 3, "set sequence.heads to 1 and sequence.kind to ring"),
        ({"lora.rank": "4", "lora.targets": "[attention, experts]", "model.moe_every": "0"}, 1, "set it to [attention]"),
        ({"sharding.kind": "dp"}, 2, "add --nproc 1, and set sharding.replicas to 2, or sharding.kind to ddp"),
        ({"pipeline.schedule": "chimera", "degrees.pp": "2", "pipeline.microbatches": "3"}, 2, "set it to one of [2, 4]"),
        ({"pipeline.schedule": "dualpipe", "degrees.pp": "3"}, 3, "set degrees.pp to 2, and add --nproc 2"),
        ({"pipeline.schedule": "gpip"}, 1, "did you mean gpipe?"),
    ],
)
def test_advice_of_several_keys_lists_and_guesses_is_tried(changed: dict[str, str], world: int, fix: str) -> None:
    test_advice_that_leads_to_another_refusal_is_left_out(changed, world, fix)


def test_changes_that_need_each_other_are_told_together() -> None:
    bad = refused("switch_tiny", {"train.global_batch": "7", "train.eval_sequences": "5"}, 2)
    assert bad.what == "train.global_batch" and " and train.eval_sequences to " in str(bad.fix)


def test_keys_of_experts_in_a_dense_model_are_refused_where_they_are_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"router.jitter: got a value in a dense model.*remove router.jitter"):
        load("dense_tiny", {"router.jitter": "0.1"})
    with pytest.raises(BadInput, match=r"experts.num_experts: got a value, and 1 more key of experts, in a dense model"):
        load("dense_tiny", {"router.jitter": "0.1", "experts.num_experts": "4"})
    (tmp_path / "own.yaml").write_text("extends: dense_tiny\nrouter: {jitter: 0.1}\n")
    with pytest.raises(BadInput, match="router.jitter"):
        load(tmp_path / "own.yaml")
    assert load("switch_tiny", {"model.moe_every": "0"})[0].router.jitter == 0.01  # kept: the command line makes the model dense on purpose


def test_a_warm_up_above_the_steps_is_refused_where_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"optimizer.warmup_steps: got 700 with train.steps=600.*set optimizer.warmup_steps to 60"):
        load("dense_tiny", {"optimizer.warmup_steps": "700"})
    (tmp_path / "own.yaml").write_text("extends: dense_tiny\noptimizer: {warmup_steps: 30}\ntrain: {steps: 20}\n")
    with pytest.raises(BadInput, match="optimizer.warmup_steps"):
        load(tmp_path / "own.yaml")
    assert load("dense_tiny", {"train.steps": "20"})[0].optimizer.warmup_steps == 50  # kept: the command line shortens the run on purpose


@pytest.mark.parametrize(
    ("key", "value", "beside"),
    [
        ("optimizer.beta2", "0.99", {"optimizer.kind": "sgd"}),
        ("optimizer.eps", "1e-3", {"optimizer.kind": "adafactor"}),
        ("optimizer.min_lr_share", "0.5", {"optimizer.schedule": "inverse_sqrt"}),
        ("model.rope.trained_length", "99", {"model.rope.scaling": "linear", "model.rope.factor": "2"}),
    ],
)
def test_what_another_choice_leaves_unread_is_refused(key: str, value: str, beside: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=f"^{key}: got .*fix: .*remove {key}$"):
        check_run(load("dense_tiny", {key: value, **beside})[0], 1)


def test_a_recipe_that_a_run_left_says_all_its_keys_whether_they_are_read_or_not(tmp_path: Path) -> None:
    """A run's recipe.yaml, which has values without effect and lacks a newer key, loads as the same recipe. A value without effect on the
    command line is refused."""
    run, origins = load("switch_tiny", {"model.moe_every": "0"})
    left = tmp_path / "recipe.yaml"
    lines = resolved_yaml(run, origins).splitlines(keepends=True)
    left.write_text("".join(line for line in lines if "save_mode" not in line))
    assert load(left)[0] == run
    with pytest.raises(BadInput, match="router.z_weight"):
        load(left, {"router.z_weight": "0.1"})


@pytest.mark.parametrize("kind", recipes.KINDS, ids=lambda kind: kind.name.replace(" ", "_"))
def test_a_bad_recipe_is_one_line_and_its_advice_works(kind: recipes.Kind, tmp_path: Path) -> None:
    told, mended = recipes.of_kind(kind, 6, tmp_path)
    assert told.problems == [] and told.tried == 6
    if not kind.name.startswith("two "):  # two independent mistakes are reported one after the other, so one fix does not mend both
        assert mended.lost <= 0.05 * mended.tried + 1, mended.problems


def test_advice_that_leaves_a_value_unread_is_not_told() -> None:
    bad = BadInput("degrees.ep", got="2", needed="experts", fix=Set("model.moe_every", 0) | Set("degrees.ep", 1))
    changed = {"degrees.ep": "2", "router.jitter": "0.1"}
    run, origins = load("switch_tiny", changed)
    assert "moe_every" not in str(tried(bad, run, 1, origins).fix)  # in a dense model, router.jitter of the command line has no effect


def test_where_nothing_works_no_value_is_told() -> None:
    bad = BadInput("model.d_ff", got="7", needed="another", fix=Set("model.d_ff", -3))
    run, origins = load("switch_tiny")
    assert str(tried(bad, run, 1, origins).fix).startswith("no change of one key alone")
