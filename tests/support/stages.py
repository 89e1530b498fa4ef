"""Stages of a Transformer for the pipeline runtime (moe/bench/grids/pipeline.py), and their random tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe.model.transformer import Output, StageLayers, Transformer
from moe.nn.context import Context
from moe.recipe.sections import Model
from parallel.pipeline.schedule import Schedule


class Layers(nn.Module):
    """One stage of a Transformer: from token ids (first stage) or hidden states to logits (last stage) or hidden states."""

    def __init__(self, model: Transformer, part: StageLayers, tokens_BL: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.layers[layer] for layer in part.layers)
        # the model is wrapped in a list because torch would register a plain attribute as a submodule, with all layers' parameters
        self.model, self.part, self.context = [model], part, Context.of(tokens_BL)
        ends = [module for module in (model.norm, model.head) if part.ends and module is not None]
        self.ends = nn.ParameterList([*([model.embedding] if part.begins else []), *(p for m in ends for p in m.parameters())])

    def forward(self, x: Tensor) -> Tensor:
        output: Output = self.model[0](x, self.context, None, self.part)
        return output.logits_BLV if output.hidden_BLD is None else output.hidden_BLD


def layers(config: Model, schedule: Schedule, tokens_BL: Tensor) -> tuple[Transformer, dict[int, nn.Module]]:
    """Return (the whole model, the same on every rank; stage number -> its module). All stages have the same number of layers."""
    model, stages = Transformer(config), schedule.num_stages
    each = config.num_layers // stages
    parts = [StageLayers(range(s * each, (s + 1) * each), begins=s == 0, ends=s == stages - 1) for s in range(stages)]
    return model, {stage: Layers(model, part, tokens_BL) for stage, part in enumerate(parts)}


def batch(microbatches: int, size: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return (input token ids, target token ids): two lists with one random tensor int64 [size, length] for each micro-batch."""
    tokens = torch.randint(0, 256, (microbatches * size, length + 1), generator=torch.Generator().manual_seed(1))
    return list(tokens[:, :-1].contiguous().split(size)), list(tokens[:, 1:].contiguous().split(size))
