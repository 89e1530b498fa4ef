"""Faults in gradients: all-reduces over wrong ranks, wrong factors, and wrong collectives in the backward pass."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe.verify.cases import Case
from parallel.data.whole import Cut
from parallel.mesh.collectives import Started, _start_exchange, join_copies
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis
from tests.mutations.mutation import Edit, Mutation


def _experts_times_ep(real: Any) -> Any:
    def wrong(self: Any) -> None:
        real(self)
        for name, grad in self.gradients():
            if self.layouts[name].family == "expert":
                grad.mul_(self.mesh.axis("ep").size)

    return wrong


def _experts_over_dp(real: Any) -> Any:
    """All gradients are reduced over the group of the dense parameters, so gradients of different experts are added."""
    return lambda layout, mesh: real(Layout(()) if layout.family == "expert" else layout, mesh)


def _copies_alone(real: Any) -> Any:
    return lambda self, bucket: None


def _hook(wrong: Any) -> Any:
    """Remove the hook's annotations, and return it: torch's DDP raises an error for annotations that are strings."""
    wrong.__annotations__ = {}
    return wrong


def _router_alone(real: Any) -> Any:
    def wrong(sums: Any, bucket: Any) -> Any:
        kept = {sums.names[id(p)]: g.clone() for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        done = real(sums, bucket)

        def restore(future: Any) -> Tensor:
            total: Tensor = future.value()
            at = 0
            for name, mine in kept.items():
                if ".router." in name:
                    total[at : at + mine.numel()] = mine.flatten()
                at += mine.numel()
            return total

        return done.then(restore)

    return _hook(wrong)


def _averaged(real: Any) -> Any:
    def wrong(sums: Any, bucket: Any) -> Any:
        bucket.buffer().div_(sums.axis.size)
        return real(sums, bucket)

    return _hook(wrong)


def _in_half(real: Any) -> Any:
    """Each rank rounds its gradients to bf16 before the all-reduce."""

    def wrong(sums: Any, bucket: Any) -> Any:
        bucket.buffer().copy_(bucket.buffer().bfloat16().float())
        return real(sums, bucket)

    return _hook(wrong)


def _never_synchronized(real: Any) -> Any:
    """No micro-batch is treated as the last of the step, so torch's DDP never all-reduces gradients."""

    def wrong(self: Any, *args: Any, last: bool) -> Any:
        return real(self, *args, last=False)

    return wrong


def _last_microbatch_alone(real: Any) -> Any:
    def wrong(self: Any, *args: Any, last: bool) -> Any:
        if last:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return real(self, *args, last=last)

    return wrong


def _kept(real: Any) -> Any:
    return lambda self: None


