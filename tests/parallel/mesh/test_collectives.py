"""Outputs and gradients of each collective equal a plain formula over the list of all ranks' tensors, differentiated by autograd."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.mesh.collectives import (
    StartedRows,
    all_gather,
    all_reduce,
    all_to_all,
    begun,
    join_copies,
    max_over,
    reduce_backward,
    reduce_scatter,
    shift,
    start_broadcast,
    start_gather,
    start_scatter_sum,
    start_sum,
    start_sum_to,
    sum_over,
)
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.mesh.regions import PREFIX
from parallel.mesh.traffic import Count
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World

# name -> degrees: axis dp over all ranks, or over ranks that are not neighbors
PLACES = {"2": Degrees(dp=2), "3": Degrees(dp=3), "4": Degrees(dp=4), "2 of 4": Degrees(dp=2, tp=2)}
SPLITS = {2: [[3, 0], [1, 2]], 3: [[0, 2, 1], [0, 0, 0], [3, 0, 4]], 4: [[0, 1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1], [5, 0, 0, 0]]}
NAMES = (
    "all_reduce",
    "reduce_backward",
    *(f"{name} {dim}" for name in ("all_gather", "reduce_scatter", "join_copies") for dim in (0, 1, -1)),
    "all_to_all",
    *(f"shift {steps}" for steps in (1, -1, 2, 0)),
)
ALIKE = ("all_reduce", "join_copies")  # results that are equal on all ranks


def ours(name: str, x: Tensor, axis: Axis) -> Tensor:
    kind, _, number = name.partition(" ")
    if kind == "all_to_all":
        splits = SPLITS[axis.size]
        return all_to_all(x, axis, send=splits[axis.index], receive=[row[axis.index] for row in splits])
    along = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "join_copies": join_copies}
    if kind in along:
        return along[kind](x, axis, dim=int(number))
    if kind == "shift":
        return shift(x, axis, steps=int(number))
    return {"all_reduce": all_reduce, "reduce_backward": reduce_backward}[kind](x, axis)


def plain(name: str, xs: list[Tensor]) -> list[Tensor]:
    """Return every rank's expected output of the collective `name`, given every rank's input."""
    kind, _, number = name.partition(" ")
    n = len(xs)
    if kind == "all_reduce":
        return [torch.stack(xs).sum(0)] * n
    if kind == "reduce_scatter":
        return list(torch.stack(xs).sum(0).chunk(n, int(number)))
    if kind in ("all_gather", "join_copies"):
        return [torch.cat(xs, int(number)) for _ in range(n)]
    if kind == "all_to_all":
        return [torch.cat([x.split(row)[r] for x, row in zip(xs, SPLITS[n], strict=True)]) for r in range(n)]
    return [xs[(r - int(number)) % n] for r in range(n)] if kind == "shift" else xs


def given(name: str, index: int, size: int) -> Tensor:
    """Return a rank's input of the collective `name`. size: number of ranks."""
    shape = (sum(SPLITS[size][index]), 5) if name == "all_to_all" else (2 * size, size, 3 * size)
    same = name == "reduce_backward"  # one tensor that is equal on all ranks
    return torch.randn(shape, generator=torch.Generator().manual_seed(0 if same else index))


def wanted(name: str, index: int, y: Tensor) -> Tensor:
    """Return the weights of a rank's output in its loss: sum(y * weights). They are equal on all ranks if the outputs are."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(100 if name.startswith(ALIKE) else 100 + index))


def twin(name: str, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's expected (output, gradient of the input), computed in one process."""
    xs = [given(name, r, size).requires_grad_() for r in range(size)]
    if name == "reduce_backward":
        xs = [xs[0]] * size
    ys = plain(name, xs)
    losses = [(y * wanted(name, r, y)).sum() for r, y in enumerate(ys)]
    (losses[0] if name.startswith(ALIKE) else torch.stack(losses).sum()).backward()
    return [(y.detach(), torch.zeros_like(x) if x.grad is None else x.grad) for x, y in zip(xs, ys, strict=True)]


def connected(place: str, rank: int) -> Axis:
    degrees = PLACES[place]
    return process.connect(degrees, World(rank, degrees.world)).axis("dp")


