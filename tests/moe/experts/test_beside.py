"""Networks next to the routed experts (shared, gated, residual), and layers with different numbers of experts (a pyramid).

Compared with the formula, with transformers' Qwen2-MoE block, with DeepSpeed's residual layer, and on two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.checks.together import check_run
from moe.experts.layer import MoELayer
from moe.model.transformer import Transformer, moe_layers
from moe.nn.context import Context
from moe.nn.linear import FeedForward
from moe.parallelize.plan import lay_out
from moe.plan.job.flops import size
from moe.recipe import sections
from moe.recipe.load import build_run
from moe.records import metrics
from moe.report.history import History
from moe.report.plots import expert_load
from parallel.errors import BadInput
from tests.support import trained

# B sequences, L length, D model, F hidden, E experts
B, L, D, F, E = 3, 7, 6, 10, 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(module: nn.Module) -> None:
    for i, p in enumerate(module.parameters()):
        p.data.copy_(random(*p.shape, seed=i + 1) / 2)


def context() -> Context:
    return Context.of(torch.zeros(B, L))


def layer_of(experts: dict[str, Any], *, shared: int = 0, ffn: str = "swiglu", **router: Any) -> MoELayer:
    settings = sections.Router(**{"preset": "glam", "capacity_factor": None, "balance_weight": 0.0} | router)
    beside = FeedForward(D, shared, ffn) if shared else None
    layer = MoELayer(sections.Experts(num_experts=E, **experts), settings, d_model=D, d_ff=F, ffn=ffn, layer=1, shared=beside)
    fill(layer)
    return layer


def gradients(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * random(*y.shape, seed=50)).sum(), leaves, retain_graph=True)


def test_a_gated_shared_network_is_the_formula() -> None:
    """y = routed + sigmoid(w x) shared(x), and its gradients."""
    layer = layer_of({"shared": 1, "shared_gate": True}, shared=13)
    shared, gate = layer.shared, layer.shared_gate
    assert shared is not None and gate is not None and gate.weight.shape == (1, D)
    x = random(B, L, D, seed=20).requires_grad_()
    y = layer(x, context())[0]
    layer.shared = None
    want = layer(x, context())[0] + torch.sigmoid(x @ gate.weight.T) * shared(x)
    torch.testing.assert_close(y, want)
    leaves = [x, gate.weight, *shared.parameters(), layer.router.weight, layer.experts.w1]
    torch.testing.assert_close(gradients(y, leaves), gradients(want, leaves))


def test_a_residual_layer_is_the_formula() -> None:
    """y = c_0 routed + c_1 dense(x) with c = softmax(W_c x), and its gradients."""
    layer = layer_of({"residual": True, "d_ff": 9})
    dense, coefficient = layer.residual, layer.coefficient
    assert dense is not None and coefficient is not None
    assert dense.w1.weight.shape == (9, D) and coefficient.weight.shape == (2, D)
    x = random(B, L, D, seed=20).requires_grad_()
    y = layer(x, context())[0]
    layer.residual = None
    c = torch.softmax(x @ coefficient.weight.T, -1)
    want = c[..., :1] * layer(x, context())[0] + c[..., 1:] * dense(x)
    torch.testing.assert_close(y, want)
    leaves = [x, coefficient.weight, *dense.parameters(), layer.router.weight, layer.experts.w2]
    torch.testing.assert_close(gradients(y, leaves), gradients(want, leaves))


def test_a_dropped_token_still_has_its_residual_network() -> None:
    layer = layer_of({"residual": True}, preset="switch", capacity_factor=0.01, min_capacity=0)
    assert layer.residual is not None and layer.coefficient is not None
    x = random(B, L, D, seed=20).abs()
    layer.router.weight.data.zero_()
    layer.router.weight.data[2] = 3.0  # every token chooses expert 2, which has one slot a sequence
    y, report = layer(x, context())
    c = torch.softmax(x @ layer.coefficient.weight.T, -1)[..., 1:]
    assert report.dropped == B * (L - 1)
    torch.testing.assert_close(y[:, 1:], (c * layer.residual(x))[:, 1:])


def test_gates_and_coefficients_are_fp32_whatever_the_model_computes_in() -> None:
    """With bf16 inputs, the coefficients are computed in fp32 and rounded once."""
    layer = layer_of({"residual": True})
    assert layer.coefficient is not None
    layer.coefficient.weight.data.mul_(20)
    x = random(B, L, D, seed=20).to(torch.bfloat16)
    c = torch.softmax(x.float() @ layer.coefficient.weight.T, -1).to(torch.bfloat16)
    residual, layer.residual = layer.residual, None
    assert residual is not None
    routed = layer(x, context())[0]
    layer.residual = residual
    assert torch.equal(layer(x, context())[0], c[..., :1] * routed + c[..., 1:] * residual(x))


@pytest.mark.parametrize("crowded", [False, True], ids=["even", "two experts take all"])
def test_a_layer_equals_the_sparse_block_of_qwen2_moe(crowded: bool) -> None:
    """The layer equals transformers' Qwen2-MoE block: output, and gradients of input, router, experts, shared expert and its gate."""
    qwen = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    settings = qwen.Qwen2MoeConfig(
        hidden_size=D,
        moe_intermediate_size=F,
        shared_expert_intermediate_size=13,
        num_experts=E,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    settings._experts_implementation = "eager"
    theirs = qwen.Qwen2MoeSparseMoeBlock(settings)
    fill(theirs)
    ours = layer_of({"shared": 1, "shared_d_ff": 13, "shared_gate": True}, shared=13)
    assert (
        isinstance(ours.shared, FeedForward) and ours.shared.w3 is not None and ours.shared_gate is not None and ours.experts.w3 is not None
    )
    x = random(B, L, D, seed=20)
    if crowded:
        x = x.abs()
        theirs.gate.weight.data[:2] += 3
    gate, up = theirs.experts.gate_up_proj.detach().chunk(2, dim=1)
    w1, w2, w3 = ours.experts.w1, ours.experts.w2, ours.experts.w3
    for weight, value in ((w1, gate.mT), (w3, up.mT), (w2, theirs.experts.down_proj.mT), (ours.router.weight, theirs.gate.weight)):
        weight.data.copy_(value)
    shared, theirs_shared = ours.shared, theirs.shared_expert
    pairs = [(shared.w1, theirs_shared.gate_proj), (shared.w3, theirs_shared.up_proj), (shared.w2, theirs_shared.down_proj)]
    pairs += [(ours.shared_gate, theirs.shared_expert_gate)]
    for mine, their in pairs:
        mine.weight.data.copy_(their.weight)
    x.requires_grad_()
    y, want = ours(x, context())[0], theirs(x)
    torch.testing.assert_close(y, want)
    mine = gradients(y, [x, ours.router.weight, w2, w1, w3, *(m.weight for m, _ in pairs)])
    gate_up, down = theirs.experts.gate_up_proj, theirs.experts.down_proj
    dx, drouter, ddown, dgate_up, *rest = gradients(want, [x, theirs.gate.weight, down, gate_up, *(t.weight for _, t in pairs)])
    first, second = dgate_up.chunk(2, dim=1)
    torch.testing.assert_close(mine, (dx, drouter, ddown.mT, first.mT, second.mT, *rest))


class _OfDeepSpeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def test_a_layer_equals_the_residual_layer_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's routed part is replaced by this project's, so only the mix with the residual network is compared, without DeepSpeed's
    bias.
    """
    layer = pytest.importorskip("deepspeed.moe.layer")
    theirs = layer.MoE(D, _OfDeepSpeed(), num_experts=E, k=1, use_residual=True)
    fill(theirs)
    theirs.coefficient.bias.data.zero_()
    ours = layer_of({"residual": True}, ffn="relu", preset="switch")
    assert ours.residual is not None and ours.coefficient is not None
    for mine, their in ((ours.residual.w1, theirs.mlp.up), (ours.residual.w2, theirs.mlp.down), (ours.coefficient, theirs.coefficient)):
        mine.weight.data.copy_(their.weight)
    alone = layer_of({}, ffn="relu", preset="switch")
    alone.router.load_state_dict(ours.router.state_dict())
    alone.experts.load_state_dict(ours.experts.state_dict())

    class Routed(nn.Module):
        l_aux = exp_counts = None

        def forward(self, x: Tensor, _: Tensor | None) -> Tensor:
            return alone(x, context())[0]  # type: ignore[no-any-return]

    theirs.deepspeed_moe = Routed()
    x = random(B, L, D, seed=20).requires_grad_()
    y, want = ours(x, context())[0], theirs(x)[0]
    torch.testing.assert_close(y, want)
    mine = gradients(y, [x, ours.coefficient.weight, ours.residual.w1.weight, ours.experts.w1])
    torch.testing.assert_close(mine, gradients(want, [x, theirs.coefficient.weight, theirs.mlp.up.weight, alone.experts.w1]))


PYRAMID: dict[str, Any] = {"num_experts": [2, 6, 4]}


def test_each_layer_has_its_own_number_of_experts() -> None:
    model = Transformer(
        sections.Model(num_layers=6, moe_every=2, d_model=8, num_heads=2, d_ff=12), sections.Experts(**PYRAMID), vocab_size=17
    )
    assert [(m.layer, m.router.num_experts, m.experts.num_experts) for m in moe_layers(model)] == [(1, 2, 2), (3, 6, 6), (5, 4, 4)]
    reports = model(torch.randint(17, (2, 5))).layers
    assert [len(r.load_E) for r in reports] == [2, 6, 4]
    assert lay_out(model)["layers.3.moe.experts.w1"].shape == (6, 8, 12)
    same = Transformer(
        sections.Model(num_layers=6, moe_every=2, d_model=8, num_heads=2, d_ff=12), sections.Experts(num_experts=6), vocab_size=17
    )
    for a, b in zip(list(moe_layers(model))[1].parameters(), list(moe_layers(same))[1].parameters(), strict=True):
        assert torch.equal(a, b)  # first values do not depend on the other layers


def test_a_list_of_equal_numbers_is_the_number() -> None:
    model = sections.Model(num_layers=6, moe_every=2)
    one, listed = (size(sections.Run(model=model, experts=sections.Experts(num_experts=n))) for n in (6, (6, 6, 6)))
    assert one == listed


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 2), (6, 2)])
def test_auto_ep_divides_every_layers_experts(world: int, ep: int) -> None:
    run = build_run({"model": {"num_layers": 6, "moe_every": 2}, "experts": PYRAMID, "train": {"global_batch": 12, "eval_sequences": 12}})
    assert check_run(run, world).degrees.ep == ep


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({"num_experts": [4, 8]}, "experts.num_experts: got 2 numbers, needed one for each of 3 layers with experts (1, 3, 5)"),
        ({"num_experts": [4, 0, 8]}, "experts.num_experts: got [4, 0, 8], needed a number above 0"),
        ({"num_experts": [4, True, 8]}, "experts.num_experts: got [4, True, 8], needed a number or a name"),
        ({"num_experts": [4, 3, 8]}, "experts.num_experts: got [4, 3, 8], needed a multiple of degrees.ep=2; fix: set degrees.ep to 1"),
        ({"num_experts": [2, 2, 1]}, "experts.num_experts: got [2, 2, 1], needed"),
        ({"shared_gate": True}, "experts.shared_gate: got true with experts.shared=0"),
        ({"shared_d_ff": 7}, "experts.shared_d_ff: got 7 with experts.shared=0"),
        ({"shared": 2, "residual": True}, "experts.residual: got true with experts.shared=2"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(experts: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        model, degrees = {"num_layers": 6, "moe_every": 2}, {"ep": 2}
        check_run(build_run({"model": model, "experts": experts, "degrees": degrees, "router": {"preset": "glam"}}), 2)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("beside", [{"residual": True}, {"shared": 2, "shared_d_ff": 5, "shared_gate": True}], ids=["residual", "shared"])
def test_a_pyramid_trains_alike_on_two_ranks_and_its_records_tell_every_layer(
    beside: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = trained.home(tmp_path, monkeypatch)
    model, experts = {"num_layers": 4}, {"num_experts": [2, 4], **beside}
    run = trained.recipe(home, model=model, experts=experts, degrees={"ep": 1})
    trained.train(run, tmp_path / "one")
    trained.train(trained.recipe(home, model=model, experts=experts, degrees={"ep": 2}), tmp_path / "two", ranks=2)
    one, two = (metrics.read(tmp_path / name) for name in ("one", "two"))
    losses = [[line["loss"] for line in lines if line["kind"] == "train"] for lines in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 6
    assert [[len(layer["load"]) for layer in line["moe"]] for line in two if line["kind"] == "train"] == [[2, 4]] * 6
    told = History.of(two)
    assert [told.load_SE(layer).shape for layer in (1, 3)] == [(6, 2), (6, 4)]
    figure = expert_load(told)
    assert figure is not None and [ax.get_ylim() for ax in figure.axes[:2]] == [(1.5, -0.5), (3.5, -0.5)]
