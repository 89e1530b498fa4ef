"""Layers of Hugging Face transformers and layers of this project with the same weights give the same outputs, losses and gradients.

In variables, `theirs` is a layer of transformers. Switch has one Linear ([out, in]) for each expert; Mixtral has `gate_up_proj` [E, 2F, D]
(gate first) and `down_proj` [E, D, F]. `ours` has [E, in, out]: w1 is the gate projection, w3 the up projection, w2 the down projection.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.experts.layer import MoELayer
from moe.nn.attention import RelativeBias
from moe.nn.context import Context
from moe.nn.linear import Norm
from moe.recipe import sections
from moe.router.losses import balance_loss, z_loss
from moe.router.routing import Routing

pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
switch = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
t5 = pytest.importorskip("transformers.models.t5.modeling_t5")

# B sequences, L length, D model, F hidden, E experts
B, L, D, F, E = 3, 17, 8, 12, 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(module: nn.Module) -> None:
    for i, p in enumerate(module.parameters()):
        p.data.copy_(random(*p.shape, seed=i) / 2)


def context() -> Context:
    return Context.of(torch.zeros(B, L))


def same(got: Tensor | None, want: Tensor | None) -> None:
    assert got is not None and want is not None
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * max(1.0, want.abs().max().item()))


def switch_pair(slots: int, ffn: str = "relu") -> tuple[Any, MoELayer]:
    """Return transformers' sparse MLP of Switch and this project's MoE layer with the same weights, without jitter, with `slots` per expert
    and sequence."""
    sizes = {"d_model": D, "d_ff": F, "num_experts": E, "expert_capacity": slots}
    off = {"router_jitter_noise": 0.0, "dropout_rate": 0.0}
    act = {"gelu": "gelu_new"}.get(ffn, ffn)  # transformers' name of GELU by tanh
    theirs = switch.SwitchTransformersSparseMLP(switch.SwitchTransformersConfig(**sizes, **off, dense_act_fn=act))
    fill(theirs)
    # ceil(L * (slots E / L) / E) = slots
    router = sections.Router(preset="switch", capacity_factor=slots * E / L, min_capacity=0, balance_weight=0.0)
    ours = MoELayer(sections.Experts(num_experts=E), router, d_model=D, d_ff=F, ffn=ffn, layer=0)
    ours.router.weight.data.copy_(theirs.router.classifier.weight)
    for e in range(E):
        ours.experts.w1.data[e] = theirs.experts[f"expert_{e}"].wi.weight.t()
        ours.experts.w2.data[e] = theirs.experts[f"expert_{e}"].wo.weight.t()
    return theirs, ours


def routed(layer: MoELayer, x_BLD: Tensor) -> Routing:
    return layer.router(x_BLD.flatten(0, 1), sequence_tokens=L, context=context())  # type: ignore[no-any-return]


@pytest.mark.parametrize("slots", [1, 3, 17])
def test_switchs_router(slots: int) -> None:
    """Both routers give the same experts, gates and logits, and the same tokens have a slot."""
    theirs, ours = switch_pair(slots)
    x_BLD = random(B, L, D, seed=20)
    mask_BLE, gate_BL1, logits_BLE = theirs.router(x_BLD.clone())
    routing = routed(ours, x_BLD)
    same(routing.gate_TK, gate_BL1.flatten(0, 1))
    same(routing.logits_TE, logits_BLE.flatten(0, 1))
    dispatched_TE = nn.functional.one_hot(routing.expert_TK[:, 0], E) * routing.kept_TK
    assert torch.equal(dispatched_TE, mask_BLE.flatten(0, 1))
    assert (slots < 17) == bool((~routing.kept_TK).any())


@pytest.mark.parametrize("slots", [1, 3, 17])
@pytest.mark.parametrize("ffn", ["relu", "gelu"])
def test_switchs_sparse_mlp(slots: int, ffn: str) -> None:
    """Both layers give the same output and the same gradients of input, router and experts, with too few slots and with enough."""
    theirs, ours = switch_pair(slots, ffn)
    x_BLD = random(B, L, D, seed=20).requires_grad_()
    twin_BLD = x_BLD.detach().clone().requires_grad_()
    y_BLD, _ = ours(x_BLD, context())
    want_BLD = theirs(twin_BLD)
    same(y_BLD, want_BLD)
    weights = random(B, L, D, seed=21)
    (y_BLD * weights).sum().backward()
    (want_BLD * weights).sum().backward()
    same(x_BLD.grad, twin_BLD.grad)
    same(ours.router.weight.grad, theirs.router.classifier.weight.grad)
    assert ours.experts.w1.grad is not None and ours.experts.w2.grad is not None
    for e in range(E):
        their = theirs.experts[f"expert_{e}"]
        for got, weight in ((ours.experts.w1.grad[e], their.wi.weight), (ours.experts.w2.grad[e], their.wo.weight)):
            same(got, torch.zeros_like(got) if weight.grad is None else weight.grad.t())


def test_switchs_losses() -> None:
    """Balance loss and z loss of a layer, with each sequence as a group, equal transformers' in value and gradient."""
    logits = random(B, L, E, seed=30).requires_grad_()
    expert_BL = logits.detach().argmax(-1)
    flat = logits.flatten(0, 1)
    balance = balance_loss(flat.softmax(-1), expert_BL.flatten().unsqueeze(1), num_groups=B)
    want_balance = switch.load_balancing_loss_func(logits.softmax(-1), expert_BL)
    for got, want in ((balance, want_balance), (z_loss(flat), switch.router_z_loss_func(logits))):
        same(got, want)
        same(*(torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (got, want)))


