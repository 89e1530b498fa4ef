"""Sums of gradients during the backward pass: they begin early, in the same order on all ranks, and give the sums of a late reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.verify.cases import Case
from parallel.data import buckets, zero
from parallel.data.buckets import Buckets
from parallel.data.ddp import DDP
from parallel.data.zero import Zero
from parallel.mesh import gradients
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import DENSE, EXPERT, Axis, Degrees, Mesh
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Tiny, start


@dataclass
class Clock:
    """Records the sums of one step. started: for each sum, (its first parameter, whether a backward pass ran, number of gradients that
    the pass had completed). most: the largest number of sums in flight."""

    started: list[tuple[str, bool, int]] = field(default_factory=list)
    most: int = 0
    running: bool = False  # a backward pass runs
    complete: int = 0  # gradients that this backward pass has completed


@contextmanager
def observed(tiny: Tiny, *, elements: int) -> Iterator[Clock]:
    """Return a context with buckets of at most `elements` elements in which no sum ends before the step waits for it."""
    clock, engine, real = Clock(), tiny.engine, buckets.start_sum
    assert isinstance(engine, DDP | Zero)
    backward = engine.backward

    def timed(loss: Tensor, *, last: bool) -> None:
        clock.running, clock.complete = True, 0
        with mock.patch.object(engine, "reduce"):  # so that it follows the end of the backward pass
            backward(loss, last=last)
        clock.running = False
        if last:
            engine.reduce()

    def started(grads: list[Tensor], axis: Axis, *, first: str, **root: int) -> Any:
        one = real(grads, axis, first=first, **root)
        clock.started.append((first, clock.running, clock.complete))
        clock.most = max(clock.most, len(engine.sums.started) + 1)
        return replace(one, work=mock.Mock(wait=one.work.wait, is_completed=lambda: False))

    def count(_: Tensor) -> None:
        clock.complete += 1

    held = [
        p.register_post_accumulate_grad_hook(count) for name, p in engine.parameters.items() if p.requires_grad and name in engine.apart
    ]
    with (
        mock.patch.object(gradients, "_BUCKET_ELEMENTS", elements),
        mock.patch.object(buckets, "start_sum", started),
        mock.patch.object(zero, "start_sum", started),
        mock.patch.object(engine, "backward", timed),
    ):
        yield clock
    for handle in held:
        handle.remove()


EDP = Case("glam", "ddp", 4, 2, 1, "fp32", experts=8, layers=4)  # each expert on two of four ranks
VARIANTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "recompute, three micro-batches": (replace(EDP, microbatches=3), {"recompute": {"kind": "full"}}),
    "fp16, experts without tokens": (replace(EDP, precision="fp16", experts=32), {}),
    "frozen": (EDP, {"lora": {"rank": 2, "targets": ("experts",)}}),
}


def compared(rank: int, case: Case, sections: dict[str, Any]) -> list[Any]:
    """For two sizes of buckets, return (`started` and `most` of the clock, trained parameters in the engine's own buckets,
    whether their sums are right)."""
    tiny, found = start(case, rank, **sections), []
    engine = tiny.engine
    assert isinstance(engine, DDP | Zero)
    trained = [name for name in engine.apart if engine.parameters[name].requires_grad]
    with mock.patch.object(engine, "reduce"), mock.patch.object(engine.sums, "expect"):  # nothing is summed
        tiny.accumulate(0)
    wanted = {name: grad.clone() for name in trained if (grad := engine.sums.parameters[name].grad) is not None}
    assert [*wanted] == trained
    for name, grad in wanted.items():  # the plain twin: one sum for each gradient, after the backward pass
        dist.all_reduce(grad, group=tiny.mesh.axis(*engine.layouts[name].summed_over()).group)
    for elements in (1, 2 * max(grad.numel() for grad in wanted.values())):
        engine.drop_gradients()
        with observed(tiny, elements=elements) as clock:
            tiny.accumulate(0)
        found.append((clock.started, clock.most, trained, all(torch.equal(engine.gradient(name), grad) for name, grad in wanted.items())))
    return found


def _all_variants(rank: int) -> dict[str, list[Any]]:
    return {name: compared(rank, *variant) for name, variant in VARIANTS.items()}


def test_sums_begin_before_the_backward_pass_ends_and_several_are_in_flight() -> None:
    of_ranks = run_on_ranks(_all_variants, 4, timeout_s=90)
    for name in VARIANTS:
        assert_early([found[name] for found in of_ranks], name)


def assert_early(of_ranks: list[list[Any]], name: str) -> None:
    """Check the results of `compared` on all ranks: sums are right, begin during the backward pass in one order, and several are in
    flight."""
    for started, most, trained, equal in (size for found in of_ranks for size in found):
        order = list(dict.fromkeys(first for first, _, _ in started))  # ZeRO-1 has a sum for each owner of a bucket's elements
        assert equal, name
        assert all(running for _, running, _ in started) and started[0][2] < len(trained) // 2, name
        assert 2 <= most <= buckets._MOST_STARTED, name
        assert order == [p for p in reversed(trained) if p in order], name
    one_each, grouped = of_ranks[0]
    assert list(dict.fromkeys(first for first, _, _ in one_each[0])) == one_each[2][::-1], name  # each once, in the last micro-batch
    assert len(grouped[0]) < len(one_each[0]) and all(found == of_ranks[0] for found in of_ranks), name


DONE: Any = SimpleNamespace(work=SimpleNamespace(is_completed=lambda: True), finish=lambda: None)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh.of(Degrees(dp=2), 0)


def _of(parameters: dict[str, nn.Parameter], mesh: Mesh) -> Buckets:
    return Buckets(parameters, {name: Layout(tuple(p.shape)) for name, p in parameters.items()}, mesh)


def test_buckets_start_in_one_order_whatever_gradient_is_complete_first(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket starts once its gradients and those of all earlier buckets are complete, for each of the 120 orders of five gradients."""
    started: list[str] = []
    monkeypatch.setattr(gradients, "_BUCKET_ELEMENTS", 5)
    monkeypatch.setattr(buckets, "start_sum", lambda grads, axis, first: started.append(first) or DONE)
    parameters = {name: nn.Parameter(torch.ones(size)) for name, size in zip("abcde", (2, 3, 4, 1, 6), strict=True)}
    together, sums = [{"e"}, {"d", "c"}, {"b", "a"}], _of(parameters, mesh)
    for order in permutations(parameters):
        sums.expect(parameters)
        for n, name in enumerate(order, 1):
            parameters[name].sum().backward()
            begun = next((i for i, bucket in enumerate(together) if not bucket <= set(order[:n])), len(together))
            assert started == ["e", "d", "b"][:begun]
        sums.start(parameters)
        sums.finish()
        started.clear()


