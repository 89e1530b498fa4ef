"""Laws of layouts: the ranks' shards cover each tensor once per copy, each element has one owner, and a gradient sum has each token once.

The second half counts by loops over ranks, which share no code with parallel/mesh/layout.py and mesh.py: which elements each rank holds,
and which tokens contribute to its gradients.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import BadInput
from parallel.mesh.layout import Layout, Tile
from parallel.mesh.mesh import DENSE, EXPERT, GRID, HEADS, NODES, Degrees, Mesh, divisors
from parallel.tensor.linear_2d import Block
from parallel.tensor.linear_3d import Cube


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Degrees, Layout]:
    """Draw degrees and the layout of a parameter, in any view, with each dim whole or cut by one or several axes that divide it."""
    dp, sp, tp = draw(st.sampled_from([s for s in itertools.product(range(1, 5), repeat=3) if math.prod(s) <= 12]))
    ep = draw(st.sampled_from(divisors(dp * sp * tp)))
    etp, col = draw(st.sampled_from(divisors(dp * sp * tp // ep))), draw(st.sampled_from(divisors(tp)))
    degrees = Degrees(
        dp=dp,
        sp=sp,
        tp=tp,
        ep=ep,
        etp=etp,
        pp=draw(st.integers(1, 2)),
        tp_col=col,
        tp_depth=draw(st.sampled_from(divisors(tp // col))),
        ep_inner=draw(st.sampled_from(divisors(ep))),
        tp_col_copies=draw(st.sampled_from(divisors(col))),
    )
    view = draw(st.sampled_from([DENSE, GRID, EXPERT, NODES, *HEADS]))
    order, dims = draw(st.permutations(view[1:])), draw(st.integers(1, 3))
    cuts: dict[int, tuple[str, ...]] = {}
    for axis in order[: draw(st.integers(0, len(order)))]:
        dim = draw(st.integers(0, dims - 1))
        cuts[dim] = (*cuts.get(dim, ()), axis)
    split: dict[int, str | tuple[str, ...]] = {dim: axes if len(axes) > 1 else axes[0] for dim, axes in cuts.items()}
    shape = tuple(draw(st.integers(1, 3)) * math.prod(map(degrees.size, cuts.get(dim, ()))) for dim in range(dims))
    return degrees, Layout(shape, split, view, alike=draw(st.sampled_from([(), ("tp",), ("tp_row", "sp")])))


def stages(degrees: Degrees) -> list[list[Mesh]]:
    """Return for each pipeline stage the meshes of its ranks. Each parameter is on one stage."""
    meshes = [Mesh.of(degrees, rank) for rank in range(degrees.world)]
    return [[m for m in meshes if m.axis("pp").index == stage] for stage in range(degrees.pp)]


@given(layouts())
@settings(max_examples=60)
def test_regions_tile_the_tensor_once_per_copy(case: tuple[Degrees, Layout]) -> None:
    degrees, layout = case
    for stage in stages(degrees):
        sets: dict[tuple[int, ...], torch.Tensor] = {}
        for mesh in stage:
            copy = tuple(mesh.axis(a).index for a in layout.copies())
            region = layout.region(mesh)
            assert tuple(s.stop - s.start for s in region) == layout.local_shape(mesh)
            sets.setdefault(copy, torch.zeros(layout.shape))[region] += 1
        assert set(sets) == set(itertools.product(*(range(degrees.size(a)) for a in layout.copies())))
        assert all(torch.equal(held, torch.ones(layout.shape)) for held in sets.values())


@given(layouts())
@settings(max_examples=60)
def test_every_element_has_exactly_one_owner(case: tuple[Degrees, Layout]) -> None:
    degrees, layout = case
    for stage in stages(degrees):
        owners = torch.zeros(layout.shape)
        for mesh in stage:
            owners[layout.region(mesh)] += layout.is_owner(mesh)
        assert torch.equal(owners, torch.ones(layout.shape))


@given(layouts())
def test_an_axis_cuts_or_copies_and_copies_are_alike_or_summed(case: tuple[Degrees, Layout]) -> None:
    _, layout = case
    assert set(layout.copies()) | set(layout.cut_by()) == set(layout.view) - {"pp"}
    assert not set(layout.copies()) & set(layout.cut_by())
    assert set(layout.copies()) == set(layout.summed_over()) | (set(layout.alike) & set(layout.copies()))


def test_dense_is_whole_everywhere_and_experts_are_cut_along_their_number() -> None:
    degrees = Degrees(dp=6, ep=3)
    whole, stack = Layout((5, 7), family="router"), Layout((12, 5, 7), {0: "ep"}, EXPERT, "expert", "layers.1.experts.{}.w1")
    assert whole.copies() == ("dp", "sp", "tp") and whole.summed_over() == ("dp", "sp")
    assert stack.copies() == stack.summed_over() == ("edp", "etp")
    assert (whole.family, stack.family) == ("router", "expert")
    for rank in range(6):
        mesh = Mesh.of(degrees, rank)
        assert whole.region(mesh) == (slice(0, 5), slice(0, 7)) and whole.is_owner(mesh) == (rank == 0)
        first = rank % 3 * 4
        assert stack.region(mesh) == (slice(first, first + 4), slice(0, 5), slice(0, 7)) and stack.is_owner(mesh) == (rank < 3)


@pytest.mark.parametrize("experts", [1, 2, 4, 7])
def test_a_dim_that_does_not_divide_is_refused(experts: int) -> None:
    with pytest.raises(BadInput, match=f"^dim 0 of a parameter: got {experts}, needed a multiple of ep=3; fix: change degrees.ep$"):
        Layout((experts, 5), {0: "ep"}, EXPERT, "expert", "x.{}").local_shape(Mesh.of(Degrees(dp=3, ep=3), 1))


def test_a_dim_that_several_axes_cut_must_divide_by_all_of_them() -> None:
    mesh = Mesh.of(Degrees(tp=8, tp_col=2, tp_depth=2))
    with pytest.raises(BadInput, match=r"^dim 0 of a parameter: got 6, needed a multiple of tp_depth \* tp_row=4; fix: change degrees.tp$"):
        Layout((6, 4), {0: ("tp_depth", "tp_row"), 1: "tp_col"}, GRID).local_shape(mesh)


# --- comparison with loops over ranks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """One rank's shard of a parameter. block: index of the shard along each dim. seen: the shards of the batch, as coordinates, whose
    tokens contribute to the rank's gradient of the shard."""

    block: tuple[int, ...]
    seen: frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """A parameter's layout, and what it must be: `cuts`, the number of shards along each dim, and `held`, each rank's shard."""

    layout: Layout
    cuts: tuple[int, ...]
    held: list[Held]


