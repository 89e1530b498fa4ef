"""Every shipped recipe is legal, and says what its first line promises."""

from __future__ import annotations

import math

import pytest

from moe.checks.together import check_run
from moe.plan.flops import Size, size
from moe.recipe.load import load, recipe_names, resolved_yaml, run_name
from moe.recipe.sections import Run


def size_of(run: Run) -> Size:
    return size(run.model, run.experts, run.router, vocab_size=run.vocab_size)


def test_a_run_has_its_recipes_name_and_goes_on_under_its_own() -> None:
    """`moe train runs/upcycled/recipe.yaml` is the run `upcycled`, not another one called `recipe`."""
    names = ("switch_tiny", "mine/small.yaml", "runs/upcycled/recipe.yaml")
    assert [run_name(recipe) for recipe in names] == ["switch_tiny", "small", "upcycled"]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_legal_on_1_2_and_8_processes(name: str) -> None:
    run, origins = load(name)
    for world in (1, 2, 8):
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


def test_the_tiny_recipes_have_equal_flops_and_the_sparse_ones_equal_parameters() -> None:
    dense, switch, glam, pr_moe = (size_of(load(name)[0]) for name in ("dense_tiny", "switch_tiny", "glam_tiny", "pr_moe_tiny"))
    assert pr_moe.training == pytest.approx(dense.training, rel=0.005)
    for sparse in (switch, glam):
        assert sparse.training == pytest.approx(dense.training, rel=0.005)  # the router is the difference
        assert sparse.total > 3 * dense.total
    assert glam.total == pytest.approx(switch.total, rel=0.001)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("dense_8b", 8.7e9, 8.7e9), ("glam_8b_64e", 143e9, 9.8e9)],
)
def test_the_papers_sizes_are_met(name: str, total: float, active: float) -> None:
    """GLaM, arXiv 2112.06905, table 4."""
    counted = size_of(load(name)[0])
    assert counted.total == pytest.approx(total, rel=0.01)
    assert counted.active == pytest.approx(active, rel=0.01)
