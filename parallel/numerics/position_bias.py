"""A bias of attention's logits that depends on the distance of query and key (T5, arXiv 1910.10683).

    distance   key 3  key 4  key 5
    query 4       1      0     -1        The 2 x 3 pairs have 4 distances. The table is read once for each distance; pairs of a diagonal
    query 5       2      1      0        share the value. Backward: gradients are summed over each diagonal, then added to table rows.

If the table were read once for each pair, the backward pass would add L x S gradients to a few rows. A GPU adds to one row serially.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import reduce
from torch import Tensor

# B batch, L queries, S keys, N = L + S - 1 distances, H heads, U rows of the table


class Bias(NamedTuple):
    """The bias of a (query, key) pair: row `bucket(distance)` of `table_UH` (fp32), one value for each head. distance: position of the
    query minus that of the key, int64. The positions of queries, and of keys, are ranges; both ranges have the same step."""

    table_UH: Tensor
    bucket: Callable[[Tensor], Tensor]

    def of(self, queries: range, keys: range) -> Tensor:
        """Return the bias of all pairs of a query and a key at these positions: [H, L, S], contiguous."""
        return self.table_UH[self._rows(queries, keys)].t().contiguous().unfold(1, len(keys), 1).flip(2).contiguous()

    def gradient(self, grad_BHLS: Tensor, queries: range, keys: range) -> Tensor:
        """Return the gradient of the table, in its dtype, given the gradient of the logits of queries and keys at these positions."""
        grad_HLS = reduce(grad_BHLS, "b h l s -> h l s", "sum").to(self.table_UH.dtype)
        row_N, heads = self._rows(queries, keys), len(grad_HLS)
        sum_HN = torch.ops.aten.unfold_backward(grad_HLS.flip(2), [heads, len(row_N)], 1, len(keys), 1)
        return torch.zeros_like(self.table_UH).index_add_(0, row_N, sum_HN.t())

    def _rows(self, queries: range, keys: range) -> Tensor:
        """Return the index of the table's row for each distance, int64 [N]. Distances ascend from (first query - last key) to (last query -
        first key)."""
        assert queries.step == keys.step or 1 in (len(queries), len(keys)), "diagonals of unequal distances"
        step = queries.step if len(queries) > 1 else keys.step
        first = queries[0] - keys[-1]
        return self.bucket(torch.arange(len(queries) + len(keys) - 1, device=self.table_UH.device) * step + first)
