"""Faults of tensor parallelism: missing and repeated all-reduces, and products of wrong blocks on a grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from moe.verify.cases import Case
from parallel.mesh.collectives import Started, reduce_backward
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis
from tests.mutations.mutation import Edit, Mutation


def _identity(real: Any) -> Any:
    """A collective returns its input."""
    return lambda tensor, *_, **__: tensor


def _not_started(real: Any) -> Any:
    return lambda tensor, axis: Started(tensor, None)


def _as_they_come(real: Any) -> Any:
    """Gathered chunks are joined as (chunk, rank), although the tokens of a sequence are ordered by (rank, chunk)."""
    return lambda runs_RBnI: torch.cat([rearrange(run, "r b n i -> b (r n) i") for run in runs_RBnI], 1)


def _summed_both_ways(real: Any) -> Any:
    return lambda tensor, axis: reduce_backward(real(tensor, axis), axis)


def _slices_alike(real: Any) -> Any:
    """Layout of a norm as if all tp ranks had seen the same tokens, although each saw another shard of the sequence."""
    return lambda self, name, shape: Layout(shape)


def _slices_of_the_bias_alike(real: Any) -> Any:
    """Layout of the output projection's bias as if all tp ranks had seen the same tokens."""

    def wrong(self: Any, name: str, shape: Any) -> Layout:
        layout: Layout = real(self, name, shape)
        return replace(layout, alike=("tp",)) if name.endswith("out_bias.weight") else layout

    return wrong


def _summed_over_tp(real: Any) -> Any:
    return lambda self, name, shape: Layout(shape, family=self.family, alike=())


def _head_norms_alike(real: Any) -> Any:
    """Layout of the norms of queries and keys as if all tp ranks had the same heads."""

    def wrong(self: Any, name: str, shape: Any) -> Layout:
        layout: Layout = real(self, name, shape)
        return replace(layout, alike=("tp",)) if name.endswith(("q_norm.weight", "k_norm.weight")) else layout

    return wrong


def _of_all_tokens(word: str) -> Any:
    """Layout of parameters with this word in their name as if each tp rank computed all tokens of a MoE layer."""

    def make(real: Any) -> Any:
        def wrong(self: Any, name: str, shape: Any) -> Layout:
            layout: Layout = real(self, name, shape)
            return replace(layout, alike=("tp",)) if word in name else layout

        return wrong

    return make


def _copies_of_heads_alike(real: Any) -> Any:
    def wrong(self: Any, name: str, shape: Any) -> Layout:
        layout: Layout = replace(real(self, name, shape), alike=("tp_row_copies",) if self.axis == "tp_row_heads" else ())
        return layout

    return wrong


def _depths_alike(real: Any) -> Any:
    return lambda self, name, shape: replace(real(self, name, shape), alike=("tp_depth",))


