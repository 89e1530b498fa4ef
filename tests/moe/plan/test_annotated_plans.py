"""Layouts and annotations of a recipe become plans, and the plans train: ten steps on four ranks equal one process, dense and sparse."""

from __future__ import annotations

import pytest

from moe.plan.graph import graph_of
from moe.verify.cases import Case
from moe.verify.expected import Expected, twin_of
from moe.verify.layouts import run_world
from moe.verify.verify import judged
from parallel.errors import BadInput
from parallel.plan.best_layout import best_layout
from parallel.plan.graph import Graph
from parallel.plan.job import Plan
from parallel.plan.kinds import plan_of_annotations, plan_of_layout
from parallel.plan.partition import Machine

MESH = {"rows": 2, "columns": 2}
LINE = "batch:rows, heads:columns, hidden:columns, vocab:columns"


def graph(model: str) -> Graph:
    return graph_of(Case(model, "ddp", 4, 1, 1, "fp32").run(), sequences=12)


def notes(of: Graph, **words: str) -> dict[str, str]:
    """The same annotation for all parameters whose name ends so (`_` for a dot), or the tensor of that name."""
    ends = {end.replace("__", "."): note for end, note in words.items()}
    return {name: note for name in (*of.parameters, "embedding.rows") for end, note in ends.items() if name.endswith(end)}


def case(model: str, plan: Plan) -> Case:
    return Case(
        model, plan.engine, plan.world, plan.ep, 1, "fp32", tp=plan.tp, tensor=plan.tensor if plan.tp > 1 else "copied", etp=plan.etp
    )


def test_plans_of_layouts_and_annotations_train_as_one_process() -> None:
    dense, sparse = graph("dense"), graph("deepseek")
    few = {"attention__q__weight": "_, columns, _, _", "ffn__w1__weight": "_, columns", "embedding__rows": "rows, ., ."}
    stacks = dict.fromkeys(("experts__w1", "experts__w3", "experts__w2"), "rows, ., .")
    ends = {"head__weight": "columns, .", "embedding": "columns, ."}
    chosen = {
        ("dense", plan_of_annotations(dense, MESH, notes(dense, **few, **ends))),
        ("dense", plan_of_layout(dense, MESH, LINE)),
        ("deepseek", plan_of_layout(sparse, MESH, f"{LINE}, experts:rows")),
        ("deepseek", plan_of_layout(sparse, MESH, f"{LINE}, experts:columns, expert_hidden:rows")),
        ("deepseek", plan_of_annotations(sparse, MESH, notes(sparse, **few, **ends, **stacks))),
    }
    assert {(model, plan.dp, plan.tp, plan.tensor, plan.ep, plan.etp) for model, plan in chosen} == {
        ("dense", 2, 2, "1d", 1, 1),
        ("deepseek", 2, 2, "1d", 2, 1),
        ("deepseek", 2, 2, "1d", 2, 2),
    }
    cases = sorted({case(model, plan) for model, plan in chosen}, key=str)
    for made, ran in run_world(cases, 4):
        row = judged(made, ran, Expected.of(twin_of(made)))
        assert row["passed"], row


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("batch:rows, heads:columns, hidden:columns", "add vocab:columns"),
        ("batch:rows", "cut batch by columns, or leave the axis out"),
        ("batch:rows, width:columns", "an axis columns that cuts neither"),
        (f"{LINE}, channels:rows", "or use channels"),
    ],
)
def test_what_is_none_of_the_kinds_is_said_in_one_line(layout: str, words: str) -> None:
    with pytest.raises(BadInput) as error:
        plan_of_layout(graph("dense"), MESH, layout)
    assert words in str(error.value)


def test_weights_cut_by_the_batchs_axis_are_fsdp() -> None:
    made = graph("dense")
    weights = {name: ", ".join(["rows", *["."] * (len(letters) - 1)]) for name, letters in made.parameters.items()}
    stream = {op.name: "rows, ., ." for op in made.operators if op.output == "bld"}
    plan = plan_of_annotations(made, {"rows": 2}, weights | stream)
    assert (plan.engine, plan.dp, plan.tp) == ("fsdp", 2, 1)


def test_the_best_layout_of_a_dense_model_on_equal_links_is_data_and_tensor_parallelism() -> None:
    best = best_layout(graph("dense"), MESH, Machine(flops=1e9, bandwidth=1e8, latency_s=1e-6))
    assert best.layout == {"batch": "rows", "heads": "columns", "hidden": "columns", "vocab": "columns"}
