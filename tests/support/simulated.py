"""Runs a program of all ranks in one process: every tensor is a list of the ranks' arrays, and a collective is a loop over them.

A plain second implementation of parallel/annotations/partition.py. It uses the program's shardings and steps, implements collectives, and
fails if ranks that should hold equal values do not. Products, dispatch and combine are einsums; pointwise operators are tanh of one input
or the product of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np

from parallel.annotations.graph import Graph, Operator
from parallel.annotations.partition import Program, shape
from parallel.annotations.resharding import Sharding, Sizes, Step, reshard

Parts = list[np.ndarray]


def places(mesh: Sizes) -> list[dict[str, int]]:
    """Return for each rank of the mesh: axis -> the rank's index on it."""
    return [dict(zip(mesh, place, strict=True)) for place in product(*map(range, mesh.values()))]


def parts_of(whole: np.ndarray, sharding: Sharding, mesh: Sizes, *, seed: int = 0) -> Parts:
    """Return each rank's array of a tensor. For partial sums, arrays are random on all ranks but the last, which gets the difference."""
    drawn = np.random.default_rng(seed)
    shares = {place: drawn.standard_normal(whole.shape) for place in product(*(range(mesh[axis]) for axis in sharding.partial))}
    last = list(shares)[-1]
    shares[last] = whole - sum((share for place, share in shares.items() if place != last), np.zeros_like(whole))
    return [_cut(shares[tuple(place[axis] for axis in sharding.partial)], sharding, mesh, place) for place in places(mesh)]


def _cut(whole: np.ndarray, sharding: Sharding, mesh: Sizes, place: Mapping[str, int]) -> np.ndarray:
    for dim, axes in enumerate(sharding.dims):
        for axis in axes:
            whole = np.split(whole, mesh[axis], dim)[place[axis]]
    return whole


def whole_of(parts: Parts, sharding: Sharding, mesh: Sizes, size: tuple[int, ...]) -> np.ndarray:
    """Assemble the whole tensor from the ranks' arrays. Raises AssertionError if copies differ."""
    total, seen = np.zeros(size), np.zeros(size)
    numbers = np.arange(int(np.prod(size))).reshape(size)
    copies = {axis for axis in mesh if axis not in sharding.axes}
    for place, part in zip(places(mesh), parts, strict=True):
        twin = next(i for i, other in enumerate(places(mesh)) if all(other[a] == (0 if a in copies else place[a]) for a in mesh))
        np.testing.assert_allclose(part, parts[twin], atol=1e-12)
        if not any(place[a] for a in copies):
            mine = _cut(numbers, sharding, mesh, place)
            total.reshape(-1)[mine] += part
            seen.reshape(-1)[mine] += 1
    assert (seen == np.prod([mesh[a] for a in sharding.partial])).all()
    return total


def take(parts: Parts, step: Step, mesh: Sizes) -> Parts:
    """Run one step that changes a tensor's sharding, a collective or a local operation. Return each rank's new array."""
    ranks, out = places(mesh), []
    for place in ranks:
        group = [part for other, part in zip(ranks, parts, strict=True) if all(other[a] == place[a] for a in mesh if a != step.axis)]
        n, me = len(group), place[step.axis]
        mine = {"slice": group[me], "all_reduce": sum(group), "reduce_scatter": sum(group)}.get(step.kind)
        if step.kind in ("slice", "reduce_scatter"):
            mine = np.split(mine, n, step.target)[me]
        elif step.kind == "all_gather":
            mine = np.concatenate(group, step.source)
        elif step.kind == "all_to_all":
            mine = np.concatenate([np.split(part, n, step.target)[me] for part in group], step.source)
        out.append(mine)
    return out


def moved(parts: Parts, held: Sharding, wanted: Sharding, program: Program, tensor: str) -> Parts:
    steps = reshard(held, wanted, shape(program.graph, tensor), program.mesh, itemsize=program.graph.itemsize)
    for step in steps:
        parts = take(parts, step, program.mesh)
    return parts


def compute(op: Operator, inputs: list[np.ndarray]) -> np.ndarray:
    assert op.kind in ("product", "dispatch", "combine", "pointwise"), op.kind
    if op.kind == "pointwise" and len(inputs) == 1:
        return np.tanh(inputs[0])
    return np.einsum(op.rule, *inputs)


def gradient_of(op: Operator, place: int, inputs: list[np.ndarray], grad: np.ndarray) -> np.ndarray:
    """Return the gradient of input number `place` on one rank, given the output's. It is repeated along dims that the output lacks."""
    if op.kind == "pointwise" and len(inputs) == 1:
        return grad * (1 - np.tanh(inputs[0]) ** 2)
    others = [i for i in range(len(inputs)) if i != place]
    terms, there = [op.output, *(op.terms[i] for i in others)], set("".join([op.output, *(op.terms[i] for i in others)]))
    lacks = [letter for letter in op.terms[place] if letter not in there]
    ones = [np.ones(inputs[place].shape[op.terms[place].index(letter)]) for letter in lacks]
    return np.einsum(f"{','.join([*terms, *lacks])}->{op.terms[place]}", grad, *(inputs[i] for i in others), *ones)


def run(program: Program, values: Mapping[str, np.ndarray], output_grads: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a program forward and backward. Return name -> whole tensor, assembled from all ranks, and "grad NAME" -> its gradient."""
    graph, mesh, lies = program.graph, program.mesh, program.shardings
    held = {name: parts_of(value, lies[name], mesh) for name, value in values.items()}
    read: dict[str, list[Parts]] = {}
    for work in program.work:
        op = work.operator
        inputs = [moved(held[n], lies[n], need, program, n) for n, need in zip(op.inputs, work.needs, strict=True)]
        read[op.name] = inputs
        made = [compute(op, [parts[rank] for parts in inputs]) for rank in range(len(places(mesh)))]
        held[op.name] = moved(made, work.made, lies[op.name], program, op.name)
    grads: dict[str, Parts] = {name: parts_of(grad, lies[name], mesh) for name, grad in output_grads.items()}
    for work in reversed(program.work):
        op = work.operator
        if op.name not in grads:
            continue
        grad = moved(grads[op.name], lies[op.name], Sharding(work.made.dims), program, op.name)
        for i, (name, given) in enumerate(zip(op.inputs, work.gives, strict=True)):
            if given is not None:
                mine = [gradient_of(op, i, [parts[rank] for parts in read[op.name]], grad[rank]) for rank in range(len(grad))]
                mine = moved(mine, given, lies[name], program, name)
                grads[name] = [a + b for a, b in zip(grads[name], mine, strict=True)] if name in grads else mine
    whole = {name: whole_of(parts, lies[name], mesh, shape(graph, name)) for name, parts in held.items()}
    return whole | {f"grad {name}": whole_of(parts, lies[name], mesh, shape(graph, name)) for name, parts in grads.items()}


def alone(graph: Graph, values: Mapping[str, np.ndarray], output_grads: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the same as `run`, computed by torch on one process."""
    import torch  # imported here, because the simulation does not need it

    held = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    for op in graph.operators:
        inputs = [held[name] for name in op.inputs]
        held[op.name] = inputs[0].tanh() if op.kind == "pointwise" and len(inputs) == 1 else torch.einsum(op.rule, *inputs)
        held[op.name].retain_grad()
    sum((held[name] * torch.tensor(grad)).sum() for name, grad in output_grads.items()).backward()  # type: ignore[union-attr]
    found = {name: value.detach().numpy() for name, value in held.items()}
    return found | {f"grad {name}": value.grad.numpy() for name, value in held.items() if value.grad is not None}
