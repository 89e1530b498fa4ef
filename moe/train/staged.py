"""A rank's stages at work on a list of passes: what the pipeline's runtime asks of a model.

runtime: F of stage s, micro-batch j  ->  engine.forward(tokens or what came, context_j, targets_j, part_s)  ->  hidden, or the loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from moe.model.transformer import Output, Transformer
from moe.nn.context import Context
from moe.train.passes import Pass
from parallel.collectives import sum_over
from parallel.data.engine import Engine
from parallel.mesh import Mesh
from parallel.pipeline.weights import Versions

Each = Callable[[int, Output], Tensor | None]  # told of every pass of a stage by number; what it gives for the last stage's is the loss


class Staged:
    """The Work of a batch (parallel/pipeline/runtime.py); `versions` by stage and `update(stage, version)` where updates do not wait."""

    def __init__(
        self,
        engine: Engine,
        passes: Sequence[Pass],
        each: Each,
        *,
        run: Callable[..., Any] | None = None,
        versions: dict[int, Versions] | None = None,
        update: Callable[[int, int], None] | None = None,
    ) -> None:
        assert isinstance(engine.module, Transformer)
        self.engine, self.model, self.passes, self.each = engine, engine.module, passes, each
        self.run = run or (lambda *args: engine.forward(*args, last=False))
        self.versions, self.on_update = versions or {}, update
        self.dtype, self.device = self.model.compute, passes[0].inputs_BL.device

    def shape(self, microbatch: int) -> tuple[int, ...]:
        return (*self.passes[microbatch].inputs_BL.shape, self.model.config.d_model)

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        p = self.passes[microbatch]
        output: Output = self.run(p.inputs_BL if x is None else x, p.context, p.targets_BL, self.model.parts[stage])
        loss = self.each(microbatch, output)
        if output.hidden_BLD is not None:
            return output.hidden_BLD
        return torch.empty(0) if loss is None else loss

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        self.engine.backward_from(output, gradient)

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        return self.versions[stage].reading(version) if stage in self.versions else nullcontext()

    def update(self, stage: int, version: int) -> None:
        if self.on_update is not None:  # else the step follows once all stages' gradients are known to be finite
            self.on_update(stage, version)


def forward_all(engine: Engine, passes: Sequence[Pass], each: Each) -> None:
    """Forward passes without gradient, over the stages where there are some; `each` sees those of this rank. Collective."""
    if engine.pipeline is not None:
        engine.pipeline.forward(Staged(engine, passes, each, run=engine.module), len(passes))
        return
    with torch.no_grad():
        for number, p in enumerate(passes):
            each(number, engine.module(p.inputs_BL, p.context, p.targets_BL))


def whole_model(engine: Engine, mesh: Mesh) -> Callable[[Tensor], Output]:
    """tokens [B, L] -> Output of logits on every rank, over the stages where there are some. Collective."""
    model = engine.module
    assert isinstance(model, Transformer)
    if engine.pipeline is None:
        return model

    def run(tokens_BL: Tensor) -> Output:
        found = torch.zeros(*tokens_BL.shape, model.vocab_size, device=tokens_BL.device)

        def each(_: int, output: Output) -> None:
            if output.hidden_BLD is None:
                found.copy_(output.logits_BLV)

        forward_all(engine, [Pass(tokens_BL, None, Context.of(tokens_BL), 1.0)], each)
        return Output(sum_over(found, mesh.axis("pp")), torch.empty(0), ())  # the other stages' are zeros

    return run
