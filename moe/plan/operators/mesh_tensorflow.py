"""Mesh-TensorFlow: dims have names, and a layout gives the mesh axis over which each name is split. All shardings follow from the names.

    layout   batch:rows, heads:columns, hidden:columns, vocab:columns, experts:rows
    einsum   b:rows, f:columns    blf, fd -> bld    each rank computes its part; f is summed, so an all-reduce over columns follows

    legal    each name is on at most one axis; no two names of a tensor or operator are on the same axis; the axis divides the size
    costs    partition.py: FLOPs of a part, sums over cut names, exchanges if a tensor is read under other names, bytes

A tensor is sharded equally wherever it has the same names. To change its sharding it gets other names (Mesh-TensorFlow's reshape). In MoE
layers, the experts' rows have the names `experts` and `expert_batch` between dispatch and combine, and all tensors outside have `batch`
and `experts_whole`. If batch and experts are both on rows, this renaming is the all-to-all.

best_layout.py finds the best layout. Sources: Mesh-TensorFlow (arXiv 1811.02084), sections 3 and 4, and its moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from parallel.annotations.graph import Dim, Graph, Operator
from parallel.annotations.partition import Cuts, Program, indices, needed, tensors, work_of
from parallel.annotations.resharding import Sharding, Sizes, check_axes
from parallel.errors import BadInput, did_you_mean

Layout = Mapping[str, str]  # name of a dim -> axis of the mesh
INSIDE, OUTSIDE = "expert_batch", "experts_whole"


def layout_of(text: str, graph: Graph, mesh: Sizes) -> dict[str, str]:
    """Parse a layout `name:axis, ...`. Raises BadInput for unknown or repeated names, unknown axes, and illegal layouts."""
    found: dict[str, str] = {}
    for rule in filter(None, (word.strip() for word in text.split(","))):
        name, colon, axis = (part.strip() for part in rule.partition(":"))
        names = sorted({dim.name for dim in renamed(graph).dims.values()})
        if not colon:
            dim = did_you_mean(name.split()[0], names) or names[0]
            raise BadInput("layout", got=repr(rule), needed="name:axis", fix=f"write {dim}:{next(iter(mesh), 'axis')}")
        if name in found:
            raise BadInput("layout", got=f"{name} twice", needed="each dim over one axis at most", fix=f"leave out {rule}")
        found[name] = axis
    check(graph, found, mesh)
    return found


def check(graph: Graph, layout: Layout, mesh: Sizes) -> None:
    """Raise BadInput for unknown names and axes, sizes that are not divisible, and two dims of a tensor or operator on one axis."""
    graph = renamed(graph)
    names = sorted({dim.name for dim in graph.dims.values()})
    for name, axis in layout.items():
        if name not in names:
            near = did_you_mean(name, names) or names[0]
            raise BadInput("layout", got=f"a dim {name!r}", needed=f"one of {', '.join(names)}", fix=f"use {near}")
        check_axes([axis], mesh, what=f"layout {name}:{axis}")
    for letter in graph.dims:
        dim = graph.dims[letter]
        if dim.name in layout and dim.size % mesh[layout[dim.name]]:
            ways = mesh[layout[dim.name]]
            raise BadInput(
                f"layout {dim.name}:{layout[dim.name]}",
                got=f"{dim.name} of size {dim.size} over {ways} ranks",
                needed="equal parts",
                fix=f"make it {-(-dim.size // ways) * ways}, or leave {dim.name} out",
            )
    for where, letters in together(graph).items():
        for a, b in combinations((graph.dims[letter].name for letter in letters), 2):
            if a in layout and layout.get(b) == layout[a]:
                other = next((axis for axis in mesh if axis != layout[a]), None)
                raise BadInput(
                    f"layout {a}:{layout[a]}, {b}:{layout[b]}",
                    got=f"two dims of {where} on {layout[a]}",
                    needed="each dim of a tensor on an axis of its own",
                    fix=f"leave out {b}" + (f", or use {b}:{other}" if other else ""),
                )


def together(graph: Graph) -> dict[str, str]:
    """Name of a tensor or operator -> its letters."""
    return {name: graph.letters(name) for name in (*graph.inputs, *graph.parameters)} | {op.name: op.factors for op in graph.operators}


def renamed(graph: Graph) -> Graph:
    """Graph with other names for the batch inside of MoE dispatch and for the experts outside of it. Unchanged without experts."""
    inside = {op.name for op in graph.operators if op.kind in ("product", "pointwise") and _has(graph, op.factors, "experts", "slots")}
    if not inside:
        return graph
    free = iter(chr(c) for c in range(ord("A"), ord("Z") + 1) if chr(c) not in graph.dims)
    dims, of_inside, of_outside = dict(graph.dims), dict[str, str](), dict[str, str]()
    for letter, dim in graph.dims.items():
        role, table = {"batch": (INSIDE, of_inside), "experts": (OUTSIDE, of_outside)}.get(dim.name, ("", of_inside))
        if role:
            table[letter] = next(free)
            dims[table[letter]] = Dim(role, dim.size)
    operators = tuple(_with(op, of_inside if op.name in inside else of_outside) for op in graph.operators)
    weights = {name for op in graph.operators if op.name in inside for name in op.inputs}
    outside = str.maketrans(of_outside)
    parameters = {name: letters if name in weights else letters.translate(outside) for name, letters in graph.parameters.items()}
    inputs = {name: letters.translate(outside) for name, letters in graph.inputs.items()}
    return Graph(dims, inputs, parameters, operators, graph.itemsize)


def _has(graph: Graph, letters: str, *roles: str) -> bool:
    return set(roles) <= {graph.dims[letter].name for letter in letters}


def _with(op: Operator, letters: Mapping[str, str]) -> Operator:
    table = str.maketrans(dict(letters))
    return replace(op, rule=op.rule.translate(table), whole=op.whole.translate(table), statistics=op.statistics.translate(table))


def program(graph: Graph, mesh: Sizes, layout: Layout) -> Program:
    """Program of all ranks for a layout. Raises BadInput as `check` does."""
    check(graph, layout, mesh)
    graph = renamed(graph)
    of = by_letter(graph, layout)
    shardings = {name: Sharding(needed(of, graph.letters(name))) for name in tensors(graph)}
    constant = indices(graph)
    return Program(graph, mesh, shardings, tuple(work_of(op, cuts(of, op), constant) for op in graph.operators))


def by_letter(graph: Graph, layout: Layout) -> Cuts:
    return {letter: (layout[dim.name],) for letter, dim in graph.dims.items() if dim.name in layout}


def cuts(of: Cuts, op: Operator) -> Cuts:
    """Cuts of one operator, from the cuts of all letters. Factors that it needs whole are not cut; they are gathered for it."""
    return {letter: of[letter] for letter in op.factors if letter in of and letter not in op.whole}
