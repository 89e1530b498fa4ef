"""Routers and layers with random weights, and routing of tokens that are ordered sequence after sequence, for tests of routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.recipe import sections
from moe.router.router import Router
from moe.router.routing import Routing

# B sequences, L length, T = B*L tokens, D model, E experts
B, L, D, E = 3, 14, 7, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(batch: int = B, length: int = L, *, seed: int = 0) -> Tensor:
    """Return token ids [batch, length], with repetitions."""
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(seed))


def router_of(
    *, num_experts: int = E, d_model: int = D, norm_eps: float | None = None, name: str = "layers.1.router", **options: Any
) -> Router:
    router = Router(sections.Router(**options), num_experts=num_experts, d_model=d_model, norm_eps=norm_eps, name=name)
    for i, p in enumerate(router.parameters()):
        p.data.copy_(random(*p.shape, seed=90 + i))
    return router


def from_logits(logits_TE: Tensor, **options: Any) -> Router:
    """Return a router that uses its input as logits."""
    num_experts = logits_TE.shape[1]
    router = router_of(num_experts=num_experts, d_model=num_experts, **options)
    router.weight.data.copy_(torch.eye(num_experts))
    return router


def layer_of(*, num_experts: int = E, d_model: int = D, **options: Any) -> MoELayer:
    layer = MoELayer(sections.Experts(num_experts=num_experts), sections.Router(**options), d_model=d_model, d_ff=9, ffn="gelu", layer=1)
    for i, p in enumerate(layer.parameters()):
        p.data.copy_(random(*p.shape, seed=i))
    return layer


def context(batch: int = B, length: int = L, *, tokens: Tensor | None = None, **options: Any) -> Context:
    return Context.of(ids(batch, length) if tokens is None else tokens, **options)


def route(router: Router, x_TD: Tensor, *, length: int = L, **options: Any) -> Routing:
    """Route tokens x [T, D]. `options` are passed to the context: seed, step, first_sequence, valid_BL, tokens."""
    return router(x_TD, sequence_tokens=length, context=context(len(x_TD) // length, length, **options))  # type: ignore[no-any-return]


def by_hand(layer: MoELayer, x_BLD: Tensor, routing: Routing) -> Tensor:
    """Return the layer's output [T, D], computed token by token: the sum of gate * expert(x) over the token's kept choices."""
    x_TD = x_BLD.flatten(0, 1)
    out = []
    for t in range(len(x_TD)):
        y_D = torch.zeros_like(x_TD[t])
        for k in range(routing.expert_TK.shape[1]):
            if routing.kept_TK[t, k]:
                e = routing.expert_TK[t, k]
                hidden = torch.nn.functional.gelu(x_TD[t] @ layer.experts.w1[e], approximate="tanh")
                y_D = y_D + routing.gate_TK[t, k] * (hidden @ layer.experts.w2[e])
        out.append(y_D)
    return torch.stack(out).view_as(x_BLD)
