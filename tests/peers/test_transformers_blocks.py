"""Sparse blocks of transformers and this project's MoE layer with the preset of that model: with the same random weights they give the same
output and gradients.

Mixtral           softmax over the chosen experts     preset mixtral; transformers does softmax, top-k, renormalize
Qwen3-MoE         top-k of softmax, renormalized      preset qwen3_moe
OLMoE             top-k of softmax                    preset qwen3_moe with gates as_is
DeepSeek-V3       sigmoid, selection bias, groups,    preset deepseek_v3 with a shared expert
                  scaled gates, shared expert
"""

from __future__ import annotations

from collections.abc import Callable
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


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixtral() -> nn.Module:
    from transformers.models.mixtral import modeling_mixtral as m

    sizes = m.MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K, router_jitter_noise=0.0)
    return _eager(m.MixtralSparseMoeBlock, sizes)


def qwen3() -> nn.Module:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as m

    sizes = m.Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True)
    return _eager(m.Qwen3MoeSparseMoeBlock, sizes)


def olmoe() -> nn.Module:
    from transformers.models.olmoe import modeling_olmoe as m

    return _eager(m.OlmoeSparseMoeBlock, m.OlmoeConfig(hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=K))


def deepseek() -> nn.Module:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

    groups = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": K, "n_routed_experts": E}
    theirs = _eager(m.DeepseekV3MoE, m.DeepseekV3Config(hidden_size=D, moe_intermediate_size=F, n_shared_experts=2, **groups))
    theirs.gate.e_score_correction_bias.copy_(random(E, seed=77) / 4)
    return theirs


def _eager(block: type[nn.Module], sizes: Any) -> nn.Module:
    sizes._experts_implementation = "eager"
    theirs: nn.Module = block(sizes)
    for i, p in enumerate(theirs.parameters()):
        p.data.copy_(random(*p.shape, seed=i) / 2)
    return theirs


BLOCKS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "mixtral": (mixtral, {"preset": "mixtral"}),
    "qwen3": (qwen3, {"preset": "qwen3_moe"}),
    "olmoe": (olmoe, {"preset": "qwen3_moe", "gates": "as_is"}),
    "deepseek": (deepseek, {"preset": "deepseek_v3", "expert_groups": 4, "top_groups": 2}),
}
EVERY = pytest.mark.parametrize("name", BLOCKS)


def pair(name: str) -> tuple[Any, MoELayer]:
    make, options = BLOCKS[name]
    theirs = make()
    shared = FeedForward(D, 2 * F, "swiglu") if name == "deepseek" else None
    router = sections.Router(num_choices=K, balance_weight=0, **options)
    ours = MoELayer(sections.Experts(num_experts=E), router, d_model=D, d_ff=F, ffn="swiglu", layer=1, shared=shared)
    for mine, their in weights(ours, theirs):
        mine.data.copy_(their)
    if ours.router.bias_E is not None:
        ours.router.bias_E.copy_(theirs.gate.e_score_correction_bias)
    return theirs, ours


def weights(ours: MoELayer, theirs: Any, *, grad: bool = False) -> list[tuple[Any, Tensor]]:
    """Return pairs (a parameter of `ours`, the same of `theirs` as [E, in, out], gate and up projections separate). `grad`: gradients
    instead."""
    of: Callable[[Any], Any] = lambda p: p.grad if grad else p  # noqa: E731
    gate, up = (p.transpose(1, 2) for p in of(theirs.experts.gate_up_proj).detach().chunk(2, dim=1))
    down = of(theirs.experts.down_proj).detach().transpose(1, 2)
    x = ours.experts
    found = [(of(x.w1), gate), (of(x.w3), up), (of(x.w2), down), (of(ours.router.weight), of(theirs.gate.weight).detach())]
    if ours.shared is not None:
        for mine, their in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            found.append((of(getattr(ours.shared, mine).weight), of(getattr(theirs.shared_experts, their).weight).detach()))
    return found


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6 * max(1.0, want.abs().max().item()))


@EVERY
def test_block_forward_and_every_gradient(name: str) -> None:
    theirs, ours = pair(name)
    x = random(B, L, D, seed=20).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    y, report = ours(x, Context.of(torch.zeros(B, L, dtype=torch.int64)))
    want = theirs(twin)
    assert report.dropped == 0
    same(y, want)
    weight = random(B, L, D, seed=21)
    (y * weight).sum().backward()
    (want * weight).sum().backward()
    assert x.grad is not None and twin.grad is not None
    same(x.grad, twin.grad)
    for mine, their in weights(ours, theirs, grad=True):
        same(mine, their)
    assert ours.router.weight.grad is not None and ours.router.weight.grad.norm() > 0.1


@EVERY
def test_gates_and_experts(name: str) -> None:
    """Both routers choose the same experts with the same gates; a token's choices may be in another order."""
    theirs, ours = pair(name)
    x = random(B, L, D, seed=22)
    _, gates, experts = theirs.gate(x.flatten(0, 1))
    routing = ours.router(x.flatten(0, 1), sequence_tokens=L, context=Context.of(torch.zeros(B, L, dtype=torch.int64)))
    spread = [torch.zeros(B * L, E).scatter(1, e, g.float()).detach() for e, g in ((experts, gates), (routing.expert_TK, routing.gate_TK))]
    same(spread[1], spread[0])


def test_deepseeks_bias_and_groups_matter_in_this_test() -> None:
    """The tests above depend on DeepSeek's selection bias, without which other experts are chosen, and on groups: each token uses two."""
    _, ours = pair("deepseek")
    x = random(B * L, D, seed=20)
    route = lambda: ours.router(x, sequence_tokens=L, context=Context.of(torch.zeros(B, L))).expert_TK.sort(1).values  # noqa: E731
    chosen = route()
    assert ours.router.bias_E is not None
    assert all(len({e // 2 for e in row}) <= 2 for row in chosen.tolist())
    ours.router.bias_E.zero_()
    assert not torch.equal(route(), chosen)
