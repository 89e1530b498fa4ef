"""Attention to a part of the keys, and the one law under every method here: partial results merge by maximum and sum.

    keys  A  B          of A alone: out_A, lse_A = log sum_A exp(score)            the same of B
    all of them         lse = log(exp lse_A + exp lse_B)
                        out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B      in any order, in any parts

A part that sees nothing has lse = -inf and out = 0, and changes nothing. The backward pass needs no merging: given the whole row's
out and lse, each part's probabilities are exp(score - lse), and the parts' gradients add up.

A block's scores never exist whole. Without documents, bias and the edge of a window torch's own flash kernel
computes a block on a CPU; everywhere else a
plain form runs over QUERIES queries at a time. Scores, softmax and sums are fp32 (fp64 where the input is).

Sources: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Rabe and Staats, arXiv 2112.05682 (blocks of keys); Dao et al.,
FlashAttention, arXiv 2205.14135, algorithms 1 and 4 (the backward pass from lse).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from einops import rearrange, reduce
from torch import Tensor

from parallel.sequence.order import cut

# B batch, L queries, S keys, H heads of queries, K of keys and values, C channels of a head, U rows of the bias table

QUERIES = 512  # whose scores exist at once in the plain form

Bucket = Callable[[Tensor, Tensor], Tensor]  # (places of queries [L], of keys [S]) -> the table's rows, int64 [L, S]


@dataclass(frozen=True)
class Tokens:
    """Those at some places of their sequences, which lie in runs; `document_BS` int64, of all places: which document each is of; None: one.
    `window`: places that a query sees, its own the last; None: all before it.

    A block without a bias and documents asks for none of their tensors, so they are made when they are asked for.
    """

    runs: tuple[range, ...]
    device: torch.device
    document_BS: Tensor | None = None
    window: int | None = None

    @cached_property
    def place_L(self) -> Tensor:
        """Int64, in their sequence."""
        return torch.cat([torch.arange(run.start, run.stop, run.step, device=self.device) for run in self.runs])

    @cached_property
    def document_BL(self) -> Tensor | None:
        """Int64, of which document of it."""
        return None if self.document_BS is None else self.document_BS[:, self.place_L]

    def __getitem__(self, part: slice) -> Tokens:
        return replace(self, runs=cut(self.runs, part))

    def within(self, keys: Tokens) -> Literal["all", "some", "none"]:
        """Which pairs of these queries and those keys, as far as they are causal, the window holds."""
        if self.window is None:
            return "all"
        (first, last), (first_key, last_key) = self._ends, keys._ends
        return "all" if last - first_key < self.window else "some" if first - last_key < self.window else "none"

    @property
    def _ends(self) -> tuple[int, int]:
        """The first place and the last."""
        return min(run[0] for run in self.runs), max(run[-1] for run in self.runs)


@dataclass(frozen=True)
class Bias:
    """Added to the scores, by head and by how far apart two places are: `table_UH` fp32 at the row that `bucket` names."""

    table_UH: Tensor
    bucket: Bucket


class Partial(NamedTuple):
    """Of a part of the keys: `out_BHLC`, and `lse_BHL`, the logarithm of the sum of exp(score), -inf where no key is seen."""

    out_BHLC: Tensor
    lse_BHL: Tensor


class Gradients(NamedTuple):
    """`table_UH`: None without a bias."""

    q_BHLC: Tensor
    k_BKSC: Tensor
    v_BKSC: Tensor
    table_UH: Tensor | None

    @staticmethod
    def zeros(q_BHLC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, bias: Bias | None) -> Gradients:
        """What blocks are added to. Wide."""
        dq, dk, dv = (torch.zeros_like(x, dtype=wide_dtype(x)) for x in (q_BHLC, k_BKSC, v_BKSC))
        return Gradients(dq, dk, dv, None if bias is None else torch.zeros_like(bias.table_UH))

    def of_other_keys(self) -> Gradients:
        """The same sums for the queries and the table, and zeros for as many keys."""
        return self._replace(k_BKSC=torch.zeros_like(self.k_BKSC), v_BKSC=torch.zeros_like(self.v_BKSC))

    def add(self, block: Gradients, *, queries: slice | None = slice(None), keys: slice | None = slice(None)) -> None:
        """A block's, in place, for some of the queries and keys; None: they are another rank's, and so is what belongs to them."""
        if queries is not None:
            self.q_BHLC[:, :, queries] += block.q_BHLC
        if keys is not None:
            self.k_BKSC[:, :, keys] += block.k_BKSC
            self.v_BKSC[:, :, keys] += block.v_BKSC
        if self.table_UH is not None and block.table_UH is not None:
            self.table_UH.add_(block.table_UH)


def nothing(q_BHLC: Tensor, sink_H: Tensor | None = None) -> Partial:
    """Of no key, or of the heads' sinks, whose values are 0: what merging begins with. Fp32, or fp64 where q is."""
    wide = wide_dtype(q_BHLC)
    lse_BHL = q_BHLC.new_full(q_BHLC.shape[:-1], -math.inf, dtype=wide)
    if sink_H is not None:
        lse_BHL.copy_(sink_H.view(-1, 1).expand_as(lse_BHL))
    return Partial(torch.zeros_like(q_BHLC, dtype=wide), lse_BHL)


