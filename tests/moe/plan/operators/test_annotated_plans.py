"""Mesh-TensorFlow layouts and GSPMD annotations become plans, and three steps of these plans on four ranks equal one process.

The same for the plans that `moe plan --search mesh-tf` and `--search gspmd` find, on machines with different best plans.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.plan.job.network import Plan
from moe.plan.operators.kinds import plan_of_annotations, plan_of_layout
from moe.plan.operators.links import Link, Machine
from moe.plan.operators.mesh_tensorflow import best_layout
from moe.plan.operators.of_recipe import graph_of
from moe.plan.search.layouts import annotated, gspmd, mesh_tf, meshes
from moe.verify.cases import Case
from moe.verify.expected import Expected, twin_of
from moe.verify.layouts import run_world
from moe.verify.verify import judged
from parallel.annotations.graph import Graph
from parallel.annotations.partition import Machine as Rates
from parallel.errors import BadInput

MESH = {"rows": 2, "columns": 2}
LINE = "batch:rows, heads:columns, hidden:columns, vocab:columns"


EVEN = Machine(1, 4, 1e9, Link(1e-6, 1e-9), Link(1e-6, 1e-9))
NODES = Machine(2, 2, 1e9, Link(1e-7, 1e-10), Link(1e-4, 1e-6))  # two nodes of two devices, with a slow network between them


def graph(model: str) -> Graph:
    return graph_of(Case(model, "ddp", 4, 1, 1, "fp32").run(), sequences=12)


def notes(of: Graph, **words: str) -> dict[str, str]:
    """Return annotations by name of parameter. words: end of the name (with `__` for a dot) -> annotation."""
    ends = {end.replace("__", "."): note for end, note in words.items()}
    return {name: note for name in (*of.parameters, "embedding.rows") for end, note in ends.items() if name.endswith(end)}


def case(model: str, plan: Plan) -> Case:
    return Case(
        model, plan.engine, plan.world, plan.ep, 1, "fp32", tp=plan.tp, tensor=plan.tensor if plan.tp > 1 else "copied", etp=plan.etp
    )


@pytest.mark.usefixtures("three_steps")
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
        ("dense", mesh_tf(dense, EVEN).plan),
        ("dense", mesh_tf(dense, NODES).plan),
        ("dense", gspmd(dense, replace(NODES, memory_bytes=260e3)).plan),
        ("deepseek", mesh_tf(sparse, NODES).plan),
        ("deepseek", gspmd(sparse, replace(EVEN, memory_bytes=400e3)).plan),
    }
    assert {(model, plan.dp, plan.tp, plan.tensor, plan.ep, plan.etp, plan.engine) for model, plan in chosen} == {
        ("dense", 2, 2, "1d", 1, 1, "ddp"),
        ("deepseek", 2, 2, "1d", 2, 1, "ddp"),
        ("deepseek", 2, 2, "1d", 2, 2, "ddp"),
        ("dense", 4, 1, "1d", 1, 1, "ddp"),
        ("dense", 2, 2, "1d", 1, 1, "fsdp"),
        ("deepseek", 4, 1, "1d", 4, 1, "ddp"),
        ("deepseek", 2, 2, "sliced", 2, 1, "ddp"),
    }
    # data parallelism and ep alone are rows of `moe verify`
    cases = sorted({case(model, plan) for model, plan in chosen if plan.tp > 1}, key=str)
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


def test_a_search_names_a_faster_layout_that_the_trainer_cannot_run() -> None:
    """Over a slow network, Mesh-TensorFlow's best layout does not divide the batch, which no engine can. Too little memory is refused."""
    dense = graph("dense")
    best, found = best_layout(dense, MESH, Rates(1e9, {"rows": 1e6, "columns": 1e10}, 1e-4)), mesh_tf(dense, NODES)
    assert (
        "batch" not in best.layout
        and found.nearest
        and found.free_seconds < found.seconds
        and "the trainer cannot run the best legal layout" in found.said
    )
    even = mesh_tf(dense, EVEN)
    assert not even.nearest and even.free_seconds == even.seconds
    assert even.seconds == pytest.approx(best_layout(dense, MESH, Rates(1e9, 1e9, 1e-6)).seconds)
    for search in (mesh_tf, gspmd):
        with pytest.raises(BadInput, match="GiB a device for the smallest layout, .* fix: --search enumerate"):
            search(dense, replace(EVEN, memory_bytes=1e5))
        with pytest.raises(BadInput, match="no layout that the trainer runs"):
            search(dense, EVEN, allowed=lambda plan: False)


def test_few_tensors_need_annotations() -> None:
    """In a dense model: the embedding's rows, one matrix of each attention and network, and the vocabulary. Columns stay within a node."""
    dense = graph("dense")
    notes = annotated(dense, MESH, "batch", {})
    assert set(notes) == {"embedding.rows", "embedding", "head.weight"} | {
        n for n in dense.parameters if n.endswith((".q.weight", ".w1.weight"))
    }
    assert list(meshes(NODES)) == [{"rows": 4}, {"rows": 2, "columns": 2}]
    assert list(meshes(EVEN)) == [{"rows": 4}, {"rows": 2, "columns": 2}, {"columns": 4}]


def test_weights_cut_by_the_batchs_axis_are_fsdp() -> None:
    made = graph("dense")
    weights = {name: ", ".join(["rows", *["."] * (len(letters) - 1)]) for name, letters in made.parameters.items()}
    stream = {op.name: "rows, ., ." for op in made.operators if op.output == "bld"}
    plan = plan_of_annotations(made, {"rows": 2}, weights | stream)
    assert (plan.engine, plan.dp, plan.tp) == ("fsdp", 2, 1)


def test_the_best_layout_of_a_dense_model_on_equal_links_is_data_and_tensor_parallelism() -> None:
    best = best_layout(graph("dense"), MESH, Rates(flops=1e9, bandwidth=1e8, latency_s=1e-6))
    assert best.layout == {"batch": "rows", "heads": "columns", "hidden": "columns", "vocab": "columns"}
