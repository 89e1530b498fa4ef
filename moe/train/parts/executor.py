"""Runs a batch's forward and backward passes, on a whole model (`Single`) or over pipeline stages (`Pipelined`), with the same calls.

    executor.run(passes, each)        forward and backward passes of a batch; then the engine has the gradients, summed over ranks
    executor.forward(passes, each)    only forward passes, without gradient

passes: this rank's micro-batches. `each(number of the micro-batch, Output)` is called after every forward pass on this rank; on the last
stage it returns the loss, from which the backward pass starts. A stage's forward pass reads tokens, or the previous stage's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from moe.data.token_shard import TokenShard
from moe.model.transformer import Output, Transformer
from moe.nn.context import Context
from moe.nn.own_loss import OwnLoss
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
from parallel.numerics.weight_gradient import PendingGradients
from parallel.pipeline.runtime import Runtime
from parallel.pipeline.schedule import Schedule, Watcher
from parallel.pipeline.weights import Versions
from parallel.watch import watchdog

Each = Callable[[int, Output], Tensor | None]  # (number of the micro-batch, its Output) -> loss; None: no backward pass starts here
Crossing = Callable[[Sequence[int]], tuple[int, ...]]  # shape of a micro-batch's tokens, [B, L] -> shape of the tensor sent between stages


def start_executor(run: Run, model: Transformer, layouts: dict[str, Layout], mesh: Mesh, *, rule: Rule | None = None) -> Executor:
    """Start the recipe's data-parallel engine for this rank's model, and return the executor that uses it. rule: a user's optimizer;
    None: the recipe's. Collective."""
    model.own_loss = OwnLoss(run.train.loss) if run.train.has_own_loss else None
    engine = start_engine(run, model, layouts, mesh, rule=rule)
    if mesh.axis("pp").size == 1:
        return Single(engine)
    return pipelined(run, engine, mesh, watchers=fillers(run, engine, mesh))


def pipelined(run: Run, engine: Engine, mesh: Mesh, *, watchers: Sequence[Watcher] = ()) -> Pipelined:
    """Return an executor of this rank's pipeline stages. watchers: called at every action of the pipeline in training. Collective."""
    runtime = stages.start_runtime(run, engine.module, engine.layouts, mesh)
    sums = stages.overlapped_sums(run, engine, runtime)
    return Pipelined(engine, runtime, crossing=lambda tokens: stages.crossing_shape(run, tokens), watchers=watchers, sums=sums)


def fillers(run: Run, engine: Engine, mesh: Mesh) -> list[BubbleFiller]:
    """Return a list of one watcher, which does K-FAC's work while the pipeline is idle. It is empty if the optimizer is not K-FAC."""
    if not isinstance(engine, KfacEngine):
        return []
    assert isinstance(engine.module, Transformer)
    of_linears = stages.stage_of_each(run, engine.module, engine.kfac.linears)
    return [BubbleFiller(engine.kfac, schedule_of(run), mesh.axis("pp"), of_linears)]


class Single:
    """Executor of a model without pipeline stages. pp_axis: an axis of one rank."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.module, Transformer)
        self.engine, self.model, self.pp_axis = engine, engine.module, Axis("pp")

    def run(self, passes: Sequence[Pass], each: Each) -> None:
        """Run forward and backward passes of one batch. Afterwards the engine has gradients, summed over ranks. each: called after every
        forward pass; returns the loss. Collective."""
        for number, p in enumerate(passes):
            last = number == len(passes) - 1
            watchdog.enter("the forward pass")
            loss = each(number, self.engine.forward(p.inputs_BL, p.context, p.targets_BL, last=last))
            assert loss is not None
            watchdog.enter("the backward pass")
            self.engine.backward(loss, last=last)

    @torch.no_grad()
    def forward(self, passes: Sequence[Pass], each: Each) -> None:
        """Run forward passes without gradient, in the model's present mode (training or evaluation). Collective."""
        for number, p in enumerate(passes):
            each(number, self.model(p.inputs_BL, p.context, p.targets_BL))


