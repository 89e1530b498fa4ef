"""A router's kernels (moe/kernels/triton/router.py) equal the router in torch operations: choices and counts exactly, the rest in fp32."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.recipe import sections
from moe.router.routing import Routing
from moe.router.scores import jittered as plain_jitter
from moe.router.slices import Shards, shards_of
from parallel.mesh.mesh import Axis, Degrees
from parallel.numerics.random import key_of, uniform
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import run_on_ranks

pytest.importorskip("triton", reason="Triton's package is not installed; it has none for this system", exc_type=ImportError)

import tests.support.interpreted  # noqa: E402, F401

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
# B sequences, L length, T = B*L tokens, E experts; T and E are no multiples of a block
B, L, E = 3, 23, 12

SIGMOID = {"preset": "deepseek_v3", "num_choices": 3, "balance_weight": 0.5, "expert_groups": 4, "top_groups": 2}
FUSED: dict[str, dict[str, Any]] = {
    "a probability as gate": {"preset": "switch", "capacity_factor": 0.7},
    "two gates sum to 1, first choices count": {"preset": "glam", "capacity_factor": 0.6, "balance_weight": 0.5},
    "softmax over the chosen": {"preset": "mixtral", "balance_weight": 0.5},
    "z loss": {"preset": "olmoe", "num_choices": 5, "balance_weight": 0.5, "z_weight": 0.3},
    "sigmoid, selection bias": SIGMOID | {"select": "top_k", "balance_counts": "all"},
    "sigmoid, groups of experts, load without bias": SIGMOID,
    "groups of experts by their best one": {
        "preset": "deepseek_v2",
        "num_choices": 5,
        "balance_weight": 0.5,
        "expert_groups": 3,
        "top_groups": 2,
    },
    "jitter": {"preset": "switch", "jitter": 0.3, "balance_weight": 0.5},
    "one sigmoid": {"preset": "llama4", "balance_weight": 0.5},
    "one group, a learned scale": {"preset": "switch", "group": "rank", "balance_scope": "micro_batch", "expert_scale": "learned"},
    "the lowest gates are dropped": {"preset": "glam", "capacity_factor": 0.6, "drop": "lowest_gate"},
}
IN_TORCH: dict[str, dict[str, Any]] = {
    "random second choices": {"preset": "gshard"},
    "gates after drops": {"preset": "nllb"},
    "experts choose": {"preset": "expert_choice"},
    "other scores": {"preset": "mixtral", "score": "sqrt_softplus", "softmax_over": "all"},
    "noise": {"preset": "switch", "noise": "gumbel"},
    "importance loss": {"preset": "glam", "importance_weight": 0.1},
    "capacity of sequences, balance of all": {"preset": "switch", "balance_scope": "micro_batch"},
}


def layer_of(kernels: str, **options: Any) -> MoELayer:
    """Return a layer whose router takes its input as logits."""
    experts = sections.Experts(num_experts=E, kernels=kernels)
    layer = MoELayer(experts, sections.Router(**options), d_model=E, d_ff=8, ffn="relu", layer=0).to(DEVICE)
    layer.router.weight.data.copy_(torch.eye(E))
    if layer.router.bias_E is not None:
        layer.router.bias_E.copy_(torch.linspace(-0.4, 0.4, E))
    if layer.router.expert_scale is not None:
        layer.router.expert_scale.data.copy_(torch.linspace(0.5, 2, E))
    return layer


def logits(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return logits [T, E], of which half the tokens have many equal ones."""
    drawn = 3 * torch.randn(B * L, E, generator=torch.Generator().manual_seed(seed))
    drawn[::2] = drawn[::2].round()
    return drawn.to(DEVICE, dtype)


def context(*, padded: bool = False) -> Context:
    valid = torch.rand(B, L, generator=torch.Generator().manual_seed(2)) > 0.4 if padded else None
    return Context.of(torch.zeros(B, L, device=DEVICE), valid_BL=None if valid is None else valid.to(DEVICE))


