"""Searches over Mesh-TensorFlow layouts and over GSPMD annotations. Each finds a Plan that the trainer can run.

    meshes       rows x columns of all devices; columns within a node
    mesh_tf      for each mesh: the best legal layout (mesh_tensorflow.py), and the best layout that the trainer can run
    gspmd        for each mesh: the sets of annotations in SETS, propagated to all tensors (gspmd.py)
                 \\__ then the fastest layout or set that fits and can run, by the costs of its program (partition.py)

A program computes one micro-batch of all replicas; gradients of weights are summed once a step. Neither paper has pipelines, so the plans
have no stages. Mesh-TensorFlow cannot shard weights over the batch's axis; annotations can (FSDP).

Sources: Mesh-TensorFlow (arXiv 1811.02084), section 4; GSPMD (arXiv 2105.04663), section 5, for what is annotated in Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from moe.plan.job.network import Plan
from moe.plan.operators import gspmd as spread
from moe.plan.operators import mesh_tensorflow
from moe.plan.operators.kinds import BY_TENSOR, plan_of
from moe.plan.operators.links import Machine
from moe.plan.operators.mesh_tensorflow import best_layout
from moe.plan.search.search import Allowed, SearchResult
from parallel.annotations.graph import Graph
from parallel.annotations.partition import Machine as Rates
from parallel.annotations.partition import Program
from parallel.annotations.resharding import Sizes
from parallel.errors import BadInput, counted

# ways to split the experts' weights over the mesh: "dim:mesh axis", separated by commas; "": not split
EXPERTS = ("", "experts:rows", "experts:columns", "experts:rows, expert_hidden:columns", "experts:columns, expert_hidden:rows")
# the set `batch` annotates dense matrices whose names end with these: query projections, and the first matrix of feed-forward networks
_FIRST = (".q.weight", ".q_up.weight", ".w1.weight")
SETS = ("batch", "batch and slices", "weights over the batch")  # sets of annotations, which `annotated` explains


@dataclass(frozen=True)
class _Candidate:
    """A mesh, and a program with one sharding for each operator. rules: the layout or annotations from which it was made, for messages."""

    mesh: Sizes
    program: Program
    rules: Mapping[str, str]


def mesh_tf(graph: Graph, machine: Machine, microbatches: int = 1, *, allowed: Allowed = lambda plan: True) -> SearchResult:
    """Find the fastest layout that the trainer can run. Raises BadInput if none fits. allowed: returns whether the recipe can be trained
    with a plan. `free_seconds` of the result is the step time of the fastest legal layout, even if the trainer cannot run it."""
    free, where = inf, ""
    for mesh in meshes(machine):
        rates = _rates(machine, mesh)
        try:
            best = best_layout(graph, mesh, rates, most_bytes=machine.memory_bytes)
        except BadInput:
            continue  # no layout of this mesh fits into memory
        seconds = _seconds(mesh_tensorflow.program(graph, mesh, best.layout), rates, microbatches)
        if seconds < free:
            free, where = seconds, f"{_said(best.layout)} on {_shape(mesh)}"
    found = _best(_layouts(graph, machine), machine, microbatches, allowed, "mesh-tf")
    return _found("mesh-tf", found, min(free, found[1]), where if free < found[1] * (1 - 1e-9) else "")


def gspmd(graph: Graph, machine: Machine, microbatches: int = 1, *, allowed: Allowed = lambda plan: True) -> SearchResult:
    """Find the fastest set of annotations (SETS) that the trainer can run. Raises BadInput if none fits. allowed: returns whether the
    recipe can be trained with a plan."""
    found = _best(_annotated(graph, machine), machine, microbatches, allowed, "gspmd")
    return _found("gspmd", found, found[1], "")


def meshes(machine: Machine) -> Iterator[dict[str, int]]:
    """Yield all meshes rows x columns of the devices, with columns within a node. An axis with one rank is left out."""
    for columns in range(1, machine.node_size + 1):
        if machine.devices % columns == 0 and machine.node_size % columns == 0:
            yield {name: size for name, size in (("rows", machine.devices // columns), ("columns", columns)) if size > 1}


def _rates(machine: Machine, mesh: Sizes) -> Rates:
    """Return the rates of a mesh on this machine. All axes get the latency of the slowest link."""
    links = machine.mesh(*mesh.values()).links
    bandwidth = {axis: 1 / link.beta_s for axis, link in zip(mesh, links, strict=True)}
    return Rates(machine.flops, bandwidth, max((link.alpha_s for link in links), default=0.0))


def _layouts(graph: Graph, machine: Machine) -> Iterator[_Candidate]:
    """Yield one layout for each mesh and each alternative in EXPERTS, which says how experts are split. The mesh axis `rows` splits the
    batch; the mesh axis `columns` splits heads, hidden units and vocabulary."""
    names = {dim.name for dim in mesh_tensorflow.renamed(graph).dims.values()}
    for mesh in meshes(machine):
        dense = [f"{name}:columns" for name in BY_TENSOR if name in names and "columns" in mesh]
        for experts in EXPERTS if "experts" in names else ("",):
            rules = [*(["batch:rows"] if "rows" in mesh else []), *dense, *filter(None, experts.split(", "))]
            if any(rule.partition(":")[2] not in mesh for rule in rules):
                continue
            try:
                layout = mesh_tensorflow.layout_of(", ".join(rules), graph, mesh)
                yield _Candidate(mesh, mesh_tensorflow.program(graph, mesh, layout), layout)
            except BadInput:
                continue  # the mesh does not divide a size


def _annotated(graph: Graph, machine: Machine) -> Iterator[_Candidate]:
    """Yield one program for each mesh, each set of annotations in SETS, and each alternative in EXPERTS."""
    sparse = any(dim.name == "experts" for dim in graph.dims.values())
    for mesh in meshes(machine):
        for kind in SETS:
            if (kind == "batch and slices" and "columns" not in mesh) or (kind == "weights over the batch" and "rows" not in mesh):
                continue
            for experts in EXPERTS if sparse else ("",):
                axes = dict(rule.split(":") for rule in experts.split(", ") if rule)
                if not set(axes.values()) <= set(mesh):
                    continue
                notes = annotated(graph, mesh, kind, axes)
                try:
                    said = {"annotated": kind, "tensors": str(len(notes)), **axes}
                    yield _Candidate(mesh, spread.program(graph, mesh, notes), said)
                except BadInput:
                    continue  # the mesh does not divide a size


def annotated(graph: Graph, mesh: Sizes, kind: str, experts: Mapping[str, str]) -> dict[str, str]:
    """Return a dict: tensor -> text of its annotation. kind: one of SETS. All sets annotate at least the embedded tokens, one matrix of
    each attention and feed-forward network, the vocabulary and the experts. `batch and slices` also cuts the sequence length of activations
    between layers. `weights over the batch` also cuts every dense weight over `rows`, the mesh axis that cuts the batch. experts: dim
    `experts` or `expert_hidden` -> the mesh axis that cuts it, if any."""
    rows, columns = "rows" if "rows" in mesh else ".", "columns" if "columns" in mesh else "."
    stream = [op for op in graph.operators if {graph.dims[x].name for x in op.output} == {"batch", "length", "width"}]
    between = [op for op in stream if op.kind in ("lookup", "pointwise", "norm")]
    sliced = kind == "batch and slices"
    notes = {op.name: _note(graph, op.output, batch=rows) for op in between[:1]}
    if sliced:
        notes = {op.name: _note(graph, op.output, batch=rows, length=columns) for op in between}
    for name, letters in graph.parameters.items():
        names = [graph.dims[letter].name for letter in letters]
        if "expert_hidden" in names:
            notes[name] = _note(graph, letters, **experts)
        elif kind == "weights over the batch":
            first = next((dim for dim in names if dim not in BY_TENSOR), None)
            notes[name] = _note(graph, letters, **dict.fromkeys(BY_TENSOR, columns), **({first: rows} if first else {}))
        elif "experts" in names and experts:
            notes[name] = _note(graph, letters)  # a router's weight, which no axis cuts
        elif columns != "." and (sliced or name.endswith(_FIRST) or "vocab" in names) and set(names) & set(BY_TENSOR):
            notes[name] = ", ".join(columns if dim in BY_TENSOR else "_" for dim in names)
    if kind == "weights over the batch":
        notes |= {op.name: _note(graph, op.output, batch=rows) for op in between}
    return notes


def _note(graph: Graph, letters: str, **axes: str) -> str:
    """Return the text of a tensor's annotation. letters: one for each of its dims. axes: name of a dim -> the mesh axis that cuts it, or
    `.`. All other dims get `.` (not cut)."""
    return ", ".join(axes.get(graph.dims[letter].name, ".") for letter in letters)


Best = tuple[Plan, float, _Candidate]


def _best(candidates: Iterable[_Candidate], machine: Machine, microbatches: int, allowed: Callable[[Plan], bool], search: str) -> Best:
    """Return (Plan, seconds, candidate) of the fastest candidate that fits, can be run as a Plan, and is allowed. search: name of the
    search, for messages."""
    best: Best | None = None
    least = inf  # fewest bytes of a candidate
    for one in candidates:
        held = one.program.bytes()
        least = min(least, held)
        seconds = _seconds(one.program, _rates(machine, one.mesh), microbatches)
        if held > machine.memory_bytes or (best is not None and seconds >= best[1]):
            continue
        try:
            plan = plan_of(one.program)
        except BadInput:
            continue
        if allowed(plan):
            best = plan, seconds, one
    if best is None:
        if machine.memory_bytes < least < inf:
            got, more = f"{least / 2**30:.1f} GiB a device for the smallest layout", ", or a larger pipeline.microbatches"
            needed = f"at most {machine.memory_bytes / 2**30:.1f} GiB"
        else:
            got, more = "no layout that the trainer runs", ""
            needed = "one with sizes that the mesh divides, and that the recipe's checks accept"
        raise BadInput(f"--search {search}", got=got, needed=needed, fix=f"--search enumerate, which has stages and ZeRO as well{more}")
    return best


def _seconds(program: Program, rates: Rates, microbatches: int) -> float:
    """Return the seconds of a step. Gradients of weights are summed once; everything else is repeated for each micro-batch."""
    weights = program.graph.parameters
    once = sum(rates.seconds(move.step) for move in program.communication if move.direction == "backward" and move.tensor in weights)
    return microbatches * (program.seconds(rates) - once) + once


def _found(search: str, best: Best, free: float, other: str) -> SearchResult:
    """Return the result of a search. best: the fastest that the trainer can run. free: seconds of the fastest legal layout. other: this
    legal layout as text; "" if the trainer can run it."""
    plan, seconds, one = best
    said = f"{_said(one.rules)} on {_shape(one.mesh)}"
    if one.program.conflicts:
        said += f", {counted(len(one.program.conflicts), 'conflict')} between propagated shardings"
    if other:
        said += f"; the trainer cannot run the best legal layout, {other} ({free / seconds:.0%} of the time)"
    return SearchResult(search, plan, seconds, free, dict(one.rules), (), bool(other), said)  # type: ignore[arg-type]


def _said(rules: Mapping[str, str]) -> str:
    return ", ".join(f"{name}:{axis}" for name, axis in rules.items()) or "nothing cut"


def _shape(mesh: Sizes) -> str:
    return " x ".join(f"{size} {axis}" for axis, size in mesh.items()) or "one device"
