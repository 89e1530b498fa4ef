"""Alpa's integer program finds the best of all choices of strategies, also with a memory limit, and its costs equal closed forms."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import inf, prod

import pytest

from moe.plan.operators.links import Link, Mesh
from moe.plan.search.alpa import intra_op
from moe.plan.search.strategies import LATER, WHOLE, Settings, candidates, change, cost_of, read_together
from parallel.annotations.graph import Dim, Graph, Operator
from parallel.errors import BadInput
from tests.support.graphs import chain

LINKS = {"1x4": (1, 4), "2x2": (2, 2), "2x4": (2, 4)}
ITEM, GRAD = 2, 2


def mesh(name: str, *, memory_bytes: float = inf) -> Mesh:
    """Return a mesh whose second axis is four times as fast as the first, with products too slow to repeat on several devices."""
    return Mesh(LINKS[name], (Link(3e-6, 4e-9), Link(2e-6, 1e-9)), flops=1e9, memory_bytes=memory_bytes)


def attention(blocks: int, *, b: int, length: int, heads: int, d: int) -> Graph:
    dims = {"b": Dim("batch", b), "l": Dim("length", length), "s": Dim("places", length), "d": Dim("width", d)}
    dims |= {"k": Dim("heads", heads), "c": Dim("channels", d // heads)}
    ops, x, parameters = [], "x", {}
    for i in range(blocks):
        for part in "qkv":
            parameters[f"{part}{i}"] = "dkc"
            ops.append(Operator(f"{i}.{part}", "product", "bld,dkc->blkc", (x, f"{part}{i}"), 2.0 * b * length * d * d))
        inputs = (f"{i}.q", f"{i}.k", f"{i}.v")
        ops.append(Operator(f"{i}.core", "attention", "blkc,bskc,bskc->blkc", inputs, 2.0 * b * length**2 * d, whole="lsc"))
        parameters[f"o{i}"] = "kcd"
        x = f"{i}.out"
        ops.append(Operator(x, "product", "blkc,kcd->bld", (f"{i}.core", f"o{i}"), 2.0 * b * length * d * d))
    return Graph(dims, {"x": "bld"}, parameters, tuple(ops), ITEM)


def experts(*, b: int, e: int, u: int, d: int, m: int) -> Graph:
    """Return an MoE layer as a graph: dispatch of `u` rows of each of `b` sequences to each of `e` experts, experts, combine."""
    dims = {"b": Dim("batch", b), "e": Dim("experts", e), "u": Dim("slots", u), "d": Dim("width", d), "m": Dim("expert_hidden", m)}
    one = 2.0 * b * e * u * d * m
    ops = (
        Operator("dispatch", "pointwise", "ebud->ebud", ("x",), whole="eud"),
        Operator("w1.rows", "product", "ebud,edm->ebum", ("dispatch", "w1"), one),
        Operator("w2.rows", "product", "ebum,emd->ebud", ("w1.rows", "w2"), one),
        Operator("combine", "pointwise", "ebud->ebud", ("w2.rows",), whole="eud"),
    )
    return Graph(dims, {"x": "ebud"}, {"w1": "edm", "w2": "emd"}, ops, ITEM)


# --- closed forms -----------------------------------------------------------------------------------------------------------------


class Forms:
    """Closed forms of the seconds of work and collectives on a mesh."""

    def __init__(self, name: str) -> None:
        self.sizes, self.alpha, self.beta = LINKS[name], (3e-6, 2e-6), (4e-9, 1e-9)

    def ring(self, size: float, axis: int, turns: int) -> float:
        n = self.sizes[axis]
        return 0.0 if n == 1 else self.alpha[axis] + turns * (n - 1) / n * size * self.beta[axis]

    def sum(self, size: float, axis: int) -> float:
        return self.ring(size, axis, 2)

    def sum_all(self, size: float) -> float:
        """Seconds of an all-reduce over both axes: reduce-scatter over the near one, all-reduce over the far one, all-gather."""
        far, near = self.sizes
        if far == 1:
            return self.sum(size, 1)
        return 2 * self.ring(size, 1, 1) + self.sum(size / near, 0)

    def work(self, flops: float) -> float:
        return 3 * flops / prod(self.sizes) / 1e9


MESHES = pytest.mark.parametrize("name", LINKS)


@MESHES
@pytest.mark.parametrize("layers", [2, 6])
def test_chain_with_a_large_batch_is_data_parallel(name: str, layers: int) -> None:
    graph, by = chain(layers, b=4096, d=16, f=32), Forms(name)
    assert intra_op(graph, mesh(name)).cost.seconds == pytest.approx(by.work(graph.flops) + layers * by.sum_all(16 * 32 * GRAD), rel=1e-9)


@pytest.mark.parametrize("layers", [2, 4, 6])
def test_chain_with_large_matrices_is_megatrons(layers: int) -> None:
    """Pairs of matrices are divided by columns, then by rows. This needs layers - 1 all-reduces in both passes together."""
    graph, by = chain(layers, b=3, d=1024, f=4096), Forms("1x4")
    expected = by.work(graph.flops) + (layers - 1) * by.sum(3 * 1024 * ITEM, 1)
    assert intra_op(graph, mesh("1x4")).cost.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["2x2", "2x4"])
@pytest.mark.parametrize("layers", [2, 6])
def test_chain_on_two_axes_is_both(name: str, layers: int) -> None:
    """Data parallelism over the far axis with tensor parallelism over the near axis, or data parallelism over both if that is faster."""
    b, d, f = 256, 128, 256
    graph, by, settings = chain(layers, b=b, d=d, f=f), Forms(name), Settings(microbatches=16)
    n0, n1 = LINKS[name]
    both = (layers - 1) * by.sum(b / n0 * d * ITEM, 1) + layers * by.sum(d * f / n1 * GRAD, 0) / 16
    data = layers * by.sum_all(d * f * GRAD) / 16
    got = intra_op(graph, mesh(name), settings).cost.seconds - by.work(graph.flops)
    assert got == pytest.approx(min(both, data), rel=1e-6)


@MESHES
@pytest.mark.parametrize("kind", ["data", "heads"])
def test_attention(name: str, kind: str) -> None:
    b, length, heads, d = (64, 32, 8, 16) if kind == "data" else (1, 8, 8, 512)
    graph, by = attention(2, b=b, length=length, heads=heads, d=d), Forms(name)
    size, (far, near) = b * length * d * ITEM, LINKS[name]
    expected = 8 * by.sum_all(d * d * GRAD)
    if kind == "heads":
        # Heads over all devices: an all-reduce of out in both blocks, and one of the gradient of the second block's input. The alternative
        # gathers heads over the near axis before `out`, whose columns are then divided, so that the all-reduces are smaller.
        gathered = 3 * by.sum(size / near, 0) + 4 * by.ring(size / far, 1, 1) + 2 * by.ring(size, 1, 1)
        expected = min(3 * by.sum_all(size), gathered)
    assert intra_op(graph, mesh(name)).cost.seconds == pytest.approx(by.work(graph.flops) + expected, rel=1e-6)


@MESHES
@pytest.mark.parametrize("kind", ["data", "experts"])
def test_experts(name: str, kind: str) -> None:
    """For large experts, expert parallelism: four all-to-alls, for dispatch and combine forward and backward. Else data parallelism."""
    b, e, u, d, m = (64, 8, 16, 8, 8) if kind == "data" else (8, 8, 2, 64, 512)
    graph, by = experts(b=b, e=e, u=u, d=d, m=m), Forms(name)
    if kind == "data":
        expected = 2 * by.sum_all(e * d * m * GRAD)
    else:
        held = b * e * u * d * ITEM / prod(LINKS[name])
        expected = 4 * (by.ring(held, 0, 1) + by.ring(held, 1, 1))
    lies = (1 if LINKS[name][0] > 1 else WHOLE, 1)  # input and output are divided by sequences
    got = intra_op(graph, mesh(name), fixed={"dispatch": lies, "combine": lies})
    assert got.cost.seconds == pytest.approx(by.work(graph.flops) + expected, rel=1e-6)


# --- compared with every choice ---------------------------------------------------------------------------------------------------


def best_of_all(graph: Graph, on: Mesh, settings: Settings, memory_bytes: float = inf) -> float:
    joined = read_together(graph)
    options, best = candidates(joined, on, settings), inf
    for some in product(*options.values()):
        cost = cost_of(joined, on, dict(zip(options, some, strict=True)))
        if cost.state_bytes + cost.output_bytes <= memory_bytes:
            best = min(best, cost.seconds)
    return best


@pytest.mark.parametrize("name", ["1x4", "2x2"])
@pytest.mark.parametrize("sizes", [(8, 12, 20), (64, 8, 4), (4, 64, 32)])
def test_equals_the_best_of_all_choices(name: str, sizes: tuple[int, int, int]) -> None:
    b, d, f = sizes
    graph = chain(3 if name == "1x4" else 2, b=b, d=d, f=f)
    assert intra_op(graph, mesh(name)).cost.seconds == pytest.approx(best_of_all(graph, mesh(name), Settings()), rel=1e-9)


def test_memory_limits_the_choice() -> None:
    """For each memory limit, `intra_op` finds the fastest choice below it. Less memory takes more time, and too little is refused."""
    graph, on, settings = chain(3, b=256, d=16, f=32), mesh("1x4"), Settings(sharded=(0, 1, 3))
    free = intra_op(graph, on, settings).cost
    whole = free.state_bytes + free.output_bytes
    times = []
    for share in (1.0, 0.8, 0.6, 0.5):
        got = intra_op(graph, on, settings, memory_bytes=whole * share).cost
        assert got.state_bytes + got.output_bytes <= whole * share * (1 + 1e-9)
        times.append(got.seconds)
        assert got.seconds == pytest.approx(best_of_all(graph, on, settings, whole * share), rel=1e-9)
    assert times == sorted(times) and times[-1] > times[0]
    with pytest.raises(BadInput, match="memory: got .* fix: give each device more memory"):
        intra_op(graph, on, settings, memory_bytes=whole * 0.05)


def test_the_least_memory_counts_a_layer_as_often_as_it_is_repeated() -> None:
    """A layer of weight 4 needs four times the memory of one layer, in the limit and in the error's advice."""
    graph, gib = chain(2, b=2**16, d=2**14, f=2**16), 2.0**30

    def least(weight: float) -> float:
        with pytest.raises(BadInput, match="memory: got ") as refused:
            intra_op(graph, mesh("1x4"), memory_bytes=gib, weight={0: weight})
        said = re.search(r"at least ([\d.]+) GiB", str(refused.value))
        assert said
        return float(said[1])

    assert least(4.0) == pytest.approx(4 * least(1.0), abs=0.25) and least(1.0) > 1


