"""Laws of the mesh: groups follow from coordinates, every view has each rank once, and making process groups never deadlocks."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.errors import BadInput, counted
from parallel.mesh.mesh import AXES, DENSE, EXPERT, GRID, NODES, VIEWS, Degrees, Mesh, check_world, divisors, view_of
from parallel.process.fork import run_on_ranks

SIZES = [sizes for sizes in itertools.product(range(1, 5), repeat=4) if math.prod(sizes) <= 24]


@st.composite
def degrees(draw: st.DrawFn) -> Degrees:
    dp, pp, tp, sp = draw(st.sampled_from(SIZES))
    ep = draw(st.sampled_from(divisors(dp * sp * tp)))
    etp = draw(st.sampled_from(divisors(dp * sp * tp // ep)))
    col = draw(st.sampled_from(divisors(tp)))
    depth = draw(st.sampled_from(divisors(tp // col)))
    inner = draw(st.sampled_from(divisors(ep)))
    copies = {f"{side}_copies": draw(st.sampled_from(divisors(n))) for side, n in (("tp_row", tp // (col * depth)), ("tp_col", col))}
    return Degrees(dp=dp, pp=pp, tp=tp, sp=sp, ep=ep, etp=etp, ep_inner=inner, tp_col=col, tp_depth=depth, **copies)


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
        assert len({tuple(place[a] for a in view) for place in places}) == d.world  # no two ranks have equal coordinates
        for axis in view:
            for group in d.groups(axis):
                assert [places[rank][axis] for rank in group] == list(
                    range(d.size(axis))
                )  # ranks of a group are in the order of their index
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
        assert place["tp"] == (place["tp_depth"] * d.tp_row + place["tp_row"]) * d.tp_col + place["tp_col"]


@given(degrees(), st.data())
def test_a_rank_finds_itself_on_each_of_its_axes(d: Degrees, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, d.world - 1))
    mesh = Mesh.of(d, rank)
    for name in AXES:
        axis = mesh.axis(name)
        assert axis.ranks in d.groups(name) and axis.ranks[axis.index] == rank
        assert axis.index == d.coordinates(rank)[name] and axis.size == d.size(name) and axis.group is None
    assert mesh.axis("world").ranks == tuple(range(d.world)) and mesh.axis("world").index == rank


@given(degrees(), st.data())
def test_a_joint_axis_is_the_ranks_that_differ_on_its_axes_alone(d: Degrees, data: st.DataObject) -> None:
    view = data.draw(st.sampled_from(VIEWS))
    names = data.draw(st.lists(st.sampled_from(view), min_size=1, max_size=4, unique=True))
    rank = data.draw(st.integers(0, d.world - 1))
    axis = Mesh.of(d, rank).axis(*names, label="here")
    places = [d.coordinates(other) for other in range(d.world)]
    alike = [other for other in range(d.world) if all(places[other][a] == places[rank][a] for a in view if a not in names)]
    assert list(axis.ranks) == alike and axis.ranks[axis.index] == rank and axis.label == "here"
    assert axis.size == math.prod(d.size(a) for a in names)


def test_a_joint_axis_is_named_for_its_axes_that_are_longer_than_one() -> None:
    mesh = Mesh.of(Degrees(dp=3, sp=2, tp=2), 5)
    assert mesh.axis("sp", "dp") is mesh.axis("dp", "sp") and mesh.axis("dp", "sp").name == "dp*sp"
    assert mesh.axis("dp", "sp", "pp").name == "dp*sp" and mesh.axis("pp", "tp") is mesh.axis("tp") and mesh.axis("pp", "pp").size == 1
    assert mesh.axis("dp", "tp_row").name == "dp*tp_row" and mesh.axis("dp", "tp_row").ranks == mesh.axis("dp", "tp").ranks
    assert (view_of("dp", "tp"), view_of("tp_col", "dp"), view_of("ep", "etp"), view_of("ep_inner")) == (DENSE, GRID, EXPERT, NODES)
    with pytest.raises(AssertionError, match="no view has the axes"):
        mesh.axis("dp", "ep")


def test_tensor_parallel_ranks_are_neighbors_and_expert_parallel_ones_too() -> None:
    d = Degrees(dp=4, pp=2, tp=3)
    assert d.groups("tp") == [(r, r + 1, r + 2) for r in range(0, 24, 3)]
    assert d.groups("pp") == [(r, r + 12) for r in range(12)]
    d = Degrees(dp=6, ep=3)
    assert d.groups("ep") == [(0, 1, 2), (3, 4, 5)] and d.groups("edp") == [(0, 3), (1, 4), (2, 5)]


def test_tensor_parallel_ranks_are_a_grid_a_pile_of_grids_or_a_cube() -> None:
    d = Degrees(dp=2, tp=4, tp_col=2)
    assert (d.tp_row, d.tp_col, d.tp_depth) == (2, 2, 1)
    assert d.groups("tp_row") == [(0, 2), (1, 3), (4, 6), (5, 7)]  # ranks with different rows form a column
    assert d.groups("tp_col") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    d = Degrees(tp=12, tp_col=2, tp_depth=3)
    assert d.groups("tp_depth") == [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]
    assert (Degrees(tp=27, tp_col=3, tp_depth=3).tp_row, Degrees(tp=5).tp_row) == (3, 5)
    d = Degrees(tp=8, tp_col=4, tp_col_copies=2)  # two neighbors in a row hold the same key-value head
    assert d.groups("tp_col_copies") == [(0, 1), (2, 3), (4, 5), (6, 7)] and d.groups("tp_col_heads")[:2] == [(0, 2), (1, 3)]
    with pytest.raises(BadInput, match="^tp_row_copies: got 3, needed a divisor of tp_row=2; fix: use one of"):
        Degrees(tp=4, tp_col=2, tp_row_copies=3)
    with pytest.raises(BadInput, match=r"^tp_col \* tp_depth: got 2 \* 4, needed a divisor of tp=4; fix: use one of \[1, 2, 4\]$"):
        Degrees(tp=4, tp_col=2, tp_depth=4)


def test_experts_fold_over_sequence_and_tensor_parallel_ranks() -> None:
    d = Degrees(dp=2, pp=2, sp=2, tp=2, ep=8)
    assert (d.edp, d.etp) == (1, 1)
    assert d.groups("ep") == [tuple(range(8)), tuple(range(8, 16))]
    d = Degrees(dp=2, sp=2, tp=2, ep=2, etp=2)
    assert d.edp == 2 and d.groups("etp") == d.groups("tp") and d.groups("ep") == d.groups("sp") and d.groups("edp") == d.groups("dp")


def test_an_exchange_in_two_steps_meets_neighbors_first() -> None:
    d = Degrees(dp=8, ep=4, etp=2, ep_inner=2)
    assert d.groups("ep") == [(0, 2, 4, 6), (1, 3, 5, 7)] and d.groups("etp") == [(r, r + 1) for r in (0, 2, 4, 6)]
    assert d.groups("ep_inner") == [(0, 2), (1, 3), (4, 6), (5, 7)] and d.groups("ep_outer") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert (d.ep_outer, Degrees(dp=4, ep=4).ep_outer, Degrees(dp=4, ep=4).groups("ep_inner")) == (2, 4, [(0,), (1,), (2,), (3,)])
    with pytest.raises(BadInput, match="^ep_inner: got 3, needed a divisor of ep=4"):
        Degrees(dp=4, ep=4, ep_inner=3)


@given(degrees())
def test_a_token_finds_every_expert_once_in_its_own_copy(d: Degrees) -> None:
    """The ranks of a stage form edp blocks of ep x etp ranks. The ranks of a block together hold every shard of every expert once."""
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
    for way in refused.value.fix.ways("degrees.ep"):
        values = {"degrees": {"dp": dp, "sp": sp, "tp": tp, "ep": 1, "etp": etp}}
        way.apply(values)
        made = Degrees(**values["degrees"])
        assert made.edp * made.ep * made.etp == stage


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
        assert f"set degrees.dp to {processes // rest}," in str(refused.value.fix)
    assert str(refused.value.fix).endswith(f"--nproc {d.world}") and f"on {counted(processes, 'process')}," in str(refused.value)


def asked(d: Degrees, rank: int) -> tuple[Mesh, list[tuple[tuple[int, ...], int]]]:
    """Return a rank's connected mesh, with some joint axes and parts of pp, and (ranks, number) of each group that it made, in order."""
    made: list[tuple[tuple[int, ...], int]] = []

    def new_group(ranks: tuple[int, ...]) -> str:
        made.append((ranks, len(made)))
        return f"group {ranks}"

    mesh = Mesh.of(d, rank).connect(new_group, world="the world's")
    mesh.part("pp", (0, d.pp - 1)[: d.pp], label="ends")
    for names in (("dp", "sp"), ("dp", "sp", "tp"), ("dp", "tp_row"), ("edp", "etp"), ("sp", "dp")):
        mesh.axis(*names)
    mesh.part("pp", tuple(range(d.pp)), label="down")
    return mesh, made


