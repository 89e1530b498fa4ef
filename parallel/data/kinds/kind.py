"""Facts about a data-parallel engine that checks, planner, trainer, rehearsal and verify ask for: an EngineKind each, listed in catalog.py.

    start    model, Setup, optimizer -> Engine          cut         shards a model before its weights have values
    load     imports what ranks need                    gathered    bytes of whole weights at a moment of a step, with ZeRO stage 3

These functions import the engine's file when they are called, so that checks and planner need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel.data.dp import Gather, Scatter
    from parallel.data.engine import Engine, Rule
    from parallel.data.fsdp import Unit
    from parallel.data.offload import Offload
    from parallel.mesh.layout import Layout
    from parallel.mesh.mesh import Mesh
    from parallel.numerics.first_values import Fill

At = Literal["forward", "loss", "head", "work", "sums", "bucket", "embedding"]  # moments of a step: moe/plan/memory/temporary.py


@dataclass(frozen=True)
class Setup:
    """A model's layouts, a recipe's values, and facts about the model. Each engine reads some of them.

    working: parameter name -> the dtype in which the model reads it; None: the dtype of the parameters.
    units: returns the parameters that are gathered together, in the order in which the model runs them.
    scatter, gather: split a micro-batch over the replicas of one process, and join their outputs (parallel/data/dp.py).
    """

    layouts: dict[str, Layout]
    mesh: Mesh
    offload: Offload
    reshard: bool
    prefetch: int
    replicas: int
    working: Callable[[str], torch.dtype] | None
    units: Callable[[], Sequence[Unit]]
    scatter: Scatter
    gather: Gather


class Whole(NamedTuple):
    """Sizes that decide which weights are whole at a moment. In elements that several ranks share, if no unit is named.

    held: elements of the rank's stages. table: of the embedding. layer: of the layer at work. matrix: of its widest matrix. behind: of the
    layer before it in the backward pass. trained_*: elements with gradients. bucket: elements of a bucket.
    """

    compute_bytes: int
    sum_bytes: int
    held: float
    table: float
    layer: float
    behind: float
    trained: float
    trained_table: float
    trained_layer: float
    trained_behind: float
    matrix: float
    bucket: float
    copies: int
    stays: bool
    on_stages: bool
    loss_chunks: int


class StandIn(NamedTuple):
    """Another engine for a rehearsal, which has no values and no addresses: changes of section `sharding`, and a line about them."""

    sharding: Mapping[str, Any]
    why: str


def nothing() -> None:
    """Import nothing more."""


@dataclass(frozen=True)
class EngineKind:
    """One row of the catalog.

    sharding: the keys of a recipe's section `sharding` that name it; `keys`: further keys that it reads.
    stage: the ZeRO stage that its states follow (moe/plan/job/states.py): 1 shards optimizer states, 2 gradients too, 3 weights too.
    cut: shards a model on the meta device and sets first values; None: every rank holds whole weights.
    by_module: weights are gathered when a module runs, so that every use of a weight must be a module's.
    frees_weights: gathered weights are freed after use, so that no product may keep its weight for the backward pass.
    steps: the optimizer sees whole `matrices`, `shards` of them, or flat `elements`.
    steps_by_stage: a pipeline stage can make its step before others have their gradients.
    threads: all replicas are threads of one process, which add their gradients as they end.
    master_copy: fp32 master weights in addition to the weights that the model reads.
    offloads: (states, place) that it can keep off the device.
    with_stages: the kind that takes its place on pipeline stages; None: itself.
    stands_in: the engine of a rehearsal; None: itself.
    planned_as: the kind that the planner takes for it; None: itself.

    Of the planner:
    overlaps: sums of gradients run during the backward pass.
    gradients: those between two steps are `freed`, kept in `buckets` if ranks hold copies, or kept in one `buffer` for all of a rank's.
    bucket: a bucket of gradients is allocated from the first gradient on (`passes`), or `always`.
    gathered, moments: bytes of whole weights and of their sums, and the moments at which they are asked for in addition to the layers'.
    """

    name: str
    start: Callable[[nn.Module, Setup, Rule], Engine]
    sharding: Mapping[str, str | int]
    keys: tuple[str, ...] = ()
    stage: int = 0
    cut: Callable[[nn.Module, Setup, torch.device, Fill], None] | None = None
    load: Callable[[], None] = nothing
    by_module: bool = False
    frees_weights: bool = False
    steps: Literal["matrices", "shards", "elements"] = "matrices"
    steps_by_stage: bool = False
    threads: bool = False
    master_copy: bool = False
    offloads: frozenset[tuple[str, str]] = frozenset()
    with_stages: str | None = None
    stands_in: StandIn | None = None
    planned_as: str | None = None
    overlaps: bool = True
    gradients: Literal["freed", "buckets", "buffer"] = "freed"
    bucket: Literal["none", "passes", "always"] = "none"
    gathered: Callable[[At, Whole], float] | None = None
    moments: tuple[At, ...] = field(default=())
