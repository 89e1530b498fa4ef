"""Trains the plain twin, a second implementation with which `moe verify` compares layouts: ten steps of whole batches on one process, with
its own model and update.

    moe/verify/plain/layer.py   the MoE layer, from the papers                moe/verify/plain/model.py             everything around it
    moe/verify/plain/step.py    weight decay, clipping, optimizers, biases    moe/verify/plain/encoder_decoder.py   encoder-decoders

It shares with the trainer only the recipe and the initial values of parameters. It computes in float64, because in fp32 its own rounding
could exceed the tolerance. Adam's first step is lr g / (|g| + eps), with learning rate lr: it turns an error d of a tiny gradient g into
lr d / eps = 300 d. For PipeDream and 2BW the twin computes gradients with older weights, as the pipeline stages do, and updates the newest
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.model.initialize import FirstValues, alone, global_name, initialize, sigma_of
from moe.model.transformer import Transformer, extra_state
from moe.nn.lora import adapt
from moe.parallelize.plan import lay_out
from moe.plan.pipeline import layers_of, schedule_of
from moe.recipe.sections import Lora, Model, Run
from moe.verify.cases import OVERFLOWS, Case
from moe.verify.plain import encoder_decoder as plain_encoder_decoder
from moe.verify.plain import model as plain_model
from moe.verify.plain.batches import PADDING, batch
from moe.verify.plain.kfac import Moments, Watched
from moe.verify.plain.layer import Layer, Weights
from moe.verify.plain.model import Rounding
from moe.verify.plain.step import PlainStep, moved_bias, norms
from moe.verify.tape import TAPED, Step, Tape
from parallel.mesh.mesh import Degrees, Mesh
from parallel.pipeline.schedules import SCHEDULES
from parallel.pipeline.schedules.kind import Size
from parallel.store.checkpoint import pieces

STEPS = 10
_EXPERT = ("w1", "w2", "w3")  # matrices of an expert
_SIGMA_OF_B = 0.1  # std of the initial values of LoRA's B (see `spread`)


@dataclass(frozen=True)
class Result:
    """Results of a run, for comparison: losses of all steps; for step 0, balance loss, gradient norm, gradients, and weights after the
    update."""

    losses: list[float]
    balance: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference(case: Case, *, rounding: Rounding | None = None, tape: Tape | None = None, steps: int = STEPS) -> Result:
    """Train the case's model with the twin for `steps` steps (at most case.steps, if that is set), in float64 unless `rounding` is given.
    tape: records the first steps."""
    run, cast = case.run(), rounding or Rounding(torch.float64)
    parameters, biases = ({n: t.to(cast.dtype) for n, t in tensors.items()} for tensors in first_values(run))
    optimizer, old = PlainStep(run.optimizer, total=None if case.values else run.train.steps), ages(case, [*parameters, *biases])
    trained = _trained(run, parameters)
    if tape is not None:
        tape.first = _copy(parameters)
    history: list[Weights] = []
    losses: list[float] = []
    first: tuple[float, float, Weights, Weights] | None = None
    for step in range(min(steps, case.steps or steps)):
        history.append(_copy(parameters | biases) if old else parameters | biases)
        read = {name: history[version_read(step, old.get(name, 0))][name] for name in history[-1]} if old else history[-1]
        sequences = batch(step, padded=case.padded, packed=case.packed, length=run.model.read_length, size=case.batch)
        passed = _gradients(run, read, trained, sequences, step=step, cast=cast, tape=tape)
        loss, gradients, layers = passed.loss, passed.gradients, passed.layers
        losses.append(loss)
        norm, skipped = norms(gradients), case.overflow and step == OVERFLOWS
        if not skipped:
            optimizer.step({name: parameters[name] for name in gradients}, gradients, passed.moments)
            for name in biases:
                biases[name] = moved_bias(biases[name], layers[name.removesuffix(".router.bias")].counts, run.router.bias_rate or 0.0)
        if first is None:
            first = sum(layer.balance.item() for layer in layers.values()), norm["total"], gradients, _copy(parameters | biases)
        if tape is not None and step < TAPED:
            reports = {f"{name}.router": _report(layer) for name, layer in layers.items()}
            seen, norm = ({}, {}) if skipped else (gradients, norm)
            tape.steps.append(Step(loss, reports, seen, norm, _copy(optimizer.exp_avg), _copy(parameters | biases)))
    assert first is not None
    return Result(losses, *first)


def updated(case: Case, gradients: Weights) -> Weights:
    """Return the parameters (float64) of a new model after its first update, which uses the given gradients. K-FAC's factors come from the
    twin's own forward and backward pass."""
    run = case.run()
    parameters, biases = ({n: t.double() for n, t in tensors.items()} for tensors in first_values(run))
    moments: Moments = {}
    if run.optimizer.kind == "kfac":
        first = batch(0, padded=case.padded, packed=case.packed, length=run.model.read_length, size=case.batch)
        own = _gradients(run, parameters | biases, _trained(run, parameters), first, step=0, cast=Rounding(torch.float64), tape=None)
        moments = own.moments
    optimizer = PlainStep(run.optimizer, total=None if case.values else run.train.steps)
    optimizer.step({n: parameters[n] for n in gradients}, {n: g.double() for n, g in gradients.items()}, moments)
    return parameters


