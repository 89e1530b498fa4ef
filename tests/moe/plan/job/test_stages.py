"""FLOPs of layers and cuts into stages: the layers' FLOPs add up to the model's, and no cut has a smaller largest cost than `cut`'s."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan.job.cut import cut, empty_rank
from moe.plan.job.flops import layer_flops, size, stage_flops
from moe.recipe import load as recipe
from parallel.errors import BadInput


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 3.0, 7.0]) | st.floats(0.01, 100), min_size=1, max_size=9), st.data())
def test_a_cut_is_the_best_of_all(costs: list[float], data: st.DataObject) -> None:
    """Among all cuts without empty stages, `cut` has the smallest largest cost and, among cuts with this cost, the least squares."""
    stages = data.draw(st.integers(1, len(costs)))

    def loads(counts: tuple[int, ...]) -> list[float]:
        ends = [0, *itertools.accumulate(counts)]
        return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]

    found = cut(costs, stages)
    assert len(found) == stages and sum(found) == len(costs) and min(found) >= 1
    every = [
        tuple(b - a for a, b in itertools.pairwise((0, *inner, len(costs))))
        for inner in itertools.combinations(range(1, len(costs)), stages - 1)
    ]
    slowest = min(max(loads(counts)) for counts in every)
    assert max(loads(found)) == pytest.approx(slowest, rel=1e-9)
    within = [counts for counts in every if max(loads(counts)) <= slowest * (1 + 1e-12)]
    squares = min(sum(load**2 for load in loads(counts)) for counts in within)
    assert sum(load**2 for load in loads(found)) == pytest.approx(squares, rel=1e-9)


@pytest.mark.parametrize(
    ("costs", "stages", "counts"),
    [([1] * 8, 4, (2, 2, 2, 2)), ([1] * 5, 2, (2, 3)), ([1, 1, 1, 1, 1, 3], 3, (2, 3, 1)), ([1, 1, 1, 1, 1, 1, 10], 3, (3, 3, 1))],
)
def test_earlier_stages_which_keep_more_get_fewer_layers(costs: list[float], stages: int, counts: tuple[int, ...]) -> None:
    assert cut(costs, stages) == counts


@pytest.mark.parametrize(("stages", "fix"), [(4, 3), (9, 3), (0, 1), (-2, 1)])
def test_more_stages_than_layers_is_one_line(stages: int, fix: int) -> None:
    with pytest.raises(BadInput, match=f"stages: got {stages}, needed 1 to 3, at most one for each layer; fix: set it to {fix}$"):
        cut([1.0, 2.0, 3.0], stages)


@pytest.mark.parametrize("name", recipe.recipe_names())
def test_layers_cost_what_the_model_costs(name: str) -> None:
    run, _ = recipe.load(name)
    flops = layer_flops(run)
    assert len(flops) == run.model.num_layers and min(flops) > 0
    assert sum(flops) == pytest.approx(size(run).forward, rel=1e-12)


def test_the_head_costs_the_same_in_a_stage_of_its_own() -> None:
    run, _ = recipe.load("switch_tiny")
    layers = layer_flops(run)
    with_it, alone = (stage_flops(run, cut) for cut in ((range(3), range(3, 4)), (range(3), range(3, 4), range(4, 4))))
    assert with_it == (sum(layers[:3]), layers[3]) and alone[:2] == (with_it[0], with_it[1] - alone[2])
    assert alone[2] == 2 * run.vocab_size * run.model.d_model


def test_a_rank_holds_something_or_is_named() -> None:
    line = [(stage % 3,) for stage in range(6)]
    assert empty_rank((0, 1, 1, 2, 0, 0), line) is None  # stage 0 has the embedding, stage 5 the head
    assert empty_rank((3, 0, 1, 0, 0, 0), line) == 1 and empty_rank((0, 0, 0, 4, 0, 0), line) == 1
    assert empty_rank((4, 0, 0, 0), [(0, 3), (1, 2), (1, 2), (0, 3)]) == 1


def test_a_layer_with_experts_costs_its_choices_and_not_its_experts() -> None:
    few, many, two = (
        recipe.load("switch_tiny", {"experts.num_experts": str(n), "router.preset": preset})[0]
        for n, preset in ((8, "switch"), (64, "switch"), (8, "glam"))
    )
    sparse = few.model.layers_with_experts()[0]
    one_expert = 2 * 2 * few.model.d_model * few.model.d_ff
    assert layer_flops(many)[sparse] - layer_flops(few)[sparse] == 2 * (64 - 8) * few.model.d_model  # FLOPs of the larger router
    assert layer_flops(two)[sparse] - layer_flops(few)[sparse] == one_expert
    assert layer_flops(few)[sparse] - layer_flops(few)[sparse - 1] == 2 * 8 * few.model.d_model


def test_costs_need_no_torch() -> None:
    code = "import sys, moe.plan.pipeline, moe.plan.job.cut; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
