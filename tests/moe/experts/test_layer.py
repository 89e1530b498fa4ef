"""The MoE layer in one process (drops, reports, dropout, shared experts), and the same numbers with its experts on 2 and 4 ranks.

Ranks are forked gloo processes. Inputs and weights are functions of seeds, so each rank makes its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.experts.dispatch.dispatcher import Local
from moe.experts.dispatch.steps import Steps
from moe.experts.experts import Experts
from moe.experts.layer import MoELayer
from moe.kernels import choose
from moe.nn.context import Context
from moe.nn.linear import FeedForward
from moe.recipe import sections
from moe.router.routing import Routing
from parallel.mesh.mesh import Axis
from tests.support.ranks import run_on_ranks

# B sequences, L length, T = B*L tokens, D model, F hidden, E experts, K choices, R rows
B, L, D, F, E = 4, 12, 6, 10, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(
    *, experts: dict[str, Any] | None = None, shared: bool = False, ffn: str = "swiglu", num_experts: int = E, **router: Any
) -> MoELayer:
    layer = MoELayer(
        sections.Experts(num_experts=num_experts, **(experts or {})),
        sections.Router(**router),
        d_model=D,
        d_ff=F,
        ffn=ffn,
        layer=1,
        shared=FeedForward(D, 3, ffn) if shared else None,
    )
    for i, p in enumerate(layer.parameters()):
        p.data.copy_(random(*p.shape, seed=i + 1) / 2)
    return layer


def context(batch: int = B, length: int = L, **options: Any) -> Context:
    return Context.of(torch.zeros(batch, length), **options)


def to_one_expert(layer: MoELayer, expert: int) -> None:
    """Set the router's weight so that `expert` is every token's first choice and the next expert its second. Needs positive channels 0."""
    layer.router.weight.data.zero_()
    layer.router.weight.data[expert, 0] = 9.0
    layer.router.weight.data[(expert + 1) % len(layer.router.weight), 0] = 5.0


@pytest.mark.parametrize("preset", ["switch", "gshard", "glam"])
@pytest.mark.parametrize("ffn", ["relu", "gelu", "geglu", "swiglu"])
def test_a_layer_is_the_sum_of_its_choices(preset: str, ffn: str) -> None:
    """y[t] = sum over kept choices of gate * expert(x[t]), each expert a plain network; the same for every gradient."""
    layer = layer_of(ffn=ffn, preset=preset, capacity_factor=0.8, min_capacity=1, jitter=0.2, balance_weight=0)
    x_BLD = random(B, L, D, seed=40).requires_grad_()
    y_BLD, report = layer(x_BLD, context())
    routing = layer.router(x_BLD.flatten(0, 1), sequence_tokens=L, context=context())
    assert report.kept > 0 and report.dropped > 0
    want_TD = []
    for t, x in enumerate(x_BLD.flatten(0, 1)):
        y = torch.zeros(D)
        for k in range(routing.kept_TK.shape[1]):
            e = int(routing.expert_TK[t, k])
            if routing.kept_TK[t, k]:
                ws = [layer.experts.w1[e], layer.experts.w2[e], *([layer.experts.w3[e]] if layer.experts.w3 is not None else [])]
                y = y + routing.gate_TK[t, k] * _network(x, ffn, *ws)
        want_TD.append(y)
    want_BLD = torch.stack(want_TD).view_as(x_BLD)
    torch.testing.assert_close(y_BLD, want_BLD)
    leaves = [x_BLD, *layer.parameters()]
    weights = random(B, L, D, seed=41)
    got, want = (torch.autograd.grad((y * weights).sum(), leaves, materialize_grads=True) for y in (y_BLD, want_BLD))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def _network(x: Tensor, ffn: str, w1: Tensor, w2: Tensor, w3: Tensor | None = None) -> Tensor:
    h = x @ w1
    act = {"relu": torch.relu, "swiglu": nn.functional.silu}.get(ffn, lambda t: nn.functional.gelu(t, approximate="tanh"))(h)
    return (act if w3 is None else act * (x @ w3)) @ w2


@pytest.mark.parametrize("preset", ["switch", "glam"])
def test_a_dropped_token_gets_exactly_zero(preset: str) -> None:
    """All tokens choose one expert with capacity 3 for each sequence: tokens 3 and later have output 0 and gradient 0."""
    layer = layer_of(preset=preset, capacity_factor=1e-6, min_capacity=3, balance_weight=0)
    to_one_expert(layer, 5)
    x_BLD = random(B, L, D).abs().requires_grad_()
    y_BLD, report = layer(x_BLD, context())
    assert y_BLD[:, :3].ne(0).all() and torch.equal(y_BLD[:, 3:], torch.zeros(B, L - 3, D))
    y_BLD.square().sum().backward()
    assert x_BLD.grad is not None and x_BLD.grad[:, :3].ne(0).any(-1).all() and torch.equal(x_BLD.grad[:, 3:], torch.zeros(B, L - 3, D))
    k = layer.router.spec.num_choices
    assert report.kept == B * 3 * k and report.dropped == B * (L - 3) * k


@pytest.mark.parametrize("preset", ["switch", "gshard", "glam"])
@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 2.0, None])
def test_kept_and_dropped_are_all_choices(preset: str, factor: float | None) -> None:
    layer = layer_of(preset=preset, capacity_factor=factor, min_capacity=0)
    k = layer.router.spec.num_choices
    _, report = layer(random(B, L, D), context())
    assert report.layer == 1 and report.kept + report.dropped == B * L * k
    assert report.load_E.sum() == B * L * k and report.load_E.dtype == torch.int64 and len(report.load_E) == E
    assert factor is not None or preset == "gshard" or report.dropped == 0


def test_a_report_counts_load_before_dropping_and_has_no_gradient() -> None:
    layer = layer_of(capacity_factor=1e-6, min_capacity=1)
    to_one_expert(layer, 2)
    _, report = layer(random(B, L, D).abs(), context())
    assert report.load_E.tolist() == [0, 0, B * L, 0, 0, 0, 0, 0] and report.kept == B
    for value in (report.balance_loss, report.z_loss, report.entropy):
        assert not value.requires_grad and value.dtype == torch.float32
    layer.router.weight.data.zero_()
    assert layer(random(B, L, D), context())[1].entropy.item() == pytest.approx(torch.log(torch.tensor(E)).item())


def test_reports_of_micro_batches_add_up() -> None:
    layer = layer_of(preset="gshard", capacity_factor=0.8, min_capacity=1, jitter=0.3)
    x_BLD = random(B, L, D)
    y_BLD, whole = layer(x_BLD, context())
    parts = [layer(x_BLD[i : i + 2], context(2, first_sequence=i)) for i in (0, 2)]
    torch.testing.assert_close(torch.cat([y for y, _ in parts]), y_BLD)
    a, b = (r for _, r in parts)
    assert torch.equal(a.load_E + b.load_E, whole.load_E) and a.kept + b.kept == whole.kept and a.dropped + b.dropped == whole.dropped
    for name in ("balance_loss", "z_loss", "entropy"):
        torch.testing.assert_close((getattr(a, name) + getattr(b, name)) / 2, getattr(whole, name))


def test_shared_experts_are_added_to_every_token() -> None:
    """The output is the routed output plus the shared network of every token, dropped ones too."""
    both, alone = (layer_of(shared=s, capacity_factor=0.5, min_capacity=1) for s in (True, False))
    for name, p in alone.named_parameters():
        p.data.copy_(both.get_parameter(name))
    x_BLD = random(B, L, D)
    assert both.shared is not None
    torch.testing.assert_close(both(x_BLD, context())[0], alone(x_BLD, context())[0] + both.shared(x_BLD))


def test_the_layer_in_bf16_is_the_layer_in_fp32_within_rounding() -> None:
    layer = layer_of(preset="glam", capacity_factor=1.0)
    x_BLD = random(B, L, D).bfloat16()
    (low, a), (full, b) = layer(x_BLD, context()), layer(x_BLD.float(), context())
    assert low.dtype == torch.bfloat16 and torch.equal(a.load_E, b.load_E) and a.kept == b.kept
    assert (low.float() - full).norm() / full.norm() < 2.0**-7


def test_expert_dropout_is_inside_the_experts_and_in_training_only() -> None:
    """A hidden unit is 0 with probability p, else multiplied by 1 / (1 - p). In evaluation nothing is dropped."""
    layer = layer_of(ffn="relu", num_experts=1, experts={"dropout": 0.4, "d_ff": 500}, capacity_factor=None)
    layer.experts.w1.data.zero_()[0, 0] = 1.0
    layer.experts.w2.data.fill_(1 / 500)
    x_BLD = torch.ones(B, L, D)
    y_TD = layer(x_BLD, context())[0].flatten(0, 1)
    kept_T = y_TD[:, 0] * 0.6
    n = B * L * 500
    assert abs(kept_T.mean().item() - 0.6) < 5 * (0.24 / n) ** 0.5
    assert 0.5 < kept_T.std().item() / (0.24 / 500) ** 0.5 < 1.5  # each token has its own mask
    assert torch.allclose(layer.eval()(x_BLD, context())[0], torch.ones(B, L, D))


def test_expert_dropout_is_the_same_in_micro_batches() -> None:
    layer = layer_of(preset="glam", experts={"dropout": 0.4}, capacity_factor=1.0, min_capacity=1)
    x_BLD = random(B, L, D)
    parts = [layer(x_BLD[i : i + 1], context(1, first_sequence=i, seed=2))[0] for i in range(B)]
    torch.testing.assert_close(torch.cat(parts), layer(x_BLD, context(seed=2))[0])
    assert not torch.equal(layer(x_BLD, context(seed=3))[0], layer(x_BLD, context(seed=2))[0])


def axis_of(rank: int, world: int) -> Axis:
    return Axis("ep", tuple(range(world)), rank, dist.group.WORLD)


def hand_routing(kind: str, ranks: int, each: int, k: int) -> list[Routing]:
    """Return each rank's routing: `k` choices of each of `each` + rank tokens, with gates that require gradients. `kind`: one of KINDS."""
    found = []
    for rank in range(ranks):
        tokens = each + rank
        scores_TE = random(tokens, E, seed=rank)
        if kind == "one rank has nothing for most experts" and rank == ranks - 1:
            scores_TE[:, : E - 2] -= 100
        if kind == "all to one expert":
            scores_TE[:, 2] += 100
        expert_TK = scores_TE.topk(k).indices
        kept_TK = torch.rand(tokens, k, generator=torch.Generator().manual_seed(rank)) < (0.6 if kind == "drops" else 2.0)
        if kind == "one rank sends nothing":
            kept_TK &= rank != 0
        gate_TK = torch.rand(tokens, k, generator=torch.Generator().manual_seed(rank + 9)).requires_grad_()
        found.append(Routing(expert_TK, gate_TK, kept_TK, scores_TE.softmax(-1), scores_TE, None, 1))
    return found


