"""Faults of sequence parallelism: wrong pairs of keys and queries, gradients on wrong ranks, and decisions from one shard of a sequence;
also documents in a sequence that see each other."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from moe.nn.vocabulary import PADDING
from moe.verify.cases import SLICED, Case
from parallel.mesh.collectives import all_gather, start_shift
from parallel.mesh.mesh import Axis
from parallel.sequence.order import ALL, Block
from parallel.sequence.softmax import Partial, repeated
from tests.mutations.mutation import Edit, Mutation


def _first_keys(real: Any) -> Any:
    """Every step of the ring's backward pass uses the rank's own keys and values instead of those received."""

    def stale(tensors: list[Tensor], axis: Axis) -> Any:
        return (((axis.index - step) % axis.size, tensors) for step in range(axis.size))

    return FunctionType(real.__code__, real.__globals__ | {"ring_round": stale})  # the forward pass keeps the real ring_round


def _not_home(real: Any) -> Any:
    """Gradients of keys and values end one rank before the rank that holds the keys."""

    def wrong(self: Any, *args: Any) -> Any:
        found = real(self, *args)
        dk, dv = start_shift([found.k_BKSC, found.v_BKSC], self.axis, steps=-1).wait()
        return found._replace(k_BKSC=dk, v_BKSC=dv)

    return wrong


def _from_zero(real: Any) -> Any:
    return lambda position_L, *given, **named: real(torch.arange(len(position_L), device=position_L.device), *given, **named)


def _same_place_seen(real: Any) -> Any:
    """Every pair of ranks uses a causal mask with its diagonal. So a query also sees the key with its own index on a later rank, which is a
    later token."""

    def wrong(self: Any, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        return (Block(ALL, ALL, True),)

    return wrong


def _around_the_mean(real: Any) -> Any:
    """The log-sum-exp of each block is that of scores from which its mean key was subtracted, so blocks are merged with wrong weights."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, **known: Any) -> Partial:
        out, lse_BHL = real(q, k, v, **known)
        mean_BHSC = repeated(k, q.shape[1]).mean(2, keepdim=True)
        return Partial(out, lse_BHL - (q * mean_BHSC).sum(-1) * q.shape[-1] ** -0.5)

    return wrong


def _over_sp(real: Any) -> Any:
    return lambda self, parts: real(self, parts) / self.axis.size


def _none_to_merge(real: Any) -> Any:
    return lambda received: []


def _heads_inside_out(real: Any) -> Any:
    """After Ulysses' all-to-all, heads are ordered by (head on a rank, rank) instead of (rank, head)."""

    def wrong(self: Any, x_BHSC: Tensor) -> Tensor:
        moved: Tensor = rearrange(real(self, x_BHSC), "b (n h) l c -> b (h n) l c", n=self.axis.size)
        return moved

    return wrong


