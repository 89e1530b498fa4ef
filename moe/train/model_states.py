"""Bytes of a model's states on a rank, counted from the live tensors of its engine, each storage once.

parameters    weights that the model reads, as this rank keeps them from step to step
gradients     between the backward pass and the step, of every parameter of which the rank then has any
optimizer     moments and everything else that the optimizer keeps, master weights apart from those that the model reads among it
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from parallel.collectives import max_over
from parallel.data.engine import Engine
from parallel.mesh import Mesh

PARTS = ("parameters", "gradients", "optimizer")


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the unique storages behind some tensors, by address. Of a distributed tensor, only this rank's part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta" and not local.is_sparse:
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


class ModelStates:
    """The most that each part took in the steps looked at."""

    def __init__(self) -> None:
        self.most = dict.fromkeys(PARTS, 0)

    def before_step(self, engine: Engine) -> None:
        """Gradients: whole ones that wait at parameters, and a rank's part of the sums."""
        waiting = [p.grad for p in engine.module.parameters() if p.grad is not None]
        self._add("gradients", storages([*waiting, *(held.tensor for held in engine.summed_gradients())]))

    def after_step(self, engine: Engine) -> None:
        """Parameters and what the optimizer keeps, which is there from the first step on."""
        held = list(engine.tensors())
        read = storages([*engine.module.parameters(), *(each.tensor for each in held if each.kind == "working weight")])
        own = storages(each.tensor for each in held if each.kind == "weight")
        if not read:  # the model's own weights are only there while they are gathered
            read = own
        self._add("parameters", read)
        self._add("optimizer", {at: size for at, size in storages(each.tensor for each in held).items() if at not in read})

    def _add(self, part: str, found: dict[int, int]) -> None:
        self.most[part] = max(self.most[part], sum(found.values()))

    def largest(self, mesh: Mesh) -> dict[str, int] | None:
        """Each part's bytes on the rank with the most of it; None if no step was looked at. Collective."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mine = torch.tensor([self.most[part] for part in PARTS], dtype=torch.float64, device=device)
        most = max_over(mine, mesh.axis("world")).tolist()
        return {part: int(size) for part, size in zip(PARTS, most, strict=True)} if any(most) else None
