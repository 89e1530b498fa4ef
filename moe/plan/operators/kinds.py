"""Finds the Plan of this project with the same shardings as a program. If there is none, the error says which sharding differs.

A program is a graph of operators with a sharding of every tensor (parallel/annotations/partition.py). `rows` and `columns` are mesh axes:

    sharding in the program                                   degree of the plan
    batch over rows, dense weights unsharded                  dp, with ddp (with fsdp, if rows shard dense weights too)
    heads, hidden and vocab over columns, length unsharded    tp, kind 1d (sliced, if columns shard the length between layers)
    experts over rows, columns or both                        ep, on the same ranks as dp and tp
    expert_hidden over rows or columns                        etp, on the same ranks as dp and tp

Each tensor's sharding is compared with its sharding in the most similar plan. The error names the first tensor that differs. A program
without a plan can still be run operator by operator with torch's DTensor (parallel/annotations/annotated.py).
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
from parallel.data.kinds import CUT, PLAIN
from parallel.errors import BadInput

BY_TENSOR = ("heads", "hidden", "vocab")  # dims that 1D tensor parallelism cuts


def plan_of_layout(graph: Graph, mesh: Sizes, layout: str) -> Plan:
    """Return the Plan for a Mesh-TensorFlow layout `name:axis, ...`. Raises BadInput if it is illegal, or if no plan has its shardings."""
    return plan_of(mesh_tensorflow.program(graph, mesh, mesh_tensorflow.layout_of(layout, graph, mesh)))


def plan_of_annotations(graph: Graph, mesh: Sizes, annotations: Mapping[str, str]) -> Plan:
    """Return the Plan for annotations that GSPMD propagates. Raises BadInput for wrong annotations, or if no plan has these shardings."""
    return plan_of(gspmd.program(graph, mesh, annotations))


def plan_of(program: Program) -> Plan:
    """Return the Plan with the program's shardings: degrees, kind of tensor parallelism and engine. Raises BadInput if no plan has these
    shardings."""
    kind = _Kind.nearest(program)
    idle = [axis for axis in program.mesh if program.mesh[axis] > 1 and axis not in (*kind.data, *kind.tensor)]
    if idle:
        got = f"an axis {idle[0]} that cuts neither the batch nor heads and hidden units"
        needed = "axes that each cut one of them, because experts use no ranks of their own"
        raise BadInput("mesh", got=got, needed=needed, fix=f"cut batch by {idle[0]}, or leave the axis out")
    if len(kind.tensor) > 1:
        raise _other("heads and hidden units", "+".join(kind.tensor), "one axis", f"leave out {kind.tensor[1]}")
    engine, tensor = _check_weights(program, kind), _check_stream(program, kind)
    dp, tp, ep, etp = (num_parts(axes, program.mesh) for axes in (kind.data, kind.tensor, kind.experts, kind.expert_hidden))
    return Plan(dp=dp, tp=tp, ep=ep, etp=etp, engine=engine, tensor=tensor)


@dataclass(frozen=True)
class _Kind:
    """Mesh axes of a plan. data: axes that cut the batch. tensor: axes that cut dense matrices. experts, expert_hidden: axes that cut the
    dims of these names in experts' weights."""

    data: Axes
    tensor: Axes
    experts: Axes
    expert_hidden: Axes

    @staticmethod
    def nearest(program: Program) -> _Kind:
        """Return the mesh axes of a plan whose shardings equal this program's as far as possible. Data axes cut the batch dim of the
        residual stream. Tensor axes are the other axes that cut heads, hidden units or vocabulary of dense weights."""
        data, weights = _cutting(program, _stream(program), ("batch",)), program.graph.parameters
        experts = {name: letters for name, letters in weights.items() if _of_experts(program.graph, letters)}
        dense = {name: letters for name, letters in weights.items() if name not in experts}
        tensor = tuple(axis for axis in _cutting(program, dense, BY_TENSOR) if axis not in data)
        return _Kind(data, tensor, _cutting(program, experts, ("experts",)), _cutting(program, experts, ("expert_hidden",)))

    def axes(self, name: str, *, of_experts: bool) -> Axes:
        """Return the mesh axes that cut the dim `name` of a weight in this plan. of_experts: whether the weight belongs to experts."""
        if of_experts:
            return {"experts": self.experts, "expert_hidden": self.expert_hidden}.get(name, ())
        return self.tensor if name in BY_TENSOR else ()