WHOLE = (0, 0)


def one_dim(dp: int, sp: int, tp: int) -> dict[str, Kind]:
    """Parameters of Megatron-LM's 1D layers. All tp ranks of a (dp, sp) see the same tokens, except norms with sequence parallelism."""
    ranks = [(d, s, t) for d in range(dp) for s in range(sp) for t in range(tp)]
    alike = [frozenset({(d, s, t) for t in range(tp)}) for d, s, _ in ranks]
    apart = [frozenset({rank}) for rank in ranks]
    return {
        "norm": Kind(Layout((6, 5)), (1, 1), [Held(WHOLE, seen) for seen in alike]),
        "norm, tokens cut": Kind(Layout((6, 5), alike=()), (1, 1), [Held(WHOLE, seen) for seen in apart]),
        "columns": Kind(Layout((3, 2 * tp), {1: "tp"}), (1, tp), [Held((0, r[2]), seen) for r, seen in zip(ranks, alike, strict=True)]),
        "rows": Kind(Layout((2 * tp, 3), {0: "tp"}), (tp, 1), [Held((r[2], 0), seen) for r, seen in zip(ranks, alike, strict=True)]),
        "vocabulary": Kind(Layout((5 * tp, 3), {0: "tp"}), (tp, 1), [Held((r[2], 0), seen) for r, seen in zip(ranks, alike, strict=True)]),
    }


