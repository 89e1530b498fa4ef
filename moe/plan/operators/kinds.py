"""Translates a program of shardings into a Plan that this project's engines and layers can run, or says why there is none.

    batch over rows, all dense weights whole                          dp, ddp     (weights over rows too: fsdp)
    heads, hidden and vocab over columns, tokens whole between layers tp, 1d      (their length over columns too: sliced)
    experts over rows, columns or both, expert_hidden over one        ep, etp     (on the same ranks as dp and tp)

The shardings are compared tensor by tensor with the shardings of the most similar plan; the first tensor that differs is named. A refused
program can still run on its graph by torch's DTensor (parallel/annotations/annotated.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moe.plan.job.network import Plan
from moe.plan.operators import gspmd, mesh_tensorflow
from parallel.annotations.graph import Graph
from parallel.annotations.partition import Program
from parallel.annotations.resharding import Axes, Sharding, Sizes, num_parts
from parallel.data.kinds.catalog import CUT, PLAIN
from parallel.errors import BadInput

BY_TENSOR = ("heads", "hidden", "vocab")  # dims that 1D tensor parallelism cuts


def plan_of_layout(graph: Graph, mesh: Sizes, layout: str) -> Plan:
    """Plan for a Mesh-TensorFlow layout `name:axis, ...`. Raises BadInput if it is illegal, or if no plan has these shardings."""
    return plan_of(mesh_tensorflow.program(graph, mesh, mesh_tensorflow.layout_of(layout, graph, mesh)))


def plan_of_annotations(graph: Graph, mesh: Sizes, annotations: Mapping[str, str]) -> Plan:
    """Plan for annotations that GSPMD propagates. Raises BadInput if they are wrong, or if no plan has the resulting shardings."""
    return plan_of(gspmd.program(graph, mesh, annotations))


def plan_of(program: Program) -> Plan:
    """Plan with the shardings of the program: degrees, kind of tensor parallelism and engine. Raises BadInput if there is none."""
    kind = _Kind.nearest(program)
    idle = [axis for axis in program.mesh if program.mesh[axis] > 1 and axis not in (*kind.data, *kind.tensor)]
    if idle:
        raise BadInput(
            "mesh",
            got=f"an axis {idle[0]} that cuts neither batch nor heads and hidden units",
            needed="axes that all divide a layer's dense work (experts use the same ranks)",
            fix=f"cut batch by {idle[0]}, or leave the axis out",
        )
    if len(kind.tensor) > 1:
        raise _other("heads and hidden units", "+".join(kind.tensor), "one axis", f"leave out {kind.tensor[1]}")
    engine = _check_weights(program, kind)
    sliced = _check_stream(program, kind)
    size = program.mesh
    return Plan(
        dp=num_parts(kind.data, size),
        tp=num_parts(kind.tensor, size),
        ep=num_parts(kind.experts, size),
        etp=num_parts(kind.expert_hidden, size),
        engine=engine,
        tensor="sliced" if sliced else "1d",
    )


@dataclass(frozen=True)
class _Kind:
    """Mesh axes of a plan for the batch (data), dense matrices (tensor), the number of experts, and experts' hidden units."""

    data: Axes
    tensor: Axes
    experts: Axes
    expert_hidden: Axes

    @staticmethod
    def nearest(program: Program) -> _Kind:
        """Return the most similar plan's axes: axes that cut tokens between layers become data, axes that cut dense weights tensor."""
        data = _cutting(program, _stream(program), ("batch",))
        dense = {name: letters for name, letters in program.graph.parameters.items() if not _of_experts(program.graph, letters)}
        experts = {name: letters for name, letters in program.graph.parameters.items() if _of_experts(program.graph, letters)}
        tensor = tuple(axis for axis in _cutting(program, dense, BY_TENSOR) if axis not in data)
        return _Kind(data, tensor, _cutting(program, experts, ("experts",)), _cutting(program, experts, ("expert_hidden",)))

    def axes(self, name: str, *, of_experts: bool) -> Axes:
        """Axes that cut the dim `name` of a weight in this plan."""
        if of_experts:
            return {"experts": self.experts, "expert_hidden": self.expert_hidden}.get(name, ())
        return self.tensor if name in BY_TENSOR else ()


