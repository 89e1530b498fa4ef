"""Which of the project's kinds a program of shardings is: the Plan that its engines and layers run, or in one line why there is none.

    batch over rows, all dense weights whole                       dp, ddp        (weights over rows too: fsdp)
    heads, hidden and vocab over columns, tokens whole between     tp, 1d         (their length over columns too: sliced)
    experts over rows, columns or both, expert_hidden over one     ep, etp        (which fold over the ranks of dp and tp)

The shardings are compared tensor by tensor with those of the kind that they are nearest to; the first that differs is named. What is
refused here still runs on its graph, by torch's DTensor (parallel/annotations/annotated.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moe.plan.job.network import Plan
from moe.plan.operators import gspmd, mesh_tensorflow
from parallel.annotations.graph import Graph
from parallel.annotations.partition import Program
from parallel.annotations.resharding import Axes, Sharding, Sizes, ways
from parallel.data.kinds.catalog import CUT, PLAIN
from parallel.errors import BadInput

BY_TENSOR = ("heads", "hidden", "vocab")  # what 1D cuts; beside experts it holds networks whole


def plan_of_layout(graph: Graph, mesh: Sizes, layout: str) -> Plan:
    """Of Mesh-TensorFlow's `name:axis, ...`. Raises BadInput for a layout that is illegal, or none of the project's kinds."""
    return plan_of(mesh_tensorflow.program(graph, mesh, mesh_tensorflow.layout_of(layout, graph, mesh)))


def plan_of_annotations(graph: Graph, mesh: Sizes, annotations: Mapping[str, str]) -> Plan:
    """Of annotations that GSPMD propagates. Raises BadInput for wrong ones, and for shardings that are none of the project's kinds."""
    return plan_of(gspmd.program(graph, mesh, annotations))


def plan_of(program: Program) -> Plan:
    """The plan whose tensors lie as the program's do: degrees, tensor kind and engine. Raises BadInput where there is none."""
    kind = _Kind.nearest(program)
    idle = [axis for axis in program.mesh if program.mesh[axis] > 1 and axis not in (*kind.data, *kind.tensor)]
    if idle:
        raise BadInput(
            "mesh",
            got=f"an axis {idle[0]} that cuts neither batch nor heads and hidden units",
            needed="every axis to share out a layer's dense work: experts fold over the same ranks",
            fix=f"cut batch by {idle[0]}, or leave the axis out",
        )
    if len(kind.tensor) > 1:
        raise _other("heads and hidden units", "+".join(kind.tensor), "one axis", f"leave out {kind.tensor[1]}")
    engine = _check_weights(program, kind)
    sliced = _check_stream(program, kind)
    size = program.mesh
    return Plan(
        dp=ways(kind.data, size),
        tp=ways(kind.tensor, size),
        ep=ways(kind.experts, size),
        etp=ways(kind.expert_hidden, size),
        engine=engine,
        tensor="sliced" if sliced else "1d",
    )


@dataclass(frozen=True)
class _Kind:
    """The axes of each part of a plan."""

    data: Axes
    tensor: Axes
    experts: Axes
    expert_hidden: Axes

    @staticmethod
    def nearest(program: Program) -> _Kind:
        """By what cuts tokens between layers, and what cuts weights."""
        data = _cutting(program, _stream(program), ("batch",))
        dense = {name: letters for name, letters in program.graph.parameters.items() if not _of_experts(program.graph, letters)}
        experts = {name: letters for name, letters in program.graph.parameters.items() if _of_experts(program.graph, letters)}
        tensor = tuple(axis for axis in _cutting(program, dense, BY_TENSOR) if axis not in data)
        return _Kind(data, tensor, _cutting(program, experts, ("experts",)), _cutting(program, experts, ("expert_hidden",)))

    def axes(self, name: str, *, of_experts: bool) -> Axes:
        """Of a weight's dim of this name."""
        if of_experts:
            return {"experts": self.experts, "expert_hidden": self.expert_hidden}.get(name, ())
        return self.tensor if name in BY_TENSOR else ()


def _of_experts(graph: Graph, letters: str) -> bool:
    """Whether a weight is the experts' own; a router has their number, and not their hidden units."""
    return "expert_hidden" in {graph.dims[letter].name for letter in letters}


def _stream(program: Program) -> dict[str, str]:
    """What goes from layer to layer: embedded tokens, and the sums after attention and networks."""
    graph = program.graph
    whole = {"batch", "length", "width"}
    return {
        op.name: op.output
        for op in graph.operators
        if op.kind in ("lookup", "pointwise", "norm") and {graph.dims[letter].name for letter in op.output} == whole
    }


def _cutting(program: Program, tensors: Mapping[str, str], names: tuple[str, ...]) -> Axes:
    """Axes that cut dims of these names in any of these tensors, in the mesh's order."""
    found = {
        axis
        for tensor, letters in tensors.items()
        for letter, axes in zip(letters, program.shardings[tensor].dims, strict=True)
        if program.graph.dims[letter].name in names
        for axis in axes
    }
    return tuple(axis for axis in program.mesh if axis in found)


def _check_weights(program: Program, kind: _Kind) -> str:
    """Each weight lies as the kind's; or all dense ones are cut by the data axes as well, as FSDP has them."""
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
    """Tokens between layers: sequences over the data axes, and perhaps slices of them over the tensor axis."""
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
