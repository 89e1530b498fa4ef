"""Faults of 16-bit precision and the loss scale: wrong scaling, wrong rounding, and overflows that only one rank detects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.verify.cases import Case
from parallel.mesh.collectives import scattered_sum
from tests.mutations.mutation import Edit, Mutation


def _unscaled_auxiliary(real: Any) -> Any:
    return lambda *args, **rest: [replace(p, context=replace(p.context, auxiliary_scale=p.share)) for p in real(*args, **rest)]


def _first_scale(real: Any) -> Any:
    """Auxiliary losses are multiplied by the loss scale of the first step."""
    first = list[float]()

    def wrong(*args: Any, loss_scale: float, **rest: Any) -> Any:
        first.append(loss_scale)
        return real(*args, loss_scale=first[0], **rest)

    return wrong


def _unscaled_ahead(real: Any) -> Any:
    return lambda self, x, targets, matrix, context: real(
        self, x, targets, matrix, replace(context, auxiliary_scale=context.auxiliary_scale / 1024.0)
    )


def _places_in_16_bits(real: Any) -> Any:
    """Positions are rounded to the compute dtype before they are multiplied by the rates."""
    return lambda position_L, *given, dtype: real(position_L.to(dtype), *given, dtype=dtype)


def _table_in_16_bits(real: Any) -> Any:
    """The table is cast before the look-up, so torch sums the gradients of a token in 16 bits."""
    return lambda row, weight_VD: torch.nn.functional.embedding(row, weight_VD.bfloat16())


def _statistics_in_16_bits(real: Any) -> Any:
    """Mean and mean square are computed in the compute dtype."""

    def wrong(x: Tensor, gain_D: Tensor, *, centered: bool, eps: float) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if centered else x
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain_D.to(x.dtype)

    return wrong


def _clipped_before_unscaled(real: Any) -> Any:
    """Clipping uses the norm of gradients that still contain the loss scale."""

    def wrong(norm: float, limit: float | None) -> float:
        factor: float = real(norm * 1024.0, limit)
        return factor

    return wrong


def _unscaled_twice(real: Any) -> Any:
    """Gradients are divided by the loss scale before the step and in it; the reported norm is correct."""

    def wrong(self: Any, lr: float, *, factor: float = 1.0) -> None:
        real(self, lr, factor=factor / 1024.0)

    return wrong


def _own_finiteness(real: Any) -> Any:
    """Each rank checks only its own gradients for overflow, so the other ranks do not skip the step."""

    def wrong(squares: Tensor, *, families: tuple[str, ...], world: Any) -> Any:
        bad = not bool(squares.isfinite().all())
        norms = real(torch.zeros_like(squares) if bad else squares, families=families, world=world)
        return [replace(norm, total=float("inf")) for norm in norms] if bad else norms

    return wrong


def _stepped_anyway(real: Any) -> Any:
    """After an overflow the optimizer steps with zero gradients: Adam's step count and moments change."""

    def wrong(self: Any) -> None:
        if not _overflowed(self):  # this method is called after every step
            return real(self)  # type: ignore[no-any-return]
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        return real(self)  # type: ignore[no-any-return]

    return wrong


def _overflowed(engine: Any) -> bool:
    return any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in engine.parameters.values())


def _kept_when_skipped(real: Any) -> Any:
    """After an overflow, the finite gradients are not cleared and are added to the next step's."""

    def wrong(self: Any) -> None:
        if not _overflowed(self):
            return real(self)  # type: ignore[no-any-return]
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return None

    return wrong


def _shards_kept_when_skipped(real: Any) -> Any:
    """After an overflow, FSDP's finite gradients are not cleared and are added to the next step's."""

    def wrong(self: Any) -> None:
        held = {p: grad for p in (self.whole | self.cut).values() if (grad := p.grad) is not None}
        here = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in held.values()]
        bad = torch.tensor(float(not all(bool(grad.isfinite().all()) for grad in here)))
        dist.all_reduce(bad)
        real(self)
        for (parameter, grad), part in zip(held.items(), here, strict=True) if bad else ():
            part.nan_to_num_(0.0, 0.0, 0.0)
            parameter.grad = grad

    return wrong


def _loss_in_16_bits(real: Any) -> Any:
    """Softmax and loss are computed in the compute dtype instead of fp32."""

    def wrong(x_BLD: Tensor, targets_BL: Tensor, matrix: Any, **rest: Any) -> Tensor:
        import torch.nn.functional as F

        from moe.nn.vocabulary import project

        logits = project(x_BLD, matrix, recast=rest["recast"])
        return F.cross_entropy(logits.flatten(0, 1), targets_BL.flatten(), reduction="sum").float()

    return wrong


