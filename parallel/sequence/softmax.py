"""Attention to a part of the keys, and the merge of such partial results, which all methods in this folder use.

    keys  A  B          A: out_A, lse_A = log sum_A exp(score)                     B: out_B, lse_B likewise
    all keys            lse = log(exp lse_A + exp lse_B)
                        out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B      in any order and any division of the keys

A block (some queries and some keys) without visible keys has lse = -inf and out = 0, and does not change the result. The backward pass
needs no merge: given the final out and lse, a block's probabilities are exp(score - lse), and the blocks' gradients are summed.

A fused kernel (parallel/numerics/fused_attention.py) computes blocks that have one document, no bias and all pairs in the window. All other
blocks are computed by plain operations, QUERIES queries at a time. Scores, softmax and sums are fp32, or fp64 for fp64 inputs. Sources:
Milakov and Gimelshein, arXiv 1805.02867 (online softmax); FlashAttention, arXiv 2205.14135, algorithms 1 and 4 (backward pass from lse).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from einops import reduce
from torch import Tensor

from parallel.numerics.fused_attention import Fused, kernel_for
from parallel.numerics.position_bias import Bias
from parallel.numerics.precision import sum_dtype
from parallel.sequence.order import cut

# B batch, L queries, S keys, H heads of queries, K heads of keys and values, C channels of a head, U rows of the bias table

QUERIES = 512  # without a fused kernel, queries are computed in groups of this size, to limit the memory of scores


@dataclass(frozen=True)
class Tokens:
    """Tokens of one rank. runs: their positions in the sequence, as ranges.

    document_BS: document number of each token of the sequences, not only of this rank's tokens, int64; None: one document. window: number
    of positions that a query sees, its position included; None: all earlier positions. place_L and document_BL are computed at their first
    use: blocks without bias and documents do not need them."""

    runs: tuple[range, ...]
    device: torch.device
    document_BS: Tensor | None = None
    window: int | None = None

    @cached_property
    def place_L(self) -> Tensor:
        """Return each token's position in its sequence, int64 [L]."""
        return torch.cat([torch.arange(run.start, run.stop, run.step, device=self.device) for run in self.runs])

    @cached_property
    def document_BL(self) -> Tensor | None:
        """Return the document number of each token, int64 [B, L]; None without documents."""
        return None if self.document_BS is None else self.document_BS[:, self.place_L]

    def by_run(self) -> Iterator[tuple[slice, range]]:
        """Yield (slice of the tokens, their positions) for each range of positions."""
        start = 0
        for run in self.runs:
            yield slice(start, start + len(run)), run
            start += len(run)

    def __getitem__(self, part: slice) -> Tokens:
        return replace(self, runs=cut(self.runs, part))

    def within(self, keys: Tokens) -> Literal["all", "some", "none"]:
        """Return whether all, some or none of the causal pairs of a query of these tokens and a key of `keys` are in the window."""
        if self.window is None:
            return "all"
        (first, last), (first_key, last_key) = self._ends, keys._ends
        return "all" if last - first_key < self.window else "some" if first - last_key < self.window else "none"

    @property
    def _ends(self) -> tuple[int, int]:
        return min(run[0] for run in self.runs), max(run[-1] for run in self.runs)


class Partial(NamedTuple):
    """The result of attention to some of the keys. out_BHLC: output. lse_BHL: log-sum-exp of the scores, -inf if no key is visible."""

    out_BHLC: Tensor
    lse_BHL: Tensor


class Gradients(NamedTuple):
    """Gradients of queries, keys, values and bias table. `table_UH` is None without a bias."""

    q_BHLC: Tensor
    k_BKSC: Tensor
    v_BKSC: Tensor
    table_UH: Tensor | None

    @staticmethod
    def zeros(q_BHLC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, bias: Bias | None) -> Gradients:
        """Return zero gradients in fp32 or wider, the start of a sum over blocks."""
        dq, dk, dv = (torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in (q_BHLC, k_BKSC, v_BKSC))
        return Gradients(dq, dk, dv, None if bias is None else torch.zeros_like(bias.table_UH))

    def of_other_keys(self) -> Gradients:
        """Return gradients that share this object's query and bias tensors, with new zeros for the keys and values of another rank."""
        return self._replace(k_BKSC=torch.zeros_like(self.k_BKSC), v_BKSC=torch.zeros_like(self.v_BKSC))

    def add(self, block: Gradients, *, queries: slice | None = slice(None), keys: slice | None = slice(None)) -> None:
        """Add a block's gradients in place to the slices `queries` and `keys`. None: skip them, because they belong to another rank."""
        if queries is not None:
            self.q_BHLC[:, :, queries] += block.q_BHLC
        if keys is not None:
            self.k_BKSC[:, :, keys] += block.k_BKSC
            self.v_BKSC[:, :, keys] += block.v_BKSC
        if self.table_UH is not None and block.table_UH is not None:
            self.table_UH.add_(block.table_UH)