class Pipelined:
    """Executor of a rank's stages. crossing: returns the shape of the tensor sent between stages. watchers: called at every action
    (forward, backward or update of a stage) in training. sums: a watcher that starts the all-reduce of a stage's gradients after the
    stage's last backward pass; not used in `stream`."""

    def __init__(
        self, engine: Engine, runtime: Runtime, *, crossing: Crossing, watchers: Sequence[Watcher] = (), sums: Watcher | None = None
    ) -> None:
        assert isinstance(engine.module, Transformer)
        self.sums = () if sums is None else (sums,)
        self.engine, self.model, self.pp_axis = engine, engine.module, runtime.axis
        self.runtime, self.crossing, self.watchers = runtime, crossing, tuple(watchers)

    def run(self, passes: Sequence[Pass], each: Each) -> None:
        """Run forward and backward passes of one batch through the pipeline. Then the engine has gradients, summed over ranks. each: called
        after every forward pass on this rank; on the last stage it returns the loss. Collective."""
        self.runtime.run(_Stages(self, passes, each, self._train), watchers=(*self.sums, *self.watchers))
        self.engine.reduce()

    def stream(
        self, passes: Sequence[Pass], each: Each, *, schedule: Schedule, versions: dict[int, Versions], update: Callable[[int, int], None]
    ) -> None:
        """Run several batches without draining the pipeline between them. passes: micro-batches of all batches. each: as in `run`.
        versions: stage -> versions of its weights. update(stage, version): called when the schedule updates a stage; changes the stage's
        weights to that version. Collective."""
        self.runtime.run(_Stages(self, passes, each, self._train, versions, update), schedule, watchers=self.watchers)

    def forward(self, passes: Sequence[Pass], each: Each) -> None:
        """Run forward passes through the pipeline, without gradient. Collective."""
        self.runtime.forward(_Stages(self, passes, each, self.model), len(passes))

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Add a watcher until the context exits."""
        self.watchers = (*self.watchers, watcher)
        try:
            yield
        finally:
            self.watchers = tuple(w for w in self.watchers if w is not watcher)

    def _train(self, *args: Any) -> Output:
        output: Output = self.engine.forward(*args, last=False)
        return output


class _Stages:
    """Actions of this rank's stages, called by parallel/pipeline/runtime.py. compute: runs a stage's forward pass. versions: stage ->
    versions of its weights. update(stage, version): changes the stage's weights to that version. If these two are left out, the caller
    makes the optimizer's step after all backward passes."""

    def __init__(
        self,
        executor: Pipelined,
        passes: Sequence[Pass],
        each: Each,
        compute: Callable[..., Output],
        versions: dict[int, Versions] | None = None,
        update: Callable[[int, int], None] = lambda stage, version: None,
    ) -> None:
        self.executor, self.passes, self.each, self.compute = executor, passes, each, compute
        self.versions, self.update = versions or {}, update
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

    def deferred(self, pending: PendingGradients) -> None:
        self.executor.engine.deferred(pending)

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        return self.versions[stage].reading(version) if stage in self.versions else nullcontext()


Executor = Single | Pipelined


def logits_of(executor: Executor, shard: TokenShard) -> Callable[[Tensor], Output]:
    """Return a function that maps token ids of whole sequences, [B, shard.length], to an Output with the logits of all tokens. All ranks
    must call it with the same ids, and all get the logits of all tokens, even if the model and the sequences are sharded. `shard` says
    which positions of a sequence this rank computes."""
    model, places, (_, sp) = executor.model, shard.position_array, shard.axes

    def run(tokens_BL: Tensor) -> Output:
        found = torch.zeros(*tokens_BL.shape, model.vocab_size, device=tokens_BL.device)

        def each(_: int, output: Output) -> None:
            if output.hidden_BLD is None:
                found[:, places] = output.logits_BLV

        mine_BL = tokens_BL[:, places]
        executor.forward([Pass(mine_BL, None, Context.of(mine_BL, positions=places, length=shard.length), 1.0)], each)
        return Output(sum_over_all(found, (sp, executor.pp_axis)), torch.empty(0), ())  # `found` is 0 for tokens of other ranks

    return run
