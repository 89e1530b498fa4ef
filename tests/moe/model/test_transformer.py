"""The Transformer without a mesh: its options run and learn, no token sees later ones, and initial weights do not depend on the layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.model.initialize import FirstValues, alone, global_name, initialize
from moe.model.transformer import Block, Output, Transformer, moe_layers
from moe.nn.attention import Attention, RelativeBias
from moe.nn.context import Context
from moe.nn.linear import FeedForward, Norm, drop
from moe.nn.rotary import _Rotate, rotate
from moe.parallelize.build import build
from moe.recipe import sections
from moe.recipe.load import build_run
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh

# B batch, L length, D model, V vocabulary, H heads, C channels of a head, E experts
B, L, V = 3, 14, 37


def tokens(batch: int = B, length: int = L, *, seed: int = 0) -> Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def model_of(*, experts: dict[str, Any] | None = None, router: dict[str, Any] | None = None, **model: Any) -> Transformer:
    """Return a model of three layers, the second with four experts unless `model` or `experts` says otherwise. All sizes differ."""
    values = {"num_layers": 3, "d_model": 24, "num_heads": 4, "d_ff": 40, "max_length": L, "moe_every": 2} | model
    return Transformer(
        sections.Model(**values),
        sections.Experts(num_experts=4, **(experts or {})),
        sections.Router(**(router or {})),
        vocab_size=V,
        seed=1,
    )


MODELS: dict[str, dict[str, Any]] = {
    "relu": {"ffn": "relu"},
    "geglu, layernorm": {"ffn": "geglu", "norm": "layernorm"},
    "swiglu, t5 positions": {"ffn": "swiglu", "positions": "t5"},
    "grouped queries": {"num_kv_heads": 2},
    "one key-value head, wide heads, t5": {"num_kv_heads": 1, "head_size": 10, "positions": "t5"},
    "untied": {"tied_embeddings": False},
    "dense": {"moe_every": 0},
    "all layers": {"moe_every": 1, "router": {"preset": "glam"}},
    "listed layers": {"moe_every": 0, "moe_layers": (0, 2), "router": {"preset": "gshard", "jitter": 0.1}},
    "GLaM's": {"ffn": "geglu", "experts": {"ffn": "gelu", "d_ff": 30, "shared": 2}, "router": {"preset": "glam"}},
    "dropout": {"dropout": 0.2, "experts": {"dropout": 0.4}},
    "DeepSeek's": {
        "ffn": "swiglu",
        "experts": {"shared": 1, "d_ff": 20},
        "router": {"preset": "deepseek_v3", "num_choices": 2, "expert_groups": 2, "top_groups": 1},
    },
    "Megatron's queue": {
        "router": {"preset": "megatron", "drop": "position", "capacity_factor": 0.8, "eval_capacity_factor": 0.8, "group": 1}
    },
    "noisy top-k": {"router": {"preset": "mixtral", "noise": "noisy_top_k", "importance_weight": 0.1}},
    "hash": {"router": {"select": "hash", "balance_weight": 0, "capacity_factor": 0.7, "eval_capacity_factor": 0.7}},
}
EVERY = pytest.mark.parametrize("options", [pytest.param(o, id=name) for name, o in MODELS.items()])


@pytest.mark.parametrize("moe_every", [0, 2])
def test_the_default_model_runs_alone(moe_every: int) -> None:
    model = Transformer(sections.Model(moe_every=moe_every))
    output = model(tokens())
    assert isinstance(output, Output) and output.logits_BLV.shape == (B, L, 256) and output.logits_BLV.dtype == torch.float32
    assert [r.layer for r in output.layers] == ([1, 3] if moe_every else []) and not dist.is_initialized()
    # the loss of an untrained model is about that of guessing
    assert F.cross_entropy(output.logits_BLV.flatten(0, 1), tokens().flatten()).item() == pytest.approx(math.log(256), abs=1.5)


@EVERY
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    """Each gradient is finite, each weight outside the experts has a nonzero one, and ten steps on one batch lower the loss."""
    model = model_of(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(10):
        output = model(tokens()[:, :-1], Context.of(tokens()[:, :-1], step=step))
        loss = F.cross_entropy(output.logits_BLV.flatten(0, 1), tokens()[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all(), name
            assert "experts" in name or p.grad.any(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@EVERY
def test_reports_come_from_the_layers_with_experts_in_order(options: dict[str, Any]) -> None:
    model = model_of(**options)
    k = sections.Router(**options.get("router", {})).num_choices
    output = model(tokens())
    assert tuple(r.layer for r in output.layers) == model.config.layers_with_experts() == tuple(layer.layer for layer in moe_layers(model))
    for r in output.layers:
        assert r.kept + r.dropped == r.load_E.sum() == B * L * k


@EVERY
def test_evaluation_is_deterministic(options: dict[str, Any]) -> None:
    model = model_of(**options).eval()
    assert torch.equal(model(tokens()).logits_BLV, model(tokens()).logits_BLV)


@EVERY
def test_a_batch_is_computed_the_same_in_micro_batches(options: dict[str, Any]) -> None:
    """In training too: jitter, random second experts and dropout depend on a token's position in the step."""
    model = model_of(**options)
    whole = model(tokens(), Context.of(tokens(), seed=5)).logits_BLV
    parts = [model(tokens()[i : i + 1], Context.of(tokens()[i : i + 1], seed=5, first_sequence=i)).logits_BLV for i in range(B)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


def test_used_alone_noise_follows_torchs_seed() -> None:
    model = model_of(router={"jitter": 0.3}, dropout=0.1)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(tokens()).logits_BLV)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_low_precision_gives_fp32_logits_and_gradients(compute: torch.dtype) -> None:
    """Results are close to fp32's. Each token has all four experts, so rounding cannot change a choice."""
    full, low = (model_of(router={"preset": "mixtral", "num_choices": 4}) for _ in range(2))
    low.compute = compute
    logits = []
    for model in (full, low):
        logits.append(model(tokens(), Context.of(tokens())).logits_BLV)
        F.cross_entropy(logits[-1].flatten(0, 1), tokens().flatten()).backward()
    assert logits[1].dtype == torch.float32
    assert (logits[1] - logits[0]).norm() < 0.03 * logits[0].norm()
    for (name, p), q in zip(low.named_parameters(), full.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and p.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() < 0.1 * q.grad.norm() + 1e-6, name


def earliest_change(model: Transformer, position: int) -> int:
    """Return the first position of sequence 0 whose logits change if the token at `position` changes; L if none does.

    Changes below 1e-5 do not count, because sums may be rounded in another order.
    """
    before, after = tokens(), tokens()
    after[0, position] = (after[0, position] + 5) % V
    context = Context.of(before, seed=3)
    changed_BL = (model(after, context).logits_BLV - model(before, context).logits_BLV).abs().amax(-1) > 1e-5
    assert not changed_BL[1:].any()
    return int(changed_BL[0].float().argmax()) if changed_BL.any() else L


@EVERY
def test_no_token_sees_later_ones_in_evaluation(options: dict[str, Any]) -> None:
    """In evaluation, logits do not change with later tokens or with other sequences."""
    model = model_of(**options).eval()
    for position in (1, 6, L - 1):
        assert earliest_change(model, position) == position


@pytest.mark.parametrize("options", [{}, {"positions": "t5"}, {"router": {"jitter": 0.3}}, {"dropout": 0.1, "experts": {"dropout": 0.3}}])
def test_no_token_sees_later_ones_with_top_1_and_drops(options: dict[str, Any]) -> None:
    """In training with drops, a later token cannot take an earlier token's slot, because slots go to tokens in order."""
    tight = {"capacity_factor": 0.6, "min_capacity": 1} | options.get("router", {})
    model = model_of(**options | {"router": tight, "moe_every": 1})
    assert sum(int(r.dropped) for r in model(tokens()).layers) > B * L
    for position in (1, 6, L - 1):
        assert earliest_change(model, position) == position


def test_no_token_sees_later_ones_with_top_2_without_drops() -> None:
    model = model_of(moe_every=1, router={"preset": "gshard", "capacity_factor": None, "jitter": 0.2})
    for position in (1, 6, L - 1):
        assert earliest_change(model, position) == position


def test_later_tokens_can_take_slots_of_second_choices_only() -> None:
    """In GShard's queue, all first choices come before any second one. So a later token can take the slot of an earlier token's second
    choice, but not of its first.
    """
    router = {"preset": "glam", "capacity_factor": 0.5, "min_capacity": 1, "group": "sequence"}
    model = model_of(moe_layers=(2,), moe_every=0, router=router, init_scale=3.0)
    (layer,) = moe_layers(model)
    seen: list[Tensor] = []
    route = layer.router.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        routing = route(*args, **kwargs)
        seen.append(routing.kept_TK)
        return routing

    layer.router.forward = spy  # type: ignore[method-assign]
    early = 0
    for position in range(1, L):
        for shift in range(1, V, 5):
            before, after = tokens(), tokens()
            after[0, position] = (after[0, position] + shift) % V
            model(before), model(after)
            changed = seen.pop()[:position] != seen.pop()[:position]
            assert not changed[:, 0].any()
            early += int(changed[:, 1].sum())
    assert early > 0


@pytest.mark.parametrize("positions", ["rotary", "t5"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_plain_loops(positions: str, kv_heads: int) -> None:
    """The reference loops over heads and positions: softmax over earlier tokens of q . k / sqrt(C) (+ T5's bias). Consecutive query heads
    share a key-value head.
    """
    heads, c, d = 4, 6, 20
    attention = Attention(sections.Model(d_model=d, num_heads=heads, head_size=c, num_kv_heads=kv_heads, positions=positions))
    for i, p in enumerate(attention.parameters()):
        p.data.copy_(random(*p.shape, seed=i) / 3)
    x_BLD = random(2, 9, d)
    q, k, v = (w(x_BLD).view(2, 9, -1, c) for w in (attention.q, attention.k, attention.v))
    mixed = torch.zeros(2, 9, heads, c)
    for b in range(2):
        for h in range(heads):
            kv = h * kv_heads // heads
            for t in range(9):
                at = torch.tensor([t])
                turn = (lambda x, position: rotate(x[None, None], position)[0, 0]) if positions == "rotary" else (lambda x, position: x)
                query = turn(q[b, t : t + 1, h], at)[0]
                keys = turn(k[b, : t + 1, kv], torch.arange(t + 1))
                bias = attention.bias().of(range(t, t + 1), range(t + 1))[h, 0] if attention.bias is not None else 0
                share = (keys @ query / math.sqrt(c) + bias).softmax(0)
                mixed[b, t, h] = share @ v[b, : t + 1, kv]
    torch.testing.assert_close(attention(x_BLD, Context.of(x_BLD[..., 0])), attention.out(mixed.flatten(2)), rtol=1e-5, atol=1e-5)


def test_grouped_queries_equal_many_heads_with_repeated_keys() -> None:
    few, many = (Attention(sections.Model(d_model=24, num_heads=4, num_kv_heads=n)) for n in (2, 4))
    for i, p in enumerate(few.parameters()):
        p.data.copy_(random(*p.shape, seed=i))
    many.q.weight.data.copy_(few.q.weight)
    many.out.weight.data.copy_(few.out.weight)
    for name in ("k", "v"):
        repeated = getattr(few, name).weight.view(2, 6, 24).repeat_interleave(2, dim=0).flatten(0, 1)
        getattr(many, name).weight.data.copy_(repeated)
    x = random(B, L, 24)
    torch.testing.assert_close(few(x, Context.of(x[..., 0])), many(x, Context.of(x[..., 0])))


def test_rotary_turns_channel_pairs_as_complex_numbers() -> None:
    c = 10
    x_BHLC = random(2, 3, L, c, dtype=torch.float64)
    angle = torch.arange(L, dtype=torch.float64).unsqueeze(1) * 10000.0 ** (-torch.arange(c // 2, dtype=torch.float64) / (c // 2))
    turned = torch.complex(x_BHLC[..., : c // 2], x_BHLC[..., c // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    got = rotate(x_BHLC, torch.arange(L))
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-5)  # angles are fp32


def test_rotary_products_depend_on_the_distance_alone() -> None:
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)
    product = [(rotate(q, torch.tensor([i])) * rotate(k, torch.tensor([i - 4]))).sum() for i in (4, 9, 100)]
    torch.testing.assert_close(product[1:], [product[0]] * 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotation_passes_gradcheck(pairs: str) -> None:
    """gradcheck of first and second derivatives, because the backward pass is written by hand."""
    x = random(2, 2, 5, 6, dtype=torch.float64).requires_grad_()
    angle = random(5, 3, seed=1, dtype=torch.float64)

    def turned(t: Tensor) -> Tensor:
        return _Rotate.apply(t, angle.cos(), angle.sin(), pairs)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(turned, x)
    assert torch.autograd.gradgradcheck(turned, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_have_fp32_statistics(dtype: torch.dtype) -> None:
    x = (random(B, L, 24) * 50 + 20).to(dtype)
    wide, gain = x.double(), random(24, seed=1)
    centered = wide - wide.mean(-1, keepdim=True)
    want = {
        "rmsnorm": wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        "layernorm": centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
    }
    for kind, value in want.items():
        norm = Norm(24, kind)
        norm.weight.data.copy_(gain)
        got, exact = norm(x), (value * gain.double()).to(dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, exact, rtol=1e-5 if dtype == torch.float32 else 2.0**-7, atol=1e-5)
        assert dtype == torch.float32 or (got == exact).float().mean() > 0.99  # the output is rounded once


def test_dropout_scales_what_it_keeps() -> None:
    x = torch.ones(40, 50, 16)
    y = drop(x, 0.25, name="x", context=Context.of(x[..., 0]))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(y.mean().item() - 1) < 5 * math.sqrt(1 / 3 / y.numel())


def test_a_dropped_token_passes_through_the_residual_connection() -> None:
    """A token that the experts drop leaves the block bitwise equal to its value after attention."""
    model = model_of(router={"capacity_factor": 0.6, "min_capacity": 1})
    block = model.layers[1]
    assert isinstance(block, Block)
    x_BLD = random(B, L, 24)
    after_attention = x_BLD + block.attention(block.attention_norm(x_BLD), Context.of(tokens()))
    y_BLD, report = block(x_BLD, Context.of(tokens()))
    same_BL = (y_BLD == after_attention).all(-1)
    assert report.dropped > 0 and same_BL.sum() == report.dropped


def test_tied_logits_are_products_with_the_embedding() -> None:
    tied, untied = model_of(moe_every=0), model_of(moe_every=0, tied_embeddings=False)
    assert tied.head is None and untied.head is not None
    untied.load_state_dict(tied.state_dict() | {"head.weight": tied.embedding.detach()})
    assert torch.equal(tied(tokens()).logits_BLV, untied(tokens()).logits_BLV)


def recipe(**degrees: int) -> sections.Run:
    return build_run(
        {
            "model": {
                "num_layers": 2, "d_model": 24, "num_heads": 4, "d_ff": 40, "ffn": "geglu", "positions": "t5", "moe_every": 2,
                "tied_embeddings": False,
            },
            "experts": {"num_experts": 8, "shared": 1},
            "degrees": degrees,
            "train": {"seed": 11},
        }
    )  # fmt: skip


def full(run: sections.Run) -> Transformer:
    return Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, seed=run.train.seed)


@pytest.mark.parametrize(("dp", "ep"), [(4, 4), (4, 2), (8, 8), (1, 1)])
def test_every_topology_starts_from_the_same_bits(dp: int, ep: int) -> None:
    """Each rank's experts equal a slice of one process's experts. All other weights are equal on all ranks."""
    run = recipe(dp=dp, ep=ep)
    whole = dict(full(run).named_parameters())
    for rank in range(dp):
        model, layouts = build(run, Mesh.of(Degrees(dp=dp, ep=ep), rank), device=torch.device("cpu"))
        mine = dict(model.named_parameters())
        assert mine.keys() == whole.keys() == layouts.keys()
        for name, p in mine.items():
            layout: Layout = layouts[name]
            assert torch.equal(p, whole[name][layout.region(Mesh.of(Degrees(dp=dp, ep=ep), rank))]), name
            assert (p.shape[0] == 8 // ep) if ".experts." in name else p.shape == whole[name].shape


def test_a_weight_depends_on_seed_and_name_alone() -> None:
    """A dense and a sparse model have equal first layers, another seed gives other weights, and no two weights have equal values."""
    run = recipe()
    a = dict(full(run).named_parameters())
    dense = dict(Transformer(run.model.model_copy(update={"moe_every": 0}), vocab_size=256, seed=11).named_parameters())
    assert all(torch.equal(dense[name], a[name]) for name in a if name.startswith("layers.0."))
    assert torch.equal(a["layers.0.attention.q.weight"], dict(full(run).named_parameters())["layers.0.attention.q.weight"])
    other = dict(Transformer(run.model, run.experts, run.router, vocab_size=256, seed=12).named_parameters())
    drawn = [p for name, p in a.items() if p.std() > 0 and "norm" not in name]
    assert not any(torch.equal(other[name], p) for name, p in a.items() if p.std() > 0)
    pieces = [e.flatten()[:9] for p in drawn for e in (p if p.ndim == 3 else [p])]
    ratios = {tuple((e / e[0]).tolist()) for e in pieces}
    assert len(ratios) == len(pieces)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_weights_are_truncated_normal_scaled_by_fan_in(scale: float) -> None:
    """sigma = sqrt(scale / fan_in), and no value exceeds 2 sigma, so the standard deviation is 0.8796 sigma."""
    model = sections.Model(
        num_layers=2, d_model=64, num_heads=4, d_ff=96, ffn="swiglu", moe_every=2, init_scale=scale, tied_embeddings=False
    )
    found = dict(Transformer(model, sections.Experts(num_experts=16), vocab_size=200).named_parameters())
    fan_in = {"w2": 96}
    for name, p in found.items():
        if "norm" in name:
            assert torch.equal(p, torch.ones_like(p))
            continue
        n = 1 if name == "embedding" else fan_in.get(name.removesuffix(".weight").split(".")[-1], 64)
        sigma = math.sqrt((1.0 if name == "embedding" else scale) / n)
        assert p.abs().max() <= 2 * sigma * (1 + 1e-6) and p.abs().max() > 1.9 * sigma, name
        assert p.std().item() == pytest.approx(0.8796 * sigma, rel=5 / math.sqrt(2 * p.numel())), name
        assert abs(p.mean().item()) < 5 * sigma / math.sqrt(p.numel()), name


def test_a_tied_embedding_starts_as_a_head_does() -> None:
    table = Transformer(sections.Model(num_layers=1, d_model=64, num_heads=4, d_ff=32, init_scale=0.1), vocab_size=500).embedding
    assert table.std().item() == pytest.approx(0.8796 / 8, rel=0.03)


def test_relative_bias_starts_with_t5s_sigma() -> None:
    """T5's bias starts with sigma = d_model^-1/2, for any number of buckets or heads. Each layer has a bias of its own."""
    found = Transformer(sections.Model(num_layers=2, d_model=64, num_heads=16, d_ff=8, positions="t5", init_scale=1.0))
    weights = [m.weight for m in found.modules() if isinstance(m, RelativeBias)]
    assert len(weights) == 2 and not torch.equal(*weights)
    for weight in weights:
        assert weight.shape == (32, 16) and weight.std().item() == pytest.approx(0.8796 / 8, rel=0.15)


def test_a_model_on_the_meta_device_has_no_weights_until_it_is_given_some() -> None:
    run = recipe()
    with torch.device("meta"):
        model = full(run)
    assert all(p.is_meta for p in model.parameters())
    initialize(model, FirstValues(model.config, *alone(model), seed=11), device="cpu")
    for (name, p), q in zip(model.named_parameters(), full(run).parameters(), strict=True):
        assert isinstance(p, nn.Parameter) and torch.equal(p, q), name


def test_checkpoints_name_experts_as_part_of_their_layer() -> None:
    assert global_name("layers.3.moe.experts.w1") == "layers.3.experts.w1"
    assert global_name("layers.3.ffn.w1.weight") == "layers.3.ffn.w1.weight"
    assert isinstance(full(recipe()).layers[0].ffn, FeedForward)