def nothing(q_BHLC: Tensor, sink_H: Tensor | None = None) -> Partial:
    """Return the Partial with which a merge starts, in fp32 or wider: output 0, log-sum-exp -inf or, with attention sinks, their logits."""
    wide = sum_dtype(q_BHLC.dtype)
    lse_BHL = q_BHLC.new_full(q_BHLC.shape[:-1], -math.inf, dtype=wide)
    if sink_H is not None:
        lse_BHL.copy_(sink_H.view(-1, 1).expand_as(lse_BHL))
    return Partial(torch.zeros_like(q_BHLC, dtype=wide), lse_BHL)


def merge(into: Partial, part: Partial, queries: slice = slice(None)) -> None:
    """Merge attention to further keys, `part`, into the slice `queries` of `into`, in place."""
    out, lse = into.out_BHLC[:, :, queries], into.lse_BHL[:, :, queries]
    both = torch.logaddexp(lse, part.lse_BHL)
    seen = both.masked_fill(both == -math.inf, 0.0)  # because -inf - -inf is NaN
    out.mul_((lse - seen).exp().unsqueeze(-1)).addcmul_(part.out_BHLC.to(out.dtype), (part.lse_BHL - seen).exp().unsqueeze(-1))
    lse.copy_(both)


def attend(
    q_BHLC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, *, triangle: bool, queries: Tokens, keys: Tokens, bias: Bias | None = None
) -> Partial:
    """Return the attention of a block's queries to its keys. triangle: the block has as many keys as queries, and query i sees only the
    first i + 1 keys; False: each query sees all keys. queries, keys: positions and documents of the block's tokens; pairs outside the
    window or of different documents are masked."""
    if queries.within(keys) == "none":
        return Partial(torch.zeros_like(q_BHLC), nothing(q_BHLC).lse_BHL)
    if (fused := _fused(q_BHLC, queries, keys, bias)) is not None:
        return Partial(*fused.forward(q_BHLC, k_BKSC, v_BKSC, triangle))
    k_BHSC, v_BHSC = (repeated(x, q_BHLC.shape[1]) for x in (k_BKSC, v_BKSC))
    out_BHLC, lse_BHL = torch.empty_like(q_BHLC), q_BHLC.new_empty(q_BHLC.shape[:-1], dtype=sum_dtype(q_BHLC.dtype))
    for chunk in _query_chunks(q_BHLC.shape[2]):
        score = scores(q_BHLC[:, :, chunk], k_BHSC, queries=queries[chunk], keys=keys, bias=bias)
        score = _masked(score, triangle=triangle, first=chunk.start)
        lse = score.logsumexp(-1)
        weight = (score - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        out_BHLC[:, :, chunk] = weight.to(v_BHSC.dtype) @ v_BHSC
        lse_BHL[:, :, chunk] = lse
    return Partial(out_BHLC, lse_BHL)


def attend_backward(
    grad_BHLC: Tensor,
    q_BHLC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    whole: Partial,
    *,
    triangle: bool,
    queries: Tokens,
    keys: Tokens,
    bias: Bias | None = None,
) -> Gradients:
    """Return a block's gradients. `grad_BHLC`: gradient of the merged output. `whole`: the merged result of all blocks of these queries;
    its `out_BHLC` has q's dtype. The other arguments are those of `attend`."""
    if queries.within(keys) == "none":
        return Gradients.zeros(q_BHLC, k_BKSC, v_BKSC, bias)
    if (fused := _fused(q_BHLC, queries, keys, bias)) is not None:
        return Gradients(*fused.backward(grad_BHLC, q_BHLC, k_BKSC, v_BKSC, *whole, triangle), None)
    k_BHSC, v_BHSC = (repeated(x, q_BHLC.shape[1]) for x in (k_BKSC, v_BKSC))
    kv_heads = k_BKSC.shape[1]
    wide, scale = sum_dtype(q_BHLC.dtype), q_BHLC.shape[-1] ** -0.5
    delta_BHL = (grad_BHLC.to(wide) * whole.out_BHLC.to(wide)).sum(-1)
    dq = torch.empty_like(q_BHLC)
    dk, dv = torch.zeros_like(k_BHSC, dtype=wide), torch.zeros_like(v_BHSC, dtype=wide)
    table = None if bias is None else torch.zeros_like(bias.table_UH)
    for chunk in _query_chunks(q_BHLC.shape[2]):
        q, grad, lse = q_BHLC[:, :, chunk], grad_BHLC[:, :, chunk], whole.lse_BHL[:, :, chunk]
        score = _masked(scores(q, k_BHSC, queries=queries[chunk], keys=keys, bias=bias), triangle=triangle, first=chunk.start)
        weight = (score - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        dv += weight.to(grad.dtype).mT @ grad
        dscore = weight * ((grad @ v_BHSC.mT).to(wide) - delta_BHL[:, :, chunk].unsqueeze(-1))
        dq[:, :, chunk] = dscore.to(q.dtype) @ k_BHSC * scale
        dk += dscore.to(q.dtype).mT @ q * scale
        if bias is not None and table is not None:
            table += table_gradient(bias, dscore, queries=queries[chunk], keys=keys)
    return Gradients(dq, summed(dk, kv_heads), summed(dv, kv_heads), table)


def _fused(q: Tensor, queries: Tokens, keys: Tokens, bias: Bias | None) -> Fused | None:
    """Return the fused kernel for this block; None if plain operations must compute it."""
    return kernel_for(q) if bias is None and queries.document_BS is None and queries.within(keys) == "all" else None


def _query_chunks(size: int) -> Iterator[slice]:
    return (slice(start, min(size, start + QUERIES)) for start in range(0, size, QUERIES))


def scores(q_BHLC: Tensor, k_BHSC: Tensor, *, queries: Tokens, keys: Tokens, bias: Bias | None) -> Tensor:
    """Return scores [B, H, L, S], fp32 or wider, with -inf for pairs of different documents or outside the window."""
    score: Tensor = (q_BHLC @ k_BHSC.mT).to(sum_dtype(q_BHLC.dtype)) * q_BHLC.shape[-1] ** -0.5
    if bias is not None:
        for rows, columns, query, key in _by_runs(queries, keys):
            score[:, :, rows, columns] += bias.of(query, key)
    if queries.document_BL is not None:
        assert keys.document_BL is not None
        other_BLS = queries.document_BL.unsqueeze(2) != keys.document_BL.unsqueeze(1)
        score.masked_fill_(other_BLS.unsqueeze(1), -math.inf)
    if queries.window is not None and queries.within(keys) != "all":
        score.masked_fill_(queries.place_L.unsqueeze(1) - keys.place_L >= queries.window, -math.inf)
    return score


def table_gradient(bias: Bias, dscore_BHLS: Tensor, *, queries: Tokens, keys: Tokens) -> Tensor:
    """Return the gradient of the bias table, in its dtype, given the scores' gradient."""
    table = torch.zeros_like(bias.table_UH)
    for rows, columns, query, key in _by_runs(queries, keys):
        table += bias.gradient(dscore_BHLS[:, :, rows, columns], query, key)
    return table


def _by_runs(queries: Tokens, keys: Tokens) -> Iterator[tuple[slice, slice, range, range]]:
    """Yield (slice of the queries, slice of the keys, positions of these queries, positions of these keys) for each run of queries with
    each run of keys. A run: tokens whose positions form one range, which may have a step (striped order)."""
    return ((rows, columns, query, key) for rows, query in queries.by_run() for columns, key in keys.by_run())


def repeated(x_BKSC: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads to `heads` heads: each serves consecutive query heads."""
    return x_BKSC if x_BKSC.shape[1] == heads else x_BKSC.repeat_interleave(heads // x_BKSC.shape[1], dim=1)


def summed(x_BHSC: Tensor, kv_heads: int) -> Tensor:
    """Sum over the query heads that each key-value head serves: [B, H, S, C] to [B, K, S, C]."""
    if x_BHSC.shape[1] == kv_heads:
        return x_BHSC
    found: Tensor = reduce(x_BHSC, "b (k g) s c -> b k s c", "sum", k=kv_heads)
    return found


def _masked(score_BHLS: Tensor, *, triangle: bool, first: int) -> Tensor:
    """Return the scores of some of a block's queries. If `triangle`, set scores of keys after the query to -inf in place. `first`: index of
    the first of these queries in the block."""
    if not triangle:
        return score_BHLS
    place_L = torch.arange(first, first + score_BHLS.shape[2], device=score_BHLS.device)
    unseen_LS = torch.arange(score_BHLS.shape[3], device=score_BHLS.device) > place_L.unsqueeze(1)
    return score_BHLS.masked_fill_(unseen_LS, -math.inf)
