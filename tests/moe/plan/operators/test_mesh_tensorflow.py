"""Mesh-TensorFlow layouts: illegal layouts, costs in closed form, the all-to-all of experts, and the best layout of all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moe.plan.operators import mesh_tensorflow
from moe.plan.operators.mesh_tensorflow import best_layout
from parallel.annotations.graph import Dim, Graph, Operator
from parallel.annotations.partition import Machine, Program, peak, shape
from parallel.errors import BadInput
from tests.support import simulated

MESH = {"rows": 2, "columns": 3}
MACHINE = Machine(flops=1e6, bandwidth={"rows": 1e5, "columns": 4e5}, latency_s=1e-4)
NETWORK = Graph(
    {"b": Dim("batch", 12), "d": Dim("width", 18), "f": Dim("hidden", 24)},
    {"x": "bd"},
    {"w1": "df", "w2": "fd"},
    (
        Operator("h", "product", "bd,df->bf", ("x", "w1"), 2.0 * 12 * 18 * 24),
        Operator("a", "pointwise", "bf->bf", ("h",)),
        Operator("y", "product", "bf,fd->bd", ("a", "w2"), 2.0 * 12 * 18 * 24),
    ),
    itemsize=8,
)
EXPERTS = Graph(
    {
        "b": Dim("batch", 6), "l": Dim("length", 5), "e": Dim("experts", 12), "u": Dim("slots", 3), "d": Dim("width", 8),
        "m": Dim("expert_hidden", 15),
    },
    {"mask": "bleu", "x": "bld"},
    {"wi": "edm", "wo": "emd"},
    (
        Operator("rows", "product", "bleu,bld->ebud", ("mask", "x"), 2e4),
        Operator("hidden", "product", "ebud,edm->ebum", ("rows", "wi"), 5e4),
        Operator("out", "product", "ebum,emd->ebud", ("hidden", "wo"), 5e4),
        Operator("y", "product", "ebud,bleu->bld", ("out", "mask"), 2e4),
    ),
    itemsize=8,
)  # fmt: skip
# Names the products with the mask, whose rules look like those of the experts' products.
EXPERTS = Graph(
    EXPERTS.dims,
    EXPERTS.inputs,
    EXPERTS.parameters,
    tuple(
        Operator(op.name, {"rows": "dispatch", "y": "combine"}.get(op.name, "product"), op.rule, op.inputs, op.flops)  # type: ignore[arg-type]
        for op in EXPERTS.operators
    ),
    itemsize=8,
)


def equals_one_process(program: Program) -> None:
    """Check that the program gives the outputs and gradients of one process, with dispatch and combine as products."""
    made = program.graph
    drawn = np.random.default_rng(2)
    values = {name: drawn.standard_normal(shape(made, name)) / 3 for name in (*made.inputs, *made.parameters)}
    ends = {"y": drawn.standard_normal(shape(made, "y"))}
    got, want = simulated.run(program, values, ends), simulated.alone(made, values, ends)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch:rows, hidden:rows", "leave out hidden, or use hidden:columns"),
        ("width:columns, hidden:columns", "leave out hidden, or use hidden:rows"),
        ("hiden:rows", "use hidden"),
        ("hidden:colums", "use columns"),
        ("hidden", "write hidden:rows"),
        ("hidden columns", "write hidden:rows"),
        ("hidden:rows, hidden:columns", "leave out hidden:columns"),
    ],
)
def test_an_illegal_layout_is_one_line(text: str, words: str) -> None:
    with pytest.raises(BadInput) as error:
        mesh_tensorflow.layout_of(text, NETWORK, MESH)
    assert words in str(error.value)


def test_a_mesh_of_no_ranks_or_no_axes_is_one_line() -> None:
    for mesh, words in (({"rows": 0}, "mesh axis rows: got 0"), ({}, "no axis: the mesh has none")):
        with pytest.raises(BadInput, match=words):
            mesh_tensorflow.layout_of("hidden:rows", NETWORK, mesh)


def test_a_size_that_is_not_divisible_is_said_with_one_that_is() -> None:
    with pytest.raises(BadInput, match="make it 28, or leave hidden out"):
        mesh_tensorflow.layout_of("hidden:rows", NETWORK, {"rows": 7})


def test_costs_are_the_closed_forms() -> None:
    """Mesh-TensorFlow, section 4.2: batch over rows, hidden over columns. All-reduces of y and of the gradients of x, w1 and w2."""
    made = mesh_tensorflow.program(NETWORK, MESH, {"batch": "rows", "hidden": "columns"})
    outputs, weights, (r, c) = 12 / 2 * 18 * 8, 18 * 24 / 3 * 8, (2, 3)
    ring_rows, ring_columns = 2 * (r - 1) / r, 2 * (c - 1) / c
    assert made.sent == pytest.approx(2 * ring_columns * outputs + 2 * ring_rows * weights)
    flops = 3 * 2 * (2 * 12 * 18 * 24) / 6
    sums = 2 * (1e-4 + ring_columns * outputs / 4e5) + 2 * (1e-4 + ring_rows * weights / 1e5)
    assert made.seconds(MACHINE) == pytest.approx(flops / 1e6 + sums)
    x, hidden = 12 * 18 / 2, 12 * 24 / 6
    # x, h, a and y are kept; at the memory peak, the gradients of y and a exist too
    assert made.bytes(of_weight=16) == pytest.approx(16 * 2 * 18 * 24 / 3 + 8 * (2 * x + 2 * hidden + max(x + hidden, 2 * hidden)))


def test_peak_is_the_largest_sum_of_tensors_alive_at_one_moment() -> None:
    """alive: tensors at each of three forward and three backward moments of a graph in which two operators read h."""
    ops = (
        Operator("h", "pointwise", "b->b", ("x",)),
        Operator("a", "pointwise", "b->b", ("h",)),
        Operator("y", "pointwise", "b,b->b", ("a", "h")),
    )
    graph = Graph({"b": Dim("batch", 2)}, {"x": "b"}, {}, ops)
    held = {"x": 1.0, "h": 10.0, "a": 100.0, "y": 1000.0}
    alive = [
        {"x", "h"}, {"x", "h", "a"}, {"x", "h", "a", "y"},
        {"x", "h", "a", "y", "grad y", "grad a", "grad h"}, {"x", "h", "a", "grad a", "grad h"}, {"x", "h", "grad h"},
    ]  # fmt: skip
    assert peak(graph, held) <= max(sum(held[name.removeprefix("grad ")] for name in moment) for moment in alive)
    assert peak(graph, held) >= 1000 + 1000 + 100 + 10 + 1


def test_experts_by_the_batchs_axis_are_an_all_to_all_there_and_back() -> None:
    layout = mesh_tensorflow.layout_of("batch:rows, experts:rows, expert_hidden:columns", EXPERTS, MESH)
    made = mesh_tensorflow.program(EXPERTS, MESH, layout)
    exchanges = [(move.direction, move.tensor) for move in made.collectives if move.step.kind == "all_to_all" and move.step.axis == "rows"]
    assert sorted(exchanges) == [("backward", "out"), ("backward", "rows"), ("forward", "out"), ("forward", "rows")]
    equals_one_process(made)
    with pytest.raises(BadInput, match="two dims of"):
        mesh_tensorflow.layout_of("expert_batch:rows, experts:rows", EXPERTS, MESH)


def every_layout(graph: Graph, mesh: dict[str, int]) -> list[dict[str, str]]:
    """Return all layouts that `check` accepts."""
    names = sorted({dim.name for dim in mesh_tensorflow.renamed(graph).dims.values()})
    legal = []
    for axes in itertools.product(("", *mesh), repeat=len(names)):
        layout = {name: axis for name, axis in zip(names, axes, strict=True) if axis}
        try:
            mesh_tensorflow.check(graph, layout, mesh)
        except BadInput:
            continue
        legal.append(layout)
    return legal


def test_every_legal_layout_gives_what_one_process_gives() -> None:
    for layout in every_layout(NETWORK, MESH):
        equals_one_process(mesh_tensorflow.program(NETWORK, MESH, layout))
    for layout in every_layout(EXPERTS, {"rows": 3})[::7]:
        equals_one_process(mesh_tensorflow.program(EXPERTS, {"rows": 3}, layout))


@pytest.mark.parametrize("machine", [MACHINE, Machine(1e3, 1e9, 0.0), Machine(1e12, 1e3, 1.0)], ids=["even", "slow ranks", "slow links"])
@pytest.mark.parametrize(("graph", "mesh"), [(NETWORK, MESH), (EXPERTS, {"rows": 2, "columns": 3})], ids=["network", "experts"])
def test_the_best_layout_is_the_best_of_all(graph: Graph, mesh: dict[str, int], machine: Machine) -> None:
    programs = [mesh_tensorflow.program(graph, mesh, layout) for layout in every_layout(graph, mesh)]
    seconds, held = [made.seconds(machine) for made in programs], [made.bytes() for made in programs]
    assert best_layout(graph, mesh, machine).seconds == pytest.approx(min(seconds))
    assert best_layout(graph, mesh, machine, objective="bytes").bytes == pytest.approx(min(held))
    limit = sorted(held)[len(held) // 3]
    within = min(s for s, h in zip(seconds, held, strict=True) if h <= limit)
    assert best_layout(graph, mesh, machine, most_bytes=limit).seconds == pytest.approx(within)


def test_a_limit_that_no_layout_keeps_is_told_with_the_least() -> None:
    least = best_layout(NETWORK, MESH, MACHINE, objective="bytes").bytes
    with pytest.raises(BadInput, match=f"at least {least:,.0f}"):
        best_layout(NETWORK, MESH, MACHINE, most_bytes=least - 1)
