"""Routers whose groups of tokens are on several ranks of sp and tp. `moe verify --kinds sequence,tensor` compares their training."""

from __future__ import annotations

import pytest
import torch

from moe.nn.context import Context
from moe.recipe.router_spec import RouterSpec
from moe.router.checks import decides_together, group_size
from moe.router.router import Router
from moe.router.routing import Routing
from moe.router.slices import Shards, shards_of
from parallel.mesh.mesh import Axis, Degrees
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
B, L, D, E = 6, 12, 10, 5


def test_a_group_is_a_sequence_some_sequences_or_a_micro_batch() -> None:
    assert group_size(ALONE) is None and not decides_together(ALONE)
    for what, spec in TOGETHER.items():
        assert decides_together(spec) == (what != "router.balance_scope=sequence")
        for group, size in (("sequence", 1), (3, 3), ("rank", 0)):
            assert group_size(spec.model_copy(update={"group": group})) == size
    assert group_size(ALONE.model_copy(update={"balance_scope": "micro_batch"})) == 0


def router_of(what: str) -> Router:
    router = Router(TOGETHER[what], num_experts=E, d_model=D)
    router.weight.data.copy_(torch.randn(E, D, generator=torch.Generator().manual_seed(1)))
    return router


def test_each_loss_over_sequences_needs_whole_groups() -> None:
    none = TOGETHER["router.balance_scope=sequence"].model_copy(update={"balance_weight": 0.0})
    assert group_size(none) is None
    for weight in ("balance_weight", "importance_weight", "load_weight"):
        assert group_size(none.model_copy(update={weight: 0.1})) == 1, weight


@pytest.mark.parametrize(("kind", "sp", "tp", "by_columns"), [("zigzag", 3, 1, False), ("striped", 2, 2, True), ("zigzag", 2, 2, False)])
def test_shards_of_sequences_are_routed_like_whole_sequences(kind: str, sp: int, tp: int, by_columns: bool) -> None:
    """Ranks with shards of sequences and padding have the choices, drops and gradients of one rank. tp cuts shards of sp once more."""
    x_BLD = torch.randn(B, L, D, generator=torch.Generator().manual_seed(0))
    valid_BL = torch.arange(L) < torch.tensor([[12], [7], [12], [3], [9], [11]])
    weight_BLE = torch.randn(B, L, E, generator=torch.Generator().manual_seed(2))
    context = Context.of(valid_BL.long(), valid_BL=valid_BL)

    def routed(router: Router, shards: Shards | None) -> tuple[Routing, torch.Tensor]:
        mine = (lambda x_T: x_T) if shards is None else shards.mine
        own = context.of_tokens(mine, share=1.0, together=lambda layer, sums: sums)
        routing = router(mine(x_BLD.flatten(0, 1)), sequence_tokens=L, shards=shards, context=own)
        probs_GE = routing.probs_TE if shards is None else shards.whole(routing.probs_TE)
        router.zero_grad()
        (probs_GE * weight_BLE.flatten(0, 1)).sum().backward()
        assert router.weight.grad is not None
        return routing, router.weight.grad.clone()

    order = Order(kind, sp, L)
    positions = [order.positions(other) for other in range(sp)]

    def shards(axis: Axis) -> Shards:
        return shards_of(axis, positions, batch=B, ways=tp, by_columns=by_columns)

    def work(rank: int) -> list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]]:
        axis, found = process.connect(Degrees(sp=sp, tp=tp), World(rank, sp * tp)).axis("sp", "tp"), []
        for what in TOGETHER:
            routing, grad = routed(router_of(what), shards(axis))
            found.append((routing.expert_TK, routing.kept_TK, routing.num_groups, grad))
        return found

    ranks = run_on_ranks(work, sp * tp)
    for number, what in enumerate(TOGETHER):
        routing, grad = routed(router_of(what), None)
        for rank in range(sp * tp):
            held = shards(Axis("sp")).held[rank]
            assert ranks[rank][number][2] == routing.num_groups
            for got, want in zip(ranks[rank][number], (routing.expert_TK, routing.kept_TK), strict=False):
                assert torch.equal(got, want[held]), what
        # each rank has the gradient of the whole loss, so the ranks' sum is divided by their number
        torch.testing.assert_close(sum(rank[number][3] for rank in ranks) / (sp * tp), grad, rtol=1e-5, atol=1e-6)
        assert what != "a capacity" or not (routing.kept_TK | ~routing.valid_T.unsqueeze(1)).all(), "nothing was dropped"


def test_every_token_is_on_one_rank() -> None:
    """Runs differ by at most one token; with columns, each rank has equally many positions of each sequence."""
    for batch, ways, by_columns in ((1, 5, False), (7, 4, False), (3, 3, True)):
        positions = [Order("zigzag", 2, L).positions(rank) for rank in range(2)]
        held = shards_of(Axis("sp"), positions, batch=batch, ways=ways, by_columns=by_columns).held
        assert torch.cat(list(held)).sort().values.tolist() == list(range(batch * L)) and len(held) == 2 * ways
        assert max(map(len, held)) - min(map(len, held)) <= (0 if by_columns else 1)
        for rank, tokens in enumerate(held):
            assert {int(token) % L for token in tokens} <= set(positions[rank // ways])