def grids(dp: int, sp: int, q: int, depth: int) -> dict[str, Kind]:
    """Parameters of 2D (depth 1) and 2.5D. The batch is cut by depth and row, channels by column; products sum dW over their grid."""
    ranks = [(d, s, k, i, j) for d in range(dp) for s in range(sp) for k in range(depth) for i in range(q) for j in range(q)]
    own = [frozenset({(d, s, k, i)}) for d, s, k, i, _ in ranks]
    grid = [frozenset({(d, s, k, i) for i in range(q)}) for d, s, k, _, _ in ranks]
    return {
        "block": Kind(
            Layout((2 * q, 3 * q), {0: "tp_row", 1: "tp_col"}, GRID),
            (q, q),
            [Held((i, j), seen) for (_, _, _, i, j), seen in zip(ranks, grid, strict=True)],
        ),
        "norm": Kind(Layout((3 * q, 1), {0: "tp_col"}, GRID), (q, 1), [Held((r[4], 0), seen) for r, seen in zip(ranks, own, strict=True)]),
        "one key-value head": Kind(
            Block("tp_col_heads").layout("", (2, 3 * q)),
            (1, q),
            [
                Held((0, i), frozenset({(d, s, k, n, j) for n in range(q)})) for d, s, k, i, j in ranks
            ],  # gradients of the queries of a column
        ),
    }


def cube(dp: int, sp: int, q: int) -> dict[str, Kind]:
    """Parameters of 3D on a cube of ranks (i, j, k). The batch is cut by i, then j, channels by k; W's dims by (k, then i) and by j.
    Products sum dW over i."""
    ranks = [(d, s, k, i, j) for d in range(dp) for s in range(sp) for k in range(q) for i in range(q) for j in range(q)]
    all_of = [frozenset({(d, s, i, j) for i in range(q) for j in range(q)}) for d, s, *_ in ranks]
    own = [frozenset({(d, s, i, j)}) for d, s, _, i, j in ranks]
    return {
        "weight": Kind(
            Layout((2 * q * q, 3 * q), {0: ("tp_depth", "tp_row"), 1: "tp_col"}, GRID),
            (q * q, q),
            [Held((k * q + i, j), seen) for (_, _, k, i, j), seen in zip(ranks, all_of, strict=True)],
        ),
        "norm": Kind(
            Layout((3 * q, 1), {0: "tp_depth"}, GRID), (q, 1), [Held((r[2], 0), seen) for r, seen in zip(ranks, own, strict=True)]
        ),
        "one key-value head": Kind(
            Cube("first", copied=True).layout("", (2, 3 * q * q)),
            (1, q * q),
            [Held((0, j * q + k), frozenset({(d, s, n, m, i) for n in range(q) for m in range(q)})) for d, s, k, i, j in ranks],
        ),
    }