def routed(layer: MoELayer, x_TD: Tensor, context: Context, shards: Shards | None = None) -> tuple[Routing, list[Tensor], Tensor]:
    """Return the routing, the losses and report, and the gradient of the input from gates and losses. With `shards`, only this rank's
    tokens are routed, and losses and report are multiplied by its share of the valid tokens."""
    x_TD, share, valid_T = x_TD.clone().requires_grad_(), 1.0, context.valid_T
    mine = (lambda of_T: of_T) if shards is None else shards.mine
    if shards is not None:
        share = len(shards.mine(x_TD)) / len(x_TD) if valid_T is None else float(shards.mine(valid_T).sum() / valid_T.sum())
        context = context.of_tokens(shards.mine, share=share, together=lambda layer, sums: sums)
    routing = layer.router(mine(x_TD), sequence_tokens=L, context=context, shards=shards)
    loss, report = layer._measured(routing, context, shards)
    assert loss is not None
    weights_TK = mine(torch.randn(len(x_TD), routing.gate_TK.shape[1], generator=torch.Generator().manual_seed(5)).to(DEVICE))
    ((routing.gate_TK * weights_TK).sum() + 50 * share * loss).backward()
    assert x_TD.grad is not None
    numbers = [x * share if x.is_floating_point() else x for x in (loss.detach(), *astuple(report)[1:-1])]
    return routing, numbers, x_TD.grad


def same(got: tuple[Routing, list[Tensor], Tensor], want: tuple[Routing, list[Tensor], Tensor]) -> None:
    assert got[0].fused is not None and want[0].fused is None
    assert torch.equal(got[0].expert_TK, want[0].expert_TK) and torch.equal(got[0].kept_TK, want[0].kept_TK)
    pairs = [*zip(got[1], want[1], strict=True), (got[2], want[2])]
    pairs += [(getattr(got[0], name).detach(), getattr(want[0], name).detach()) for name in ("gate_TK", "probs_TE", "logits_TE")]
    for mine, plain in pairs:
        assert mine.dtype == plain.dtype and mine.shape == plain.shape
        if plain.is_floating_point():
            bound = 2e-6 if plain.dtype == torch.float32 else torch.finfo(plain.dtype).eps
            torch.testing.assert_close(mine, plain, rtol=bound, atol=bound * max(plain.abs().flatten().tolist(), default=0))
        else:
            assert torch.equal(mine, plain)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", FUSED)
def test_gates_losses_report_and_gradient_are_those_of_torch_operations(name: str, padded: bool) -> None:
    x_TD = logits(len(name), torch.bfloat16 if name in ("z loss", "jitter") else torch.float32)
    same(*(routed(layer_of(kernels, **FUSED[name]), x_TD, context(padded=padded)) for kernels in ("triton", "cpu")))


@pytest.mark.parametrize("name", ["two gates sum to 1, first choices count", "sigmoid, groups of experts, load without bias"])
def test_a_recomputed_pass_takes_the_first_ones_choices(name: str) -> None:
    """The second pass has other logits. Its gates and losses are those of its logits for the first pass's choices."""
    made = []
    for kernels in ("triton", "cpu"):
        layer, twice = layer_of(kernels, **FUSED[name]), context().remembering()
        first = layer.router(logits(1), sequence_tokens=L, context=twice)
        made.append(routed(layer, logits(2), twice))
        assert torch.equal(made[-1][0].expert_TK, first.expert_TK) and torch.equal(made[-1][0].kept_TK, first.kept_TK)
    same(*made)


@pytest.mark.parametrize("name", IN_TORCH)
def test_other_routers_are_computed_in_torch_operations(name: str) -> None:
    layer = layer_of("triton", **IN_TORCH[name])
    assert layer.router(logits(1), sequence_tokens=L, context=context()).fused is None


@pytest.mark.parametrize("name", ["one group, a learned scale", "sigmoid, groups of experts, load without bias", "jitter"])
def test_no_tokens_are_routed_as_in_torch_operations(name: str) -> None:
    made = []
    for kernels in ("triton", "cpu"):
        layer = layer_of(kernels, **FUSED[name])
        made.append(routed(layer, logits(1)[:0], Context.of(torch.zeros(0, L, device=DEVICE))))
    same(*made)
    assert all(not loss.any() for loss in made[0][1])