def _router_in_16_bits(real: Any) -> Any:
    """The router's logits are computed in bf16."""
    return lambda x_TI, weight_OI: torch.nn.functional.linear(x_TI.bfloat16(), weight_OI.bfloat16()).float()


def _half_of_the_parts(real: Any) -> Any:
    """After the step, the attention's working weights keep their old values."""

    def wrong(self: Any, lr: float, **how: Any) -> None:
        before = {name: p.data.clone() for name, p in self.parameters.items()}
        real(self, lr, **how)
        for name, parameter in self.parameters.items():
            if ".attention." in name:
                parameter.data.copy_(before[name])

    return wrong


def _weights_of_16_bits(real: Any) -> Any:
    """Weights are rounded to bf16 after each update, so small changes are lost."""

    def wrong(self: Any, lr: float, **how: Any) -> None:
        real(self, lr, **how)
        for parameter in self.parameters.values():
            parameter.data.copy_(parameter.data.bfloat16().float())

    return wrong


def _weight_gradient_in_16_bits(real: Any) -> Any:
    """The gradient of a weight is a product of 16-bit rows and of gradients rounded to 16 bits; that of the rows is exact."""

    def wrong(ctx: Any, grad: Tensor) -> Any:
        of_rows, _, *rest = real(ctx, grad)
        return of_rows, real(ctx, grad.to(ctx.dtype))[1], *rest

    return wrong


def _summed_as_they_are(real: Any) -> Any:
    return lambda grad, axis, *, dim: scattered_sum(grad, axis, dim=dim)


def _rounded_before_the_sum(real: Any) -> Any:
    return lambda tensor, axis, *, dim=0: real(tensor.bfloat16(), axis, dim=dim).to(tensor.dtype)


_FP16 = Case("deepseek", "ddp", 1, 1, 1, "fp16")
_FP16_DENSE = Case("dense", "ddp", 1, 1, 1, "fp16")
_IN_16_BITS = "tests/moe/nn/test_16_bits.py::"
_BF16 = Case("dense", "ddp", 1, 1, 1, "bf16")
_OVERFLOW = Case("deepseek", "ddp", 2, 2, 1, "fp32", overflow=True)
_OVERFLOW_1 = Case("deepseek", "ddp", 1, 1, 1, "fp32", overflow=True)