def merge(into: Partial, part: Partial, queries: slice = slice(None)) -> None:
    """Add a part for some of the queries, in place."""
    out, lse = into.out_BHLC[:, :, queries], into.lse_BHL[:, :, queries]
    both = torch.logaddexp(lse, part.lse_BHL)
    seen = both.masked_fill(both == -math.inf, 0.0)  # else -inf - -inf
    out.mul_((lse - seen).exp().unsqueeze(-1)).addcmul_(part.out_BHLC.to(out.dtype), (part.lse_BHL - seen).exp().unsqueeze(-1))
    lse.copy_(both)


def wide_dtype(x: Tensor) -> torch.dtype:
    """In which sums are taken."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attend(
    q_BHLC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, *, triangle: bool, queries: Tokens, keys: Tokens, bias: Bias | None = None
) -> Partial:
    """A block: all of the keys, or with `triangle` (as many queries as keys) of each query those up to its own place in the block.

    Nothing else is masked by places but what a window hides: who calls knows which blocks are seen. Documents are, too: `queries` and
    `keys` say which.
    """
    if queries.within(keys) == "none":
        return Partial(torch.zeros_like(q_BHLC), nothing(q_BHLC).lse_BHL)
    k_BHSC, v_BHSC = (repeated(x, q_BHLC.shape[1]) for x in (k_BKSC, v_BKSC))
    if _flash(q_BHLC, queries, keys, bias):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHLC, k_BHSC, v_BHSC, 0.0, triangle)
        return Partial(*found)
    out_BHLC, lse_BHL = torch.empty_like(q_BHLC), q_BHLC.new_empty(q_BHLC.shape[:-1], dtype=wide_dtype(q_BHLC))
    for run in _runs(q_BHLC.shape[2]):
        score = scores(q_BHLC[:, :, run], k_BHSC, queries=queries[run], keys=keys, bias=bias)
        score = _masked(score, triangle=triangle, first=run.start)
        lse = score.logsumexp(-1)
        weight = (score - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        out_BHLC[:, :, run] = weight.to(v_BHSC.dtype) @ v_BHSC
        lse_BHL[:, :, run] = lse
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
    """This block's part of the gradients; `whole`: the merged result of all blocks of these queries, out in q's dtype."""
    if queries.within(keys) == "none":
        return Gradients.zeros(q_BHLC, k_BKSC, v_BKSC, bias)
    k_BHSC, v_BHSC = (repeated(x, q_BHLC.shape[1]) for x in (k_BKSC, v_BKSC))
    kv_heads = k_BKSC.shape[1]
    if _flash(q_BHLC, queries, keys, bias):
        lse_BHL = rearrange(rearrange(whole.lse_BHL, "b h l -> b l h").contiguous(), "b l h -> b h l")  # as its forward pass lays it
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHLC, q_BHLC, k_BHSC, v_BHSC, whole.out_BHLC, lse_BHL, 0.0, triangle
        )
        return Gradients(dq, summed(dk, kv_heads), summed(dv, kv_heads), None)
    wide, scale = wide_dtype(q_BHLC), q_BHLC.shape[-1] ** -0.5
    delta_BHL = (grad_BHLC.to(wide) * whole.out_BHLC.to(wide)).sum(-1)
    dq = torch.empty_like(q_BHLC)
    dk, dv = torch.zeros_like(k_BHSC, dtype=wide), torch.zeros_like(v_BHSC, dtype=wide)
    table = None if bias is None else torch.zeros_like(bias.table_UH)
    for run in _runs(q_BHLC.shape[2]):
        q, grad, lse = q_BHLC[:, :, run], grad_BHLC[:, :, run], whole.lse_BHL[:, :, run]
        score = _masked(scores(q, k_BHSC, queries=queries[run], keys=keys, bias=bias), triangle=triangle, first=run.start)
        weight = (score - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        dv += weight.to(grad.dtype).mT @ grad
        dscore = weight * ((grad @ v_BHSC.mT).to(wide) - delta_BHL[:, :, run].unsqueeze(-1))
        dq[:, :, run] = dscore.to(q.dtype) @ k_BHSC * scale
        dk += dscore.to(q.dtype).mT @ q * scale
        if bias is not None and table is not None:
            table += of_table(bias, dscore, queries=queries[run], keys=keys)
    return Gradients(dq, summed(dk, kv_heads), summed(dv, kv_heads), table)


def _flash(q: Tensor, queries: Tokens, keys: Tokens, bias: Bias | None) -> bool:
    """Whether torch has a kernel for the block that tells the lse."""
    return q.device.type == "cpu" and bias is None and queries.document_BS is None and queries.within(keys) == "all"


def _runs(size: int) -> Iterator[slice]:
    return (slice(start, min(size, start + QUERIES)) for start in range(0, size, QUERIES))


def scores(q_BHLC: Tensor, k_BHSC: Tensor, *, queries: Tokens, keys: Tokens, bias: Bias | None) -> Tensor:
    """Wide [B, H, L, S], with -inf where the documents differ, and outside of the window."""
    score: Tensor = (q_BHLC @ k_BHSC.mT).to(wide_dtype(q_BHLC)) * q_BHLC.shape[-1] ** -0.5
    if bias is not None:
        score += rearrange(bias.table_UH[bias.bucket(queries.place_L, keys.place_L)], "l s h -> h l s")
    if queries.document_BL is not None:
        assert keys.document_BL is not None
        other_BLS = queries.document_BL.unsqueeze(2) != keys.document_BL.unsqueeze(1)
        score.masked_fill_(other_BLS.unsqueeze(1), -math.inf)
    if queries.window is not None and queries.within(keys) != "all":
        score.masked_fill_(queries.place_L.unsqueeze(1) - keys.place_L >= queries.window, -math.inf)
    return score


def of_table(bias: Bias, dscore_BHLS: Tensor, *, queries: Tokens, keys: Tokens) -> Tensor:
    """The gradient of the bias table from that of the scores, in the table's dtype."""
    row_N = bias.bucket(queries.place_L, keys.place_L).flatten()
    of_pairs: Tensor = reduce(dscore_BHLS, "b h l s -> (l s) h", "sum").to(bias.table_UH.dtype)
    return torch.zeros_like(bias.table_UH).index_add_(0, row_N, of_pairs)


def repeated(x_BKSC: Tensor, heads: int) -> Tensor:
    """Key-value heads for so many heads of queries: each serves a run of them."""
    return x_BKSC if x_BKSC.shape[1] == heads else x_BKSC.repeat_interleave(heads // x_BKSC.shape[1], dim=1)


def summed(x_BHSC: Tensor, kv_heads: int) -> Tensor:
    """Over the heads of queries that one key-value head serves."""
    if x_BHSC.shape[1] == kv_heads:
        return x_BHSC
    found: Tensor = reduce(x_BHSC, "b (k g) s c -> b k s c", "sum", k=kv_heads)
    return found


def _masked(score_BHLS: Tensor, *, triangle: bool, first: int) -> Tensor:
    """`first`: which query of the block is the first of these."""
    if not triangle:
        return score_BHLS
    place_L = torch.arange(first, first + score_BHLS.shape[2], device=score_BHLS.device)
    unseen_LS = torch.arange(score_BHLS.shape[3], device=score_BHLS.device) > place_L.unsqueeze(1)
    return score_BHLS.masked_fill_(unseen_LS, -math.inf)
