"""Tools for the adapters of `moe verify --peer NAME`. An adapter is a file moe/verify/peers/NAME.py with

PACKAGES    module -> package that pip installs
MODELS      names for --model; ROUTED: those with routers
DEGREES     the axes that it supports, from ep, tp and fsdp
load()      imports the modules, before ranks are forked
pairs(models, degrees, pin)   yields a Pair for each comparison. degrees: axis -> number of ranks. pin: routers on several ranks choose
                              the experts that they chose on one process (moe/verify/yours/choices.py)
others()    optional: returns further names for --model, which depend on the installed release; `--model others` is all of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.verify.yours.recorder import record

VOCABULARY = 264  # number of token ids


@dataclass(frozen=True)
class Pair:
    """A comparison to run: a model in a layout. one: records a step on one process into a folder. many: records the same step on each of
    `world` ranks. `many` may read the recording of `one`, which is in the folder `one` next to the folder of `many`."""

    model: str
    layout: str
    world: int
    one: Callable[[Path], None]
    many: Callable[[Path], None]


def subsets(degrees: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield each non-empty subset of the axes, as a dict: axis -> degree. Small subsets come first."""
    for size in range(1, len(degrees) + 1):
        yield from map(dict, combinations(degrees.items(), size))


def batch() -> Tensor:
    """Return the global batch [4, 11] of token ids."""
    return torch.randint(0, VOCABULARY, (4, 11), generator=torch.Generator().manual_seed(1))


def write_weights(model: nn.Module, folder: Path) -> None:
    """Add random numbers to the weights, since initial values of 0 or 1 would hide faults. Write weights and buffers to weights.pt."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}, folder / "weights.pt")


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [B, L, V]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(folder: Path, model: nn.Module, logits: Callable[[Tensor], Tensor], tokens: Tensor, *, pin: bool = False) -> None:
    """Record a training step with AdamW on these token ids into the folder. pin: replay the routers' choices that the single process
    recorded. logits: token ids -> the model's logits."""
    optimizer = adamw(model)
    for step in record(folder, model, optimizer, pin=folder.parent / "one" if pin else None):
        loss = loss_of(logits(tokens[:, :-1]), tokens[:, 1:])
        step.note("loss", loss)
        loss.backward()
        optimizer.step()


def adamw(model: nn.Module) -> Any:
    """Return the AdamW with which all adapters train. Its eps is large, so that a tiny gradient does not cause an update as large as lr."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6, foreach=False)
