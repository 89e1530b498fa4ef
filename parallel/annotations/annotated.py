"""Runs a partitioned program (parallel/annotations/partition.py) on real ranks with torch's DTensor, forward and backward.

    DTensor --redistribute, to_local--> this rank's shard --compute--> local output --from_local, redistribute--> DTensor

A factor is a letter of the operator's einsum rule. An input's gradient is declared Partial over each mesh axis that shards a factor which
the input lacks. DTensor derives all collectives from these placements. It can shard a dim over several axes only in the order of the mesh;
a program that needs another order is refused.
Source: GSPMD (arXiv 2105.04663), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.annotations.graph import Operator
from parallel.annotations.partition import Program, Work, shape
from parallel.annotations.resharding import Sharding, Sizes, num_parts
from parallel.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def device_mesh(sizes: Sizes, *, device: str = "cpu") -> DeviceMesh:
    """Return a DeviceMesh of all ranks of the process group. sizes: axis -> its size; the last axis varies fastest from rank to rank."""
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@dataclass(frozen=True)
class Rank:
    """An argument of every Compute function: this rank's position in the mesh, and the operator to compute. sizes: mesh axis -> size.
    work: the operator with its sharding. factors: letter of the operator's rule -> size in the unsharded model."""

    mesh: DeviceMesh
    sizes: Sizes
    work: Work
    factors: Mapping[str, int]

    def region(self, letter: str) -> slice:
        """Return the range of indices that this rank computes along a factor (a letter of the operator's einsum)."""
        axes = self.work.cuts.get(letter, ())
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + self.mesh.get_local_rank(axis)
        size = self.factors[letter] // num_parts(axes, self.sizes)
        return slice(index * size, (index + 1) * size)

    def total(self, local: Tensor, letters: str, *, read: Literal["in parts", "in copies"]) -> Tensor:
        """All-reduce `local` (sum) over the mesh axes that shard the dims with these letters, for example for the mean square of a norm.
        read: how ranks use the sum, which decides the backward pass. "in parts": each rank computes a different part of the output from it
        (a norm), so the sum's gradients are all-reduced too. "in copies": all ranks compute the same result from it (a loss), so the
        gradients are already equal and are not reduced."""
        return self._all_reduce(local, letters, "sum", read)

    def largest(self, local: Tensor, letters: str) -> Tensor:
        """All-reduce `local` (elementwise maximum) over the mesh axes that shard the dims with these letters, without gradient."""
        return self._all_reduce(local.detach(), letters, "max", "in copies")

    def _all_reduce(self, local: Tensor, letters: str, how: str, read: str) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        axes = {axis for letter in letters for axis in self.work.cuts.get(letter, ())}
        if not axes:
            return local
        partial: list[Placement] = [Partial(how) if axis in axes else Replicate() for axis in self.sizes]
        grads: list[Placement] = [Partial() if axis in axes and read == "in parts" else Replicate() for axis in self.sizes]
        reduced = DTensor.from_local(local, self.mesh, partial, run_check=False).redistribute(placements=[Replicate() for _ in self.sizes])
        return reduced.to_local(grad_placements=grads)


Compute = Callable[[Operator, Sequence[Tensor], Rank], Tensor]  # (operator, this rank's shards of its inputs, rank) -> local output


def product(op: Operator, inputs: Sequence[Tensor], rank: Rank) -> Tensor:
    """Compute an operator as the einsum of its rule over its local inputs."""
    return torch.einsum(op.rule, *inputs)


class Annotated:
    """Runs an SPMD program (partition.py) on real ranks. mesh: must have the program's axes in the same order. compute: computes an
    operator on local tensors. Raises BadInput if the program shards a dim over several axes in another order than the mesh's."""

    def __init__(self, program: Program, mesh: DeviceMesh, compute: Compute = product) -> None:
        self.program, self.mesh, self.compute = program, mesh, compute
        assert prod(program.mesh.values()) == mesh.size() and tuple(program.mesh) == mesh.mesh_dim_names
        for name, sharding in program.shardings.items():
            self.placements(sharding, name)
        for work in program.work:
            for sharding in (*work.needs, work.made):
                self.placements(sharding, work.operator.name)

    def placed(self, name: str, whole: Tensor) -> DTensor:
        """Return an input or a parameter as a leaf DTensor with the program's sharding. whole: the unsharded tensor, equal on all ranks.
        The DTensor requires grad if it is floating-point."""
        from torch.distributed.tensor import DTensor

        sharding = self.program.shardings[name]
        shard = whole
        for dim, axes in enumerate(sharding.dims):
            for axis in axes:
                shard = shard.chunk(self.program.mesh[axis], dim)[self.mesh.get_local_rank(axis)]
        made = DTensor.from_local(shard.detach().clone(), self.mesh, self.placements(sharding, name), run_check=False)
        made.requires_grad_(whole.is_floating_point())
        return made

    def __call__(self, values: Mapping[str, DTensor]) -> dict[str, DTensor]:
        """Run the forward pass. values: name -> DTensor made by `placed`, for each input and parameter. Return a dict: name of each
        operator -> its output."""
        from torch.distributed.tensor import DTensor

        tensors, sizes = dict(values), {letter: dim.size for letter, dim in self.program.graph.dims.items()}
        entered: dict[tuple[str, Sharding], DTensor] = {}
        for work in self.program.work:
            op, inputs = work.operator, []
            for name, need, given in zip(op.inputs, work.needs, work.gives, strict=True):
                if (name, need) not in entered:
                    entered[name, need] = tensors[name].redistribute(placements=self.placements(need, name))
                grads = None if given is None else self.placements(given, name)
                inputs.append(entered[name, need].to_local(grad_placements=grads))
            local = self.compute(op, inputs, Rank(self.mesh, self.program.mesh, work, sizes))
            made = DTensor.from_local(local, self.mesh, self.placements(work.made, op.name), run_check=False)
            tensors[op.name] = made.redistribute(placements=self.placements(self.program.shardings[op.name], op.name))
            assert tuple(tensors[op.name].shape) == shape(self.program.graph, op.name), f"{op.name}: {tuple(tensors[op.name].shape)}"
        return {op.name: tensors[op.name] for op in self.program.graph.operators}

    def placements(self, sharding: Sharding, tensor: str) -> list[Placement]:
        """Return the sharding as DTensor placements, one for each mesh axis. tensor: its name, for the error message if DTensor has no such
        sharding."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        order = list(self.program.mesh)
        for axes in sharding.dims:
            wanted = sorted(axes, key=order.index)
            if list(axes) != wanted:
                needed = f"the order of the mesh's axes, {', '.join(order)}, in which DTensor cuts a dim"
                raise BadInput(f"sharding of {tensor}", got="+".join(axes), needed=needed, fix=f"annotate {'+'.join(wanted)}")
        of = {axis: dim for dim, axes in enumerate(sharding.dims) for axis in axes}
        return [Shard(of[axis]) if axis in of else Partial() if axis in sharding.partial else Replicate() for axis in order]
