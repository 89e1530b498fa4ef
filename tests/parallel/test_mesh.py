"""Laws of the mesh: groups and coordinates say the same, all views cover the same ranks, and every rank makes the same groups."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.errors import BadInput
from parallel.mesh import AXES, VIEWS, Degrees, Mesh, check_world, divisors

SIZES = [sizes for sizes in itertools.product(range(1, 5), repeat=4) if math.prod(sizes) <= 24]


@st.composite
def degrees(draw: st.DrawFn) -> Degrees:
    dp, pp, tp, sp = draw(st.sampled_from(SIZES))
    ep = draw(st.sampled_from(divisors(dp * sp * tp)))
    etp = draw(st.sampled_from(divisors(dp * sp * tp // ep)))
    return Degrees(dp=dp, pp=pp, tp=tp, sp=sp, ep=ep, etp=etp, ep_inner=draw(st.sampled_from(divisors(ep))))


@given(degrees())
def test_the_expert_view_has_as_many_ranks_as_the_dense_one(d: Degrees) -> None:
    assert d.edp * d.ep * d.etp == d.dp * d.sp * d.tp
    assert d.world == d.pp * d.dp * d.sp * d.tp


@given(degrees())
def test_groups_of_every_axis_cover_the_world_once(d: Degrees) -> None:
    for axis in AXES:
        groups = d.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(d.world))
        assert {len(group) for group in groups} == {d.size(axis)}


@given(degrees())
def test_a_group_is_the_ranks_that_differ_on_its_axis_alone(d: Degrees) -> None:
    places = [d.coordinates(rank) for rank in range(d.world)]
    for view in VIEWS:
        assert len({tuple(place[a] for a in view) for place in places}) == d.world  # a place belongs to one rank
        for axis in view:
            for group in d.groups(axis):
                assert [places[rank][axis] for rank in group] == list(range(d.size(axis)))  # in order of the place on it
                assert len({tuple(places[rank][a] for a in view if a != axis) for rank in group}) == 1


@given(degrees())
def test_both_views_cut_the_same_ranks_of_a_stage(d: Degrees) -> None:
    stage = d.dp * d.sp * d.tp
    for rank in range(d.world):
        place = d.coordinates(rank)
        assert place["pp"] == rank // stage
        dense = (place["dp"] * d.sp + place["sp"]) * d.tp + place["tp"]
        expert = (place["edp"] * d.ep + place["ep"]) * d.etp + place["etp"]
        assert dense == expert == rank % stage
        assert place["ep"] == place["ep_outer"] * d.ep_inner + place["ep_inner"]


@given(degrees(), st.data())
def test_a_rank_finds_itself_on_each_of_its_axes(d: Degrees, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, d.world - 1))
    mesh = Mesh.of(d, rank)
    for name in AXES:
        axis = mesh.axis(name)
        assert axis.ranks in d.groups(name) and axis.ranks[axis.index] == rank
        assert axis.index == d.coordinates(rank)[name] and axis.size == d.size(name) and axis.group is None
    assert mesh.axis("world").ranks == tuple(range(d.world)) and mesh.axis("world").index == rank


def test_tensor_parallel_ranks_are_neighbours_and_expert_parallel_ones_too() -> None:
    d = Degrees(dp=4, pp=2, tp=3)
    assert d.groups("tp") == [(r, r + 1, r + 2) for r in range(0, 24, 3)]
    assert d.groups("pp") == [(r, r + 12) for r in range(12)]
    d = Degrees(dp=6, ep=3)
    assert d.groups("ep") == [(0, 1, 2), (3, 4, 5)] and d.groups("edp") == [(0, 3), (1, 4), (2, 5)]


def test_experts_fold_over_sequence_and_tensor_parallel_ranks() -> None:
    d = Degrees(dp=2, pp=2, sp=2, tp=2, ep=8)
    assert (d.edp, d.etp) == (1, 1)
    assert d.groups("ep") == [tuple(range(8)), tuple(range(8, 16))]
    d = Degrees(dp=2, sp=2, tp=2, ep=2, etp=2)
    assert d.edp == 2 and d.groups("etp") == d.groups("tp") and d.groups("ep") == d.groups("sp") and d.groups("edp") == d.groups("dp")


def test_an_exchange_in_two_steps_meets_neighbours_first() -> None:
    d = Degrees(dp=8, ep=4, etp=2, ep_inner=2)
    assert d.groups("ep") == [(0, 2, 4, 6), (1, 3, 5, 7)] and d.groups("etp") == [(r, r + 1) for r in (0, 2, 4, 6)]
    assert d.groups("ep_inner") == [(0, 2), (1, 3), (4, 6), (5, 7)] and d.groups("ep_outer") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert (d.ep_outer, Degrees(dp=4, ep=4).ep_outer, Degrees(dp=4, ep=4).groups("ep_inner")) == (2, 4, [(0,), (1,), (2,), (3,)])
    with pytest.raises(BadInput, match="^ep_inner: got 3, needed a divisor of ep=4"):
        Degrees(dp=4, ep=4, ep_inner=3)


@given(degrees())
def test_a_token_finds_every_expert_once_in_its_own_copy(d: Degrees) -> None:
    """The ranks of one ep x etp block hold each part of each expert once; the blocks are the edp copies, and tile a stage."""
    blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(d.world):
        place = d.coordinates(rank)
        blocks.setdefault((place["pp"], place["edp"]), []).append((place["ep"], place["etp"]))
    assert len(blocks) == d.pp * d.edp
    assert all(sorted(parts) == list(itertools.product(range(d.ep), range(d.etp))) for parts in blocks.values())


@pytest.mark.parametrize("axis", ["dp", "pp", "tp", "sp", "ep", "etp"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_degree_below_one_is_refused_by_name(axis: str, value: int) -> None:
    with pytest.raises(BadInput, match=f"^degrees.{axis}: got {value}, needed .*; fix: .*degrees.{axis} to 1$"):
        Degrees(**{axis: value})


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 70), st.integers(1, 3))
def test_expert_degrees_must_divide_a_stage_and_the_fix_helps(dp: int, sp: int, tp: int, ep: int, etp: int) -> None:
    stage = dp * sp * tp
    if stage % (ep * etp) == 0:
        assert Degrees(dp=dp, sp=sp, tp=tp, ep=ep, etp=etp).edp >= 1
        return
    with pytest.raises(BadInput) as refused:
        Degrees(dp=dp, sp=sp, tp=tp, ep=ep, etp=etp)
    assert f"dp * sp * tp = {stage}" in str(refused.value) and refused.value.got == ep * etp
    for listed in refused.value.fix.split("[")[1].rstrip("]").split(", "):
        assert Degrees(dp=dp, sp=sp, tp=tp, ep=int(listed)).edp * int(listed) == stage


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(BadInput, match=f"^rank: got {rank}, needed 0 to 3;"):
        Mesh.of(Degrees(dp=4), rank)


@given(degrees(), st.integers(1, 300))
def test_degrees_must_multiply_to_the_processes_and_the_fix_helps(d: Degrees, processes: int) -> None:
    if d.world == processes:
        check_world(d, processes)
        return
    with pytest.raises(BadInput) as refused:
        check_world(d, processes)
    rest = d.pp * d.tp * d.sp
    if processes % rest == 0:
        assert f"set degrees.dp to {processes // rest}," in refused.value.fix
    assert refused.value.fix.endswith(f"--nproc {d.world}") and f"on {processes} processes" in str(refused.value)


@given(degrees())
def test_every_rank_makes_every_group_once_and_in_the_same_order(d: Degrees) -> None:
    orders: list[list[tuple[int, ...]]] = []
    for rank in range(d.world):
        made: list[tuple[int, ...]] = []

        def new_group(ranks: tuple[int, ...], made: list[tuple[int, ...]] = made) -> str:
            made.append(ranks)
            return f"group {ranks}"

        mesh = Mesh.of(d, rank).connect(new_group)
        orders.append(made)
        for axis in mesh.axes.values():
            assert axis.group == (f"group {axis.ranks}" if axis.size > 1 else None)
    assert all(order == orders[0] for order in orders)
    assert len(set(orders[0])) == len(orders[0])
    assert set(orders[0]) == {g for axis in AXES for g in d.groups(axis) if len(g) > 1} | (
        {tuple(range(d.world))} if d.world > 1 else set()
    )


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them_in_order(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert math.prod(divisors(n)) ** 2 == n ** len(divisors(n))
