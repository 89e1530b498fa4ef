"""Routers whose groups of tokens are on several ranks (sequence parallelism). `moe verify --kinds sequence` compares their training."""

from __future__ import annotations

import pytest
import torch

from moe.nn.context import Context
from moe.recipe.router_spec import RouterSpec
from moe.router.checks import check_groups, needs_group
from moe.router.router import Router, Routing
from moe.router.slices import SequenceShards
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees
from parallel.process import process
from parallel.process.process import World
from parallel.sequence.order import Order
from tests.support.ranks import run_on_ranks

ALONE = RouterSpec(num_choices=2, balance_weight=0.01, balance_scope="global_batch")
TOGETHER = {
    "a capacity": ALONE.model_copy(update={"capacity_factor": 1.25}),
    "a capacity in evaluation": ALONE.model_copy(update={"eval_capacity_factor": 2.0, "group": 2}),
    "router.select=expert_choice": RouterSpec(
        num_choices=2, select="expert_choice", capacity_factor=1.0, eval_capacity_factor=1.0, balance_scope="global_batch"
    ),
    "router.select=sinkhorn": ALONE.model_copy(update={"select": "sinkhorn", "balance_weight": 0.0}),
    "router.balance_scope=sequence": ALONE.model_copy(update={"balance_scope": "sequence"}),
}
B, L, D, E = 4, 12, 10, 6


@pytest.mark.parametrize("what", TOGETHER)
def test_group_rank_is_refused_with_shards_of_sequences(what: str) -> None:
    assert needs_group(TOGETHER[what]) in what and needs_group(ALONE) is None
    by_rank = TOGETHER[what].model_copy(update={"group": "rank"})
    with pytest.raises(BadInput, match=r"router.group: got rank with degrees.sp=4 .*; fix: set router.group to sequence") as refused:
        check_groups(by_rank, Degrees(dp=2, sp=4))
    assert "\n" not in str(refused.value)
    for spec, degrees in (
        (TOGETHER[what], Degrees(sp=4)),
        (by_rank, Degrees(dp=8, ep=8)),
        (ALONE.model_copy(update={"group": "rank"}), Degrees(sp=2)),
    ):
        check_groups(spec, degrees)


def router_of(what: str) -> Router:
    router = Router(TOGETHER[what], num_experts=E, d_model=D)
    router.weight.data.copy_(torch.randn(E, D, generator=torch.Generator().manual_seed(1)))
    return router


def test_each_loss_over_sequences_needs_whole_groups() -> None:
    none = TOGETHER["router.balance_scope=sequence"].model_copy(update={"balance_weight": 0.0})
    assert needs_group(none) is None
    for weight in ("balance_weight", "importance_weight", "load_weight"):
        assert needs_group(none.model_copy(update={weight: 0.1})) == "router.balance_scope=sequence", weight


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_shards_of_sequences_are_routed_like_whole_sequences(kind: str) -> None:
    """Three ranks with shards of sequences and padding have the choices, drops and gradients of one rank."""
    x_BLD = torch.randn(B, L, D, generator=torch.Generator().manual_seed(0))
    valid_BL = torch.arange(L) < torch.tensor([[12], [7], [12], [3]])
    weight_BLE = torch.randn(B, L, E, generator=torch.Generator().manual_seed(2))

    def routed(router: Router, places: list[int]) -> tuple[Routing, torch.Tensor]:
        context = Context.of(valid_BL[:, places].long(), valid_BL=valid_BL[:, places], positions=places, length=L)
        routing = router(x_BLD[:, places].reshape(-1, D), sequence_tokens=len(places), context=context)
        whole = routing if router.slices is None else router.slices.mapped(routing, router.slices.whole)
        router.zero_grad()
        (whole.probs_TE * weight_BLE.reshape(-1, E)).sum().backward()
        assert router.weight.grad is not None
        return routing, router.weight.grad.clone()

    def work(rank: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        axis, order, found = process.connect(Degrees(sp=3), World(rank, 3)).axis("sp"), Order(kind, 3, L), []
        for what in TOGETHER:
            router = router_of(what)
            router.slices = SequenceShards(axis, [order.positions(other) for other in range(3)])
            routing, grad = routed(router, list(order.positions(rank)))
            found.append((routing.expert_TK, routing.kept_TK, grad))
        return found

    ranks = run_on_ranks(work, 3)
    for number, what in enumerate(TOGETHER):
        routing, grad = routed(router_of(what), list(range(L)))
        for rank in range(3):
            places = list(Order(kind, 3, L).positions(rank))
            for got, want in zip(ranks[rank][number], (routing.expert_TK, routing.kept_TK), strict=False):
                assert torch.equal(got.view(B, len(places), -1), want.view(B, L, -1)[:, places]), what
        # each rank has the gradient of the whole loss, so the ranks' sum is divided by 3
        torch.testing.assert_close(sum(rank[number][2] for rank in ranks) / 3, grad, rtol=1e-5, atol=1e-6)
        assert what != "a capacity" or not (routing.kept_TK | ~routing.valid_T.unsqueeze(1)).all(), "nothing was dropped"