def _first_slice(real: Any) -> Any:
    return lambda length, *, axis: slice(0, length // axis.size)


def _rows_of_others_kept(real: Any) -> Any:
    """A token whose embedding row is on another rank gets row 0 of this rank instead of zeros."""

    def wrong(tokens: Tensor, matrix: Any, others: Any) -> Tensor:
        row = tokens - matrix.first
        found: Tensor = matrix.weight[row.masked_fill((row < 0) | (row >= len(matrix.weight)), 0)]
        return found

    return wrong


def _counted_by_every_rank(real: Any) -> Any:
    """The sum of exponentials over ranks is t times too large, as if every rank counted the logits of all rows."""

    def wrong(scores_2N: Tensor, axis: Axis) -> Tensor:
        total_N, target_N = real(scores_2N, axis)
        share_N = total_N / axis.size
        return torch.stack((share_N + (total_N - share_N).detach() + torch.tensor(float(axis.size)).log(), target_N))

    return wrong


def _own_maximum(real: Any) -> Any:
    """Each rank subtracts its own maximum of the logits instead of the maximum over ranks."""
    return lambda tensor, axis: tensor


def _one_block_on(real: Any) -> Any:
    """In the forward pass, each step of SUMMA uses the weights' block of the previous step."""

    def wrong(mine: Tensor, axis: Axis) -> Any:
        found = list(real(mine, axis))
        late = axis.name == "tp_row" and not axis.label.endswith("backward")
        return iter(found[-1:] + found[:-1] if late else found)

    return wrong


def _own_share(real: Any) -> Any:
    """Each rank of a column keeps its own partial weight gradient instead of the sum."""

    def wrong(shares: Any, axis: Axis) -> Tensor:
        if axis.name != "tp_row":
            found: Tensor = real(shares, axis)
            return found
        own: Tensor = [share.clone() for share in shares][axis.index]
        return own

    return wrong


def _own_channels(real: Any) -> Any:
    return lambda parts, axis: torch.stack([x.mean(-1, keepdim=True) for x in parts])


def _own_targets(real: Any) -> Any:
    return lambda self, mesh, size, path: replace(real(self, mesh, size, path), targets=lambda targets: targets)


_LINE = Case("dense", "ddp", 2, 1, 3, "fp32", tp=2, tensor="1d")
_SLICED = Case("dense", "ddp", 2, 1, 1, "fp32", tp=2, tensor="sliced")
_SQUARE = Case("dense", "ddp", 4, 1, 1, "fp32", tp=4, tensor="2d", batch=24)
_DEEP = replace(_SQUARE, world=8, tp=8, tensor="2.5d")
_CUBE = replace(_DEEP, tensor="3d")

MUTATIONS = (
    Mutation(
        "input_gradients_not_summed",
        "f does not sum in the backward pass: input gradients of products, and of the head, remain each rank's own part",
        "NovaSky-AI/SkyRL#1886, there before the head",
        "tensor",
        _LINE,
        (Edit("parallel.tensor.overlapped:start_sum", _not_started), Edit("parallel.tensor.vocabulary:reduce_backward", _identity)),
    ),
    Mutation(
        "output_gradients_summed",
        "g also sums in the backward pass, although every rank has the whole gradient: it grows by the number of ranks with each layer",
        "tenstorrent/tt-metal#31748",
        "tensor",
        _LINE,
        (Edit("parallel.tensor.linear_1d:all_reduce", _summed_both_ways),),
    ),
    Mutation(
        "copies_summed_over_tp",
        "Gradients of norms are summed over tp, although every tp rank has the whole gradient",
        "inclusionAI/AReno#496",
        "tensor",
        _LINE,
        (Edit("parallel.tensor.style:Copied.layout", _summed_over_tp),),
    ),
    Mutation(
        "norms_of_slices_not_summed",
        "With slices between layers, a norm's gradient covers one slice, and the ranks' gradients are never summed",
        "NVIDIA/Megatron-LM#1446; EleutherAI/gpt-neox#1257",
        "tensor",
        _SLICED,
        (Edit("parallel.tensor.sliced:SlicedNorm.layout", _slices_alike),),
    ),
    Mutation(
        "output_bias_of_slices_not_summed",
        "With slices between layers, the gradient of attention's output bias covers one slice, and the ranks' gradients are never summed",
        "no public report known to us; reasoned from NVIDIA/Megatron-LM#1446, there in norms",
        "tensor",
        replace(_SLICED, model="gpt_oss", ep=2),
        (Edit("parallel.tensor.style:Copied.layout", _slices_of_the_bias_alike),),
    ),
    Mutation(
        "dropout_of_slices_equal",
        "Every rank uses the dropout mask of the first slice",
        "PaddlePaddle/PaddleFleetX#1005",
        "tensor",
        replace(_SLICED, model="gshard", ep=2),
        (Edit("parallel.tensor.sliced:own_columns", _first_slice),),
    ),
    Mutation(
        "runs_of_slices_in_the_order_they_come",
        "Chunks that were gathered one after another are joined in that order: tokens are at wrong positions before the softmax "
        "and when their sums return to the slices",
        "NVIDIA/TransformerEngine#530, there in the input of a weight's gradient",
        "tensor",
        replace(_SLICED, model="gshard", ep=2, tensor="overlapped_sliced"),
        (Edit("parallel.tensor.overlapped:_joined", _as_they_come),),
    ),
    Mutation(
        "copies_of_key_heads_not_summed",
        "Ranks with a copy of the same key-value head keep the gradient from their own query heads; the copies' gradients are not summed",
        "bigcode-project/Megatron-LM#37",
        "tensor",
        Case("dense", "ddp", 4, 1, 1, "fp32", tp=4, tensor="1d"),
        (Edit("parallel.tensor.linear_1d:Column.layout", _copies_of_heads_alike),),
    ),
    Mutation(
        "biases_of_key_heads_not_summed",
        "The same for the biases of keys and values",
        "no public report known to us; reasoned from bigcode-project/Megatron-LM#37, there in the matrices",
        "tensor",
        Case("gpt_oss", "ddp", 4, 2, 1, "fp32", tp=4, tensor="1d"),
        (Edit("parallel.tensor.grid:Channels.layout", _copies_of_heads_alike),),
    ),
    Mutation(
        "rows_of_others_not_zero",
        "A token whose row is on another rank is looked up in row 0, and that row is added to its embedding (in the reports, a bias "
        "that every rank adds before the sum)",
        "huggingface/text-generation-inference#1036; Wenyueh/MinivLLM#80",
        "tensor",
        _LINE,
        (Edit("moe.nn.vocabulary:_look_up_here", _rows_of_others_kept),),
    ),
    Mutation(
        "vocabulary_counted_by_every_rank",
        "The loss counts all logits on every rank: it is log t too large, and its gradients are wrong",
        "NVIDIA/Megatron-LM#7452",
        "tensor",
        _LINE,
        (Edit("parallel.tensor.vocabulary:merged", _counted_by_every_rank),),
    ),
    Mutation(
        "loss_by_a_ranks_own_maximum",
        "Sums of exponentials are merged although each rank subtracted a different maximum",
        "no public report known to us; reasoned from NVIDIA/Megatron-LM: core/tensor_parallel/cross_entropy.py, which takes the maximum "
        "over ranks first",
        "tensor",
        _LINE,
        (Edit("parallel.tensor.vocabulary:max_over", _own_maximum),),
    ),
    Mutation(
        "summa_multiplies_the_wrong_blocks",
        "In each step of SUMMA a block of x meets the block of W of the step before",
        "no public report known to us; reasoned from Optimus, arXiv 2104.05343, section 3",
        "tensor",
        _SQUARE,
        (Edit("parallel.tensor.linear_2d:blocks", _one_block_on),),
    ),
    Mutation(
        "weight_gradient_of_one_row",
        "A block's gradient covers the sequences of its own row of ranks: the shares of the other ranks of its column are not summed",
        "no public report known to us; reasoned from Optimus, arXiv 2104.05343, section 3",
        "tensor",
        _SQUARE,
        (Edit("parallel.tensor.linear_2d:summed", _own_share),),
    ),
    Mutation(
        "norm_of_a_ranks_own_channels",
        "A norm's statistics cover only the channels of one rank (in the report: queries and keys across heads)",
        "EleutherAI/gpt-neox#1424",
        "tensor",
        _SQUARE,
        (Edit("parallel.tensor.grid:_means", _own_channels),),
    ),
    Mutation(
        "embedding_not_transposed",
        "Embedding rows are not transposed: sequences stay split by column and channels by row, but layers expect the opposite",
        "no public report known to us; reasoned from Optimus, arXiv 2104.05343, section 3",
        "tensor",
        _SQUARE,
        (Edit("parallel.tensor.vocabulary:transposed", _identity),),
    ),
    Mutation(
        "depth_not_summed",
        "In 2.5D every depth has a copy of a block, and its gradient covers the sequences of one depth only",
        "no public report known to us; reasoned from Tesseract, arXiv 2105.14500, whose depths hold copies of a block",
        "tensor",
        _DEEP,
        (Edit("parallel.tensor.linear_2d:Block.layout", _depths_alike),),
    ),
    Mutation(
        "targets_not_turned",
        "In 3D the logits belong to other sequences than x did, but the loss uses the targets of x",
        "no public report known to us; reasoned from 3D parallelism, arXiv 2105.14450, section 3.2",
        "tensor",
        _CUBE,
        (Edit("parallel.tensor.vocabulary:VocabularyCube.others", _own_targets),),
    ),
    Mutation(
        "norms_of_heads_not_summed",
        "The gradients of the norms of queries and keys are not summed, although each tp rank has other heads",
        "no public report known to us; reasoned from NVIDIA/Megatron-LM#1446, there in norms of slices",
        "tensor",
        replace(_LINE, model="free", ep=2, microbatches=1),
        (Edit("parallel.tensor.style:Copied.layout", _head_norms_alike),),
    ),
    Mutation(
        "shared_gate_not_summed",
        "The gradient of the shared network's gate is not summed, although each tp rank has other tokens of the MoE layer",
        "no public report known to us; reasoned from huggingface/transformers#48205, there in routers",
        "tensor",
        replace(_LINE, model="qwen3_moe", ep=2, microbatches=1),
        (Edit("parallel.tensor.style:Copied.layout", _of_all_tokens("shared_gate")),),
    ),
    Mutation(
        "coefficients_not_summed",
        "The same for the coefficients of a residual MoE layer, with slices between layers",
        "no public report known to us; reasoned from huggingface/transformers#48205, there in routers",
        "tensor",
        replace(_SLICED, model="mixtral", ep=2),
        (Edit("parallel.tensor.style:Copied.layout", _of_all_tokens("coefficient")),),
    ),
)