def _tiled(real: Any) -> Any:
    def wrong(self: Any, x_BKLC: Tensor) -> Tensor:
        return x_BKLC.repeat(1, real(self, x_BKLC).shape[1] // x_BKLC.shape[1], 1, 1)

    return wrong


def _first_heads_bias(real: Any) -> Any:
    def wrong(self: Any, *args: Any, bias: Any = None, **beside: Any) -> Any:
        if bias is not None:
            first_UH = bias.table_UH.chunk(self.axis.size, dim=1)[0]
            bias = bias._replace(table_UH=first_UH.repeat(1, self.axis.size))
        return real(self, *args, bias=bias, **beside)

    return wrong


def _first_heads_sinks(real: Any) -> Any:
    def wrong(self: Any, *args: Any, sink_H: Any = None, **beside: Any) -> Any:
        if sink_H is not None:
            sink_H = sink_H.chunk(self.axis.size)[0].repeat(self.axis.size)
        return real(self, *args, sink_H=sink_H, **beside)

    return wrong


def _times_sp(real: Any) -> Any:
    """Gradients are sp times too large, as if each rank's loss were the mean over its own shard of the sequence."""

    def wrong(sums: Any, bucket: Any) -> Any:
        bucket.buffer().mul_(sums.axis.size)
        return real(sums, bucket)

    wrong.__annotations__ = {}  # torch raises an error if a hook's annotations are strings
    return wrong


def _over_dp_alone(real: Any) -> Any:
    return lambda layout, mesh: mesh.axis(*(axis for axis in layout.summed_over() if axis != "sp"))


def _one_document(real: Any) -> Any:
    return lambda self, *args, **beside: real(self, *args, **beside | {"document_BS": None})


def _no_group(real: Any) -> Any:
    return lambda spec: None


def _by_rank(real: Any) -> Any:
    """Tokens all-gathered over sp are ordered by rank instead of by position."""
    return lambda self, x_T: all_gather(x_T, self.axis)


def _shifted_after_cutting(real: Any) -> Any:
    """Tokens whose next token is on another rank have no target."""

    def wrong(self: Any, part: Tensor) -> Tensor:
        targets: Tensor = real(self, part).clone()
        held = set(self.positions)
        lost = [at for at, place in enumerate(self.positions) if place + 1 < self.length and place + 1 not in held]
        targets[:, lost] = PADDING
        return targets

    return wrong


def _loss_on_each_rank(real: Any) -> Any:
    """Each rank that holds a slice counts the loss of the whole sequence."""

    def wrong(self: Any, logp_BL: Tensor, arranged: Any, *, whole: Any, **known: Any) -> Tensor:
        slices = whole(logp_BL.detach()).shape[1] / logp_BL.shape[1]
        loss: Tensor = real(self, logp_BL, arranged, whole=whole, **known) * slices
        return loss

    return wrong


def _separators_alone(real: Any) -> Any:
    def wrong(self: Any, separator: int | None, whole: Any) -> Any:
        return replace(real(replace(self, begins_T=None), separator, whole), begins_T=self.begins_T)

    return wrong


_RING = Case("dense", "ddp", 2, 1, 3, "fp32", sp=2, attention="zigzag", length=SLICED)
_ULYSSES = replace(_RING, attention="ulysses")
_GROUPS = Case("glam", "ddp", 2, 1, 1, "fp32", sp=2, attention="zigzag", experts=8, length=SLICED)

MUTATIONS = (
    Mutation(
        "ring_backward_with_the_first_keys",
        "Every step of the backward ring uses the keys and values of the first step",
        "huggingface/diffusers#14265",
        "sequence",
        _RING,
        (Edit("parallel.sequence.ring:Ring.backward", _first_keys),),
    ),
    Mutation(
        "key_gradients_not_home",
        "Gradients of keys and values are sent around the ring and stop one rank too early",
        "no public report known to us; reasoned from Ring Attention, arXiv 2310.01889, whose backward pass sends them round",
        "sequence",
        _RING,
        (Edit("parallel.sequence.ring:Ring.backward", _not_home),),
    ),
    Mutation(
        "positions_restart_on_each_rank",
        "Rotary positions begin at 0 on every rank",
        "sgl-project/sglang#28463",
        "sequence",
        _RING,
        (Edit("moe.nn.attention:turns_of", _from_zero),),
    ),
    Mutation(
        "striped_triangle_not_strict",
        "In striped order a query sees the key with its own index on a later rank, which is a later token",
        "no public report known to us; reasoned from Striped Attention, arXiv 2311.09431, whose triangles have a diagonal or none",
        "sequence",
        replace(_RING, attention="striped"),
        (Edit("parallel.sequence.order:Order._blocks", _same_place_seen),),
    ),
    Mutation(
        "parts_weighed_by_shifted_sums",
        "Parts are merged by log-sum-exps of scores that were shifted by the mean of each part's own keys",
        "ROCm/aiter#3334",
        "sequence",
        _RING,
        (Edit("parallel.sequence.ring:attend", _around_the_mean),),
    ),
    Mutation(
        "colossal_gradients_over_sp",
        "Gradients of keys and values are divided by the number of ranks after they were summed",
        "hpcaitech/ColossalAI#3044",
        "sequence",
        replace(_RING, attention="colossal"),
        (Edit("parallel.sequence.colossal_ring:ColossalRing._own", _over_sp),),
    ),
    Mutation(
        "helpers_results_lost",
        "The result that a rank computed for a busier rank is sent back but never merged",
        "no public report known to us; reasoned from DistFlashAttn, arXiv 2310.03294, section 3.2",
        "sequence",
        replace(_RING, world=3, sp=3, attention="lightseq"),
        (Edit("parallel.sequence.balanced:_pairs", _none_to_merge),),
    ),
    Mutation(
        "heads_come_back_in_another_order",
        "After attention the all-to-all orders heads with the rank as the inner index",
        "no public report known to us; reasoned from DeepSpeed-Ulysses, arXiv 2309.14509, whose second all-to-all undoes the first",
        "sequence",
        _ULYSSES,
        (Edit("parallel.sequence.ulysses:Ulysses._tokens_for_heads", _heads_inside_out),),
    ),
    Mutation(
        "key_heads_tiled",
        "With fewer key-value heads than ranks, heads are tiled instead of repeated, and serve wrong query heads",
        "ekzhang/jax-js#180",
        "sequence",
        replace(_ULYSSES, world=4, sp=4),
        (Edit("parallel.sequence.ulysses:Ulysses._shareable", _tiled),),
    ),
    Mutation(
        "bias_of_the_first_heads",
        "Every rank uses the position bias of the first rank's heads (over tp in the report)",
        "bigscience-workshop/Megatron-DeepSpeed#227",
        "sequence",
        replace(_ULYSSES, model="gshard"),
        (Edit("parallel.sequence.ulysses:Ulysses.__call__", _first_heads_bias),),
    ),
    Mutation(
        "gradients_times_sp",
        "Each rank's loss is the mean over its slice, and gradients are summed: sp times too large",
        "deepspeedai/DeepSpeed#5248",
        "sequence",
        _ULYSSES,
        (Edit("parallel.data.ddp:_sum_bucket", _times_sp),),
    ),
    Mutation(
        "gradients_summed_over_dp_alone",
        "Gradients are summed over a group without sp: with one data rank nothing is summed",
        "ByteDance-Seed/VeOmni#1115",
        "sequence",
        _RING,
        (Edit("parallel.data.ddp:data_axis", _over_dp_alone),),
    ),
    Mutation(
        "documents_see_each_other",
        "With sequence parallelism the document mask is lost, and attention is only causal",
        "huggingface/trl#6843",
        "sequence",
        Case("packed", "ddp", 2, 1, 1, "fp32", sp=2, attention="zigzag", length=SLICED),
        (Edit("parallel.sequence.method:Method.__call__", _one_document),),
    ),
    Mutation(
        "last_target_of_a_slice_lost",
        "Targets are shifted after sequences are cut, so the last token of a slice has none",
        "huggingface/transformers#36607",
        "sequence",
        _RING,
        (Edit("moe.data.token_shard:TokenShard.targets", _shifted_after_cutting),),
    ),
    Mutation(
        "capacity_of_each_slice",
        "Capacity is counted over the tokens of one rank instead of whole sequences",
        "no public report known to us; reasoned from deepspeedai/DeepSpeed: moe/sharded_moe.py, top1gating, which counts the tokens "
        "of a rank",
        "sequence",
        _GROUPS,
        (Edit("moe.experts.spread:group_size", _no_group),),
    ),
    Mutation(
        "slices_left_in_the_ranks_order",
        "Tokens gathered from all ranks are not sorted by position",
        "THUDM/slime#1871; modelscope/ms-swift#10071",
        "sequence",
        _GROUPS,
        (Edit("moe.router.slices:Shards.whole", _by_rank),),
    ),
    Mutation(
        "sinks_of_the_first_heads",
        "With Ulysses, every rank uses the sinks of the first rank's heads",
        "no public report known to us; reasoned from bigscience-workshop/Megatron-DeepSpeed#227, there in position biases",
        "sequence",
        Case("gpt_oss", "ddp", 2, 1, 1, "fp32", sp=2, attention="ulysses", length=SLICED),
        (Edit("parallel.sequence.ulysses:Ulysses.__call__", _first_heads_sinks),),
    ),
    Mutation(
        "own_loss_times_sp",
        "The loss of a user's function counts on each of the ranks that share a sequence",
        "no public report known to us; reasoned from deepspeedai/DeepSpeed#5248, there in the usual loss",
        "test",
        "tests/moe/nn/test_own_loss.py::test_dpo_begins_at_log_2_on_ranks_and_falls",
        (Edit("moe.nn.own_loss:OwnLoss.__call__", _loss_on_each_rank),),
    ),
    Mutation(
        "packed_chats_see_each_other",
        "With a document mask, documents begin at separators alone, and a packed chat sees the chat before it",
        "no public report known to us; reasoned from huggingface/trl#6843, there with sequence parallelism",
        "data",
        Case("packed", "ddp", 1, 1, 1, "fp32", packed=True),
        (Edit("moe.nn.context:Context.with_documents", _separators_alone),),
    ),
)