MUTATIONS = (
    Mutation(
        "auxiliary_loss_without_loss_scale",
        "In fp16 the auxiliary losses are not multiplied by the loss scale, so unscaling makes them vanish",
        "NVIDIA-NeMo/Automodel#1412",
        "data",
        _FP16,
        (Edit("moe.train.loop.step:passes_of", _unscaled_auxiliary),),
    ),
    Mutation(
        "auxiliary_loss_keeps_the_first_scale",
        "After an overflow has halved the loss scale, the auxiliary losses are still multiplied by the first scale",
        "no public report known to us; reasoned from NVIDIA-NeMo/Automodel#1412, there without the scale",
        "data",
        _OVERFLOW_1,
        (Edit("moe.train.loop.step:passes_of", _first_scale),),
    ),
    Mutation(
        "further_tokens_without_loss_scale",
        "In fp16 the loss of multi-token prediction is not multiplied by the loss scale",
        "no public report known to us; reasoned from NVIDIA-NeMo/Automodel#1412, there in the auxiliary losses",
        "data",
        Case("ahead", "ddp", 1, 1, 1, "fp16"),
        (Edit("moe.model.transformer:Transformer._join_ahead", _unscaled_ahead),),
    ),
    Mutation(
        "places_in_16_bits",
        "Rotary positions are rounded to bf16, which has no odd number above 256",
        "huggingface/diffusers#13922, there places of images above 65,536",
        "test",
        _IN_16_BITS + "test_late_tokens_attend_as_in_fp32",
        (Edit("moe.nn.attention:turns_of", _places_in_16_bits),),
    ),
    Mutation(
        "embedding_summed_in_16_bits",
        "The gradients of a token that occurs often are summed in 16 bits",
        "tenstorrent/tt-metal#36341",
        "test",
        _IN_16_BITS + "test_a_tokens_gradients_are_summed_in_fp32",
        (Edit("moe.nn.vocabulary:_embedded", _table_in_16_bits),),
    ),
    Mutation(
        "norms_in_16_bits",
        "The statistics of a norm are computed in the compute dtype",
        "pytorch/pytorch#133085",
        "test",
        _IN_16_BITS + "test_a_norm_rounds_only_its_result",
        (Edit("moe.nn.linear:normed", _statistics_in_16_bits),),
    ),
    Mutation(
        "clipped_before_unscaled",
        "Gradients are clipped while they still contain the loss scale",
        "Lightning-AI/pytorch-lightning#9599",
        "data",
        _FP16_DENSE,
        (Edit("moe.train.loop.step:clip_factor", _clipped_before_unscaled),),
    ),
    Mutation(
        "unscaled_twice",
        "Gradients are divided by the loss scale before the step and again in it",
        "THUDM/slime#1842",
        "data",
        _FP16_DENSE,
        (Edit("parallel.data.stepped:Stepped.step", _unscaled_twice),),
    ),
    Mutation(
        "overflow_known_to_one_rank",
        "Only the rank whose gradient overflowed skips the step",
        "hpcaitech/ColossalAI#1175",
        "data",
        _OVERFLOW,
        (Edit("parallel.numerics.clip:norms_of", _own_finiteness),),
    ),
    Mutation(
        "skipped_step_counted",
        "A skipped step counts in Adam's bias correction, and its moments decay",
        "allenai/OLMo-core#309",
        "data",
        _OVERFLOW_1,
        (Edit("parallel.data.ddp:DDP.drop_gradients", _stepped_anyway),),
    ),
    Mutation(
        "skipped_step_keeps_gradients",
        "Gradients of a skipped step are not cleared and are added to the next step's",
        "deepspeedai/DeepSpeed#7839",
        "data",
        _OVERFLOW_1,
        (Edit("parallel.data.ddp:DDP.drop_gradients", _kept_when_skipped),),
    ),
    Mutation(
        "skipped_step_keeps_shards_of_gradients",
        "FSDP keeps the finite gradients of a skipped step and adds them to the next step's",
        "deepspeedai/DeepSpeed#7839, there without FSDP",
        "data",
        Case("deepseek", "fsdp", 2, 2, 1, "fp32", overflow=True),
        (Edit("parallel.data.fsdp:FSDP.drop_gradients", _shards_kept_when_skipped),),
    ),
    Mutation(
        "loss_in_16_bits",
        "Softmax and cross-entropy run in the compute dtype",
        "Modalities/modalities#464",
        "data",
        _BF16,
        (Edit("moe.model.transformer:summed_loss", _loss_in_16_bits),),
    ),
    Mutation(
        "router_in_16_bits",
        "The router computes in bf16, so nearly tied tokens are routed differently",
        "deepspeedai/DeepSpeed#5156",
        "data",
        Case("switch", "ddp", 1, 1, 1, "fp32"),
        (Edit("moe.router.router:linear_fp32", _router_in_16_bits),),
    ),
    Mutation(
        "working_weights_not_refreshed",
        "After the step some working weights are not refreshed from their master weights",
        "deepspeedai/DeepSpeed#2058",
        "data",
        Case("dense", "ddp", 2, 1, 1, "fp32"),
        (Edit("parallel.data.stepped:Stepped.step", _half_of_the_parts),),
    ),
    Mutation(
        "no_master_weights",
        "The optimizer updates 16-bit weights although fp32 master weights were requested",
        "NVIDIA/apex#1731",
        "data",
        Case("dense", "ddp", 1, 1, 1, "fp32"),
        (Edit("parallel.data.stepped:Stepped.step", _weights_of_16_bits),),
    ),
    Mutation(
        "router_gradient_in_16_bits",
        "The gradient of the router's weight is computed in the compute dtype",
        "no public report known to us; reasoned from Switch, arXiv 2101.03961, section 2.4, whose routers compute in fp32",
        "test",
        _IN_16_BITS + "test_a_product_of_16_bit_tokens_in_fp32_has_exact_gradients",
        (Edit("parallel.numerics.weight_gradient:_Product.backward", _weight_gradient_in_16_bits),),
    ),
    Mutation(
        "gradients_of_gathered_tokens_summed_in_16_bits",
        "The backward pass of an all-gather sums 16-bit gradients in their dtype",
        "no public report known to us; reasoned from pytorch/pytorch: MixedPrecision, which has a dtype for sums of gradients",
        "test",
        "tests/parallel/mesh/test_collectives.py::test_all_gather_sums_16_bit_gradients_in_fp32",
        (Edit("parallel.mesh.collectives:_wide_scattered_sum", _summed_as_they_are),),
    ),
    Mutation(
        "partial_results_rounded_before_their_sum",
        "Each rank rounds its part of a token's sum of experts' results to bf16 before the parts are added",
        "no public report known to us; reasoned from DeepSeek-V3, arXiv 2412.19437, section 3.3, whose combined results are wider than "
        "the tokens sent",
        "test",
        "tests/moe/experts/dispatch/test_dispatch.py::test_gathering_adds_partial_sums_in_fp32",
        (Edit("parallel.mesh.collectives:reduce_scatter", _rounded_before_the_sum),),
    ),
)
