"""Runs a batch's forward and backward passes, on a whole model or over pipeline stages. Callers need not know which.

    executor = start_executor(run, model, layouts, mesh)    Single(engine)  or  Pipelined(engine, runtime)
    executor.run(passes, each)                              forward and backward of a batch; then the engine holds summed gradients
    executor.forward(passes, each)                          forward alone, without gradient

`each(number of the micro-batch, Output)` is called for every forward pass on this rank. On the last stage it returns the scalar for the
backward pass. With stages, F of stage s and micro-batch j is the engine's forward pass of part s of the model, over tokens or the previous
stage's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from moe.data.token_shard import TokenShard
from moe.model.transformer import Output, Transformer
from moe.nn.context import Context
from moe.parallelize import stages
from moe.parallelize.engines import start_engine
from moe.plan.pipeline import schedule_of
from moe.recipe.sections import Run
from moe.train.parts.passes import Pass
from parallel.data.engine import Engine, Rule
from parallel.kfac.fisher import BubbleFiller
from parallel.kfac.grafted import KfacEngine
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh
from parallel.pipeline.runtime import Runtime
from parallel.pipeline.schedule import Schedule, Watcher
from parallel.pipeline.weights import Versions
from parallel.watch import watchdog

Each = Callable[[int, Output], Tensor | None]
Crossing = Callable[[Sequence[int]], tuple[int, ...]]  # maps the shape of a micro-batch's tokens [B, L] to the shape sent between stages


class Executor(Protocol):
    """Interface of both executors. `pp_axis`: the pipeline axis over which layers are cut; it has one rank if the model is whole."""

    engine: Engine
    model: Transformer
    pp_axis: Axis

    def run(self, passes: Sequence[Pass], each: Each) -> None:
        """Run forward and backward of one batch; afterwards the engine holds summed gradients. Collective."""
        ...

    def forward(self, passes: Sequence[Pass], each: Each) -> None:
        """Run forward without gradient, in training or evaluation mode as `model.training` says. Collective."""
        ...


def start_executor(run: Run, model: Transformer, layouts: dict[str, Layout], mesh: Mesh, *, rule: Rule | None = None) -> Executor:
    """Return the executor of this recipe: the model in its data-parallel engine, with a pipeline runtime if it is cut into stages. `rule`:
    a user's own optimizer. Collective."""
    engine = start_engine(run, model, layouts, mesh, rule=rule)
    if mesh.axis("pp").size == 1:
        return Single(engine)
    return pipelined(run, engine, mesh, watchers=fillers(run, engine, mesh))


def pipelined(run: Run, engine: Engine, mesh: Mesh, *, watchers: Sequence[Watcher] = ()) -> Pipelined:
    """Return an executor of this rank's stages. Collective: groups are made."""
    runtime = stages.start_runtime(run, engine.module, engine.layouts, mesh)
    sums = stages.overlapped_sums(run, engine, runtime)
    return Pipelined(engine, runtime, crossing=lambda tokens: stages.crossing_shape(run, tokens), watchers=watchers, sums=sums)


def fillers(run: Run, engine: Engine, mesh: Mesh) -> list[BubbleFiller]:
    """Return watchers that do K-FAC's work in a pipeline's idle times; none for another optimizer."""
    if not isinstance(engine, KfacEngine):
        return []
    assert isinstance(engine.module, Transformer)
    of_linears = stages.stage_of_each(run, engine.module, engine.kfac.linears)
    return [BubbleFiller(engine.kfac, schedule_of(run), mesh.axis("pp"), of_linears)]


