"""The runtime on several ranks gives the losses and gradients of one process, for any schedule."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from parallel.errors import BadInput
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.weight_gradient import PendingGradients, linear
from parallel.pipeline.check import check
from parallel.pipeline.links import Links
from parallel.pipeline.runtime import Recorder, Runtime, StageReplicas, forwards
from parallel.pipeline.schedule import Action, Op, Schedule, Span, Watcher
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.chimera import chimera
from parallel.process import process
from parallel.process.process import World
from tests.support.plain_simulation import any_order, find, sends
from tests.support.ranks import run_on_ranks

ROWS, WIDTH = 3, 5


def weights(stages: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(stages)
    return [nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in range(stages)]


def given(microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def stage(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(linear(x, weight)) + 0.5 * x


def twin(stages: int, microbatches: int) -> tuple[list[float], list[Tensor]]:
    held, losses = weights(stages), []
    for j in range(microbatches):
        x, target = given(j)
        for weight in held:
            x = stage(x, weight)
        loss = (x * target).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    return losses, [w.grad for w in held if w.grad is not None]


@dataclass
class Layers:
    """Work of a chain of small layers: one weight matrix a stage."""

    weights: list[nn.Parameter]
    losses: dict[int, float] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)  # weak references to all outputs of stages
    alive: list[int] = field(default_factory=list)  # for each backward pass, the number of outputs that exist at its start
    dtype = torch.float32
    device = torch.device("cpu")

    def shape(self, microbatch: int) -> tuple[int, ...]:
        return ROWS, WIDTH

    def forward(self, number: int, microbatch: int, x: Tensor | None) -> Tensor:
        first, target = given(microbatch)
        y = stage(first if x is None else x, self.weights[number])
        if number < len(self.weights) - 1:
            self.outputs.append(weakref.ref(y))
            return y
        loss = (y * target).sum()
        self.losses[microbatch] = loss.item()
        return loss

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        self.alive.append(sum(ref() is not None for ref in self.outputs))
        torch.autograd.backward(output, gradient)

    def deferred(self, pending: PendingGradients) -> None:
        pending.compute()

    def reading(self, number: int, version: int) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, number: int, version: int) -> None: ...


def start(schedule: Schedule, rank: int, mesh: Mesh | None = None) -> tuple[Runtime, Layers]:
    mesh = mesh or process.connect(Degrees(pp=schedule.num_ranks), World(rank, schedule.num_ranks))
    for homes in sorted(set(schedule.homes)):
        mesh.part("pp", homes, label="replicas")
    down = mesh.part("pp", tuple(range(schedule.num_ranks)), label="down")
    assert down is not None
    work = Layers(weights(schedule.num_stages))
    mine = {str(s): work.weights[s] for s in schedule.stages_of(rank)}
    layouts = {n: Layout((WIDTH, WIDTH), holders=homes if len(homes) > 1 else ()) for n in mine for homes in [schedule.homes[int(n)]]}
    replicas = StageReplicas(mine, layouts, mesh, of_stage={int(n): [n] for n in mine})
    return Runtime(schedule, mesh.axis("pp"), Links(mesh.axis("pp"), down), replicas), work


def run_all(schedules: list[Schedule]) -> list[list[tuple[dict[int, float], dict[int, Tensor]]]]:
    """Run the schedules on ranks. Return for each schedule and rank (micro-batch -> loss, stage -> gradient of its weight)."""

    def work(rank: int) -> list[tuple[dict[int, float], dict[int, Tensor]]]:
        found, mesh = [], process.connect(Degrees(pp=schedules[0].num_ranks), World(rank, schedules[0].num_ranks))
        for schedule in schedules:
            runtime, layers = start(schedule, rank, mesh)
            runtime.run(layers)
            assert not any(ref() is not None for ref in layers.outputs)
            found.append((layers.losses, {s: w.grad for s, w in enumerate(layers.weights) if w.grad is not None}))
        return found

    ranks = run_on_ranks(work, schedules[0].num_ranks, timeout_s=60)
    return [[found[i] for found in ranks] for i in range(len(schedules))]


def assert_same(schedule: Schedule, ranks: list[tuple[dict[int, float], dict[int, Tensor]]]) -> None:
    losses, gradients = twin(schedule.num_stages, schedule.microbatches)
    found = {j: loss for mine, _ in ranks for j, loss in mine.items()}
    assert [found[j] for j in range(schedule.microbatches)] == pytest.approx(losses, rel=1e-6)
    for number, gradient in enumerate(gradients):
        for rank in schedule.homes[number]:
            torch.testing.assert_close(ranks[rank][1][number], gradient, rtol=1e-5, atol=1e-5)
    for rank, (_, mine) in enumerate(ranks):
        assert set(mine) == set(schedule.stages_of(rank))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 7)])
def test_every_schedule_gives_the_gradients_of_one_process(ranks: int, microbatches: int) -> None:
    """`Layers.update` does nothing, so schedules with updates within a batch also have the gradients of one process."""
    schedules = []
    for name, kind in SCHEDULES.items():
        m = microbatches - microbatches % ranks if name == "chimera" else microbatches
        if name in ("chimera", "dualpipe") and ranks % 2:
            continue
        schedules.append(make_schedule(name, ranks=ranks, microbatches=m, batches=1 if kind.batches == 1 else 2))
    if ranks == 4:
        schedules.append(chimera(4, 8, pipelines=4))
    for schedule, found in zip(schedules, run_all(schedules), strict=True):
        assert_same(schedule, found)


def test_random_valid_schedules_give_the_gradients_of_one_process() -> None:
    """Ranks have several stages or none, and many messages arrive before they are needed."""
    schedules = [check(any_order(3, 4, seed)) for seed in range(25)]
    for schedule, found in zip(schedules, run_all(schedules), strict=True):
        assert_same(schedule, found)


def test_the_runtime_frees_a_stages_output_after_it_was_sent() -> None:
    """In GPipe no output exists when the first backward pass starts; only autograd graphs and inputs are kept."""

    def work(rank: int) -> list[int]:
        runtime, layers = start(make_schedule("gpipe", ranks=3, microbatches=5), rank)
        runtime.run(layers)
        return layers.alive

    assert run_on_ranks(work, 3, timeout_s=30) == [[0] * 5] * 3


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera", "zb_v"])
def test_runtime_forward_runs_any_number_of_micro_batches(name: str) -> None:
    """Fewer or more than the schedule trains. A micro-batch runs on the ranks that train the micro-batch of the same number modulo 4."""

    def work(rank: int) -> list[dict[int, float]]:
        runtime, layers = start(make_schedule(name, ranks=2, microbatches=4), rank)
        found = []
        for count in (1, 3, 9):
            layers.losses.clear()
            runtime.forward(layers, count)
            found.append(dict(layers.losses))
        assert all(w.grad is None for w in layers.weights)
        return found

    ranks = run_on_ranks(work, 2, timeout_s=30)
    schedule = make_schedule(name, ranks=2, microbatches=4)
    for i, count in enumerate((1, 3, 9)):
        losses = {j: loss for found in ranks for j, loss in found[i].items()}
        assert [losses[j] for j in range(count)] == pytest.approx(twin(schedule.num_stages, count)[0], rel=1e-6)
        for node, action in forwards(schedule, count).nodes():
            trained = find(schedule, Op.F, action.stage, action.microbatch % 4)
            assert trained is not None and node.rank == trained.rank


def test_bytes_sent_are_those_of_the_messages() -> None:
    def work(rank: int) -> tuple[int, int]:
        schedule = make_schedule("1f1b", ranks=3, microbatches=4)
        runtime, layers = start(schedule, rank)
        communicator = runtime.axis.communicator
        communicator.reset_counts()
        runtime.run(layers)
        messages = sum(len(sends(schedule, node)) for node, _ in schedule.nodes() if node.rank == rank)
        return communicator.counts()["pp", "send"].sent, messages * ROWS * WIDTH * 4

    for sent, expected in run_on_ranks(work, 3, timeout_s=30):
        assert sent == expected > 0


def test_ranks_with_different_schedules_all_raise_bad_input() -> None:
    """Before anything is sent, so that the same process group works afterwards."""

    def work(rank: int) -> str:
        schedules = [make_schedule(name, ranks=2, microbatches=4) for name in ("gpipe", "1f1b")]
        runtime, layers = start(schedules[rank], rank)
        with pytest.raises(BadInput) as refused:
            runtime.run(layers)
        runtime.run(layers, schedules[0])
        return str(refused.value)

    said = run_on_ranks(work, 2, timeout_s=30)
    assert "got schedule gpipe of 4 micro-batches [3, 5]" in said[0] and "got schedule 1f1b" in said[1]


def test_an_error_on_one_rank_does_not_hang_the_others() -> None:
    def work(rank: int) -> None:
        runtime, layers = start(make_schedule("1f1b", ranks=2, microbatches=4), rank)
        if rank == 1:
            layers.weights[1] = nn.Parameter(torch.zeros(WIDTH + 1, WIDTH))
        runtime.run(layers)

    with pytest.raises(AssertionError, match="rank 1 failed"):
        run_on_ranks(work, 2, timeout_s=30)


class _Noted(Watcher):
    """Watcher that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def before(self, action: Action) -> None:
        self.calls.append(f"before {action}")

    def after(self, at: int, took: Span) -> None:
        self.calls.append(f"after {at} {took.action}")


def test_watchers_are_called_before_and_after_every_action() -> None:
    def work(rank: int) -> list[str]:
        runtime, layers = start(make_schedule("1f1b", ranks=2, microbatches=3), rank)
        noted, recorder = _Noted(), Recorder()
        runtime.run(layers, watchers=[noted, recorder])
        order = runtime.schedule.orders[rank]
        assert noted.calls == ["begin", *(text for at, action in enumerate(order) for text in (f"before {action}", f"after {at} {action}"))]
        record = recorder.record
        assert [took.action for took in record] == list(order)
        assert all(a.end <= b.start for a, b in zip(record, record[1:], strict=False))
        return noted.calls

    for found in run_on_ranks(work, 2, timeout_s=30):
        assert len(found) == 1 + 2 * 7  # `begin`, and two calls for each of 3 F, 3 B and U
