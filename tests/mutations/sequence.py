"""Sequence parallelism: keys that meet the wrong queries, gradients that do not come home, and what is decided by a slice alone."""

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
from parallel.sequence import ring
from parallel.sequence.order import ALL, Block
from parallel.sequence.softmax import Partial, repeated
from tests.mutations.mutation import Edit, Mutation


def _first_keys(real: Any) -> Any:
    """The backward pass goes by what was saved in the first step: the rank's own keys and values, whichever should be there."""

    def stale(axis: Axis, k: Tensor, v: Tensor) -> Any:
        return (ring._Held((axis.index - step) % axis.size, k, v) for step in range(axis.size))

    return FunctionType(real.__code__, real.__globals__ | {"_round": stale})  # the forward pass keeps its own


def _not_home(real: Any) -> Any:
    """The last hop is left out: taken back here."""

    def wrong(self: Any, *args: Any) -> Any:
        found = real(self, *args)
        dk, dv = start_shift([found.k_BKSC, found.v_BKSC], self.axis, steps=-1).wait()
        return found._replace(k_BKSC=dk, v_BKSC=dv)

    return wrong


def _from_zero(real: Any) -> Any:
    return lambda self, length, *, device: torch.arange(length, device=device)


def _same_place_seen(real: Any) -> Any:
    """The triangle with its diagonal for all pairs of ranks: a key as far along as the query comes after it on a later rank."""

    def wrong(self: Any, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        return (Block(ALL, ALL, True),)

    return wrong


def _around_the_mean(real: Any) -> Any:
    """Scores of a part are of keys without that part's mean: right for its own result, and not for what weighs it."""

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
    """Of heads that come together from several ranks the rank is taken for the inner number."""

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
            bias = replace(bias, table_UH=first_UH.repeat(1, self.axis.size))
        return real(self, *args, bias=bias, **beside)

    return wrong


def _times_sp(real: Any) -> Any:
    """Each rank's loss is the mean over its slice, and gradients are summed."""

    def wrong(sums: Any, bucket: Any) -> Any:
        bucket.buffer().mul_(sums.axis.size)
        return real(sums, bucket)

    wrong.__annotations__ = {}  # torch looks at a hook's, and finds texts here
    return wrong


def _over_dp_alone(real: Any) -> Any:
    return lambda layout, mesh: mesh.axis(*(axis for axis in layout.summed_over() if axis != "sp"))


def _one_document(real: Any) -> Any:
    return lambda self, *args, **beside: real(self, *args, **beside | {"document_BS": None})


def _no_group(real: Any) -> Any:
    return lambda spec: None


def _by_rank(real: Any) -> Any:
    """What was gathered stays one rank's after another's, and each takes out its places as if it were in their order."""
    return lambda self, x_BL: all_gather(x_BL, self.axis, dim=1)


def _shifted_after_cutting(real: Any) -> Any:
    """The last token of a run has no target: it is the first token of another rank's."""

    def wrong(self: Any, part: Tensor) -> Tensor:
        targets: Tensor = real(self, part).clone()
        held = set(self.positions)
        lost = [at for at, place in enumerate(self.positions) if place + 1 < self.length and place + 1 not in held]
        targets[:, lost] = PADDING
        return targets

    return wrong


_RING = Case("dense", "ddp", 2, 1, 3, "fp32", sp=2, attention="zigzag", length=SLICED)
_ULYSSES = replace(_RING, attention="ulysses")
_GROUPS = Case("glam", "ddp", 2, 1, 1, "fp32", sp=2, attention="zigzag", experts=8, length=SLICED)

MUTATIONS = (
    Mutation(
        "ring_backward_with_the_first_keys",
        "Every step of the backward ring uses the keys and values that the first one had",
        "huggingface/diffusers#14265",
        "sequence",
        _RING,
        (Edit("parallel.sequence.ring:Ring.backward", _first_keys),),
    ),
    Mutation(
        "key_gradients_not_home",
        "Gradients of keys and values go round with them and stop one rank before their own",
        "no public report known to us; reasoned from Ring Attention, arXiv 2310.01889, whose backward pass sends them round",
        "sequence",
        _RING,
        (Edit("parallel.sequence.ring:Ring.backward", _not_home),),
    ),
    Mutation(
        "positions_restart_on_each_rank",
        "Rotary positions count the tokens that a rank has, from 0",
        "sgl-project/sglang#28463",
        "sequence",
        _RING,
        (Edit("moe.nn.context:Context.places", _from_zero),),
    ),
    Mutation(
        "striped_triangle_not_strict",
        "In striped order a query sees the key at its own number on a later rank, which is the next token",
        "no public report known to us; reasoned from Striped Attention, arXiv 2311.09431, whose triangles have a diagonal or none",
        "sequence",
        replace(_RING, attention="striped"),
        (Edit("parallel.sequence.order:Order._blocks", _same_place_seen),),
    ),
    Mutation(
        "parts_weighed_by_shifted_sums",
        "Each part's log-sum-exp is of scores that are shifted by its own keys' mean, and parts are merged by it",
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
        "What a rank computed for another that has more to do is sent back and never merged",
        "no public report known to us; reasoned from DistFlashAttn, arXiv 2310.03294, section 3.2",
        "sequence",
        replace(_RING, world=3, sp=3, attention="lightseq"),
        (Edit("parallel.sequence.balanced:_pairs", _none_to_merge),),
    ),
    Mutation(
        "heads_come_back_in_another_order",
        "After attention the all-to-all puts heads together with the rank as the inner number",
        "no public report known to us; reasoned from DeepSpeed-Ulysses, arXiv 2309.14509, whose second all-to-all undoes the first",
        "sequence",
        _ULYSSES,
        (Edit("parallel.sequence.ulysses:Ulysses._tokens_for_heads", _heads_inside_out),),
    ),
    Mutation(
        "key_heads_tiled",
        "Fewer key-value heads than ranks are repeated as a row, not each in its place, and serve other heads of queries",
        "ekzhang/jax-js#180",
        "sequence",
        replace(_ULYSSES, world=4, sp=4),
        (Edit("parallel.sequence.ulysses:Ulysses._shareable", _tiled),),
    ),
    Mutation(
        "bias_of_the_first_heads",
        "Every rank adds the bias of the first rank's heads to its own: there over tp",
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
        "The group of the gradients' sum leaves sp out: with one data rank nothing is summed",
        "ByteDance-Seed/VeOmni#1115",
        "sequence",
        _RING,
        (Edit("parallel.data.ddp:data_axis", _over_dp_alone),),
    ),
    Mutation(
        "documents_see_each_other",
        "Where sequences are cut the mask of documents is dropped, and attention is causal alone",
        "huggingface/trl#6843",
        "sequence",
        Case("packed", "ddp", 2, 1, 1, "fp32", sp=2, attention="zigzag", length=SLICED),
        (Edit("parallel.sequence.method:Method.__call__", _one_document),),
    ),
    Mutation(
        "last_target_of_a_slice_lost",
        "Targets are shifted after sequences were cut: the last token of a slice has none",
        "huggingface/transformers#36607",
        "sequence",
        _RING,
        (Edit("moe.data.token_shard:TokenShard.targets", _shifted_after_cutting),),
    ),
    Mutation(
        "capacity_of_each_slice",
        "Capacity is counted over the tokens of one rank, where the group is whole sequences",
        "no public report known to us; reasoned from deepspeedai/DeepSpeed: moe/sharded_moe.py, top1gating, which counts the tokens "
        "of a rank",
        "sequence",
        _GROUPS,
        (Edit("moe.parallelize.sequence:needs_group", _no_group),),
    ),
    Mutation(
        "slices_left_in_the_ranks_order",
        "Tokens gathered from all ranks are not put in the order of their places",
        "THUDM/slime#1871; modelscope/ms-swift#10071",
        "sequence",
        _GROUPS,
        (Edit("moe.router.slots.slices:Slices.whole_sequences", _by_rank),),
    ),
)
