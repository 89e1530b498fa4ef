"""Sparse blocks of transformers with special options and this project's MoE layer with the preset of that model: with the same random
weights they give the same output and gradients.

GPT-OSS           affine logits, softmax over the chosen, biases of experts, bounded swiglu       preset gpt_oss
Qwen2-MoE         top-k of softmax, not renormalized; a gated shared expert                       preset qwen2_moe
Llama 4           sigmoid of the chosen, which scales the expert's input                          preset llama4
LongCat-Flash     skip experts, a bias for selection, gates times a factor                        a recipe key each
NLLB              its router alone: transformers 5.23 gives all tokens to experts 0 and 1         preset nllb
DeepSeek-V2       groups ranked by their best expert, gates times a factor, shared experts        preset deepseek_v2

Blocks with Mixtral's layout of weights: tests/peers/test_transformers_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.nn.linear import FeedForward
from moe.recipe import sections

pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

# B sequences, L length, D model, F hidden, E experts, K choices
B, L, D, F, E, K = 3, 17, 10, 12, 8, 3
Pairs = list[
    tuple[nn.Parameter, nn.Parameter, Callable[[Tensor], Tensor]]
]  # parameter here, in transformers, function from transformers' layout to this


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_is(x: Tensor) -> Tensor:
    return x


def block(kind: type[nn.Module], sizes: Any, name: str = "eager") -> Any:
    sizes._experts_implementation = name
    theirs = kind(sizes)
    for i, p in enumerate(theirs.parameters()):
        p.data.copy_(random(*p.shape, seed=i) / 2)
    return theirs


def layer(experts: dict[str, Any] | None = None, *, shared: nn.Module | None = None, ffn: str = "swiglu", **router: Any) -> MoELayer:
    swiglu = router.pop("swiglu", None)
    settings = sections.Router(balance_weight=0, **router)
    sizes = {"d_model": D, "d_ff": F, "ffn": ffn, "layer": 1}
    return MoELayer(sections.Experts(num_experts=E, **(experts or {})), settings, **sizes, swiglu=swiglu, shared=shared)  # type: ignore[arg-type]


def gpt_oss() -> tuple[Any, MoELayer, Pairs]:
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    theirs = block(m.GptOssMLP, m.GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K))
    theirs.experts.limit = 0.9  # so low that some activations are clamped
    swiglu = sections.Swiglu(alpha=1.702, limit=0.9, offset=1.0)
    ours, x = layer({"biases": True}, preset="gpt_oss", num_choices=K, swiglu=swiglu), theirs.experts
    mine = ours.experts
    assert mine.b1 is not None and mine.b3 is not None and mine.w3 is not None
    assert ours.output_bias is not None and ours.router.logit_bias is not None
    even: Callable[[Tensor], Tensor] = lambda w: w[..., ::2]  # noqa: E731
    odd: Callable[[Tensor], Tensor] = lambda w: w[..., 1::2]  # noqa: E731
    pairs = [(mine.w1, x.gate_up_proj, even), (mine.w3, x.gate_up_proj, odd), (mine.w2, x.down_proj, as_is)]
    pairs += [(mine.b1, x.gate_up_proj_bias, even), (mine.b3, x.gate_up_proj_bias, odd), (ours.output_bias, x.down_proj_bias, as_is)]
    pairs += [(ours.router.weight, theirs.router.weight, as_is), (ours.router.logit_bias, theirs.router.bias, as_is)]
    return theirs, ours, pairs


def deepseek_v2() -> tuple[Any, MoELayer, Pairs]:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as m

    groups = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": K, "n_routed_experts": E, "topk_method": "group_limited_greedy"}
    sizes = m.DeepseekV2Config(
        hidden_size=D,
        num_attention_heads=2,
        moe_intermediate_size=F,
        n_shared_experts=2,
        routed_scaling_factor=16.0,
        norm_topk_prob=False,
        **groups,
    )
    theirs, shared = block(m.DeepseekV2Moe, sizes), FeedForward(D, 2 * F, "swiglu")
    ours = layer(shared=shared, preset="deepseek_v2", num_choices=K, expert_groups=4, top_groups=2)
    return theirs, ours, [*fused(ours, theirs), (ours.router.weight, theirs.gate.weight, as_is), *beside(shared, theirs.shared_experts)]


def qwen2() -> tuple[Any, MoELayer, Pairs]:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as m

    sizes = m.Qwen2MoeConfig(
        hidden_size=D, num_attention_heads=2, moe_intermediate_size=F, shared_expert_intermediate_size=9, num_experts=E,
        num_experts_per_tok=K, norm_topk_prob=False,
    )  # fmt: skip
    theirs, shared = block(m.Qwen2MoeSparseMoeBlock, sizes), FeedForward(D, 9, "swiglu")
    ours = layer({"shared": 1, "shared_gate": True}, shared=shared, preset="qwen2_moe", num_choices=K)
    assert ours.shared_gate is not None
    pairs = [*fused(ours, theirs), (ours.router.weight, theirs.gate.weight, as_is), *beside(shared, theirs.shared_expert)]
    return theirs, ours, [*pairs, (ours.shared_gate.weight, theirs.shared_expert_gate.weight, as_is)]


def llama4(choices: int) -> tuple[Any, MoELayer, Pairs]:
    from transformers.models.llama4 import modeling_llama4 as m

    sizes = m.Llama4TextConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=choices)
    theirs, shared = block(m.Llama4TextMoe, sizes), FeedForward(D, F, "swiglu")
    ours, x = layer(shared=shared, preset="llama4", num_choices=choices), theirs.experts
    half: Callable[[int], Callable[[Tensor], Tensor]] = lambda i: lambda w: w.chunk(2, dim=2)[i]  # noqa: E731
    assert ours.experts.w3 is not None
    pairs = [(ours.experts.w1, x.gate_up_proj, half(0)), (ours.experts.w3, x.gate_up_proj, half(1)), (ours.experts.w2, x.down_proj, as_is)]
    return theirs, ours, [*pairs, (ours.router.weight, theirs.router.weight, as_is), *beside(shared, theirs.shared_expert)]


def longcat() -> tuple[Any, MoELayer, Pairs]:
    from transformers.models.longcat_flash import modeling_longcat_flash as m

    sizes = m.LongcatFlashConfig(hidden_size=D, num_attention_heads=2, expert_ffn_hidden_size=F, n_routed_experts=E, zero_expert_num=3,
                                 moe_topk=K, routed_scaling_factor=6.0)  # fmt: skip
    theirs = block(m.LongcatFlashMoE, sizes)
    theirs.router.e_score_correction_bias.copy_(random(E + 3, seed=77) / 9)
    ours, x = layer({"skip": 3}, preset="qwen2_moe", num_choices=K, bias_rate=0.0, gate_scale=6.0), theirs.experts
    assert ours.router.bias_E is not None and ours.experts.w3 is not None
    ours.router.bias_E.copy_(theirs.router.e_score_correction_bias)
    half: Callable[[int], Callable[[Tensor], Tensor]] = lambda i: lambda w: w[:E].chunk(2, dim=1)[i].transpose(1, 2)  # noqa: E731
    pairs: Pairs = [(ours.experts.w1, x.gate_up_proj, half(0)), (ours.experts.w3, x.gate_up_proj, half(1))]
    return (
        theirs,
        ours,
        [*pairs, (ours.experts.w2, x.down_proj, lambda w: w.transpose(1, 2)), (ours.router.weight, theirs.router.classifier.weight, as_is)],
    )


@pytest.mark.parametrize("capacity", [64, 6])
def test_nllbs_router(capacity: int) -> None:
    """Both routers give the same kept choices and gates, which sum to 1 over a token's kept choices."""
    from transformers.models.nllb_moe import modeling_nllb_moe as m

    sizes = m.NllbMoeConfig(d_model=D, num_experts=E, expert_capacity=capacity, router_bias=False, router_dtype="float32")
    theirs = m.NllbMoeTop2Router(sizes)
    ours = layer(preset="nllb", capacity_factor=capacity * E / (2 * B * L)).router
    ours.weight.data.copy_(random(E, D, seed=3))
    theirs.classifier.weight.data.copy_(random(E, D, seed=3))
    x = random(B * L, D, seed=4)
    _, want, _ = theirs(x)
    routing = ours(x, sequence_tokens=L, context=Context.of(torch.zeros(B, L, dtype=torch.int64)))
    gate_TK = routing.gate_TK * routing.kept_TK
    assert bool(routing.kept_TK.all()) == (capacity == 64)
    same(torch.zeros(B * L, E).scatter(1, routing.expert_TK, gate_TK), want)