def test_a_gradient_that_changes_after_its_sum_has_started_is_an_error(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_BUCKET_ELEMENTS", 1)
    monkeypatch.setattr(buckets, "start_sum", lambda *_, **__: DONE)
    parameters = {name: nn.Parameter(torch.ones(1)) for name in "ab"}
    sums = _of(parameters, mesh)
    sums.expect(parameters)
    parameters["b"].sum().backward()
    with pytest.raises(AssertionError, match="the gradient of b changed"):
        parameters["b"].sum().backward()


def test_sums_of_another_axis_start_as_soon_as_their_gradients_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts between dense weights, whose gradients are summed over other ranks, do not wait for the first dense weight's bucket."""
    started: list[str] = []
    monkeypatch.setattr(gradients, "_BUCKET_ELEMENTS", 2)
    monkeypatch.setattr(buckets, "start_sum", lambda grads, axis, first: started.append(first) or DONE)
    names = ["embedding", "dense0", "expert0", "dense1", "expert1"]
    parameters = {name: nn.Parameter(torch.ones(1)) for name in names}
    layouts = {name: Layout((1,), view=EXPERT if "expert" in name else DENSE) for name in names}
    sums = Buckets(parameters, layouts, Mesh.of(Degrees(dp=4, ep=2), 0))
    sums.expect(names)
    begun = []
    for name in reversed(names):
        parameters[name].sum().backward()
        begun.append(list(started))
    assert begun == [[], [], ["expert1"], ["expert1", "dense1"], ["expert1", "dense1", "embedding"]]
