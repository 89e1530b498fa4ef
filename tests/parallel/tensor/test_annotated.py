"""Annotated graphs by DTensor on four ranks: tensors, gradients and one step equal one process; collectives equal the program's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode  # imported before the forks, because it takes seconds

from moe.plan.operators import gspmd, mesh_tensorflow
from parallel.annotations.annotated import Annotated, Rank, device_mesh, product
from parallel.annotations.graph import Dim, Graph, Operator
from parallel.annotations.partition import Program, shape
from parallel.errors import BadInput
from tests.support.ranks import run_on_ranks

MESH = {"rows": 2, "columns": 2}
DENSE = Graph(
    {"b": Dim("batch", 4), "l": Dim("length", 6), "d": Dim("width", 8), "f": Dim("hidden", 10)},
    {"x": "bld"},
    {"scale": "d", "w1": "df", "w2": "fd"},
    (
        Operator("norm", "norm", "bld,d->bld", ("x", "scale"), statistics="d"),
        Operator("h", "product", "bld,df->blf", ("norm", "w1")),
        Operator("act", "pointwise", "blf->blf", ("h",)),
        Operator("out", "product", "blf,fd->bld", ("act", "w2")),
        Operator("y", "pointwise", "bld,bld->bld", ("x", "out")),
    ),
    itemsize=8,
)
SPARSE = Graph(
    {
        "g": Dim("batch", 4), "s": Dim("length", 6), "e": Dim("experts", 8), "c": Dim("slots", 3), "m": Dim("width", 10),
        "h": Dim("expert_hidden", 14),
    },
    {"mask": "gsec", "x": "gsm"},
    {"wi": "emh", "wo": "ehm"},
    (
        Operator("rows", "dispatch", "gsec,gsm->egcm", ("mask", "x")),
        Operator("hidden", "product", "egcm,emh->egch", ("rows", "wi")),
        Operator("act", "pointwise", "egch->egch", ("hidden",)),
        Operator("out", "product", "egch,ehm->egcm", ("act", "wo")),
        Operator("mixed", "combine", "egcm,gsec->gsm", ("out", "mask")),
        Operator("y", "pointwise", "gsm,gsm->gsm", ("x", "mixed")),
    ),
    itemsize=8,
)  # fmt: skip
PROGRAMS: dict[str, Program] = {
    "megatron": gspmd.program(DENSE, MESH, {"w1": "_, columns", "x": "rows, _, _"}),
    "slices": gspmd.program(DENSE, MESH, {"w1": ". , columns", "x": "rows, columns, .", "y": "rows, columns, ."}),
    "sharded weights": gspmd.program(DENSE, MESH, {"w1": "rows, columns", "w2": "columns, rows", "x": "rows, _, _", "act": "rows, _, _"}),
    "width and both axes on one dim": gspmd.program(DENSE, MESH, {"x": "_, _, columns", "h": "rows+columns, _, _"}),
    "experts and groups on one axis": gspmd.program(SPARSE, MESH, {"x": "rows, _, _", "wi": "rows, _, columns", "wo": "rows, columns, _"}),
    "experts by names": mesh_tensorflow.program(SPARSE, MESH, {"batch": "rows", "experts": "rows", "expert_hidden": "columns"}),
    "names on a width": mesh_tensorflow.program(DENSE, MESH, {"batch": "rows", "width": "columns"}),
}


def compute(op: Operator, inputs: Sequence[Tensor], rank: Rank | None) -> Tensor:
    """Return an operator's output. rank: the rank that computes its shard; None: one process computes the whole tensor."""
    if op.kind == "norm":
        x, scale = inputs
        squares = x.square().sum(-1, keepdim=True)
        return x * torch.rsqrt((rank.total(squares, "d", read="in parts") if rank else squares) / DENSE.dims["d"].size) * scale
    if op.kind == "pointwise":
        return torch.tanh(inputs[0]) if len(inputs) == 1 else inputs[0] + inputs[1]
    return torch.einsum(op.rule, *inputs) if rank is None else product(op, inputs, rank)


def values(graph: Graph) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(shape(graph, name), generator=generator, dtype=torch.float64) for name in (*graph.inputs, *graph.parameters)}
    return {name: value / 2 for name, value in made.items()}


def weights_of_outputs(graph: Graph) -> Tensor:
    return torch.randn(shape(graph, "y"), generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def alone(graph: Graph) -> dict[str, Tensor]:
    """Return name -> output, gradient or stepped weight, computed on one process."""
    leaves = {name: value.requires_grad_() for name, value in values(graph).items()}
    held = dict(leaves)
    for op in graph.operators:
        held[op.name] = compute(op, [held[name] for name in op.inputs], None)
    (held["y"] * weights_of_outputs(graph)).sum().backward()
    return found({name: t.detach() for name, t in held.items()}, leaves)


def found(held: dict[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    grads = {f"grad {name}": leaf.grad.clone() for name, leaf in leaves.items()}
    torch.optim.SGD(leaves.values(), lr=0.1).step()  # one operator of DTensor; tests/moe/parallelize/test_annotated.py calls AdamW's ten
    return {**held, **grads, **{f"stepped {name}": leaf.detach() for name, leaf in leaves.items()}}


def _ranks(rank: int) -> dict[str, dict[str, Tensor]]:
    results: dict[str, dict[str, Any]] = {}
    mesh = device_mesh(MESH)
    for label, program in PROGRAMS.items():
        ranks = Annotated(program, mesh, compute)
        leaves = {name: ranks.placed(name, value) for name, value in values(program.graph).items()}
        with CommDebugMode() as counts:
            held = ranks(leaves)
            (held["y"] * ranks.placed("y", weights_of_outputs(program.graph)).detach()).sum().full_tensor().backward()
        results[label] = {name: t.detach().full_tensor() for name, t in found({**leaves, **held}, leaves).items()}
        results[label]["travels"] = {str(op).rpartition(".")[2]: n for op, n in counts.get_comm_counts().items() if n}
    return results


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(_ranks, 4)


@pytest.mark.parametrize("label", PROGRAMS)
def test_four_ranks_are_one_process(label: str, on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    want = alone(PROGRAMS[label].graph)
    for of_rank in on_ranks:
        for name, value in want.items():
            torch.testing.assert_close(of_rank[label][name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_collectives_equal_the_programs(on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    """The number of all-reduces that torch counts equals the program's, and one for each axis that cuts y, for the loss."""
    program, counted = PROGRAMS["megatron"], on_ranks[0]["megatron"]["travels"]
    assert {move.step.kind for move in program.collectives} == {"all_reduce"}
    assert list(counted.values()) == [len(program.collectives) + len(program.shardings["y"].axes)]


def test_an_order_that_dtensor_does_not_know_is_refused() -> None:
    with pytest.raises(BadInput, match="annotate rows\\+columns"):
        program = gspmd.program(DENSE, MESH, {"x": "columns+rows, _, _"})
        ranks = Annotated.__new__(Annotated)
        ranks.program = program
        ranks.placements(program.shardings["x"], "x")
