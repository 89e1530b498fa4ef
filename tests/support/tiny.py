"""The model, batches and step of `moe verify` on running ranks, for tests of engines, norms, precision and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it with the first optimizer, in 1.5 s; imported once, before ranks are forked
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.checks.together import check_run
from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.parallelize.build import build
from moe.parallelize.sequence import shard_of
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import Executor, start_executor
from moe.train.parts.numbers import Numbers
from moe.train.start import state
from moe.verify.cases import Case
from moe.verify.plain.batches import batch
from parallel.data.engine import Engine
from parallel.mesh.mesh import Mesh
from parallel.numerics.clip import GradientNorm
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.process import World

State = dict[str, dict[str, Tensor]]
CPU = torch.device("cpu")


@dataclass
class Tiny:
    run: Run
    mesh: Mesh
    model: Transformer
    executor: Executor
    scale: LossScale
    numbers: Numbers | None = None  # returned by the last accumulate

    @property
    def engine(self) -> Engine:
        return self.executor.engine

    @property
    def shard(self) -> TokenShard:
        """This rank's shard of the batch."""
        return shard_of(self.run, self.mesh, self.run.train.global_batch)

    def accumulate(self, step: int, *, scale: float | None = None) -> Numbers:
        """Run forward and backward for one step's batch; gradients accumulate. Return its loss and counts."""
        self.numbers = accumulate(
            self.executor,
            self.shard.of_batch(batch(step, length=self.run.model.read_length, size=self.run.train.global_batch)),
            shard=self.shard,
            microbatches=self.run.pipeline.microbatches,
            seed=self.run.train.seed,
            step=step,
            loss_scale=self.scale.value if scale is None else scale,
        )
        return self.numbers

    def finish(self) -> GradientNorm:
        o = self.run.optimizer
        assert self.numbers is not None
        return finish(
            self.engine, self.numbers, world=self.mesh.axis("world"), scale=self.scale, lr=o.lr, clip_norm=o.clip_norm, device=CPU
        )

    def step(self, step: int) -> GradientNorm:
        self.accumulate(step)
        return self.finish()

    def state(self) -> State:
        """Return copies of every parameter's weight and optimizer moments, as this rank holds them."""
        return {name: {kind: t.detach().clone() for kind, t in self.engine.state(name).items()} for name in self.engine.layouts}

    def adam_steps(self) -> set[float]:
        """Return the step counters of Adam's states, which engines keep in different objects."""
        optimizer = self.engine.zero.optimizer if hasattr(self.engine, "zero") else self.engine.optimizer  # type: ignore[attr-defined]
        return {float(state["step"]) for state in optimizer.state.values()}

    @contextmanager
    def spoiled(self, name: str, *, rank: int, value: float = float("inf")) -> Iterator[None]:
        """Within the context, one element of a parameter's gradient on `rank` is `value`, before gradients are reduced over ranks."""

        def spoil(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[-1] = value
            return grad

        path, _, last = name.rpartition(".")
        module, handles = self.model.get_submodule(path), []
        if self.mesh.rank == rank and isinstance(getattr(module, last), DTensor):  # the gathered weight exists only while the module runs
            gathered = [handles.append]
            handles.append(module.register_forward_pre_hook(lambda module, _: gathered[0](getattr(module, last).register_hook(spoil))))
        elif self.mesh.rank == rank:
            handles.append(getattr(module, last).register_hook(spoil))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def start(case: Case, rank: int, *, scale: LossScale | None = None, **sections: dict[str, Any]) -> Tiny:
    """Build the model and engine of a layout; collective. `sections` replaces fields of the recipe, as in train={"seed": 8}."""
    run = check_run(case.run(), case.world)
    run = run.model_copy(update={name: getattr(run, name).model_copy(update=fields) for name, fields in sections.items()})
    mesh = process.connect(run.mesh_degrees(), World(rank, case.world))
    model, layouts = build(run, mesh, device=CPU)
    return Tiny(run, mesh, model, start_executor(run, model, layouts, mesh), scale or LossScale.of(run.precision.loss_scale))


def hand_over(folder: Path, one: Tiny, other: Tiny, *, step: int) -> None:
    """Save a checkpoint of `one` after `step` steps, and resume `other`, which may have another layout, from it. Collective."""
    counters, again, scale = state.Counters(step=step, updates=step), state.Counters(), LossScale.of("none")
    recipe = one.run.model_dump(mode="json")
    state.save(folder, one.engine, one.mesh, counters=counters, scale=scale, recipe=recipe, tokenizer={}, data="text", keep=1)
    other.run, found = one.run, state.find(folder, other.mesh, log=print)
    more: dict[str, Any] = {"counters": again, "scale": scale, "data": "text", "recipe": recipe, "log": lambda _: None}
    assert state.resume(found, other.engine, other.mesh, **more) and again == counters


def same(a: State, b: State) -> bool:
    """Return whether both states are bitwise equal."""
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys() and all(torch.equal(a[name][kind], b[name][kind]) for kind in a[name]) for name in a
    )