def _of_experts(graph: Graph, letters: str) -> bool:
    """True if a weight belongs to experts. (A router's weight has a dim `experts`, but no dim `expert_hidden`.)"""
    return "expert_hidden" in {graph.dims[letter].name for letter in letters}


def _stream(program: Program) -> dict[str, str]:
    """Tensors of the residual stream, name -> letters: embedded tokens, and sums after attention and networks."""
    graph = program.graph
    whole = {"batch", "length", "width"}
    return {
        op.name: op.output
        for op in graph.operators
        if op.kind in ("lookup", "pointwise", "norm") and {graph.dims[letter].name for letter in op.output} == whole
    }


def _cutting(program: Program, tensors: Mapping[str, str], names: tuple[str, ...]) -> Axes:
    """Axes that cut a dim with one of these names in any of these tensors, in the mesh's order. tensors: name -> letters of its dims."""
    found = {
        axis
        for tensor, letters in tensors.items()
        for letter, axes in zip(letters, program.shardings[tensor].dims, strict=True)
        if program.graph.dims[letter].name in names
        for axis in axes
    }
    return tuple(axis for axis in program.mesh if axis in found)


def _check_weights(program: Program, kind: _Kind) -> str:
    """Check that weights have the plan's shardings. Returns fsdp if the data axes cut all dense weights too, and ddp if none."""
    sharded, whole = list[str](), list[str]()
    for name, letters in program.graph.parameters.items():
        of_experts = _of_experts(program.graph, letters)
        names = [program.graph.dims[letter].name for letter in letters]
        wanted = Sharding(tuple(kind.axes(dim, of_experts=of_experts) for dim in names))
        got = program.shardings[name]
        less = Sharding(tuple(tuple(axis for axis in axes if of_experts or axis not in kind.data) for axes in got.dims))
        if less != wanted:
            dim = next(i for i, (a, b) in enumerate(zip(less.dims, wanted.dims, strict=True)) if a != b)
            says = f"{names[dim]}:{wanted.dims[dim][0]}" if wanted.dims[dim] else f"nothing on {names[dim]}"
            raise _other(name, str(got), f"{wanted} as tensor.kind 1d has it", f"add {says}" if wanted.dims[dim] else f"lay {says}")
        if not of_experts:
            (whole if less == got else sharded).append(name)
    if sharded and whole:
        raise _other(
            whole[0], str(program.shardings[whole[0]]), f"a dim over {'+'.join(kind.data)}, as {sharded[0]} has", "cut all weights or none"
        )
    return CUT if sharded else PLAIN


def _check_stream(program: Program, kind: _Kind) -> Literal["", "sliced"]:
    """Check the residual stream: batch over the data axes. Returns "sliced" if its length is cut over the tensor axis."""
    found: set[Axes] = set()
    for name, letters in _stream(program).items():
        of = {program.graph.dims[letter].name: axes for letter, axes in zip(letters, program.shardings[name].dims, strict=True)}
        if of["batch"] != kind.data or of["width"] or of["length"] not in ((), kind.tensor):
            raise _other(
                name, str(program.shardings[name]), f"batch over {'+'.join(kind.data) or 'nothing'} and width whole", "annotate it so"
            )
        found.add(of["length"])
    if len(found) > 1:
        raise _other("tokens between layers", "slices at some places", "the same everywhere", "annotate all or none with slices")
    return "sliced" if kind.tensor in found and kind.tensor else ""


def _other(what: str, got: str, needed: str, fix: str) -> BadInput:
    return BadInput(f"sharding of {what}", got=got, needed=needed, fix=f"{fix}, or run the graph by DTensor")
