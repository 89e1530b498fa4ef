"""All-to-all in two steps: within the node to the rank with the destination's local rank, then between nodes.

    ep 4 = 2 nodes x 2        rank 0 (node 0, local 0) --step 1: node 0--> rank 1 (node 0, local 1) --step 2: local 1--> rank 3
    row for an expert         of rank 3 (node 1, local 1)

Between nodes, a rank sends `node_size` times fewer and larger messages with the same bytes; within the node it sends more bytes. Rank
(o, i) of the axes ep_outer and ep_inner is rank o * inner + i of ep. Source: Tutel (arXiv 2206.03382, section 3.4).
"""

from __future__ import annotations

from math import gcd

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import Mesh, divisors
from parallel.mesh.traffic import Load, Message, Traffic


class Hierarchical(Dispatcher):
    name = "hierarchical"
    about = "many nodes"
    reads = {"node_size": "only hierarchical knows nodes"}
    examples = {"hierarchical": {"node_size": 2}}
    least_ranks = 4

    def check(self, *, ranks: int, held: int) -> None:
        size = self.settings.node_size
        if size is None:
            got, needed = "null with dispatch.kind=hierarchical", "how many ranks of the ep axis share a node"
            fix = Set("it", *divisors(ranks)) | Set("dispatch.kind", "all_to_all")
            raise BadInput("dispatch.node_size", got=got, needed=needed, fix=fix)
        if ranks > 1 and ranks % size:
            needed = f"a divisor of degrees.ep={ranks}"
            raise BadInput("dispatch.node_size", got=size, needed=needed, fix=Set("it", *divisors(ranks)))

    def traffic(self, load: Load) -> Traffic:
        inner = gcd(self.settings.node_size or 1, load.ranks)
        near, far = ("ep_inner", inner, 1), ("ep_outer", load.ranks // inner, inner)
        row_bytes, most = load.rows * load.row_bytes, load.busiest
        rows = [Message(axis, "all_to_all", row_bytes, ranks, stride, busiest=most) for axis, ranks, stride in (near, far)]
        counts = [Message(axis, "counts", 8 * load.bins // stride, ranks, stride) for axis, ranks, stride in (near, far)]
        return Traffic.there_and_back(*counts, rows=tuple(rows))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        from moe.experts.dispatch.steps import Steps

        return Steps.over(("ep_inner", "ep_outer"), mesh, sizes)
