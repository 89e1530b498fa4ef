"""An annotated graph on real ranks: torch's DTensor runs the program of parallel/annotations/partition.py, forward and backward.

    value --redistribute--> as the operator needs it --to_local--> shard --compute--> output --from_local, redistribute--> value

Each operator works on plain local tensors, this rank's shards. DTensor's placements say how its inputs and its output are sharded:
Shard(dim) for each mesh axis that cuts a dim, Partial for an axis over which ranks have partial sums. The gradient of an input is Partial
over every axis that cuts a factor (a letter of the operator's rule) which the input lacks. So DTensor derives every sum, gather and
exchange, forward and backward. DTensor cuts a dim by mesh axes only in the mesh's order; a sharding with another order is refused.

A function `compute(op, local inputs, rank) -> local output` computes an operator; the default is `product`, an einsum. Sources: GSPMD
(arXiv 2105.04663), section 4; torch.distributed.tensor.
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
    """Make a DeviceMesh of the running ranks. sizes: axis -> its size; the last axis varies fastest from rank to rank."""
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@dataclass(frozen=True)
class Rank:
    """This rank, for a function that computes an operator. work: the operator and its cuts. factors: letter -> size in the whole model."""

    mesh: DeviceMesh
    sizes: Sizes
    work: Work
    factors: Mapping[str, int]

    def region(self, letter: str) -> slice:
        """Return the slice of a factor (0 to its whole size) that this rank has in the operator."""
        axes = self.work.cuts.get(letter, ())
        place = 0
        for axis in axes:
            place = place * self.sizes[axis] + self.mesh.get_local_rank(axis)
        part = self.factors[letter] // num_parts(axes, self.sizes)
        return slice(place * part, (place + 1) * part)

    def total(self, local: Tensor, letters: str, *, read: Literal["in parts", "in copies"]) -> Tensor:
        """Return the sum of the ranks' tensors `local` over the axes that cut these factors, as for the mean square of a norm.

        read: what ranks compute from the sum. "in parts": other parts of an output on each rank (a norm), so the sum's gradients are added
        over ranks. "in copies": the same on every rank (a loss), so each already has the whole gradient.
        """
        return self._over(local, letters, "sum", read)

    def largest(self, local: Tensor, letters: str) -> Tensor:
        """Return the elementwise maximum of the ranks' tensors `local` over the axes that cut these factors, without gradient."""
        return self._over(local.detach(), letters, "max", "in copies")

    def _over(self, local: Tensor, letters: str, how: str, read: str) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        axes = {axis for letter in letters for axis in self.work.cuts.get(letter, ())}
        if not axes:
            return local
        whole = [Replicate() for _ in self.sizes]
        parts: list[Placement] = [Partial(how) if axis in axes else Replicate() for axis in self.sizes]
        grads: list[Placement] = [Partial() if axis in axes and read == "in parts" else Replicate() for axis in self.sizes]
        shared = DTensor.from_local(local, self.mesh, parts, run_check=False)
        return shared.redistribute(placements=whole).to_local(grad_placements=grads)


Compute = Callable[[Operator, Sequence[Tensor], Rank], Tensor]


def product(op: Operator, inputs: Sequence[Tensor], rank: Rank) -> Tensor:
    """Compute an operator as an einsum of its local inputs."""
    return torch.einsum(op.rule, *inputs)


class Annotated:
    """Runs a program on the running ranks. mesh: has the program's axes, in its order. compute: computes an operator on local tensors.

    Raises BadInput if the program cuts a dim by axes in another order than the mesh's.
    """

    def __init__(self, program: Program, mesh: DeviceMesh, compute: Compute = product) -> None:
        self.program, self.mesh, self.compute = program, mesh, compute
        assert prod(program.mesh.values()) == mesh.size() and tuple(program.mesh) == mesh.mesh_dim_names
        for name, sharding in program.shardings.items():
            self.placements(sharding, name)
        for work in program.work:
            for sharding in (*work.needs, work.made):
                self.placements(sharding, work.operator.name)

    def placed(self, name: str, whole: Tensor) -> DTensor:
        """Return an input or a parameter, of which every rank has `whole`, as a sharded leaf DTensor; floating-point ones require grad."""
        from torch.distributed.tensor import DTensor

        sharding = self.program.shardings[name]
        part = whole
        for dim, axes in enumerate(sharding.dims):
            for axis in axes:
                part = part.chunk(self.program.mesh[axis], dim)[self.mesh.get_local_rank(axis)]
        made = DTensor.from_local(part.detach().clone(), self.mesh, self.placements(sharding, name), run_check=False)
        made.requires_grad_(whole.is_floating_point())
        return made

    def __call__(self, values: Mapping[str, DTensor]) -> dict[str, DTensor]:
        """Run the program. values: all inputs and parameters, made by `placed`. Returns operator -> output."""
        from torch.distributed.tensor import DTensor

        held, sizes = dict(values), {letter: dim.size for letter, dim in self.program.graph.dims.items()}
        brought: dict[tuple[str, Sharding], DTensor] = {}
        for work in self.program.work:
            op, inputs = work.operator, []
            for name, need, given in zip(op.inputs, work.needs, work.gives, strict=True):
                if (name, need) not in brought:
                    brought[name, need] = held[name].redistribute(placements=self.placements(need, name))
                grads = None if given is None else self.placements(given, name)
                inputs.append(brought[name, need].to_local(grad_placements=grads))
            local = self.compute(op, inputs, Rank(self.mesh, self.program.mesh, work, sizes))
            made = DTensor.from_local(local, self.mesh, self.placements(work.made, op.name), run_check=False)
            held[op.name] = made.redistribute(placements=self.placements(self.program.shardings[op.name], op.name))
            assert tuple(held[op.name].shape) == shape(self.program.graph, op.name), f"{op.name}: {tuple(held[op.name].shape)}"
        return {op.name: held[op.name] for op in self.program.graph.operators}

    def placements(self, sharding: Sharding, tensor: str) -> list[Placement]:
        """Return the sharding of `tensor` as placements, one for each mesh axis."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        order = list(self.program.mesh)
        for axes in sharding.dims:
            wanted = sorted(axes, key=order.index)
            if list(axes) != wanted:
                needed = f"the order of the mesh's axes, {', '.join(order)}, in which DTensor cuts a dim"
                raise BadInput(f"sharding of {tensor}", got="+".join(axes), needed=needed, fix=f"annotate {'+'.join(wanted)}")
        of = {axis: dim for dim, axes in enumerate(sharding.dims) for axis in axes}
        return [Shard(of[axis]) if axis in of else Partial() if axis in sharding.partial else Replicate() for axis in order]
