"""Ring attention: keys and values go around a ring of ranks. At each step, a rank's queries attend to the keys that it has just received.

    step 0     rank 0: q0 x kv0     rank 1: q1 x kv1     rank 2: q2 x kv2          kv ->  to the next rank during the computation
    step 1             q0 x kv2             q1 x kv0             q2 x kv1
    step 2             q0 x kv1             q1 x kv2             q2 x kv0          results merge (softmax.py); N - 1 hops

    backward   the same ring; each kv's gradients follow that kv from rank to rank, and a last hop brings them to its own rank

The order in which ranks hold the positions (order.py) decides how evenly the work of causal attention is spread over the ranks.
Costs: docs/parallel/sequence_ring.md. Source: Liu, Zaharia and Abbeel, arXiv 2310.01889.
"""

from __future__ import annotations

from torch import Tensor

from parallel.mesh.collectives import Messages, ring_round, start_shift
from parallel.sequence.method import Known, Method, SavedTensors
from parallel.sequence.softmax import Gradients, Partial, attend, attend_backward, merge, nothing


class Ring(Method):
    """Ring attention, for any order of positions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        mine, merged = known.tokens(self.axis.index, q), nothing(q, known.sink_H)
        for source, (k_there, v_there) in ring_round([k, v], self.axis):
            theirs = known.keys(source, q)
            for rows, columns, triangle in self.order.blocks(self.axis.index, source):
                k_seen, v_seen = k_there[:, :, columns], v_there[:, :, columns]
                part = attend(q[:, :, rows], k_seen, v_seen, triangle=triangle, queries=mine[rows], keys=theirs[columns], bias=known.bias)
                merge(merged, part, rows)
        return merged.out_BHLC.to(q.dtype), merged.lse_BHL

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        out, lse = kept
        mine, bias, total = known.tokens(self.axis.index, q), known.bias, Gradients.zeros(q, k, v, known.bias)
        coming: Messages | None = None
        for source, (k_there, v_there) in ring_round([k, v], self.axis):
            theirs = known.keys(source, q)
            total = total if coming is None else total.of_other_keys()
            for rows, columns, triangle in self.order.blocks(self.axis.index, source):
                block = grad[:, :, rows], q[:, :, rows], k_there[:, :, columns], v_there[:, :, columns]
                whole = Partial(out[:, :, rows], lse[:, :, rows])
                found = attend_backward(*block, whole, triangle=triangle, queries=mine[rows], keys=theirs[columns], bias=bias)
                total.add(found, queries=rows, keys=columns)
            of_keys = [total.k_BKSC, total.v_BKSC]
            if coming is not None:  # gradients of these keys and values, summed over the ranks that had them earlier
                for here, before in zip(of_keys, coming.wait(), strict=True):
                    here += before
            coming = start_shift(of_keys, self.axis)
        assert coming is not None
        dk, dv = coming.wait()  # the last hop brings the gradients to the rank that owns the keys
        return total._replace(k_BKSC=dk, v_BKSC=dv)