def experts(dp: int, sp: int, tp: int, ep: int, etp: int) -> dict[str, Kind]:
    """Parameters of an MoE layer. Every rank has its own tokens. An expert gets tokens of the ep * etp neighboring ranks that share one
    copy of all experts."""
    ranks = [(c, e, h) for c in range(dp * sp * tp // (ep * etp)) for e in range(ep) for h in range(etp)]
    seen = [frozenset({(c, e, h) for e in range(ep) for h in range(etp)}) for c, _, _ in ranks]
    own = [frozenset({rank}) for rank in ranks]
    stack = Layout((2 * ep, 3, 2 * etp), {0: "ep", 2: "etp"}, EXPERT, "expert", "experts.{}.w1")
    return {
        "experts": Kind(stack, (ep, 1, etp), [Held((e, 0, h), s) for (_, e, h), s in zip(ranks, seen, strict=True)]),
        "router": Kind(Layout((3, 4), family="router", alike=()), (1, 1), [Held(WHOLE, s) for s in own]),
    }


@st.composite
def methods(draw: st.DrawFn) -> tuple[Degrees, Kind, tuple[int, int]]:
    """Draw degrees of at most 64 ranks, a parameter of one method, and (dim, number of tiles) for a tile of it."""
    dp, sp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3), (4, 2)]))
    method = draw(st.sampled_from(["1d", "2d", "2.5d", "3d", "experts"]))
    pp = draw(st.integers(1, 2))
    if method in ("1d", "experts"):
        tp = draw(st.integers(1, 64 // (pp * dp * sp)).filter(lambda n: n <= 8))
        ep = draw(st.sampled_from(divisors(dp * sp * tp)))
        etp = draw(st.sampled_from(divisors(dp * sp * tp // ep)))
        kinds = one_dim(dp, sp, tp) if method == "1d" else experts(dp, sp, tp, ep, etp)
        degrees = Degrees(dp=dp, sp=sp, tp=tp, pp=pp, ep=ep, etp=etp)
    else:
        room = 64 // (pp * dp * sp)
        q, depth = draw(st.sampled_from([(q, d) for q in (1, 2, 3) for d in (1, 2, 3) if q * q * (q if method == "3d" else d) <= room]))
        depth = {"2d": 1, "3d": q}.get(method, depth)
        kinds = cube(dp, sp, q) if method == "3d" else grids(dp, sp, q, depth)
        side = "tp_row" if method == "3d" else "tp_col"
        degrees = Degrees(dp=dp, sp=sp, tp=q * q * depth, tp_col=q, tp_depth=depth, pp=pp, **{f"{side}_copies": q})
    kind = kinds[draw(st.sampled_from(sorted(kinds)))]
    return degrees, kind, (draw(st.integers(0, len(kind.cuts) - 1)), draw(st.integers(1, 2)))


@given(methods())
@settings(max_examples=150)
def test_gradients_of_each_method_have_every_token_once(case: tuple[Degrees, Kind, tuple[int, int]]) -> None:
    degrees, kind, _ = case
    assert degrees.world // degrees.pp == len(kind.held)
    everything = frozenset().union(*(held.seen for held in kind.held))
    for stage in stages(degrees):
        found = [(held, mesh) for held, mesh in zip(kind.held, stage, strict=True)]
        at = {mesh.rank: held for held, mesh in found}
        for held, mesh in found:
            same = {rank for rank, other in at.items() if other.block == held.block}
            assert set(mesh.axis(*kind.layout.copies()).ranks if kind.layout.copies() else {mesh.rank}) == same
            summed = mesh.axis(*kind.layout.summed_over()).ranks
            parts = [token for rank in summed for token in at[rank].seen]
            assert len(parts) == len(set(parts)) and set(parts) == everything  # each shard of the batch once
            alike = [rank for rank in same if at[rank].seen == held.seen]
            assert same == {
                other for rank in alike for other in next(m for _, m in found if m.rank == rank).axis(*kind.layout.summed_over()).ranks
            }


@given(methods())
@settings(max_examples=150)
def test_regions_are_the_blocks_of_each_method_and_have_one_owner(case: tuple[Degrees, Kind, tuple[int, int]]) -> None:
    degrees, kind, (dim, count) = case
    shape = kind.layout.shape
    each = [size // cut for size, cut in zip(shape, kind.cuts, strict=True)]
    for stage in stages(degrees):
        owners, shards = torch.zeros(shape), torch.zeros(shape)
        for held, mesh in zip(kind.held, stage, strict=True):
            region = kind.layout.region(mesh)
            assert region == tuple(slice(b * n, (b + 1) * n) for b, n in zip(held.block, each, strict=True))
            owners[region] += kind.layout.is_owner(mesh)
            shards[region] += kind.layout.shard_counts(mesh)
            tiles = [replace(kind.layout, tile=Tile(dim, index, count)).region(mesh)[dim] for index in range(count)]
            assert tiles[0].start == region[dim].start and tiles[-1].stop == region[dim].stop
            assert all(a.stop == b.start for a, b in pairwise(tiles))
        assert torch.equal(owners, torch.ones(shape))
        assert torch.equal(shards, torch.full(shape, float(math.prod(map(degrees.size, kind.layout.summed_over())))))


def test_a_tied_embedding_on_two_stages_is_owned_once() -> None:
    degrees = Degrees(dp=2, pp=3, tp=2)
    layout = replace(Layout((4, 3)), holders=(0, 2))
    meshes = [Mesh.of(degrees, rank) for rank in range(degrees.world)]
    holding = [mesh for mesh in meshes if mesh.axis("pp").index in layout.holders]
    assert [mesh.rank for mesh in holding if layout.is_owner(mesh)] == [0]
    assert [mesh.rank for mesh in holding if layout.shard_counts(mesh)] == [0, 2]
