"""The gradient norm on every layout equals one process's. If one rank's gradient is not finite, all ranks get an infinite norm."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.verify.cases import Case
from moe.verify.twin import Result, reference
from parallel.data.deepspeed import load_deepspeed
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import EXPERT as EXPERT_VIEW
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.numerics.clip import GradientNorm, clip_factor, gradient_norm
from parallel.process.fork import run_on_ranks
from parallel.process.process import World, connect
from tests.support.tiny import CPU, start

EXPERT, ROUTER, DENSE = "layers.1.moe.experts.w2", "layers.1.moe.router.weight", "layers.0.attention.q.weight"
FAMILY = {EXPERT: "expert", ROUTER: "router", DENSE: "dense"}
LAYOUTS = [(2, 2), (4, 2)]  # (dp, ep): each expert on one rank, or on two
SPOILED = {  # (dp, ep) -> (parameter, value) for gradients that get this value: every family, inf and NaN
    (2, 2): [(EXPERT, math.inf), (EXPERT, math.nan), (ROUTER, math.inf), (DENSE, math.nan)],
    (4, 2): [(EXPERT, math.nan)],
}


KINDS = ["ddp", "fsdp", "zero1", "zero2", "zero3", "zero3+cpu-all"]
each_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def single_process() -> Result:
    return reference(Case("switch", "ddp", 1, 1, 1, "fp32"))


@cache
def norms(dp: int, ep: int) -> list[dict[str, Any]]:
    """Return each rank's norms of each kind: clean, with each of SPOILED, and clean again."""
    load_deepspeed()

    def work(rank: int) -> dict[str, Any]:
        found = {}
        for kind in KINDS:
            tiny = start(Case("switch", kind, dp, ep, 1, "fp32"), rank)

            def norm(tiny: Any = tiny) -> list[Any]:
                tiny.accumulate(0)
                n = gradient_norm(
                    tiny.engine.owned_gradients(), families=("dense", "router", "expert"), world=tiny.mesh.axis("world"), device=CPU
                )
                tiny.engine.drop_gradients()
                return [n.total, n.families, n.finite]

            found[kind] = {"clean": norm()}
            for name, value in SPOILED[dp, ep]:
                with tiny.spoiled(name, rank=dp - 1, value=value):
                    found[kind][f"{name} {value}"] = norm()
            found[kind]["again"] = norm()
        return found

    return run_on_ranks(work, dp, timeout_s=240)


@each_kind
@pytest.mark.parametrize("dp, ep", LAYOUTS)
def test_the_norm_and_its_parts_are_those_of_one_process(kind: str, dp: int, ep: int) -> None:
    gradients = single_process().gradients
    family = {n: "expert" if ".experts." in n else "router" if ".router." in n else "dense" for n in gradients}
    assert set(family.values()) == {"dense", "router", "expert"}
    expected = {
        f: math.sqrt(sum(float(g.double().square().sum()) for n, g in gradients.items() if family[n] == f)) for f in family.values()
    }
    for found in norms(dp, ep):
        for when in ("clean", "again"):  # "again": after spoiled gradients were dropped
            total, parts, finite = found[kind][when]
            assert finite and total == pytest.approx(single_process().norm, rel=1e-6)
            assert parts == pytest.approx(expected, rel=1e-6)
            assert total == pytest.approx(math.sqrt(sum(p**2 for p in parts.values())), rel=1e-12)


@each_kind
@pytest.mark.parametrize("dp, ep", LAYOUTS)
def test_not_finite_on_one_rank_is_not_finite_on_any_and_names_the_family(kind: str, dp: int, ep: int) -> None:
    for found in norms(dp, ep):
        for name, value in SPOILED[dp, ep]:
            total, parts, finite = found[kind][f"{name} {value}"]
            assert not finite and total == math.inf
            assert [f for f, part in parts.items() if not math.isfinite(part)] == [FAMILY[name]]


def test_averaging_the_norms_of_ranks_is_not_the_norm() -> None:
    """Sums of squares 100 and 20 on two ranks: the norm is sqrt(120), not the mean of sqrt(100) and sqrt(20) (DeepSpeed issue 8475)."""

    def work(rank: int) -> float:
        world = connect(Degrees(dp=2, ep=2), World(rank, 2)).axis("world")
        expert = torch.full((20,), math.sqrt(5.0)) if rank == 0 else torch.full((20,), 1.0)
        return gradient_norm([("expert", expert)], families=("expert",), world=world, device=CPU).total

    got = run_on_ranks(work, 2, timeout_s=60)
    averaged = (math.sqrt(100) + math.sqrt(20)) / 2
    assert got == pytest.approx([math.sqrt(120)] * 2, rel=1e-7)
    assert averaged == pytest.approx(7.236, abs=1e-3) and abs(got[0] / averaged - 1) > 0.3


def test_copies_are_counted_once() -> None:
    """A dense gradient with copies on four ranks, and experts with copies on two, count once in the norm."""

    def work(rank: int) -> list[float]:

        mesh = connect(Degrees(dp=4, ep=2), World(rank, 4))
        held = {
            "dense": (Layout((9,)), torch.full((9,), 2.0)),
            "expert": (Layout((4, 3), {0: "ep"}, EXPERT_VIEW, "expert", "{}"), torch.ones(2, 3) + rank % 2),
        }
        owned = [(name, grad) for name, (layout, grad) in held.items() if layout.is_owner(mesh)]
        n = gradient_norm(owned, families=("dense", "expert"), world=mesh.axis("world"), device=CPU)
        return [n.families["dense"] ** 2, n.families["expert"] ** 2]

    assert run_on_ranks(work, 4, timeout_s=60) == [pytest.approx([36.0, 6.0 + 24.0])] * 4


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.floats(-1e6, 1e6, width=32), max_size=5)), max_size=6))
def test_one_rank_needs_no_group_and_sums_squares(parts: list[tuple[str, list[float]]]) -> None:
    n = gradient_norm([(f, torch.tensor(v)) for f, v in parts], families=("a", "b"), world=Axis("world"), device=CPU)
    squares = {f: sum(x**2 for g, v in parts if g == f for x in v) for f in "ab"}
    assert n.families == pytest.approx({f: math.sqrt(s) for f, s in squares.items()}, rel=1e-5, abs=1e-20)
    assert n.total == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5, abs=1e-20) and n.finite


@given(st.floats(1e-9, 1e9), st.none() | st.floats(1e-6, 1e6))
def test_clipping_brings_the_norm_to_the_limit_and_never_raises_it(norm: float, limit: float | None) -> None:
    factor = clip_factor(norm, limit)
    assert 0 < factor <= 1 and norm * factor == pytest.approx(min(norm, limit or norm), rel=1e-9)
    assert (factor == 1) == (limit is None or norm <= limit)


def test_unscaling_divides_every_part() -> None:
    n = GradientNorm(10.0, {"dense": 6.0, "expert": 8.0}).divided_by(4.0)
    assert n == GradientNorm(2.5, {"dense": 1.5, "expert": 2.0})
    assert not GradientNorm(math.inf, {"dense": math.inf}).divided_by(65536.0).finite


def test_a_mesh_of_one_rank_owns_all() -> None:

    assert Layout((3,)).is_owner(Mesh.of(Degrees()))