@given(degrees())
def test_every_axis_has_a_group_and_equal_ranks_share_one(d: Degrees) -> None:
    for rank in {0, d.world // 2, d.world - 1}:
        mesh, made = asked(d, rank)
        everyone = tuple(range(d.world))
        for axis in mesh.axes.values():
            assert axis.group == (None if axis.size == 1 else "the world's" if axis.ranks == everyone else f"group {axis.ranks}")
        own = [ranks for ranks, _ in made if ranks != (rank,)]
        parts = [axis.ranks for axis in mesh.more.values() if axis is not None and axis.size > 1]
        assert all(rank in ranks for ranks in own)  # a rank makes only groups that contain it
        assert sorted(own) == sorted([*{axis.ranks for axis in mesh.axes.values() if 1 < axis.size < d.world}, *parts])


@given(degrees())
def test_making_groups_never_deadlocks(d: Degrees) -> None:
    """In a simulation, a group is made once it is the next group, with the same number, on all of its ranks. No rank waits for ever."""
    left = {rank: asked(d, rank)[1] for rank in range(d.world)}
    assert len({len(made) for made in left.values()}) == 1
    while any(left.values()):
        ready = [made[0] for rank, made in left.items() if made and all(left[r] and left[r][0] == made[0] for r in made[0][0])]
        assert ready, f"deadlock: {left}"
        for ranks, _ in set(ready):
            for rank in ranks:
                left[rank].pop(0)


def test_a_rank_of_131072_knows_its_place_in_under_a_second() -> None:
    for d in (Degrees(dp=256, pp=16, sp=4, tp=8, ep=64, ep_inner=8, tp_col=2, tp_depth=2), Degrees(dp=131072)):
        started = time.process_time()
        _, made = asked(d, 77777)
        assert time.process_time() - started < 1
        assert d.world == 131072 and len(made) <= len(AXES) + 6  # at most one group for each axis, joint axis or part


def _sums(rank: int) -> list[list[float]]:
    """Return this rank's sums over axes of three meshes made one after another. Parts of pp have groups without some of the ranks."""
    import torch

    from parallel.mesh.collectives import sum_over
    from parallel.process import process

    found = []
    for d in (Degrees(dp=2, pp=2, tp=2), Degrees(dp=2, pp=4, ep=2), Degrees(tp=8, tp_col=2, tp_depth=2)):
        mesh = process.connect(d, process.World(rank, 8))
        part = mesh.part("pp", (0, d.pp - 1)[: d.pp], label="ends")
        axes = [mesh.axis(*names) for names in (("dp", "tp"), ("tp_row", "tp_col"), ("world",), ("pp",), ("edp",))]
        found.append([sum_over(torch.tensor(float(2**rank)), axis).item() for axis in axes + ([] if part is None else [part])])
    return found


def test_groups_that_only_their_members_make_add_up_over_their_ranks() -> None:
    total = lambda ranks: float(sum(2**r for r in ranks))  # noqa: E731
    for rank, (first, second, third) in enumerate(run_on_ranks(_sums, 8, timeout_s=60)):
        stage = range(rank // 4 * 4, rank // 4 * 4 + 4)
        ends = (rank % 4, rank % 4 + 4)
        assert first == [*map(total, (stage, [r for r in stage if r // 2 == rank // 2], range(8), ends, stage, ends))]
        pair, through = (rank // 2 * 2, rank // 2 * 2 + 1), range(rank % 2, 8, 2)
        assert second == [
            *map(total, (pair, (rank,), range(8), through, (rank,), *([(rank % 2, rank % 2 + 6)] if rank // 2 in (0, 3) else [])))
        ]
        assert third == [*map(total, (range(8), stage, range(8), (rank,), range(8), (rank,)))]


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them_in_order(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert math.prod(divisors(n)) ** 2 == n ** len(divisors(n))
