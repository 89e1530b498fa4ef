"""Dispatchers send tokens to their chosen experts and bring the results back. One file each, all with the same results.

    y_TD = dispatcher.run(x_TD, routing, experts)

    local           all experts are here                           fused, nothing is sent
    all_to_all      uneven: kept rows only                         2 k (ep - 1) / ep rows a token, forward
    padded          equal blocks of capacity rows                  also sends empty slots; all messages have equal sizes
    all_gather      all tokens to all ranks, reduce-scatter        2 (ep - 1) rows a token; for small ep
    hierarchical    within the node, then between nodes            fewer, larger messages between nodes
    chunked         all_to_all for chunks of the held experts      one chunk computes while the next is sent

Only the dispatcher knows which rank holds an expert (`split` is the experts' network over etp). It keeps no state between calls.
Memory is proportional to routed rows (tokens * choices * width). Source: GShard (arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.experts.dispatch.all_gather import AllGather
from moe.experts.dispatch.all_to_all import AllToAll
from moe.experts.dispatch.base import Dispatcher, Dropout, Network, whole
from moe.experts.dispatch.chunked import Chunked
from moe.experts.dispatch.hierarchical import Hierarchical
from moe.experts.dispatch.local import Local
from moe.experts.dispatch.padded import Padded
from moe.experts.dispatch.split import Split
from moe.recipe.plugin import is_plugin, load_plugin
from parallel.errors import BadInput
from parallel.mesh.mesh import Mesh

if TYPE_CHECKING:
    from moe.recipe import sections

__all__ = ["AllGather", "AllToAll", "Chunked", "Dispatcher", "Dropout", "Hierarchical", "Local", "Padded", "Split", "dispatcher_of"]


def dispatcher_of(
    settings: sections.Dispatch, mesh: Mesh, *, kernels: str = "auto", label: str = "", placement: tuple[int, ...] | None = None
) -> Dispatcher:
    """Make one layer's dispatcher from checked settings. Raise BadInput for a plugin that does not make a Dispatcher.

    `placement`: the expert at each place (None: expert p at place p). Rank i of ep holds the i-th chunk of places.
    """
    ep, etp = mesh.axis("ep", label=label), mesh.axis("etp", label=label)
    if ep.size == etp.size == 1:
        return Local()
    network: Network = whole if etp.size == 1 else Split(etp)
    if is_plugin(settings.kind):
        make = load_plugin("dispatch.kind", settings.kind, arguments=None)
        try:
            own: Dispatcher = make(ep, kernels, network=network, placement=placement)
        except TypeError as error:
            needed = "a callable with the arguments (ep, kernels, *, network, placement), like AllToAll"
            raise BadInput("dispatch.kind", got=f"{settings.kind}: {error}", needed=needed, fix="see: docs/use/plugins.md") from error
        if not callable(getattr(own, "run", None)):
            got = f"{settings.kind}, which gives a {type(own).__name__} without run()"
            raise BadInput("dispatch.kind", got=got, needed="a Dispatcher (moe/experts/dispatch/base.py)", fix="see: docs/use/plugins.md")
        return own
    if ep.size == 1 or (settings.kind in ("auto", "all_to_all") and settings.overlap_chunks == 1):
        return AllToAll(ep, kernels, network=network, placement=placement)
    if settings.kind == "padded":
        return Padded(ep, kernels, network=network, placement=placement)
    if settings.kind == "all_gather":
        return AllGather(ep, kernels, network=network, placement=placement)
    if settings.kind == "hierarchical":
        inner, outer = mesh.axis("ep_inner", label=label), mesh.axis("ep_outer", label=label)
        return Hierarchical(inner, outer, kernels, network=network, placement=placement)
    return Chunked(ep, settings.overlap_chunks, kernels, network=network, placement=placement)
