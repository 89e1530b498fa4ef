"""FSDP: every rank keeps 1/N of each parameter, gradient and optimizer state (parallel/data/fsdp.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.data.kinds.kind import At, EngineKind, GatheredSizes, Setup

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel.data.engine import Engine, Rule
    from parallel.numerics.first_values import Fill


def load() -> None:
    import parallel.data.fsdp  # noqa: F401


def cut(model: nn.Module, setup: Setup, device: torch.device, fill: Fill) -> None:
    from parallel.data.fsdp import shard

    reshard = setup.reshard and setup.mesh.axis("pp").size == 1
    shard(model, setup.units(), layouts=setup.layouts, mesh=setup.mesh, device=device, reshard=reshard, prefetch=setup.prefetch, fill=fill)


def start(model: nn.Module, setup: Setup, optimizer: Rule) -> Engine:
    from parallel.data.fsdp import FSDP

    host = setup.offload.optimizer == "cpu"
    return FSDP(model, layouts=setup.layouts, mesh=setup.mesh, optimizer=optimizer, once=not setup.reshard, host=host)


def gathered(at: At, w: GatheredSizes) -> float:
    """Return the bytes of gathered weights and unsharded gradients at point `at` of a step (docs/parallel/planner_memory.md, Stage 3): the
    loss, a layer's backward pass ("work"), the reduction of its gradients ("sums"), or the backward pass of the head or of the
    embedding. w: numbers of elements, and bytes of an element."""
    c, r = w.compute_bytes, w.sum_bytes  # bytes of an element of gathered weights, and of summed gradients
    if w.once:
        return c * w.held + r * w.trained
    left = w.held - w.behind  # the layer whose backward pass ended just before is freed
    if w.on_stages:
        return _each_pass(at, w)
    match at:
        case "loss":
            return c * (w.held if w.stays else w.table if w.loss_chunks > 1 else 0.0)
        case "work":
            return c * (left if w.stays else 2 * w.layer) + r * w.trained_behind
        case "head":  # here `behind` is the last layer, which is already gathered for its backward pass
            of_table = w.trained_table
            return max(
                c * (w.held if w.stays else w.table + w.behind) + r * of_table,
                c * (w.held - w.table if w.stays else w.behind) + 2 * r * of_table,
            )
        case "sums":
            most = c * (left if w.stays else 2 * w.layer) + r * (w.trained_behind + w.trained_layer)
            return max(most, c * (left - w.layer if w.stays else w.layer) + 2 * r * w.trained_layer)
        case "embedding":
            return (2 * r - c) * w.trained_table
    return 0.0


def _each_pass(at: At, w: GatheredSizes) -> float:
    """Return the bytes of gathered weights and unsharded gradients on a pipeline rank, if gradients are reduce-scattered after each
    backward pass. A stage's weights stay gathered from a forward pass until its next backward pass; `w.held` counts the weights that are
    gathered at this moment. The unsharded gradients of one layer, the input of the last reduce-scatter, stay allocated until the next
    reduce-scatter, also during forward passes (`w.trained_behind`)."""
    c, r = w.compute_bytes, w.sum_bytes
    match at:
        case "loss":
            return c * w.held + r * w.trained_behind + (2 * r - c) * w.trained_table
        case "work" | "sums":
            return c * w.held + r * w.trained_behind
        case "embedding":
            return r * w.trained_layer + 2 * r * w.trained_table
    return 0.0


FSDP = EngineKind(
    "fsdp",
    start,
    {"kind": "fsdp"},
    keys=("reshard", "prefetch", "offload"),
    offloads=frozenset({("optimizer", "cpu")}),
    stage=3,
    cut=cut,
    load=load,
    by_module=True,
    steps="shards",
    gathered=gathered,
    moments=("head",),
)
