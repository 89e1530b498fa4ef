"""Bytes of a model's states on a rank, counted from the live tensors of its engine, each storage once.

parameters    weights that the model reads, as this rank keeps them from step to step
gradients     between the backward pass and the step, of every parameter that has one on this rank
optimizer     moments and all other optimizer states, including master weights separate from the weights that the model reads
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from parallel.data.engine import Engine
from parallel.mesh.collectives import max_over
from parallel.mesh.mesh import Mesh

PARTS = ("parameters", "gradients", "optimizer")


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return bytes of the unique storages behind some tensors, by address. A distributed tensor counts with this rank's shard only."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta" and not local.is_sparse:
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


class ModelStates:
    """Maximum bytes of each kind over the steps measured."""

    def __init__(self) -> None:
        self.most = dict.fromkeys(PARTS, 0)

    def before_step(self, engine: Engine) -> None:
        """Measure gradients: unreduced ones at parameters, and this rank's shard of the sums."""
        waiting = [p.grad for p in engine.module.parameters() if p.grad is not None]
        self._add("gradients", storages([*waiting, *(held.tensor for held in engine.summed_gradients())]))

    def after_step(self, engine: Engine) -> None:
        """Measure parameters and optimizer states, which exist from the first step on."""
        held = list(engine.tensors())
        read = storages([*engine.module.parameters(), *(each.tensor for each in held if each.kind == "working weight")])
        own = storages(each.tensor for each in held if each.kind == "weight")
        if not read:  # the model's own weights exist only while they are gathered
            read = own
        self._add("parameters", read)
        self._add("optimizer", {at: size for at, size in storages(each.tensor for each in held).items() if at not in read})

    def _add(self, part: str, found: dict[int, int]) -> None:
        self.most[part] = max(self.most[part], sum(found.values()))

    def largest(self, mesh: Mesh) -> dict[str, int] | None:
        """Return the maximum over ranks of each kind's bytes; None if no step was measured. Collective."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mine = torch.tensor([self.most[part] for part in PARTS], dtype=torch.float64, device=device)
        most = max_over(mine, mesh.axis("world")).tolist()
        return {part: int(size) for part, size in zip(PARTS, most, strict=True)} if any(most) else None
