"""Groups of tokens that a router decides about together: which axes cut them, by the tokens that ranks read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.data.token_shard import TokenShard
from moe.recipe.router_spec import RouterSpec
from moe.router.groups import check_groups, cut_by
from parallel.errors import BadInput
from parallel.mesh import Degrees, Mesh

ALONE = RouterSpec(num_choices=2, balance_weight=0.01, balance_scope="global_batch")
TOGETHER = {
    "a capacity": replace(ALONE, capacity_factor=1.25),
    "a capacity in evaluation": replace(ALONE, eval_capacity_factor=2.0, group=2),
    "router.select=expert_choice": replace(ALONE, select="expert_choice", capacity_factor=1.0),
    "router.select=sinkhorn": replace(ALONE, select="sinkhorn"),
    "router.balance_scope=sequence": replace(ALONE, balance_scope="sequence"),
}


@pytest.mark.parametrize("degrees", [Degrees(dp=4, ep=2), Degrees(dp=2, tp=2, pp=2), Degrees(sp=2), Degrees(dp=2, sp=3, tp=2)])
@pytest.mark.parametrize("what", TOGETHER)
def test_axes_that_cut_a_group_are_those_whose_ranks_read_parts_of_a_sequence(what: str, degrees: Degrees) -> None:
    """Counted: the axes along which a rank reads other positions of the same sequences."""
    mine = TokenShard.of(Mesh.of(degrees, 0), num_sequences=12, length=12)
    found = set()
    for name in ("dp", "sp", "tp", "pp"):
        for rank in Mesh.of(degrees, 0).axis(name).ranks:
            other = TokenShard.of(Mesh.of(degrees, rank), num_sequences=12, length=12)
            if other.sequences == mine.sequences and other.positions != mine.positions:
                found.add(name)
    assert set(cut_by(TOGETHER[what], degrees)) == found
    assert cut_by(ALONE, degrees) == cut_by(replace(TOGETHER[what], group="rank"), degrees) == ()


def test_a_cut_group_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"degrees.sp: got 4, needed 1 with a capacity over groups of whole sequences") as refused:
        check_groups(TOGETHER["a capacity"], Degrees(dp=2, sp=4))
    assert "\n" not in str(refused.value)
    check_groups(ALONE, Degrees(dp=2, sp=4))
    check_groups(TOGETHER["a capacity"], Degrees(dp=8, ep=8))