def fused(ours: MoELayer, theirs: Any) -> Pairs:
    """Return Pairs of experts' weights. transformers stores them as gate_up_proj [E, 2 F, D], gate first, and down_proj [E, D, F]."""
    half: Callable[[int], Callable[[Tensor], Tensor]] = lambda i: lambda w: w.chunk(2, dim=1)[i].transpose(1, 2)  # noqa: E731
    x, mine = theirs.experts, ours.experts
    assert mine.w3 is not None
    return [(mine.w1, x.gate_up_proj, half(0)), (mine.w3, x.gate_up_proj, half(1)), (mine.w2, x.down_proj, lambda w: w.transpose(1, 2))]


def beside(mine: FeedForward, theirs: Any) -> Pairs:
    assert mine.w3 is not None
    three = ((mine.w1, theirs.gate_proj), (mine.w3, theirs.up_proj), (mine.w2, theirs.down_proj))
    return [(linear.weight, their.weight, as_is) for linear, their in three]


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-6 * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("make", [gpt_oss, deepseek_v2, qwen2, partial(llama4, 1), partial(llama4, 3), longcat])
def test_block_forward_and_every_gradient(make: Callable[[], tuple[Any, MoELayer, Pairs]]) -> None:
    theirs, ours, pairs = make()
    for mine, their, lies in pairs:
        mine.data.copy_(lies(their.detach()))
    assert {id(mine) for mine, _, _ in pairs} == {id(p) for p in ours.parameters()}
    x = random(B, L, D, seed=20).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    y, report = ours(x, Context.of(torch.zeros(B, L, dtype=torch.int64)))
    want = theirs(twin)
    want = want[0] if isinstance(want, tuple) else want
    assert report.dropped == 0
    same(y, want.view_as(y))
    weight = random(B, L, D, seed=21)
    (y * weight).sum().backward()
    (want.view_as(y) * weight).sum().backward()
    assert x.grad is not None and twin.grad is not None
    same(x.grad, twin.grad)
    for mine, their, lies in pairs:
        assert mine.grad is not None and their.grad is not None and mine.grad.norm() > 0
        same(mine.grad, lies(their.grad))