@cache
def results(place: str) -> list[dict[str, Any]]:
    """Return for each rank: name of a collective -> its output, gradient and counts."""

    def work(rank: int) -> dict[str, Any]:
        axis = connected(place, rank)
        found: dict[str, Any] = {}
        for name in NAMES:
            x = given(name, axis.index, axis.size).requires_grad_()
            before = x.detach().clone()
            axis.communicator.reset_counts()
            y = ours(name, x, axis)
            (y * wanted(name, axis.index, y)).sum().backward()
            counts = axis.communicator.counts()
            found[name] = {
                "y": y.detach(), "grad": x.grad, "unchanged": torch.equal(x, before),
                "counts": {key: [c.calls, c.bytes] for (_, key), c in counts.items()}, "axes": [a for a, _ in counts],
            }  # fmt: skip
            # inputs and gradients may have different strides on different ranks
            z = given(name, axis.index, axis.size)
            z = (z.movedim(0, -1).contiguous().movedim(-1, 0) if axis.index else z).requires_grad_()
            out = ours(name, z, axis)
            out.sum().backward()
            found[name] |= {"y_strided": out.detach(), "grad_of_sum": z.grad}
        return found

    return run_on_ranks(work, PLACES[place].world, timeout_s=60)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", PLACES)
def test_forward_and_backward_equal_the_twin(place: str, name: str) -> None:
    degrees = PLACES[place]
    expected = twin(name, degrees.dp)
    for rank, found in enumerate(results(place)):
        y, grad = expected[degrees.coordinates(rank)["dp"]]
        torch.testing.assert_close(found[name]["y"], y, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[name]["grad"], grad, rtol=1e-6, atol=1e-6)
        assert found[name]["unchanged"]


def test_all_gather_sums_16_bit_gradients_in_fp32() -> None:
    """Of the gradients 1, 1/512, 1/512 and 1/512 of four ranks, the sum in bf16 is 1 + 1/128 if it is rounded once, and 1 if each addition
    to 1 is rounded. Each rank in turn has the gradient 1, because the order of additions differs between shards."""

    def work(rank: int) -> list[float]:
        axis = connected("4", rank)
        x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        slope = torch.where(torch.arange(16) % 4 == rank, 1.0, 2.0**-9)
        (all_gather(x, axis) * slope).sum().backward()
        assert x.grad is not None
        return [float(g) for g in x.grad]

    assert run_on_ranks(work, 4, timeout_s=60) == [[1 + 2.0**-7] * 4] * 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", PLACES)
def test_strides_do_not_matter(place: str, name: str) -> None:
    for found in results(place):
        torch.testing.assert_close(found[name]["y_strided"], found[name]["y"], rtol=1e-6, atol=1e-6)
        kind, n = name.split()[0], PLACES[place].dp
        # the gradient of the sum of all outputs: the number of outputs that contain an input element, 1 or n
        times = n if kind in ("reduce_backward", "all_gather") else 1
        assert torch.equal(found[name]["grad_of_sum"], torch.full_like(found[name]["grad_of_sum"], times))


