"""Splits a micro-batch over replicas of DP, and joins their outputs: the model's side of parallel/data/dp.py.

A replica has an equal share of the micro-batch's sequences, with the tokens' own indices in the step, so that noise, capacity
groups and losses equal those on one device. Auxiliary losses are weighted by the replica's share of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe.experts.layer import LayerReport
from moe.model.transformer import Output
from moe.nn.context import Context
from parallel.data.dp import Together
from parallel.mesh.layout import Tile

Args = tuple[Tensor, Context, Tensor]  # inputs [B, L], their context, targets [B, L]


def scatter(args: tuple[Any, ...], devices: Sequence[torch.device], together: Sequence[Together]) -> list[tuple[Any, ...]]:
    """Return the arguments of each replica: its share of the sequences, on its device."""
    inputs_BL, context, targets_BL = args
    shares = _shares(args, len(devices))
    parts: list[tuple[Any, ...]] = []
    for i, device in enumerate(devices):
        run = Tile(0, i, len(devices)).run(len(inputs_BL))
        tokens = slice(run.start * inputs_BL.shape[1], run.stop * inputs_BL.shape[1])
        mine = context.of_tokens(tokens, share=shares[i], together=together[i]).to(device)
        parts.append((inputs_BL[run].to(device), mine, targets_BL[run].to(device)))
    return parts


def _shares(args: tuple[Any, ...], count: int) -> list[float]:
    """Return each replica's share of the micro-batch's valid tokens."""
    inputs_BL, context, _ = args
    valid_BL = torch.ones_like(inputs_BL) if context.valid_T is None else context.valid_T.view(inputs_BL.shape)
    held = [int(valid_BL[Tile(0, i, count).run(len(inputs_BL))].sum()) for i in range(count)]
    return [n / max(1, sum(held)) for n in held]


def gather(args: tuple[Any, ...], outputs: Sequence[Output], device: torch.device) -> Output:
    """Join outputs on `device`: losses are summed, and layer reports combined as if one replica had run the micro-batch."""
    shares = _shares(args, len(outputs))
    layers = []
    for reports in zip(*(output.layers for output in outputs), strict=True):
        counts = {name: sum(getattr(r, name).to(device) for r in reports) for name in ("load_E", "kept", "dropped")}
        means = {
            name: sum(getattr(r, name).to(device) * share for r, share in zip(reports, shares, strict=True))
            for name in ("balance_loss", "importance_loss", "load_loss", "z_loss", "entropy")
        }
        layers.append(LayerReport(reports[0].layer, **counts, **means))
    loss = torch.stack([output.loss.to(device) for output in outputs]).sum()
    return Output(torch.cat([output.logits_BLV.to(device) for output in outputs]), loss, tuple(layers))
