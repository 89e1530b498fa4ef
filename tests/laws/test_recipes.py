"""Every shipped recipe is legal, and has the property that the comment in its first line states."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moe.checks.together import check_run
from moe.plan.job.flops import Size, size
from moe.recipe.load import load, recipe_names, resolved_yaml, run_name
from moe.recipe.sections import Router, Run
from parallel.errors import BadInput


def size_of(run: Run) -> Size:
    return size(run)


def test_a_run_has_its_recipes_name_and_goes_on_under_its_own() -> None:
    """`moe train runs/upcycled/recipe.yaml` continues the run `upcycled`, and starts no run named `recipe`."""
    names = ("switch_tiny", "mine/small.yaml", "runs/upcycled/recipe.yaml")
    assert [run_name(recipe) for recipe in names] == ["switch_tiny", "small", "upcycled"]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_legal_on_1_2_and_8_processes(name: str) -> None:
    """Numbers of processes that tp * sp does not divide are left out."""
    run, origins = load(name)
    for world in (world for world in (1, 2, 8) if world % (run.degrees.tp * run.degrees.sp) == 0):
        resolved = check_run(run, world)
        assert resolved.mesh_degrees().world == world
        assert resolved.degrees.ep == (math.gcd(world, *run.experts.counts) if run.model.layers_with_experts() else 1)
    assert set(origins.values()) > {"default"}


@pytest.mark.parametrize("name", recipe_names())
def test_a_resolved_recipe_reads_back_as_itself(name: str, tmp_path: object) -> None:
    run, origins = load(name)
    path = tmp_path / "resolved.yaml"  # type: ignore[operator]
    path.write_text(resolved_yaml(run, origins))
    assert load(str(path))[0] == run


def test_values_of_python_are_taken_as_they_are_and_text_as_yaml() -> None:
    values = {
        "optimizer.lr": 1e-3,
        "train.steps": 7,
        "model.tied_embeddings": False,
        "router.capacity_factor": None,
        "experts.num_experts": [4, 8],
        "data.path": Path("2024"),
    }
    run, origins = load("switch_tiny", values)
    assert (run.optimizer.lr, run.train.steps, run.model.tied_embeddings, run.data.path) == (1e-3, 7, False, "2024")
    assert run.router.capacity_factor is None and run.experts.num_experts == (4, 8)
    assert {origins[key] for key in values} == {"command line"}
    text = {"optimizer.lr": "1e-3", "train.steps": "7", "model.tied_embeddings": "false", "router.capacity_factor": "null"}
    assert load("switch_tiny", text | {"experts.num_experts": "[4, 8]", "data.path": "2024"})[0] == run
    with pytest.raises(BadInput, match="^train.steps: got true, needed a number"):
        load("switch_tiny", {"train.steps": True})
    with pytest.raises(BadInput, match="^optimizer.lr: got "):
        load("switch_tiny", {"optimizer.lr": object()})


def test_a_preset_that_is_chosen_anew_drops_what_the_parent_set_in_its_own(tmp_path: Path) -> None:
    """A recipe that changes its parent's router preset does not inherit the parent preset's keys. Mixtral is dropless: it must not get
    the capacity factor 2.0 of switch_tiny."""
    (tmp_path / "mine.yaml").write_text("extends: switch_tiny\nrouter: {preset: mixtral, jitter: 0.5}\n")
    for run, origins in (load(str(tmp_path / "mine.yaml")), load("switch_tiny", {"router.jitter": "0.5", "router.preset": "mixtral"})):
        assert run.router.own == {"jitter": 0.5} and run.router == Router(preset="mixtral", jitter=0.5)
        assert origins["router.capacity_factor"] == "mixtral: null; not 2.0, which switch_tiny.yaml has for its own preset"
        assert origins["router.group"] == 'mixtral: "sequence"'  # switch_tiny has the same value
    (tmp_path / "child.yaml").write_text("extends: mine\nrouter: {capacity_factor: 3.0}\n")  # without a new preset, keys are inherited
    assert load(str(tmp_path / "child.yaml"))[0].router.own == {"jitter": 0.5, "capacity_factor": 3.0}


def test_the_tiny_recipes_have_equal_flops_and_the_sparse_ones_equal_parameters() -> None:
    dense, switch, glam, pr_moe = (size_of(load(name)[0]) for name in ("dense_tiny", "switch_tiny", "glam_tiny", "pr_moe_tiny"))
    assert pr_moe.training == pytest.approx(dense.training, rel=0.005)
    for sparse in (switch, glam):
        assert sparse.training == pytest.approx(dense.training, rel=0.005)  # only the router's parameters are added
        assert sparse.total > 3 * dense.total
    assert glam.total == pytest.approx(switch.total, rel=0.001)


@pytest.mark.parametrize(("name", "total", "active"), [("dense_8b", 8.7e9, 8.7e9), ("glam_8b_64e", 143e9, 9.8e9)])
def test_the_papers_sizes_are_met(name: str, total: float, active: float) -> None:
    """Total and active parameters equal table 4 of GLaM (arXiv 2112.06905) within 1 %."""
    counted = size_of(load(name)[0])
    assert counted.total == pytest.approx(total, rel=0.01)
    assert counted.active == pytest.approx(active, rel=0.01)