def _splits_as_forward(real: Any) -> Any:
    """The backward pass of the experts' all-to-all uses the splits of the forward pass. Surplus rows are cut, missing rows are 0."""

    def fitted(rows: Tensor, count: int) -> Tensor:
        return torch.cat((rows[:count], rows.new_zeros(max(0, count - len(rows)), *rows.shape[1:])))

    def wrong(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        started = ctx.started
        given = fitted(grad, sum(started.send))
        rows = _start_exchange(given, started.axis.backward(), send=started.send, receive=started.receive).wait()
        started.buffer, started.work = fitted(rows, sum(started.send)), SimpleNamespace(wait=lambda: None)
        return grad, None

    return wrong


def _own_slice(real: Any) -> Any:
    """The backward pass of an all-gather takes this rank's slice of its own gradient, without adding other ranks' gradients."""

    def wrong(grad: Tensor, axis: Axis, *, dim: int) -> Tensor:
        each = grad.shape[dim] // axis.size
        return grad.narrow(dim, axis.index * each, each).contiguous()

    return wrong


def _own_slice_started(real: Any) -> Any:
    """Like `_own_slice`, for rows that were gathered while others were computed."""
    return lambda grad, axis: Started(_own_slice(None)(grad, axis, dim=0), None)


def _own_part(real: Any) -> Any:
    """The backward pass of a reduce-scatter keeps this rank's part of the gradient, with zeros in place of other ranks' parts."""

    def wrong(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
        def own(grad: Tensor) -> Tensor:
            parts = grad.chunk(axis.size, dim)
            return torch.cat([part if place == axis.index else torch.zeros_like(part) for place, part in enumerate(parts)], dim)

        branch = tensor.view_as(tensor)
        if branch.requires_grad:
            branch.register_hook(own)
        summed: Tensor = real(branch, axis, dim=dim)
        return summed

    return wrong


def _gates_detached(real: Any) -> Any:
    """Gates (at most four columns) are all-gathered without autograd; tokens are gathered with autograd."""

    def wrong(self: Any, tensor: Tensor, longest: int, **rest: Any) -> Tensor:
        gathered: Tensor = real(self, tensor.detach() if tensor.is_floating_point() and tensor.shape[-1] <= 4 else tensor, longest, **rest)
        return gathered

    return wrong


def _averaged_by_the_engine(real: Any) -> Any:
    def wrong(self: Any, loss: Tensor, *, last: bool) -> None:
        real(self, loss, last=last)
        if last:
            for _, part in self._partitions():
                part.div_(self.mesh.axis("dp").size)

    return wrong


def _experts_doubled(real: Any) -> Any:
    """Experts' gradients are multiplied by ep, as if they were averaged over their own group only."""

    def wrong(self: Any) -> None:
        real(self)
        for name, grad in self.gradients():
            if self.layouts[name].family == "expert":
                grad.mul_(self.mesh.axis("ep").size)

    return wrong


def _gate_of_all_rows(real: Any) -> Any:
    """Gates of choices that have no row on this rank also get a gradient."""

    def wrong(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate_TK, *rest = real(ctx, grad_TD)
        row_TK = ctx.plan.row_TK
        return rows, torch.where(row_TK < 0, gate_TK.abs().mean(), gate_TK), *rest

    return wrong


def _norm(change: Any) -> Any:
    """Replace `norms_of` by `change`, which gets the real function too. squares: this rank's sum of squared gradients of each family."""

    def make(real: Any) -> Any:
        return lambda squares, *, families, world: change(real, squares, families, world)

    return make


def _mean_of_norms(real: Any, squares: Tensor, families: Any, world: Any) -> Any:
    from parallel.mesh.collectives import sum_over
    from parallel.numerics.clip import GradientNorm

    roots = sum_over(squares.sqrt(), world) / world.size
    return [GradientNorm(roots.square().sum().sqrt().item(), dict(zip(families, roots.tolist(), strict=True)))]


def _without_experts(real: Any, squares: Tensor, families: Any, world: Any) -> Any:
    squares[families.index("expert")] = 0
    return real(squares, families=families, world=world)


def _of_each_rank(real: Any, squares: Tensor, families: Any, world: Any) -> Any:
    return real(squares, families=families, world=replace(world, ranks=(world.ranks[world.index],), index=0, group=None))


def _copies_counted(real: Any) -> Any:
    def wrong(self: Any) -> Any:
        for name, parameter in self.parameters.items():
            yield self.layouts[name].family, parameter.grad

    return wrong


def _copied_biases_counted(real: Any) -> Any:
    """The output biases of experts, of which each rank has a copy, are counted on each rank."""

    def wrong(self: Any) -> Any:
        yield from real(self)
        for name, grad in self.gradients():
            if name.endswith(".output_bias") and not self.layouts[name].is_owner(self.mesh):
                yield self.layouts[name].family, grad

    return wrong


class _EvenStarts(Cut):
    """Shards that begin where they would if ranks had about equally many elements; the last ranks have fewer."""

    def run(self, place: int) -> tuple[int, int]:
        return place * self.size // self.axis.size, super().run(place)[1]


def _even_starts(real: Any) -> Any:
    return lambda parameter, axis: _EvenStarts(**vars(real(parameter, axis)))


def _without_scale(real: Any) -> Any:
    """The gradients of an adapter's two matrices leave out its scale."""

    def wrong(ctx: Any, grad: Tensor) -> Any:
        found = list(real(ctx, grad))
        found[2:4] = [found[2] / ctx.scale, found[3] / ctx.scale]
        return tuple(found)

    return wrong


def _copied_halves_alike(real: Any) -> Any:
    """Layout of stacks without hidden units (halves of experts' adapters) as if all etp ranks computed the same gradient."""

    def wrong(self: Any, name: str, shape: Any) -> Layout:
        layout: Layout = real(self, name, shape)
        return replace(layout, alike=("etp",)) if self._dim(name) is None else layout

    return wrong


def _tile_biases_twice(real: Any) -> Any:
    def wrong(self: Any) -> Any:
        network = real(self)
        if self.hidden.stop - self.hidden.start == self.d_ff:
            return network
        w1, w2, w3, b1, b3 = network.tensors
        return type(network).of([w1, w2, w3, 2 * b1, b3], network.activation)

    return wrong


def _without_slope(real: Any) -> Any:
    """The backward pass from chunks of logits takes the gradient of capped logits as the gradient of the logits."""

    def wrong(ctx: Any, grad_2N: Tensor) -> Any:
        x_ND, weight_VD, row_N, here_N, scores = ctx.saved_tensors
        _, _, *rest = real(ctx, grad_2N)
        capped_NV = ctx.cap * (x_ND @ weight_VD.t() / ctx.cap).tanh()
        slope_NV = (capped_NV - scores[0].unsqueeze(1)).exp() * grad_2N[0].unsqueeze(1)
        slope_NV.scatter_add_(1, row_N.unsqueeze(1), (grad_2N[1] * here_N).unsqueeze(1))
        return slope_NV @ weight_VD, slope_NV.t() @ x_ND, *rest

    return wrong


def _detached_if_frozen(real: Any) -> Any:
    def wrong(self: Any, x_TD: Tensor, **given: Any) -> Any:
        frozen = not any(parameter.requires_grad for parameter in self.parameters())
        return real(self, x_TD.detach() if frozen else x_TD, **given)

    return wrong


_DENSE = Case("dense", "ddp", 2, 1, 1, "fp32")
_DENSE_3 = Case("dense", "ddp", 2, 1, 3, "fp32")
_EP = Case("switch", "ddp", 2, 2, 1, "fp32")
_EDP = Case("switch", "ddp", 4, 2, 1, "fp32")  # ep 2 on 4 ranks: each expert has two copies
_ROWS = Case("glam", "ddp", 2, 2, 1, "fp32", experts=8)
_ADAPTED = Case("lora", "ddp", 2, 1, 1, "fp32", etp=2)

MUTATIONS = (
    Mutation(
        "expert_gradients_times_ep",
        "An expert's gradient covers the tokens of its whole ep group but is averaged over its copies only: ep times too large",
        "deepspeedai/DeepSpeed#5259, NVIDIA/Megatron-LM#5956",
        "data",
        _EP,
        (Edit("parallel.data.buckets:SummedEarly.reduce", _experts_times_ep),),
    ),
    Mutation(
        "experts_summed_over_dp",
        "Experts' gradients are reduced over the group of the dense parameters, so different experts are summed",
        "NVIDIA/Megatron-LM#5916",
        "data",
        _EP,
        (Edit("parallel.data.ddp:data_axis", _experts_over_dp),),
    ),
    Mutation(
        "parts_of_experts_summed_over_dp",
        "Experts that are not spread over ep, but cut over more ranks than dense parameters, are reduced over the dense parameters' group: "
        "gradients of different parts are summed",
        "NVIDIA/Megatron-LM#6080",
        "expert",
        Case("glam", "ddp", 2, 1, 1, "fp32", etp=2, experts=8),
        (Edit("parallel.data.ddp:data_axis", _experts_over_dp),),
    ),
    Mutation(
        "copies_of_experts_not_summed",
        "Experts are left out of the data-parallel reduction although they have copies",
        "facebookresearch/fairseq#4220",
        "data",
        _EDP,
        (Edit("parallel.data.buckets:Buckets._start", _copies_alone),),
    ),
    Mutation(
        "router_not_reduced",
        "Each rank has the router's gradient of its own rows only; the ranks' gradients are never summed",
        "huggingface/transformers#48205",
        "data",
        _EP,
        (Edit("parallel.data.ddp:_sum_bucket", _router_alone),),
    ),
    Mutation(
        "averaged_though_already_a_share",
        "Gradients are divided twice, because the loss was already divided: here by the data ranks, in the report by the micro-batches",
        "areal-project/AReaL#1273",
        "data",
        _DENSE,
        (Edit("parallel.data.ddp:_sum_bucket", _averaged),),
    ),
    Mutation(
        "reduced_in_16_bits",
        "Gradients are rounded to bf16 before they are summed over ranks",
        "deepspeedai/DeepSpeed#5170",
        "data",
        _DENSE,
        (Edit("parallel.data.ddp:_sum_bucket", _in_half),),
    ),
    Mutation(
        "last_microbatch_not_synchronized",
        "The last micro-batch of a step runs without synchronization: the condition of no_sync is off by one",
        "modelscope/FunASR#3472",
        "data",
        _DENSE_3,
        (Edit("parallel.data.ddp:DDP.forward", _never_synchronized),),
    ),
    Mutation(
        "only_last_microbatch_counts",
        "Gradients of earlier micro-batches are cleared before the last one",
        "NVIDIA/Megatron-LM#7186",
        "data",
        _DENSE_3,
        (Edit("parallel.data.ddp:DDP.forward", _last_microbatch_alone),),
    ),
    Mutation(
        "gradients_not_cleared",
        "A step's gradients remain in the next step: zero_grad is skipped in one configuration",
        "deepspeedai/DeepSpeed#7839",
        "data",
        Case("switch", "ddp", 1, 1, 1, "fp32"),
        (Edit("parallel.data.ddp:DDP.drop_gradients", _kept),),
    ),
    Mutation(
        "backward_splits_not_exchanged",
        "The all-to-all's backward pass uses the splits of the forward one, so gradients go to ranks that did not send the rows",
        "no public report known to us; reasoned from pytorch/pytorch: torch/distributed/nn/functional.py, _AlltoAllSingle, which "
        "exchanges them",
        "expert",
        _ROWS,
        (Edit("parallel.mesh.collectives:_Finish.backward", _splits_as_forward),),
    ),
    Mutation(
        "gather_backward_takes_own_slice",
        "all_gather's backward pass takes this rank's slice of its own gradient and ignores the other ranks' gradients for it",
        "NVIDIA-NeMo/Automodel#1260; pytorch/xla#5784",
        "expert",
        replace(_ROWS, rows="all_gather"),
        (
            Edit("parallel.mesh.collectives:_wide_scattered_sum", _own_slice),
            Edit("parallel.mesh.exchange:start_scatter_sum", _own_slice_started),
        ),
    ),
    Mutation(
        "scatter_backward_stays_local",
        "reduce_scatter's backward pass returns this rank's part of the gradient and does not gather the other parts",
        "huggingface/nanotron#172",
        "expert",
        Case("glam", "ddp", 2, 1, 1, "fp32", etp=2, experts=8),
        (Edit("moe.experts.dispatch.network:reduce_scatter", _own_part),),
    ),
    Mutation(
        "rows_gathered_over_etp_without_sum",
        "Each rank with a part of every expert keeps its share of the rows' gradient; the shares are not summed",
        "pytorch/torchtitan#4054",
        "expert",
        Case("glam", "ddp", 2, 1, 1, "fp32", etp=2, experts=8),
        (Edit("moe.experts.dispatch.network:all_gather", lambda real: join_copies),),
    ),
    Mutation(
        "output_bias_times_etp",
        "Each rank with a part of every expert adds the whole output bias, and the outputs are summed: the bias counts etp times",
        "pytorch/torchtitan#4245",
        "expert",
        Case("gpt_oss", "ddp", 2, 1, 1, "fp32", etp=2, experts=8),
        (Edit("moe.experts.layer:MoELayer._output_biases", lambda real: lambda self, routing: 2 * real(self, routing)),),
    ),
    Mutation(
        "gates_gathered_without_gradient",
        "Gates are gathered over ep by a collective without autograd, so the router learns from its auxiliary losses only",
        "NVIDIA-NeMo/Automodel#2995",
        "expert",
        replace(_ROWS, rows="all_gather"),
        (Edit("moe.experts.dispatch.all_gather:Gathered.gathered", _gates_detached),),
    ),
    Mutation(
        "zero_averages",
        "ZeRO averages gradients over ranks although the loss was already divided",
        "deepspeedai/DeepSpeed#5618",
        "data",
        Case("dense", "zero1", 2, 1, 1, "fp32"),
        (Edit("parallel.data.zero:Zero.backward", _averaged_by_the_engine),),
    ),
    Mutation(
        "sharded_experts_doubled",
        "With FSDP and ep 2, experts' gradients are twice as large",
        "pytorch/pytorch#160285",
        "data",
        Case("gshard", "fsdp", 2, 2, 1, "fp32"),
        (Edit("parallel.data.fsdp:FSDP.reduce", _experts_doubled),),
    ),
    Mutation(
        "gates_of_absent_rows",
        "Gates of choices without a row on this rank get a gradient; the forward pass does not show it",
        "huggingface/transformers#48687",
        "expert",
        _ROWS,
        (Edit("moe.kernels.rows:_Combine.backward", _gate_of_all_rows),),
    ),
    Mutation(
        "norms_of_ranks_averaged",
        "The gradient norm is the mean of the ranks' norms although each rank has different experts",
        "deepspeedai/DeepSpeed#8475",
        "data",
        _EP,
        (Edit("parallel.numerics.clip:norms_of", _norm(_mean_of_norms)),),
    ),
    Mutation(
        "experts_left_out_of_the_norm",
        "The norm used for clipping leaves out the experts",
        "deepspeedai/DeepSpeed#8476",
        "data",
        _EP,
        (Edit("parallel.numerics.clip:norms_of", _norm(_without_experts)),),
    ),
    Mutation(
        "each_rank_clips_by_its_own_norm",
        "Every rank clips by the norm of its own parameters, so copies of a parameter are updated differently",
        "NVIDIA-NeMo/Automodel#3816",
        "data",
        _EP,
        (Edit("parallel.numerics.clip:norms_of", _norm(_of_each_rank)),),
    ),
    Mutation(
        "copies_counted_in_the_norm",
        "Parameters that all ranks hold are counted in the norm once for every rank",
        "hpcaitech/ColossalAI#2192",
        "data",
        _DENSE,
        (Edit("parallel.data.stepped:Stepped.owned_gradients", _copies_counted),),
    ),
    Mutation(
        "copied_expert_biases_counted_in_the_norm",
        "The norm counts experts' output biases once for each rank that has a copy: copies are looked for in a wrong group (in the report, "
        "with Muon)",
        "NVIDIA/Megatron-LM#6099",
        "expert",
        Case("gpt_oss", "ddp", 2, 1, 1, "fp32", etp=2, experts=8),
        (Edit("parallel.data.stepped:Stepped.owned_gradients", _copied_biases_counted),),
    ),
    Mutation(
        "uneven_shards_begin_early",
        "Of a matrix that the ranks do not divide, FSDP gives later ranks the first values of earlier elements",
        "no public report known to us; reasoned from pytorch/pytorch: distributed/fsdp, whose last shards are shorter",
        "data",
        Case("latent", "fsdp", 3, 1, 1, "fp32"),
        (Edit("parallel.data.fsdp:_cut_of", _even_starts),),
    ),
    Mutation(
        "adapter_gradient_without_scale",
        "The gradients of LoRA's A and B leave out the scale alpha / r",
        "no public report known to us; reasoned from arXiv 2106.09685, section 4.1",
        "data",
        _ADAPTED,
        (Edit("moe.nn.lora:_Product.backward", _without_scale), Edit("moe.nn.lora:_GroupedProduct.backward", _without_scale)),
    ),
    Mutation(
        "adapters_of_experts_not_summed",
        "The half of an expert's adapter of which every etp rank has a copy keeps the gradient from this rank's hidden units",
        "no public report known to us; reasoned from arXiv 2106.09685, with experts that are cut over ranks",
        "data",
        _ADAPTED,
        (Edit("parallel.tensor.style:Stacked.layout", _copied_halves_alike),),
    ),
    Mutation(
        "frozen_router_detached",
        "If the router is frozen, its input gets no gradient either",
        "no public report known to us; reasoned from ST-MoE, arXiv 2202.08906, which trains parts of a model",
        "data",
        Case("frozen", "ddp", 2, 2, 1, "fp32"),
        (Edit("moe.router.router:Router.forward", _detached_if_frozen),),
    ),
    Mutation(
        "biases_of_tiles_twice",
        "With tiles, the biases of an expert's hidden units are added twice",
        "no public report known to us; reasoned from deepspeedai/DeepSpeed: TiledLinear, which adds a bias in one tile only",
        "data",
        Case("gpt_oss", "ddp", 1, 1, 1, "fp32", tiles=5, head_tiles=3),
        (Edit("moe.experts.experts:Experts._read", _tile_biases_twice),),
    ),
    Mutation(
        "capped_logits_without_slope",
        "With chunks of the loss, the gradient of capped logits leaves out the derivative of the cap",
        "no public report known to us; reasoned from arXiv 2408.00118, whose logits are capped",
        "data",
        Case("ahead", "ddp", 2, 1, 1, "fp32", head_tiles=3, chunks=7),
        (Edit("moe.nn.vocabulary:_Scores.backward", _without_slope),),
    ),
)