def test_jitter_spares_the_input_of_our_experts_and_not_of_theirs() -> None:
    """Transformers jitters the router's input in place, so in fp32 training its experts read jittered inputs. Experts here do not."""
    theirs, ours = switch_pair(17)
    theirs.router.jitter_noise = 0.9
    x_BLD = random(B, L, D, seed=20)
    twin_BLD = x_BLD.clone()
    theirs.train()(twin_BLD)
    assert not torch.equal(twin_BLD, x_BLD)
    ours.router.spec = ours.router.spec.model_copy(update={"jitter": 0.9})
    before = x_BLD.clone()
    ours.train()(x_BLD, context())
    assert torch.equal(x_BLD, before)


def mixtral_pair() -> tuple[Any, MoELayer]:
    """Return transformers' sparse block of Mixtral (`eager`: experts run one by one) and this project's with the same weights."""
    settings = mixtral.MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2)
    settings.router_jitter_noise = 0.0
    settings._experts_implementation = "eager"
    theirs = mixtral.MixtralSparseMoeBlock(settings)
    fill(theirs)
    router = sections.Router(preset="glam", capacity_factor=None, balance_weight=0.0)
    ours = MoELayer(sections.Experts(num_experts=E), router, d_model=D, d_ff=F, ffn="swiglu", layer=0)
    ours.router.weight.data.copy_(theirs.gate.weight)
    gate, up = theirs.experts.gate_up_proj.detach().chunk(2, dim=1)
    assert ours.experts.w3 is not None
    ours.experts.w1.data.copy_(gate.transpose(1, 2))
    ours.experts.w3.data.copy_(up.transpose(1, 2))
    ours.experts.w2.data.copy_(theirs.experts.down_proj.transpose(1, 2))
    return theirs, ours