def first_values(run: Run) -> tuple[Weights, Weights]:
    """Return the initial (parameters, selection biases of routers) of the model, each as a dict: name in checkpoints -> tensor. Stacks of
    experts are split, so each expert's matrices have their own names."""
    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
        adapt(model, run.lora)
    initialize(model, FirstValues(run.model, *alone(model), seed=run.train.seed, spread=spread))
    layouts, mesh = lay_out(model), Mesh.of(Degrees())
    whole = [p for name, t in model.named_parameters() for p in pieces(global_name(name), layouts[name], mesh, t.detach())]
    return {p.name: p.tensor.clone() for p in whole}, _copy(extra_state(model))


def spread(name: str, shape: tuple[int, ...], model: Model) -> float | None:
    """Return the standard deviation of a tensor's initial values in all cases. It is the trainer's (`sigma_of`), except that LoRA's B does
    not begin at 0. With B = 0, A would have no gradient in the first step, and a wrong scale of the adapter would not change its output."""
    return _SIGMA_OF_B if name.endswith((".lora_b", *(f".{w}_b" for w in _EXPERT))) else sigma_of(name, shape, model)


@dataclass(frozen=True)
class _Pass:
    """Results of a batch's forward and backward pass. loss: mean over targets. layers: name of an MoE layer -> its results. moments:
    second moments of inputs and output gradients, for K-FAC; otherwise {}."""

    loss: float
    gradients: Weights
    layers: dict[str, Layer]
    moments: Moments


def _trained(run: Run, parameters: Weights) -> set[str]:
    """Return the names of the parameters that are trained."""
    return set(_adapters(list(parameters)) if run.lora.rank else [name for name in parameters if not _frozen(name, run.train.freeze)])


def _gradients(run: Run, weights: Weights, trained: set[str], sequences: Tensor, *, step: int, cast: Rounding, tape: Tape | None) -> _Pass:
    """Run a batch forward and backward. The weights in `trained` get gradients. sequences: the step's batch, from `batch`."""
    leaves = {name: value.clone().requires_grad_() if name in trained else value for name, value in weights.items()}
    predicted = (sequences[:, 1 + run.model.source_length :] >= 0).sum().item()
    places = torch.arange(sequences[:, :-1].numel())

    def note(name: str, values: Tensor) -> None:
        if tape is not None:
            tape.note(step, name, places, values)

    twin = plain_model if run.model.kind == "decoder" else plain_encoder_decoder
    read = _with_adapters(leaves, run.lora)
    read = Watched(read) if run.optimizer.kind == "kfac" else read
    passed = twin.forward(run, read, sequences, step=step, cast=cast, note=note)
    mean = passed.loss / predicted
    whole = mean + sum(layer.auxiliary(run.router) for layer in passed.layers.values())
    if passed.ahead is not None:
        whole = whole + run.model.ahead_weight * passed.ahead / (sequences[:, :-1] != PADDING).sum().item()
    whole.backward()  # type: ignore[no-untyped-call]
    gradients = {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items() if name in trained}
    return _Pass(mean.item(), gradients, passed.layers, read.moments() if isinstance(read, Watched) else {})


