"""Facts about data-parallel engines for checks, planner, trainer, rehearsal and verify: one EngineKind for each engine, listed in
__init__.py. An EngineKind's functions import the engine's file when they are called, so that checks and planner need no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel.data.dp import Gather, Scatter
    from parallel.data.engine import Engine, Rule
    from parallel.data.fsdp import Unit
    from parallel.data.offload import Offload
    from parallel.mesh.layout import Layouts
    from parallel.mesh.mesh import Mesh
    from parallel.numerics.first_values import Fill

# Points of a step at which memory may peak: a forward pass, the loss, the backward pass of the head, of a layer ("work") or of the
# embedding, and the reduction of a layer's ("sums") or a bucket's gradients.
At = Literal["forward", "loss", "head", "work", "sums", "bucket", "embedding"]


@dataclass(frozen=True)
class Setup:
    """The input from which an engine starts: layouts, mesh, values of the recipe's section `sharding`, and functions of the model.
    working: parameter name -> the dtype in which the model reads it; None: the parameter's own dtype. casts: whether weights are cast to
    this dtype at each use or once a step (precision.casts). units: returns FSDP's units, in the order in which the model runs them.
    scatter, gather: for engine dp, functions that split the arguments of a forward pass among the replicas, and that join their outputs."""

    layouts: Layouts
    mesh: Mesh
    offload: Offload
    reshard: bool
    prefetch: int
    replicas: int
    working: Callable[[str], torch.dtype] | None
    casts: Literal["use", "step"]
    units: Callable[[], Sequence[Unit]]
    scatter: Scatter
    gather: Gather


class GatheredSizes(NamedTuple):
    """Sizes from which `gathered` computes the bytes of gathered weights and unsharded gradients. These are numbers of elements of sharded
    weights:

    held: all weights of the rank's pipeline stages. table: the embedding or head. layer: the layer that computes now. matrix: this layer's
    largest matrix. behind: the layer whose backward pass ended just before. trained, trained_table, trained_layer, trained_behind: held,
    table, layer and behind without frozen weights. bucket: a bucket of gradients.

    compute_bytes, sum_bytes: bytes of an element of gathered weights, and of summed gradients. copies: number of ranks over which a weight
    is sharded; without sharding, each would hold a copy. stays: whether weights stay gathered between passes. on_stages:
    whether there are pipeline stages. once: whether gradients are reduced only after a stage's last backward pass, so that unsharded ones
    add up until then. loss_chunks: number of chunks of tokens in which the loss is computed."""

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
    once: bool
    loss_chunks: int


class StandIn(NamedTuple):
    """The engine that `moe rehearse` uses instead of an engine that it cannot run. sharding: keys and values that select it in the recipe's
    section `sharding`. why: the reason."""

    sharding: Mapping[str, Any]
    why: str


def _load() -> None:
    import torch._dynamo  # noqa: F401 (every optimizer of torch imports it)


@dataclass(frozen=True)
class EngineKind:
    """Facts about one engine.

    start: makes the engine. sharding: keys and values of a recipe's section `sharding` that select this engine. keys: further keys that the
    engine reads. load: imports the libraries that ranks need.
    stage: the ZeRO stage that shards the same states as this engine: 1 optimizer states, 2 gradients too, 3 weights too.
    cut: shards a model on the meta device and sets first values; None: every rank holds whole weights.
    by_module: a module's weights are gathered only while the module runs, so no other module may use them.
    frees_weights: gathered weights are freed after use, so no matrix product may save its weight for the backward pass.
    steps: the form in which the optimizer gets parameters: whole `matrices`, `shards` of matrices, or flat `elements`.
    steps_by_stage: a pipeline stage can make its optimizer step before other stages have their gradients.
    casts: the values of precision.casts that this engine supports.
    threads: replicas are threads of one process. master_copy: there are fp32 master weights next to the weights that the model reads.
    offloads: pairs (states, place) that the engine can offload, such as ("optimizer", "cpu").
    with_stages: name of the engine that is used instead of this one if there are pipeline stages; None: this one. Three more fields name
    the engine that is used instead: unless_flat, if the optimizer cannot step flat ranges of fp32 elements; stands_in, in a rehearsal;
    planned_as, in the planner.
    overlaps: sums of gradients run during the backward pass.
    gradients: between two steps, gradients are `freed`, or kept in `buckets` (if several ranks hold copies of a weight) or in one `buffer`.
    bucket: when a bucket of gradients is allocated: never (`none`), from the first gradient of a pass on (`passes`), or `always`.
    gathered: (point of a step, sizes) -> bytes of gathered weights and unsharded gradients; None: weights are not sharded. moments: points
    of a step at which this engine's memory may peak in addition to the points common to all engines."""

    name: str
    start: Callable[[nn.Module, Setup, Rule], Engine]
    sharding: Mapping[str, str | int]
    keys: tuple[str, ...] = ()
    stage: int = 0
    cut: Callable[[nn.Module, Setup, torch.device, Fill], None] | None = None
    load: Callable[[], None] = _load
    by_module: bool = False
    frees_weights: bool = False
    steps: Literal["matrices", "shards", "elements"] = "matrices"
    steps_by_stage: bool = False
    threads: bool = False
    casts: tuple[str, ...] = ("use",)
    master_copy: bool = False
    offloads: frozenset[tuple[str, str]] = frozenset()
    with_stages: str | None = None
    unless_flat: str | None = None
    stands_in: StandIn | None = None
    planned_as: str | None = None
    overlaps: bool = True
    gradients: Literal["freed", "buckets", "buffer"] = "freed"
    bucket: Literal["none", "passes", "always"] = "none"
    gathered: Callable[[At, GatheredSizes], float] | None = None
    moments: tuple[At, ...] = ()