class Single:
    """Executor of the whole model on every rank."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.module, Transformer)
        self.engine, self.model, self.pp_axis = engine, engine.module, Axis("pp")

    def run(self, passes: Sequence[Pass], each: Each) -> None:
        for number, p in enumerate(passes):
            last = number == len(passes) - 1
            watchdog.enter("the forward pass")
            loss = each(number, self.engine.forward(p.inputs_BL, p.context, p.targets_BL, last=last))
            assert loss is not None
            watchdog.enter("the backward pass")
            self.engine.backward(loss, last=last)

    @torch.no_grad()
    def forward(self, passes: Sequence[Pass], each: Each) -> None:
        for number, p in enumerate(passes):
            each(number, self.model(p.inputs_BL, p.context, p.targets_BL))


class Pipelined:
    """Executor of a rank's stages. `crossing`: shape of the tensor sent between stages. `watchers` see every action in training. `sums`
    sees the actions of a batch whose gradients are summed at its end, and begins that sum early for finished stages."""

    def __init__(
        self, engine: Engine, runtime: Runtime, *, crossing: Crossing, watchers: Sequence[Watcher] = (), sums: Watcher | None = None
    ) -> None:
        assert isinstance(engine.module, Transformer)
        self.sums = () if sums is None else (sums,)
        self.engine, self.model, self.pp_axis = engine, engine.module, runtime.axis
        self.runtime, self.crossing, self.watchers = runtime, crossing, tuple(watchers)

    def run(self, passes: Sequence[Pass], each: Each) -> None:
        self.runtime.run(self._work(passes, each, self._train), watchers=(*self.sums, *self.watchers))
        self.engine.reduce()

    def stream(
        self,
        passes: Sequence[Pass],
        each: Each,
        *,
        schedule: Schedule,
        versions: Mapping[int, Versions],
        update: Callable[[int, int], None],
    ) -> None:
        """Run several batches without a drain between them. `versions` by stage; `update(stage, version)` does the schedule's U."""
        self.runtime.run(_Stages(self, passes, each, self._train, versions, update), schedule, watchers=self.watchers)

    def forward(self, passes: Sequence[Pass], each: Each) -> None:
        self.runtime.forward(self._work(passes, each, self.model), len(passes))

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Add one watcher until the context exits."""
        self.watchers = (*self.watchers, watcher)
        try:
            yield
        finally:
            self.watchers = tuple(w for w in self.watchers if w is not watcher)

    def _work(self, passes: Sequence[Pass], each: Each, compute: Callable[..., Any]) -> _Stages:
        """Return a batch's work without updates: the step follows once all gradients are known to be finite."""
        return _Stages(self, passes, each, compute, {}, lambda stage, version: None)

    def _train(self, *args: Any) -> Output:
        output: Output = self.engine.forward(*args, last=False)
        return output


class _Stages:
    """Work of this rank's stages (parallel/pipeline/runtime.py). `compute`: the model's forward pass."""

    def __init__(
        self,
        executor: Pipelined,
        passes: Sequence[Pass],
        each: Each,
        compute: Callable[..., Output],
        versions: Mapping[int, Versions],
        update: Callable[[int, int], None],
    ) -> None:
        self.executor, self.passes, self.each, self.compute = executor, passes, each, compute
        self.versions, self.update = versions, update
        self.dtype, self.device = executor.model.compute, passes[0].inputs_BL.device

    def shape(self, microbatch: int) -> tuple[int, ...]:
        return self.executor.crossing(self.passes[microbatch].inputs_BL.shape)

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        watchdog.enter(f"F of stage {stage}, micro-batch {microbatch},")
        p = self.passes[microbatch]
        output = self.compute(p.inputs_BL if x is None else x, p.context, p.targets_BL, self.executor.model.parts[stage])
        loss = self.each(microbatch, output)
        if output.hidden_BLD is not None:
            return output.hidden_BLD
        return torch.empty(0) if loss is None else loss

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        watchdog.enter("the backward pass")
        self.executor.engine.backward_from(output, gradient)

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        return self.versions[stage].reading(version) if stage in self.versions else nullcontext()


def logits_of(executor: Executor, shard: TokenShard) -> Callable[[Tensor], Output]:
    """Return a function: tokens [B, length of the shard] -> Output with logits on every rank, for any sharding of model and sequences.
    Collective."""
    model, places, (_, sp) = executor.model, shard.position_array, shard.axes

    def run(tokens_BL: Tensor) -> Output:
        found = torch.zeros(*tokens_BL.shape, model.vocab_size, device=tokens_BL.device)

        def each(_: int, output: Output) -> None:
            if output.hidden_BLD is None:
                found[:, places] = output.logits_BLV

        mine_BL = tokens_BL[:, places]
        executor.forward([Pass(mine_BL, None, Context.of(mine_BL, positions=places, length=shard.length), 1.0)], each)
        return Output(sum_over_all(found, (sp, executor.pp_axis)), torch.empty(0), ())  # zeros from the other sequence shards and stages

    return run