@pytest.mark.parametrize("crowded", [False, True], ids=["even", "two experts take all"])
def test_mixtrals_sparse_block(crowded: bool) -> None:
    """Both blocks give the same output and the same gradients of input, router and experts, also if three experts get no token."""
    theirs, ours = mixtral_pair()
    x_BLD = random(B, L, D, seed=20)
    if crowded:
        x_BLD = x_BLD.abs()
        for weight in (theirs.gate.weight, ours.router.weight):
            weight.data[:2] += 3
    x_BLD.requires_grad_()
    twin_BLD = x_BLD.detach().clone().requires_grad_()
    y_BLD, report = ours(x_BLD, context())
    want_BLD = theirs(twin_BLD)
    assert report.dropped == 0 and (int((report.load_E == 0).sum()) == 3) == crowded
    same(y_BLD, want_BLD)
    weights = random(B, L, D, seed=21)
    (y_BLD * weights).sum().backward()
    (want_BLD * weights).sum().backward()
    same(x_BLD.grad, twin_BLD.grad)
    same(ours.router.weight.grad, theirs.gate.weight.grad)
    assert ours.experts.w3 is not None
    w1, w2, w3 = (w.grad for w in (ours.experts.w1, ours.experts.w2, ours.experts.w3))
    assert w1 is not None and w2 is not None and w3 is not None
    same(torch.cat([w1, w3], dim=2).transpose(1, 2), theirs.experts.gate_up_proj.grad)
    same(w2.transpose(1, 2), theirs.experts.down_proj.grad)


@pytest.mark.parametrize("k", [1, 2])
def test_mixtrals_balance_loss_of_one_layer_is_k_times_ours(k: int) -> None:
    """Transformers' loss counts all k choices of a token without dividing by k."""
    logits_TE = random(B * L, E, seed=31).requires_grad_()
    ours = balance_loss(logits_TE.softmax(-1), logits_TE.detach().topk(k).indices, num_groups=1)
    theirs = mixtral.load_balancing_loss_func((logits_TE,), num_experts=E, top_k=k)
    same(k * ours, theirs)
    same(*(torch.autograd.grad(v, logits_TE)[0] for v in (k * ours, theirs)))


def test_trap_mixtrals_balance_loss_of_two_collapsed_layers_is_that_of_even_use() -> None:
    """Transformers averages loads and probabilities over layers before it multiplies them. So two layers that send all tokens to one expert
    each, but to different ones, have the loss of even use. This project's loss of each such layer is 2, twice that of even use."""
    layers = [torch.tensor([[40.0, -40.0]]).repeat(9, 1), torch.tensor([[-40.0, 40.0]]).repeat(9, 1)]
    assert mixtral.load_balancing_loss_func(tuple(layers), num_experts=2, top_k=1).item() == pytest.approx(1)
    ours = [balance_loss(logits.softmax(-1), logits.argmax(-1, keepdim=True), num_groups=1).item() for logits in layers]
    assert ours == pytest.approx([2, 2])


def test_t5s_relative_position_buckets() -> None:
    length = 300
    position_L = torch.arange(length)
    distance_LL = position_L - position_L.unsqueeze(1)
    want_LL = t5.T5Attention._relative_position_bucket(distance_LL, bidirectional=False, num_buckets=32, max_distance=128)
    bias = RelativeBias(num_heads=3)
    bias.weight.data.copy_(torch.arange(32.0).unsqueeze(1) + torch.tensor([0.0, 100.0, 200.0]))
    got_HLL = bias().of(range(length), range(length))
    for head in range(3):
        assert torch.equal(got_HLL[head].long() - 100 * head, want_LL)
    assert want_LL.max() == 31 and got_HLL.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rmsnorm_is_mixtrals(dtype: torch.dtype) -> None:
    ours, theirs = Norm(D, "rmsnorm"), mixtral.MixtralRMSNorm(D, eps=1e-6)
    gain = random(D, seed=3)
    ours.weight.data.copy_(gain)
    theirs.weight.data.copy_(gain)
    x = (random(B, L, D) * 3).to(dtype)
    got, want = ours(x), theirs(x)
    assert got.dtype == dtype
    # transformers rounds to bf16 before it multiplies by the gain, this project afterwards
    torch.testing.assert_close(got.float(), want.float(), rtol=1e-5 if dtype == torch.float32 else 2.0**-6, atol=1e-6)