KINDS = ["even", "drops", "one rank has nothing for most experts", "one rank sends nothing", "all to one expert"]


def steps(rank: int, world: int) -> Steps:
    return Steps((axis_of(rank, world),), kernels=choose("auto"))


def dispatched(dispatcher: Local | Steps, x_TD: Tensor, routing: Routing, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return (output, gradients of input, gates and expert weights), for a fixed gradient of the output."""
    leaves = [x_TD.clone().requires_grad_(), routing.gate_TK, *(w.clone().requires_grad_() for w in weights)]
    y_TD = dispatcher.run(leaves[0], routing, experts_with(leaves[2:]))
    grads = torch.autograd.grad((y_TD * x_TD.cos()).sum(), leaves)
    return y_TD.detach(), list(grads)


def experts_with(weights: list[Tensor]) -> Experts:
    """Return an Experts module whose w1, w2 and w3 are these tensors, not copies of them."""
    experts = Experts(len(weights[0]), d_model=D, d_ff=F, ffn="swiglu")
    for name, weight in zip(("w1", "w2", "w3"), weights, strict=True):
        delattr(experts, name)
        setattr(experts, name, weight)
    return experts


def expert_weights() -> list[Tensor]:
    return [random(*shape, seed=i) / 3 for i, shape in enumerate([(E, D, F), (E, F, D), (E, D, F)])]


def _dispatch_on_rank(rank: int, world: int) -> dict[str, list[Tensor]]:
    found = {}
    for kind in KINDS:
        for k in (1, 2):
            routing = hand_routing(kind, world, 13, k)[rank]
            mine = [w.chunk(world)[rank] for w in expert_weights()]
            y, grads = dispatched(steps(rank, world), random(13 + rank, D, seed=50 + rank), routing, mine)
            found[f"{kind} {k}"] = [y, *grads]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_all_to_all_equals_local(world: int) -> None:
    """Output and gradients of input and gates equal Local's. Weights' gradients equal Local's, summed over the ranks' tokens."""
    ranks = run_on_ranks(_dispatch_on_rank, world, world, timeout_s=60)
    for kind in KINDS:
        for k in (1, 2):
            sums = [torch.zeros_like(w) for w in expert_weights()]
            for rank, routing in enumerate(hand_routing(kind, world, 13, k)):
                y, grads = dispatched(Local(), random(13 + rank, D, seed=50 + rank), routing, expert_weights())
                got = ranks[rank][f"{kind} {k}"]
                # only Local fuses the gates into the kernel, so sums round differently
                for mine, whole in zip(got[:3], [y, *grads[:2]], strict=True):
                    assert (mine - whole).abs().max() <= 1e-6 * whole.abs().max()
                for total, grad in zip(sums, grads[2:], strict=True):
                    total += grad
            for i, total in enumerate(sums):
                torch.testing.assert_close(torch.cat([r[f"{kind} {k}"][3 + i] for r in ranks]), total, rtol=1e-5, atol=1e-5)


ROUTERS: list[dict[str, Any]] = [
    *({"preset": preset} for preset in ("switch", "gshard", "nllb", "expert_choice", "mixtral")),
    {"preset": "deepseek_v3", "num_choices": 2, "expert_groups": 4, "top_groups": 2},
    *({"preset": "switch", "select": select, "balance_weight": 0.0} for select in ("sinkhorn", "sparsemixer", "hash")),
    {"preset": "glam", "noise": "noisy_top_k", "load_weight": 0.1, "importance_weight": 0.1, "drop": "lowest_gate"},
]


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: "-".join(map(str, router.values())))
def test_a_batch_without_sequences_has_no_output_and_gradients_of_0(router: dict[str, Any]) -> None:
    for training in (True, False):
        layer = layer_of(**router).train(training)
        tokens = torch.zeros(0, 6, dtype=torch.int64)
        y, report = layer(torch.zeros(0, 6, D), Context.of(tokens))
        y.sum().backward()
        assert y.shape == (0, 6, D) and not any(value.any() for value in list(vars(report).values())[1:-1]) and report.share == 1
        grads = [p.grad for p in layer.parameters()]
        assert not training or all(grad is not None for grad in grads)
        assert not any(grad is not None and grad.any() for grad in grads)


def _follow_on_rank(rank: int, world: int) -> list[Tensor]:
    routing = hand_routing("drops", world, 13, 2)[rank]
    dispatcher = steps(rank, world)
    number_T = torch.arange(13 + rank) + 1000 * rank
    plan, planned = dispatcher.planned(routing)
    (step,) = planned()
    sent = step.start(dispatcher.kernels.permute(number_T.unsqueeze(1).float().repeat(1, 3), plan))
    rows = step.finish(sent, dispatcher.kernels)
    return [rows[:, 0].detach(), step.follow(number_T[plan.token_R]), step.arrived.counts_PE[0]]


def test_integers_arrive_in_the_order_of_the_rows() -> None:
    """Integers sent by the same step arrive in the order of the rows: by expert, then source rank, then token."""
    ranks = run_on_ranks(_follow_on_rank, 2, 2, timeout_s=60)
    routings = hand_routing("drops", 2, 13, 2)
    for rank, (rows, followed, counts) in enumerate(ranks):
        assert torch.equal(rows.long(), followed) and followed.dtype == torch.int64
        want = []
        for expert in range(rank * E // 2, (rank + 1) * E // 2):
            for source, routing in enumerate(routings):
                want += [1000 * source + t for t in ((routing.expert_TK == expert) & routing.kept_TK).nonzero()[:, 0].tolist()]
        assert followed.tolist() == want and counts.sum() == len(want)


LAYERS: dict[str, dict[str, Any]] = {
    "switch": {"preset": "switch", "capacity_factor": 0.8, "min_capacity": 1, "jitter": 0.3, "z_weight": 0.01},
    "gshard": {"preset": "gshard", "capacity_factor": 1.0, "min_capacity": 1, "shared": True},
    "dropout": {"preset": "glam", "capacity_factor": None, "experts": {"dropout": 0.4}},
    "one expert": {"preset": "switch", "capacity_factor": None},
}


def _layer_case(name: str) -> MoELayer:
    layer = layer_of(**LAYERS[name])
    if name == "one expert":
        to_one_expert(layer, 3)
    return layer


def _layer_on_rank(rank: int, world: int) -> dict[str, list[Tensor]]:
    found = {}
    for name in LAYERS:
        layer = _layer_case(name)
        whole = {n: p.data for n, p in layer.experts.named_parameters()}
        layer.experts.hold(range(rank * E // world, (rank + 1) * E // world))
        for n, p in layer.experts.named_parameters():
            p.data.copy_(whole[n].chunk(world)[rank])
        layer.dispatcher = steps(rank, world)
        x_BLD = random(B, L, D).abs().chunk(world)[rank].clone().requires_grad_()
        held = B // world
        y_BLD, report = layer(x_BLD, context(held, first_sequence=rank * held, seed=4, auxiliary_scale=1 / world))
        (y_BLD * random(B, L, D, seed=6).chunk(world)[rank]).sum().backward()
        counts = torch.stack([report.kept, report.dropped, *report.load_E])
        grads = [p.grad for p in (*layer.parameters(), x_BLD)]
        found[name] = [y_BLD.detach(), counts, *(g for g in grads if g is not None)]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_is_the_same_with_its_experts_on_ranks(world: int) -> None:
    """Output, drops, load and every gradient, with jitter, random second experts, expert dropout, shared experts, balance and z losses."""
    ranks = run_on_ranks(_layer_on_rank, world, world, timeout_s=60)
    for name in LAYERS:
        layer = _layer_case(name)
        x_BLD = random(B, L, D).abs().requires_grad_()
        y_BLD, report = layer(x_BLD, context(seed=4))
        (y_BLD * random(B, L, D, seed=6)).sum().backward()
        got = [r[name] for r in ranks]
        torch.testing.assert_close(torch.cat([g[0] for g in got]), y_BLD.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(sum(g[1] for g in got), torch.stack([report.kept, report.dropped, *report.load_E]))
        parameters = [*layer.named_parameters(), ("x", x_BLD)]
        assert all(len(g) == 2 + len(parameters) for g in got), "a parameter has no gradient"
        for i, (parameter, p) in enumerate(parameters, start=2):
            pieces = [g[i] for g in got]
            spread = parameter == "x" or parameter.startswith("experts.")
            assert p.grad is not None
            torch.testing.assert_close(torch.cat(pieces) if spread else sum(pieces), p.grad, rtol=1e-5, atol=1e-5)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    """All tokens choose expert 3, on rank 1 of 4. The other ranks take part in the exchanges, and their experts' gradients are 0."""
    names = [n for n, _ in _layer_case("one expert").named_parameters()]
    for rank, found in enumerate(run_on_ranks(_layer_on_rank, 4, 4, timeout_s=60)):
        grads = dict(zip(names, found["one expert"][2:], strict=False))
        chosen = [bool(g.any()) for e in range(E // 4) for g in [grads["experts.w1"][e]]]
        assert chosen == [rank == 1 and e == 1 for e in range(E // 4)]
