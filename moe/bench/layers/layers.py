"""Makes one MoE layer of each system for the same case: the same input, router, routing, weights and amount of work.

Each function makes a layer and returns its forward and backward pass. Routing is chosen in advance: rows of the router's matrix are
orthonormal. Each input is a sum of the rows of the experts that its token must choose, so these experts have the highest logits.

    relu networks (w1, w2)            ours, DeepSpeed MoE, transformers' Switch, torch grouped_mm, dense, limit
    swiglu networks (w1, w3, w2)      ours, transformers' Mixtral in its three forms, DeepSpeed's AutoEP, limit
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.experts.layer import MoELayer
from moe.kernels.activation import activate
from moe.nn.context import Context
from parallel.errors import BadInput

# T tokens, D width, F hidden, E experts, K choices, R = T * K rows


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer. tokens: number on a rank. width: of the model. hidden: units of an expert. experts: number on all ranks. k: number
    of experts that each token chooses."""

    tokens: int
    width: int
    hidden: int
    experts: int
    k: int

    @property
    def rows(self) -> int:
        return self.tokens * self.k

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.hidden} E{self.experts} k{self.k}"


@dataclass(frozen=True)
class LayerCase:
    """Sizes, dtype and routing of a layer. routing: `balanced`: equal loads; `skewed`: expert 0 gets half of all rows, at most one row of
    each token."""

    shape: Shape
    dtype: torch.dtype
    routing: str
    device: torch.device = torch.device("cpu")

    def weights(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)  # on the device, because a CPU takes minutes for a layer of Mixtral
        values: Tensor = torch.randn(*shape, generator=generator, device=self.device) * shape[-1] ** -0.5
        return values.to(dtype or self.dtype)

    def router(self) -> Tensor:
        """Return the router's weight [E, D], fp32, with orthonormal rows."""
        s = self.shape
        if s.experts > s.width:
            raise BadInput("experts", got=s.experts, needed=f"at most width={s.width}", fix="raise the width of the Shape")
        q: Tensor = torch.linalg.qr(torch.randn(s.width, s.experts, generator=torch.Generator().manual_seed(1)))[0]
        return q.t().contiguous().to(self.device)

    def experts_of_tokens(self) -> Tensor:
        """Return the experts [T, K] that every token must choose, in the order of their logits, highest first."""
        s, order_T = self.shape, torch.randperm(self.shape.tokens, generator=torch.Generator().manual_seed(2))
        expert_TK = torch.arange(s.rows).view(s.tokens, s.k)
        if self.routing == "balanced":
            expert_TK = expert_TK % s.experts
        else:
            expert_TK = 1 + expert_TK % (s.experts - 1)
            expert_TK[: min(s.tokens, s.rows // 2), 0] = 0
        return expert_TK[order_T].to(self.device)

    def inputs(self) -> Tensor:
        """Return the input [T, D]: for each token the sum of its experts' rows of the router, with decreasing weights, plus small noise."""
        s = self.shape
        strength = torch.linspace(6.0, 5.0, s.k, device=self.device)
        x_TD = (self.router()[self.experts_of_tokens()] * strength[:, None]).sum(1)
        return (x_TD + 0.01 * torch.randn(s.tokens, s.width, generator=torch.Generator().manual_seed(3)).to(self.device)).to(self.dtype)

    def gradient(self) -> Tensor:
        return self.weights(self.shape.tokens, self.shape.width, seed=4)


class Pass:
    """One layer, ready to run: a call runs forward and backward. grad: the output's gradient; leaves: tensors that get a gradient."""

    def __init__(self, parameters: list[Tensor], forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
        self.x, self.grad, self.forward = x.detach().requires_grad_(), grad, forward
        self.leaves = [self.x, *parameters]

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> Tensor:
        """Run forward and backward, and return the output. Afterwards the leaves have their gradients."""
        self.clear()
        y = self.forward(self.x)
        y.backward(self.grad.view(y.shape))  # type: ignore[no-untyped-call]
        return y


def router_settings(k: int) -> dict[str, Any]:
    """Return settings of a dropless top-k router, as in preset switch (k = 1), glam (k = 2) or mixtral (k > 2). The presets themselves are
    not read, because they need packages (pydantic) that a machine with a GPU may lack.
    """
    plain: dict[str, Any] = dict(
        num_choices=k, input_norm="none", logits="linear", logit_cap=None, score="softmax", softmax_over="all", jitter=0.0, noise="none",
        select="top_k", hash_table=None, mixer_margin=0.01, expert_groups=1, top_groups=1, group_score="two_best", second="always",
        bias_rate=None, gates="as_is", gate_scale=1.0, expert_scale="none", gate_on="output", group="sequence", capacity_factor=None,
        eval_capacity_factor=None, min_capacity=0, capacity_counts="choices", capacity_rounding="ceil", capacity_multiple=1,
        drop="position", queue="choices_first", balance_loss="switch", balance_weight=0.0, balance_counts="all", balance_scope="sequence",
        importance_weight=0.0, load_weight=0.0, z_weight=0.0,
    )  # fmt: skip
    if k == 1:
        return plain | {"min_capacity": 4, "balance_weight": 0.01}
    if k == 2:
        return plain | {"gates": "before_drop", "min_capacity": 4, "balance_weight": 0.01, "balance_counts": "first"}
    return plain | {"softmax_over": "chosen", "balance_weight": 0.001, "balance_scope": "micro_batch"}


def ours(case: LayerCase, ffn: str, *, master: torch.dtype | None = None, kernels: str = "auto") -> Pass:
    """This project's dropless layer as in training, with statistics and balance loss. ffn: relu or swiglu. master: dtype of the weights;
    None: the case's dtype. kernels: value of experts.kernels."""
    s = case.shape
    # a plain namespace instead of RouterSpec, because RouterSpec needs pydantic and this benchmark does not
    spec = SimpleNamespace(**router_settings(s.k), vectors=0, random_second=False, asks_balance=True, own_balance=None)
    sizes: dict[str, Any] = {"of_layer": lambda nth: s.experts, "d_ff": None, "ffn": None, "skip": 0, "free": 0}
    options: dict[str, Any] = {"kernels": kernels, "dropout": 0.0, "shared_gate": False, "residual": False, "biases": False}
    experts = SimpleNamespace(**sizes, **options, products="plain")
    with case.device:
        layer = MoELayer(cast(Any, experts), cast(Any, spec), d_model=s.width, d_ff=s.hidden, ffn=ffn, layer=1)
    layer.experts.to(master or case.dtype)
    layer.router.weight.data.copy_(case.router())
    for parameter, weight in zip((layer.experts.w1, layer.experts.w2, layer.experts.w3), stack(case, ffn), strict=True):
        if parameter is not None and weight is not None:
            parameter.data.copy_(weight)
    context = Context.of(torch.zeros(1, s.tokens, device=case.device))
    return Pass(list(layer.parameters()), lambda x: layer(x, context)[0], case.inputs().unsqueeze(0), case.gradient())


def limit(case: LayerCase, ffn: str) -> Pass:
    """The speed limit: batched matrix products in which every expert has the same number of rows, without routing. ffn: relu or swiglu."""
    s = case.shape
    each = -(-s.rows // s.experts)
    x_ERD = case.weights(s.experts, each, s.width, seed=5)
    w1, w2, w3 = stack(case, ffn)

    def forward(x_ERD: Tensor) -> Tensor:
        gate = torch.bmm(x_ERD, w3) if w3 is not None else None
        return torch.bmm(activate(torch.bmm(x_ERD, w1), gate, ffn), w2)

    parameters = [w for w in (w1, w2, w3) if w is not None]
    return Pass(parameters, forward, x_ERD, case.weights(s.experts, each, s.width, seed=6))


def dense(case: LayerCase) -> Pass:
    """A dense feed-forward network with k * F hidden units, which has the same FLOPs for each token as the MoE layer."""
    s = case.shape
    w1 = case.weights(s.width, s.hidden * s.k, seed=10).requires_grad_()
    w2 = case.weights(s.hidden * s.k, s.width, seed=11).requires_grad_()
    return Pass([w1, w2], lambda x: F.relu(x @ w1) @ w2, case.inputs(), case.gradient())


def stack(case: LayerCase, ffn: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the weights of all experts, which require gradients: (w1 [E, D, F], w2 [E, F, D], w3 [E, D, F], None unless ffn is swiglu)."""
    s = case.shape
    w1 = case.weights(s.experts, s.width, s.hidden, seed=10).requires_grad_()
    w2 = case.weights(s.experts, s.hidden, s.width, seed=11).requires_grad_()
    return w1, w2, case.weights(s.experts, s.width, s.hidden, seed=12).requires_grad_() if ffn == "swiglu" else None


def grouped_mm(case: LayerCase) -> Pass:
    """A layer on torch's grouped_mm: sorts rows by expert, multiplies twice, and sums each token's rows weighted by gates."""
    s = case.shape
    router = case.router().requires_grad_()
    w1, w2, _ = stack(case, "relu")

    def forward(x_TD: Tensor) -> Tensor:
        probs_TE = F.linear(x_TD.float(), router).softmax(-1)
        gate_TK, expert_TK = probs_TE.topk(s.k)
        order_R = expert_TK.flatten().argsort(stable=True)
        offsets = torch.bincount(expert_TK.flatten(), minlength=s.experts).cumsum(0).int()
        hidden = F.relu(F.grouped_mm(x_TD[order_R // s.k], w1, offs=offsets))
        rows_RD = F.grouped_mm(hidden, w2, offs=offsets)
        back_RD = torch.empty_like(rows_RD).index_copy(0, order_R, rows_RD)
        return (back_RD.view(s.tokens, s.k, s.width) * gate_TK.unsqueeze(-1).to(rows_RD.dtype)).sum(1)

    return Pass([router, w1, w2], forward, case.inputs(), case.gradient())


def deepspeed(case: LayerCase) -> Pass:
    """DeepSpeed's MoE layer: with capacity factor 1 if routing is balanced, otherwise dropless (padded to the expert with the most
    rows)."""
    moe = _deepspeed("moe.layer", case.device)
    s, balanced = case.shape, case.routing == "balanced"
    expert = nn.Sequential(nn.Linear(s.width, s.hidden, bias=False), nn.ReLU(), nn.Linear(s.hidden, s.width, bias=False))
    options: dict[str, Any] = {"drop_tokens": balanced, "use_rts": False, "top2_2nd_expert_sampling": False}
    layer = moe.MoE(s.width, expert, num_experts=s.experts, k=s.k, capacity_factor=1.0, **options)
    layer.set_deepspeed_parallelism()
    layer = layer.to(case.device, case.dtype)
    layer.deepspeed_moe.gate.wg.weight.data = case.router()
    w1, w2, _ = stack(case, "relu")
    for expert, up, down in zip(layer.deepspeed_moe.experts.deepspeed_experts, w1, w2, strict=True):
        expert[0].weight.data.copy_(up.t())
        expert[2].weight.data.copy_(down.t())
    return Pass(list(layer.parameters()), lambda x: layer(x)[0], case.inputs().unsqueeze(0), case.gradient())


def _deepspeed(name: str, device: torch.device) -> ModuleType:
    """Start DeepSpeed in this process, for a model on `device`, and import its module `name`."""
    from parallel.data.deepspeed import start_deepspeed

    start_deepspeed(device)
    return import_module(f"deepspeed.{name}")


def hf_switch(case: LayerCase) -> Pass:
    """transformers' Switch block. Every expert has slots for all tokens, so that none is dropped."""
    from transformers.models.switch_transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    s = case.shape
    settings = SwitchTransformersConfig(
        d_model=s.width, d_ff=s.hidden, num_experts=s.experts, expert_capacity=s.tokens, router_jitter_noise=0.0, dropout_rate=0.0
    )
    layer: Any = SwitchTransformersSparseMLP(settings).to(case.device, case.dtype)
    layer.router.classifier.weight.data = case.router()
    w1, w2, _ = stack(case, "relu")
    for expert, up, down in zip(layer.experts.values(), w1, w2, strict=True):
        expert.wi.weight.data.copy_(up.t())
        expert.wo.weight.data.copy_(down.t())
    return Pass(list(layer.parameters()), lambda x: layer(x), case.inputs().unsqueeze(0), case.gradient())


def hf_mixtral(case: LayerCase, form: str) -> Pass:
    """transformers' Mixtral block. form: its implementation of experts: eager, batched_mm or grouped_mm."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    s = case.shape
    settings = MixtralConfig(hidden_size=s.width, intermediate_size=s.hidden, num_local_experts=s.experts, num_experts_per_tok=s.k)
    settings._experts_implementation = form
    layer = MixtralSparseMoeBlock(settings).to(case.device, case.dtype)
    layer.gate.weight.data = case.router().to(case.dtype)
    w1, w2, w3 = stack(case, "swiglu")
    assert w3 is not None
    layer.experts.gate_up_proj.data.copy_(torch.cat((w1, w3), dim=2).transpose(1, 2))
    layer.experts.down_proj.data.copy_(w2.transpose(1, 2))
    return Pass(list(layer.parameters()), lambda x: layer(x), case.inputs().unsqueeze(0), case.gradient())


def deepspeed_autoep(case: LayerCase) -> Pass:
    """The layer by which DeepSpeed's AutoEP replaces transformers' Mixtral block, built without AutoEP's engine."""
    # AutoEP's engine in DeepSpeed 0.19.8 fails with transformers 5.23
    names = ("auto_ep", "auto_ep_config", "auto_ep_layer")
    auto_ep, settings, layers = (_deepspeed(f"module_inject.{name}", case.device) for name in names)
    from transformers import MixtralConfig, MixtralForCausalLM

    s = case.shape
    sizes: dict[str, Any] = {"hidden_size": s.width, "intermediate_size": s.hidden, "num_hidden_layers": 1, "vocab_size": 8}
    sizes |= {"num_local_experts": s.experts, "num_experts_per_tok": s.k, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    config = settings.parse_autoep_config({"enabled": True, "autoep_size": 1, "preset_model": "mixtral"})
    [found] = auto_ep.AutoEP(model, config).ep_parser()
    layer = layers.AutoEPMoELayer(found, model.get_submodule(found.moe_module_name), 1, 0, config).to(case.device, case.dtype)
    layer.router.gate.weight.data.copy_(case.router())
    w1, w2, w3 = stack(case, "swiglu")
    assert w3 is not None
    for parameter, weight in zip((layer.experts.w1, layer.experts.w2, layer.experts.w3), (w1, w2, w3), strict=True):
        parameter.data.copy_(weight.transpose(1, 2))
    return Pass(list(layer.parameters()), lambda x: layer(x), case.inputs().unsqueeze(0), case.gradient())