@pytest.mark.parametrize("place", PLACES)
def test_bytes_are_what_a_rank_hands_in(place: str) -> None:
    n = PLACES[place].dp
    whole = 2 * n * n * 3 * n * 4
    for rank, found in enumerate(results(place)):
        index = PLACES[place].coordinates(rank)["dp"]
        rows = [sum(SPLITS[n][index]), sum(row[index] for row in SPLITS[n])]  # rows sent forward, and gradient rows sent backward
        theory = {
            "all_reduce": {"all_reduce": [1, whole]},
            "reduce_backward": {"all_reduce": [1, whole]},
            "all_to_all": {"all_to_all": [2, sum(rows) * 5 * 4]},
        }
        for dim in (0, 1, -1):
            theory[f"all_gather {dim}"] = {"all_gather": [1, whole], "reduce_scatter": [1, n * whole]}
            theory[f"join_copies {dim}"] = {"all_gather": [1, whole]}
            theory[f"reduce_scatter {dim}"] = {"reduce_scatter": [1, whole], "all_gather": [1, whole // n]}
        for steps in (1, -1, 2, 0):
            theory[f"shift {steps}"] = {"shift": [2, 2 * whole]} if steps % n else {}
        assert {name: found[name]["counts"] for name in NAMES} == theory
        assert {axis for name in NAMES for axis in found[name]["axes"]} == {"dp"}


@pytest.mark.parametrize("name", [n for n in NAMES if n != "all_to_all"])
def test_an_axis_of_one_does_nothing(name: str) -> None:
    x, axis = torch.randn(4, 3, 2, requires_grad=True), Axis("tp")
    assert ours(name, x, axis) is x and axis.communicator.counts() == {}


def test_an_axis_of_one_sends_no_rows_and_sums_nothing() -> None:
    x, mesh = torch.randn(4, 3), Mesh.of(Degrees())
    assert all_to_all(x, mesh.axis("ep"), send=[4], receive=[4]) is x
    assert sum_over(x, mesh.axis("dp")) is x and max_over(x, mesh.axis("dp")) is x and mesh.communicator.counts() == {}


def test_plain_sum_and_maximum_are_in_place() -> None:
    def work(rank: int) -> list[Any]:
        axis = connected("3", rank)
        x, y = torch.tensor([rank, 10 - rank]), torch.tensor([float(rank), -rank])
        return [sum_over(x, axis) is x, max_over(y, axis) is y, x, y]

    for summed, greatest, x, y in run_on_ranks(work, 3, timeout_s=60):
        assert summed and greatest and x.tolist() == [3, 27] and y.tolist() == [2.0, 0.0]


def test_counts_add_up_by_axis_and_start_anew() -> None:
    mesh = Mesh.of(Degrees(dp=2, ep=2))
    for axis, numel in (("dp", 3), ("dp", 5), ("ep", 7)):
        mesh.axis(axis, label="layers.1").count("all_reduce", torch.zeros(numel, dtype=torch.bfloat16))
    assert mesh.communicator.counts() == {("dp", "all_reduce"): Count(2, 16, 16), ("ep", "all_reduce"): Count(1, 14, 14)}
    mesh.communicator.reset_counts()
    assert mesh.communicator.counts() == {}


def test_two_meshes_of_one_process_count_apart() -> None:
    """Parts of an axis and labelled axes are counted by their own mesh. `everyone`, an axis without a mesh, is counted by neither."""

    def work(rank: int) -> list[Any]:
        world = World(rank, 2)
        first, second = (process.connect(Degrees(pp=2), world) for _ in range(2))
        down = first.part("pp", (0, 1), label="down")
        assert down is not None
        x = torch.ones(6)
        for axis in (first.axis("pp"), down, first.axis("world", label="layers.2"), second.axis("pp"), process.everyone(world)):
            sum_over(x, axis)
        found = [{f"{axis} {name}": c.calls for (axis, name), c in mesh.communicator.counts().items()} for mesh in (first, second)]
        first.communicator.reset_counts()
        return [*found, len(first.communicator.counts()), len(second.communicator.counts())]

    for found in run_on_ranks(work, 2, timeout_s=60):
        assert found == [{"pp all_reduce": 2, "world all_reduce": 1}, {"pp all_reduce": 1}, 0, 1]


def test_sent_is_what_must_leave_the_rank() -> None:
    """`sent` of each collective of 12 fp32 numbers on 4 ranks equals the ring formulas; all_to_all does not count its own rank's rows."""
    axis, handed = Axis("ep", (0, 2, 4, 6), index=1), torch.zeros(6, 2)
    theory = {"counts": 36, "reduce_scatter": 36, "all_gather": 144, "all_reduce": 72, "shift": 48, "all_to_all": 40}
    counts = axis.communicator.counts
    for name in theory:
        splits = {"send": [3, 1, 0, 2], "receive": [0, 1, 0, 9]} if name == "all_to_all" else {}
        axis.count(name, handed, **splits)
    assert {name: c.sent for (_, name), c in counts().items()} == theory
    assert {c.bytes for c in counts().values()} == {48}
    axis.communicator.reset_counts()
    axis.count("all_to_all", torch.zeros(0, 2), send=[0] * 4, receive=[5] * 4)
    assert counts() == {("ep", "all_to_all"): Count(1, 0, 0)}


def test_a_profile_names_the_collective_that_is_waited_for() -> None:
    def work(rank: int) -> list[str]:
        axis, x = process.connect(Degrees(ep=2, dp=2), World(rank, 2)).axis("ep"), torch.ones(2, 3)
        kinds = [start_gather, start_scatter_sum, start_sum, partial(start_broadcast, root=1), partial(start_sum_to, root=0)]
        started = [*(start(x.clone(), axis) for start in kinds), begun(x, StartedRows(axis, [1, 1], [1, 1]))]
        with torch.profiler.profile() as profiler:
            for one in started:
                one.wait()
        return [event.name.removeprefix(PREFIX) for event in profiler.events() if event.name.startswith(PREFIX)]

    names = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all")
    assert run_on_ranks(work, 2, timeout_s=60) == [[f"{name} over ep" for name in names]] * 2