def _of_experts(graph: Graph, letters: str) -> bool:
    """Return whether a weight with these dims belongs to experts. (A router's weight has a dim `experts`, but no `expert_hidden`.)"""
    return "expert_hidden" in {graph.dims[letter].name for letter in letters}


def _stream(program: Program) -> dict[str, str]:
    """Return a dict: tensor -> letters of its dims, for the tensors of the residual stream: embeddings, outputs of norms, and residual sums
    after attention and feed-forward networks."""
    dims, kinds = program.graph.dims, ("lookup", "pointwise", "norm")
    named = {op.name: op.output for op in program.graph.operators if op.kind in kinds}
    return {name: letters for name, letters in named.items() if {dims[letter].name for letter in letters} == {"batch", "length", "width"}}


def _cutting(program: Program, tensors: Mapping[str, str], names: tuple[str, ...]) -> Axes:
    """Return the mesh axes that cut a dim with one of these `names` in any of the tensors. tensors: tensor -> letters of its dims."""
    found = {
        axis
        for tensor, letters in tensors.items()
        for letter, axes in zip(letters, program.shardings[tensor].dims, strict=True)
        if program.graph.dims[letter].name in names
        for axis in axes
    }
    return tuple(axis for axis in program.mesh if axis in found)


def _check_weights(program: Program, kind: _Kind) -> str:
    """Check that weights have the plan's shardings. Returns the engine: fsdp if the data axes shard all dense weights, ddp if they shard
    none."""
    sharded, whole = list[str](), list[str]()
    for name, letters in program.graph.parameters.items():
        of_experts = _of_experts(program.graph, letters)
        names = [program.graph.dims[letter].name for letter in letters]
        wanted = Sharding(tuple(kind.axes(dim, of_experts=of_experts) for dim in names))
        got = program.shardings[name]
        less = Sharding(tuple(tuple(axis for axis in axes if of_experts or axis not in kind.data) for axes in got.dims))
        if less != wanted:
            dim = next(i for i, (a, b) in enumerate(zip(less.dims, wanted.dims, strict=True)) if a != b)
            fix = f"add {names[dim]}:{wanted.dims[dim][0]}" if wanted.dims[dim] else f"do not cut {names[dim]}"
            raise _other(name, str(got), f"{wanted} as tensor.kind 1d has it", fix)
        if not of_experts:
            (whole if less == got else sharded).append(name)
    if sharded and whole:
        needed = f"a dim over {'+'.join(kind.data)}, as {sharded[0]} has"
        raise _other(whole[0], str(program.shardings[whole[0]]), needed, "cut all weights or none")
    return CUT if sharded else PLAIN


def _check_stream(program: Program, kind: _Kind) -> Literal["1d", "sliced"]:
    """Check that the data axes cut the batch of the residual stream. Returns sliced if the tensor axis cuts its length, else 1d."""
    found: set[Axes] = set()
    for name, letters in _stream(program).items():
        of = {program.graph.dims[letter].name: axes for letter, axes in zip(letters, program.shardings[name].dims, strict=True)}
        if of["batch"] != kind.data or of["width"] or of["length"] not in ((), kind.tensor):
            needed = f"batch over {'+'.join(kind.data) or 'nothing'} and width whole"
            raise _other(name, str(program.shardings[name]), needed, f"annotate {name} with this sharding")
        found.add(of["length"])
    if len(found) > 1:
        got, fix = "length cut after some operators, whole after others", "annotate all tensors between layers with the same sharding"
        raise _other("tokens between layers", got, "one sharding after all operators", fix)
    return "sliced" if kind.tensor and kind.tensor in found else "1d"


def _other(what: str, got: str, needed: str, fix: str) -> BadInput:
    """Return the error for a tensor `what` with a sharding that no plan has."""
    return BadInput(f"sharding of {what}", got=got, needed=needed, fix=f"{fix}, or run the graph by DTensor")