def _frozen(name: str, parts: Sequence[str]) -> bool:
    """Return whether train.freeze contains this parameter. parts: entries of train.freeze, such as `attention` or `layers.0-3`."""
    words = name.split(".")
    of_part = {
        "embedding": name == "embedding",
        "head": words[0] == "head",
        "attention": bool({"attention", "cross"} & {*words}),
        "dense": bool({"ffn", "shared", "shared_gate", "residual", "coefficient"} & {*words}),
        "experts": "experts" in words or words[-1] == "output_bias",
        "router": "router" in words,
        "norms": any(word == "norm" or word.endswith("_norm") for word in words),
    }
    runs = [part.removeprefix("layers.").split("-") for part in parts if part.startswith("layers.")]
    return any(of_part.get(part) for part in parts) or any(words[0] == "layers" and int(a[0]) <= int(words[1]) <= int(a[-1]) for a in runs)


def _adapters(names: list[str]) -> list[str]:
    """Return the names of LoRA adapters among `names`."""
    of_experts = tuple(f".{w}_{half}" for w in _EXPERT for half in "ab")
    return [name for name in names if name.endswith((".lora_a", ".lora_b"))] + [name for name in names if name.endswith(of_experts)]


def _with_adapters(weights: Weights, lora: Lora) -> Weights:
    """Return the weights with LoRA adapters of rank r merged (arXiv 2106.09685): W + alpha / r B A for dense W [out, in]; w + alpha / r w_a
    w_b for experts' w [in, out]."""
    adapters = {*_adapters(list(weights))}
    found = {name: w for name, w in weights.items() if name not in adapters}
    for name in weights:
        if name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            added = torch.einsum("or,ri->oi", weights[f"{stem}.lora_b"], weights[name])
            found[f"{stem}.weight"] = found[f"{stem}.weight"] + added * (lora.alpha / lora.rank)
        elif name.endswith(tuple(f".{w}_a" for w in _EXPERT)):
            stem = name.removesuffix("_a")
            added = torch.einsum("ir,ro->io", weights[name], weights[f"{stem}_b"])
            found[stem] = found[stem] + added * (lora.alpha / lora.rank)
    return found


def _report(layer: Layer) -> Tensor:
    """Return float64 [5 + E] of an MoE layer: balance, importance, load and z loss, number of choices with a slot, choices per expert."""
    means = [loss.item() for loss in (layer.balance, layer.importance, layer.load, layer.z)]
    return torch.tensor([*means, layer.kept, *layer.counts], dtype=torch.float64)


def version_read(step: int, age: int) -> int:
    """Return the version (number of updates) of the weights with which the gradient of `step` is computed. age: delay, in updates."""
    # at least 1 from step 1 on: the ranks run step 0 alone and drain the pipeline (layouts.py), then stream the other steps
    return max(min(step, 1), step - age)


def ages(case: Case, names: list[str]) -> dict[str, int]:
    """Return a dict: name of a parameter or router's bias -> its age. Gradients are computed with a value that is older than the newest
    value by this number of updates. {} if the schedule computes all gradients with the newest values."""
    age = SCHEDULES[case.schedule].age
    if age is None:
        return {}
    run = case.run()
    held = layers_of(run, schedule_of(run))

    def stage(name: str) -> int:
        if not name.startswith("layers."):
            return 0 if name == "embedding" else len(held) - 1
        return next(stage for stage, layers in enumerate(held) if int(name.split(".")[1]) in layers)

    size = Size(case.pp, case.microbatches)
    return {name: age(size, stage(name)) for name in names}


def _copy(tensors: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in tensors.items()}