def test_a_recomputed_layer_pays_its_forward_pass_twice_and_keeps_its_last_output() -> None:
    """Compared with every choice, for four memory limits. The layer has the middle two of four products."""
    plain, on, settings = chain(4, b=256, d=16, f=32), mesh("1x4"), Settings(sharded=(0, 1))
    graph = replace(plain, operators=tuple(replace(op, layer=(i + 1) // 2) for i, op in enumerate(plain.operators)))
    paid, kept = {"layer1": 4 / 3, "layer2": 4 / 3}, ("layer0", "layer2", "layer3")
    costs = []
    for some in product(*candidates(graph, on, settings).values()):
        chosen = dict(zip(graph.named, some, strict=True))
        seconds = sum(s.seconds * paid.get(name, 1.0) for name, s in chosen.items())
        for x, name, _ in graph.edges:
            size = prod(graph.dims[a].size for a in graph.letters(x)) * ITEM
            seconds += change(size, on, chosen[x].gives, chosen[name].reads[0]) * paid.get(name, 1.0)
        costs.append((sum(s.state_bytes for s in some) + 3 * sum(chosen[name].output_bytes for name in kept), seconds))
    most = min(costs, key=lambda cost: cost[1])[0]
    for limit in (inf, 0.9 * most, 0.7 * most, 1.01 * min(costs)[0]):
        got = intra_op(graph, on, settings, memory_bytes=limit, in_flight=3, again={1: "layer2"}).chosen
        held = sum(s.state_bytes for s in got.values()) + 3 * sum(got[name].output_bytes for name in kept)
        best = min(seconds for held, seconds in costs if held <= limit)
        mine = sum(s.seconds * paid.get(name, 1.0) for name, s in got.items())
        mine += sum(
            change(prod(graph.dims[a].size for a in graph.letters(x)) * ITEM, on, got[x].gives, got[name].reads[0]) * paid.get(name, 1.0)
            for x, name, _ in graph.edges
        )
        assert held <= limit * (1 + 1e-9) and mine == pytest.approx(best, rel=1e-6)
    with pytest.raises(BadInput, match="needed enough for at least one choice"):
        intra_op(graph, on, settings, memory_bytes=1.01 * min(costs)[0], in_flight=3)


def test_a_relaxed_and_rounded_solution_is_nearly_optimal() -> None:
    """Within 5 % of the exact solution and below the memory limit. The relaxation mixes strategies; rounding takes one per operator."""
    graph, on, settings = chain(6, b=256, d=16, f=32), mesh("1x4"), Settings(sharded=(0, 1, 3))
    free = intra_op(graph, on, settings).cost
    limit = 0.7 * (free.state_bytes + free.output_bytes)
    exact, rounded = (intra_op(graph, on, settings, memory_bytes=limit, large=n) for n in (10**9, 0))
    assert (exact.solved, rounded.solved) == ("exactly", "relaxed and rounded")
    assert rounded.cost.seconds == pytest.approx(exact.cost.seconds, rel=0.05)
    assert rounded.cost.state_bytes + rounded.cost.output_bytes <= limit


def test_seconds_of_changing_a_sharding() -> None:
    """`change` counts both passes: slicing a whole tensor costs the all-gather of its gradient; partial sums cost an all-reduce."""
    on, size = mesh("1x4"), 4096.0
    by = Forms("1x4")
    got = {
        (a, b): change(size, on, (WHOLE, a), (WHOLE, b))
        for a, b in [(WHOLE, 0), (0, WHOLE), (0, LATER), (WHOLE, LATER), (0, 1), (LATER, 0)]
    }
    gather, total = by.ring(size, 1, 1), by.sum(size, 1)
    exchange = 2 * by.ring(size / 4, 1, 1)
    assert got == pytest.approx(
        {(WHOLE, 0): gather, (0, WHOLE): gather, (0, LATER): 2 * gather, (WHOLE, LATER): total, (0, 1): exchange, (LATER, 0): inf}
    )