def test_padding_may_be_a_strided_view() -> None:
    valid_BL = (torch.arange(2 * B * L, device=DEVICE) % 7 > 2)[None, ::2]
    one = Context.of(torch.zeros(1, B * L, device=DEVICE), valid_BL=valid_BL)
    assert one.valid_T is not None and not one.valid_T.is_contiguous()
    same(*(routed(layer_of(kernels, **FUSED["one sigmoid"]), logits(1), one) for kernels in ("triton", "cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_jitter_has_the_random_numbers_of_torch_operations(dtype: torch.dtype) -> None:
    from moe.kernels.triton import jittered

    x_TD, grad_TD, key = torch.randn(5, 1100, dtype=dtype, device=DEVICE), torch.randn(5, 1100, device=DEVICE), key_of("jitter")
    position_T = torch.tensor([0, 7, 2**31 - 1, 2**31, 2**33 + 5], device=DEVICE)
    made = []
    for jitter in (
        lambda x: jittered(x, position_T, key=key, size=0.25),
        lambda x: plain_jitter(x.float(), uniform(key, position_T, 1100), 0.25),
    ):
        x = x_TD.clone().requires_grad_()
        y = jitter(x)
        y.backward(grad_TD)
        made.append((y.detach(), x.grad))
    torch.testing.assert_close(made[0], made[1], rtol=0 if DEVICE.type == "cpu" else 1e-6, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_slots_of_choices_on_several_ranks_are_those_of_all_in_one_tensor(groups: int) -> None:
    """Three ranks hold unequal numbers of tokens in any order; a group has more tokens than a block, and some choices need no slot."""
    from moe.kernels import cpu, triton

    draw, held = torch.Generator().manual_seed(groups), (torch.arange(280) * 33 % 280).split((90, 140, 50))
    expert_GK = torch.randint(-1, E, (280, 3), generator=draw)
    row_G = torch.cat([140 * rank + torch.arange(len(of_rank)) for rank, of_rank in enumerate(held)])[torch.cat(held).argsort()]
    expert_PK = torch.full((3 * 140, 3), E + 1).index_copy(0, row_G, expert_GK)
    sizes: dict[str, Any] = {"num_groups": groups, "num_experts": E, "slots_each": 40 // groups}
    kept_GK = cpu.kept(expert_GK.clamp(min=0), expert_GK >= 0, **sizes)
    assert 0.2 < kept_GK.float().mean() < 0.9 * (expert_GK >= 0).float().mean()
    for rank, (of_rank, counted) in enumerate(zip(held, (1, 2, 3), strict=True)):
        mine = sizes | {"mine": range(140 * rank, 140 * rank + len(of_rank)), "counted": counted}
        kept_TK, counted_GE = triton.queues(expert_PK.to(DEVICE), row_G.to(DEVICE), **mine)
        assert torch.equal(kept_TK.cpu(), kept_GK[of_rank]) and torch.equal(cpu.kept_of_rows(expert_PK, row_G, **mine), kept_GK[of_rank])
        want = [(of_group == torch.arange(E)).sum(0).tolist() for of_group in expert_GK[:, :counted].reshape(groups, -1, 1)]
        assert counted_GE.tolist() == want


@pytest.mark.skipif(DEVICE.type == "cuda", reason="forked ranks cannot use the GPU of their parent")
def test_sequences_with_tokens_on_two_ranks_are_routed_as_whole_sequences() -> None:
    """Together, the ranks' choices, drops, gates, losses, report and gradients are those of torch operations for whole sequences. A
    recomputed pass has the same bits."""
    cases = [
        (name, number % 2 == 0) for number, name in enumerate(FUSED) if name not in ("jitter", "one sigmoid")
    ]  # every second is padded
    positions = [range(9), range(9, L)]

    def work(rank: int) -> list[tuple[bool, list[Tensor], list[Tensor]]]:
        axis, found = process.connect(Degrees(sp=2), World(rank, 2, place="cpu")).axis("sp"), []
        for name, padded in cases:
            shards, again = shards_of(axis, positions, batch=B), context(padded=padded).remembering()
            routing, numbers, grad = routed(layer_of("triton", **FUSED[name]), logits(len(name)), again, shards)
            axis.communicator.reset_counts()
            recomputed = routed(layer_of("triton", **FUSED[name]), logits(len(name)), again, shards)
            assert all(map(torch.equal, (*numbers, grad), (*recomputed[1], recomputed[2]))), name
            assert not axis.communicator.counts() or "lowest" in name, "a recomputed pass sends nothing"
            mine = [routing.expert_TK, routing.kept_TK, routing.gate_TK.detach()]
            found.append((routing.fused is not None, mine, [*numbers, grad]))
        return found

    of_ranks = run_on_ranks(work, 2)
    held = shards_of(Axis("sp"), positions, batch=B).held
    for number, (name, padded) in enumerate(cases):
        routing, *rest = routed(layer_of("cpu", **FUSED[name]), logits(len(name)), context(padded=padded))
        for (fused, got, _), mine in zip([found[number] for found in of_ranks], held, strict=True):
            assert fused and torch.equal(got[0], routing.expert_TK[mine]) and torch.equal(got[1], routing.kept_TK[mine]), name
            torch.testing.assert_close(got[2], routing.gate_TK[mine].detach(), rtol=2e-6, atol=2e-6)
        for parts, want in zip(zip(*(found[number][2] for found in of_ranks), strict=True), [*rest[0], rest[1]], strict=True):
            torch.testing.assert_close(sum(parts), want, rtol=4e-6, atol=4e-6 * float(want.abs().max()), msg=partial("{}: {}".format, name))
