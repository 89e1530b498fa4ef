"""Laws of layouts: the ranks' regions tile the full tensor once per copy, and each element has one owner."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import BadInput
from parallel.layout import Layout, dense, stacked_over
from parallel.mesh import DENSE, EXPERT, Degrees, Mesh, divisors


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Degrees, Layout]:
    """Any degrees, and any parameter that divides by them: in either view, with each dim whole or cut by one axis."""
    dp, sp, tp = draw(st.sampled_from([s for s in itertools.product(range(1, 5), repeat=3) if math.prod(s) <= 12]))
    ep = draw(st.sampled_from(divisors(dp * sp * tp)))
    degrees = Degrees(dp=dp, sp=sp, tp=tp, ep=ep, etp=draw(st.sampled_from(divisors(dp * sp * tp // ep))), pp=draw(st.integers(1, 2)))
    view = draw(st.sampled_from([DENSE, EXPERT]))
    cuts = draw(st.permutations([*view[1:], None, None]))[: draw(st.integers(1, 3))]
    split = {dim: axis for dim, axis in enumerate(cuts) if axis}
    shape = tuple(draw(st.integers(1, 3)) * (degrees.size(axis) if axis else 1) for axis in cuts)
    return degrees, Layout(shape, split, view)


def stages(degrees: Degrees) -> list[list[Mesh]]:
    """The meshes of the ranks of each pipeline stage: a parameter lives on one stage."""
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
def test_an_axis_either_cuts_or_copies(case: tuple[Degrees, Layout]) -> None:
    degrees, layout = case
    assert set(layout.copies()) | set(layout.split.values()) == set(layout.view) - {"pp"}
    assert not set(layout.copies()) & set(layout.split.values())


def test_dense_is_whole_everywhere_and_experts_are_cut_along_their_number() -> None:
    degrees = Degrees(dp=6, ep=3)
    whole, stack = dense((5, 7), "router"), stacked_over("ep", (12, 5, 7), unstack="layers.1.experts.{}.w1")
    assert whole.copies() == ("dp", "sp", "tp") and stack.copies() == ("edp", "etp")
    assert (whole.family, stack.family) == ("router", "expert")
    for rank in range(6):
        mesh = Mesh.of(degrees, rank)
        assert whole.region(mesh) == (slice(0, 5), slice(0, 7)) and whole.is_owner(mesh) == (rank == 0)
        first = rank % 3 * 4
        assert stack.region(mesh) == (slice(first, first + 4), slice(0, 5), slice(0, 7)) and stack.is_owner(mesh) == (rank < 3)


@pytest.mark.parametrize("experts", [1, 2, 4, 7])
def test_a_dim_that_does_not_divide_is_refused(experts: int) -> None:
    with pytest.raises(BadInput, match=f"^dim 0 of a parameter: got {experts}, needed a multiple of ep=3; fix: change degrees.ep$"):
        stacked_over("ep", (experts, 5), unstack="x.{}").local_shape(Mesh.of(Degrees(dp=3, ep=3), 1))
