"""The plain twin of `moe verify`: a loop over whole batches with plain kernels, torch's AdamW, no engine and no process group.

Where a layout's gradients are of older weights (PipeDream, 2BW), so are the twin's: the values that a parameter had `age` updates ago
are put under it for forward and backward, and the step is made from the newest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts.layer import LayerReport
from moe.model.transformer import Transformer, extra_state, global_name
from moe.nn.context import Context
from moe.parallelize.build import decays, lay_out
from moe.parallelize.stages import parts_of, stages_with
from moe.plan.pipeline import schedule_of
from moe.verify.cases import BATCH, LENGTH, Case
from parallel.checkpoint import pieces
from parallel.mesh import Degrees, Mesh
from parallel.precision import DTYPES

STEPS = 10


@dataclass(frozen=True)
class Result:
    """What one layout computed; tensors by the names that checkpoints use, whole."""

    losses: list[float]
    balance: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def batch(step: int) -> Tensor:
    """The sequences of one step, int64 [BATCH, LENGTH + 1]; tokens are uneven, so that experts are too.

    The first two differ: attention over equal tokens gives equal states, and a router that ranks tokens would order them by rounding.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.rand(BATCH, LENGTH + 1, generator=generator) ** 2 * 256).long()
    tokens[:, 1] = torch.where(tokens[:, 1] == tokens[:, 0], (tokens[:, 0] + 1) % 256, tokens[:, 1])
    return tokens


def reference(case: Case, *, parts: int = 1) -> Result:
    """The plain twin of a case's model, in its compute dtype; where its gradients are of older weights, those of the same age.

    `parts`: each batch is cut into so many, whose gradients add up: another order of the same sums.
    """
    run = case.run()
    experts = run.experts.model_copy(update={"kernels": "reference"})
    compute = DTYPES[case.precision]
    model = Transformer(run.model, experts, run.router, vocab_size=run.vocab_size, compute=compute, seed=run.train.seed)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decays(n, p)], "weight_decay": run.optimizer.weight_decay},
        {"params": [p for n, p in named.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=run.optimizer.lr, betas=(run.optimizer.beta1, run.optimizer.beta2), eps=run.optimizer.eps)
    ages = _ages(case, model)
    history: list[dict[str, Tensor]] = []
    losses: list[float] = []
    kept: tuple[float, float, dict[str, Tensor], dict[str, Tensor]] | None = None
    for step in range(STEPS):
        tokens = batch(step)
        history.append({n: t.detach().clone() for n, t in (named | extra_state(model)).items()} if ages else {})
        _put(model, {n: history[max(min(step, 1), step - age)][n] for n, age in ages.items()})  # the first step is drained
        optimizer.zero_grad()
        reports = [_pass(model, part, number, seed=run.train.seed, step=step) for number, part in enumerate(tokens.chunk(parts))]
        _put(model, history[-1])
        losses.append(sum(loss for loss, _ in reports))
        gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        for p in named.values():
            assert p.grad is not None
            p.grad.mul_(min(1.0, (run.optimizer.clip_norm or norm) / norm))
        optimizer.step()
        layers = list(zip(*(found for _, found in reports), strict=True))  # of each layer the reports of all parts
        for bias_E, of_layer in zip(extra_state(model).values(), layers, strict=False):  # each layer has one, or none has
            load_E = torch.stack([report.load_E for report in of_layer]).sum(0)
            bias_E += (run.router.spec.bias_rate or 0.0) * torch.sign(load_E.double().mean() - load_E).float()
        if kept is None:
            balance = sum(r.balance_loss.item() for of_layer in layers for r in of_layer) / parts
            weights = _whole(model, {n: p.detach() for n, p in named.items()}) | {n: b.clone() for n, b in extra_state(model).items()}
            kept = balance, norm, _whole(model, gradients), weights
    assert kept is not None
    return Result(losses, *kept)


def _pass(model: Transformer, tokens: Tensor, number: int, *, seed: int, step: int) -> tuple[float, tuple[LayerReport, ...]]:
    """Forward and backward of an equal part of a batch: its share of the loss, and what its layers report."""
    share = len(tokens) / BATCH
    context = Context.of(tokens[:, :-1], seed=seed, step=step, first_sequence=number * len(tokens), auxiliary_scale=share)
    output = model(tokens[:, :-1], context)
    loss = F.cross_entropy(output.logits_BLV.flatten(0, 1), tokens[:, 1:].flatten()) * share
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), output.layers


def _ages(case: Case, model: Transformer) -> dict[str, int]:
    """By how many updates the weights that a gradient is of are older than those it changes; {} where by none."""
    if not case.delayed:
        return {}
    run = case.run()
    parts = parts_of(run, schedule_of(run))
    names = [*dict(model.named_parameters()), *extra_state(model)]
    return {n: 1 if case.schedule == "two_bw" else case.pp - 1 - stages_with(model, n, parts)[0] for n in names}


def _put(model: Transformer, values: dict[str, Tensor]) -> None:
    everything = dict(model.named_parameters()) | extra_state(model)
    for name, value in values.items():
        everything[name].data.copy_(value)


def _whole(model: Transformer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layouts = lay_out(model)
    mesh = Mesh.of(Degrees())
    return {p.name: p.tensor.clone() for n, t in tensors.items() for p in pieces(global_name(n), layouts[n], mesh, t)}
