"""PipeDream and 2BW on ranks have the losses of one process that computes gradients at equally old weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.checks.together import check_run
from moe.model.initialize import global_name
from moe.model.transformer import Transformer, extra_state, moe_layers
from moe.nn.context import Context
from moe.parallelize.engines import decays
from moe.parallelize.plan import lay_out
from moe.plan.pipeline import layers_of, schedule_of
from moe.recipe.sections import Run
from moe.train.loop.step import move_biases, stream
from moe.verify.cases import Case
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.pipeline.schedule import Action, Op
from parallel.pipeline.weights import Versions
from parallel.store.checkpoint import pieces
from tests.support.ranks import run_on_ranks
from tests.support.tiny import batch, start

STEPS, LAYERS = 7, 5
RATES = [0.003 * (n + 1) / STEPS for n in range(STEPS)]
DELAYED: dict[str, Any] = {"model": {"dropout": 0.1}}


def recipe(case: Case, **sections: dict[str, Any]) -> Run:
    run = case.run()
    merged = {name: DELAYED.get(name, {}) | sections.get(name, {}) for name in DELAYED | sections}
    return run.model_copy(update={name: getattr(run, name).model_copy(update=fields) for name, fields in merged.items()})


def version_read(schedule: str, step: int, stage: int, stages: int, *, vertical_sync: bool = False) -> int:
    """Return the version (number of updates) of the weights at which a stage computes step number `step`, as the papers define it."""
    if schedule == "two_bw":
        return max(0, step - 1)
    return max(0, step - max(0, stages - 1 if vertical_sync else stages - 1 - stage))


def twin(run: Run, *, stages: int, vertical_sync: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one process: gradients at each stage's old weights update the newest weights. Return (losses, final weights)."""
    layers = layers_of(run, schedule_of(run))
    experts = run.experts.model_copy(update={"kernels": "reference"})
    model = Transformer(run.model, experts, run.router, vocab_size=run.vocab_size, seed=run.train.seed)
    named, biases = dict(model.named_parameters()), extra_state(model)

    def stage_of(name: str) -> int:
        words = name.split(".")
        if words[0] == "layers":
            return next(s for s, held in enumerate(layers) if int(words[1]) in held)
        return 0 if words[0] == "embedding" else stages - 1

    everything = named | biases
    history = [{name: tensor.detach().clone() for name, tensor in everything.items()}]
    o = run.optimizer
    groups = [{"params": [p for n, p in named.items() if decays(n, p) == d], "weight_decay": o.weight_decay * d} for d in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(o.beta1, o.beta2), eps=o.eps)
    losses = []
    for step in range(STEPS):
        for name, tensor in everything.items():
            version = version_read(run.pipeline.schedule, step, stage_of(name), stages, vertical_sync=vertical_sync)
            tensor.data.copy_(history[version][name])
        tokens = batch(step)
        output = model(tokens[:, :-1], Context.of(tokens[:, :-1], seed=run.train.seed, step=step))
        loss = F.cross_entropy(output.logits_BLV.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for name, tensor in everything.items():
            tensor.data.copy_(history[-1][name])
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        move_biases(model, {report.layer: report.load_E for report in output.layers})
        history.append({name: tensor.detach().clone() for name, tensor in everything.items()})
    layouts, one = lay_out(model), Mesh.of(Degrees())
    parts = (p for name, tensor in named.items() for p in pieces(global_name(name), layouts[name], one, tensor.detach()))
    return losses, {p.name: p.tensor.clone() for p in parts}


def streamed(case: Case, cuts: tuple[int, ...] = (STEPS,), **sections: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train with the pipeline runtime, which drains after each number of steps in `cuts`. Return (losses, final weights)."""

    def work(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        merged = {name: DELAYED.get(name, {}) | sections.get(name, {}) for name in DELAYED | sections}
        tiny = start(case, rank, **merged)
        losses, done = [], 0
        for count in cuts:
            first = done
            found = stream(
                tiny.executor,
                [tiny.shard.of_batch(batch(done + n)) for n in range(count)],
                schedule=schedule_of(tiny.run, batches=count),
                shard=tiny.shard,
                world=tiny.mesh.axis("world"),
                seed=tiny.run.train.seed,
                step=done,
                rate=lambda n, first=first: RATES[first + n],  # type: ignore[misc]
            )
            losses += [numbers.loss for numbers, _ in found]
            done += count
        owned = {name: layout for name, layout in tiny.engine.layouts.items() if layout.is_owner(tiny.mesh)}
        weights = {name: tiny.model.get_parameter(name).detach() for name in owned}
        parts = (p for name, layout in owned.items() for p in pieces(global_name(name), layout, tiny.mesh, weights[name]))
        return losses, {p.name: p.tensor.clone() for p in parts}

    ranks = run_on_ranks(work, case.world, timeout_s=60)
    assert all(losses == ranks[0][0] for losses, _ in ranks)
    return ranks[0][0], {name: tensor for _, weights in ranks for name, tensor in weights.items()}


def case_of(schedule: str, *, model: str, pp: int, world: int, microbatches: int, ep: int = 1, recompute: str = "none") -> Case:
    return Case(model, "ddp", world, ep, microbatches, "fp32", recompute, pp=pp, schedule=schedule, layers=LAYERS)


def assert_same(got: tuple[list[float], dict[str, Tensor]], want: tuple[list[float], dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert got[1].keys() == want[1].keys()
    for name, weight in want[1].items():
        torch.testing.assert_close(got[1][name], weight, rtol=1e-4, atol=1e-5 * weight.abs().max().item())


@pytest.mark.parametrize(
    ("pp", "model", "vertical_sync", "recompute"), [(2, "dense", False, "full"), (3, "gshard", False, "none"), (3, "gshard", True, "full")]
)
def test_pipedream_has_the_losses_of_its_delayed_twin(pp: int, model: str, vertical_sync: bool, recompute: str) -> None:
    case = case_of("pipedream", model=model, pp=pp, world=pp, microbatches=1, recompute=recompute)
    settings = {"pipeline": {"vertical_sync": vertical_sync}}
    want = twin(recipe(case, **settings), stages=pp, vertical_sync=vertical_sync)
    assert_same(streamed(case, **settings), want)


@pytest.mark.parametrize(("pp", "world", "ep", "model"), [(2, 2, 1, "dense"), (3, 3, 1, "switch"), (2, 4, 2, "gshard")])
def test_two_bw_has_the_losses_of_its_delayed_twin(pp: int, world: int, ep: int, model: str) -> None:
    """2BW with 3 micro-batches an update, also with data and expert parallelism, equals the reference."""
    case = case_of("two_bw", model=model, pp=pp, world=world, microbatches=3, ep=ep)
    assert_same(streamed(case), twin(recipe(case), stages=pp))


def test_a_selection_bias_is_as_old_as_the_weights_it_goes_with() -> None:
    case = case_of("two_bw", model="deepseek", pp=2, world=2, microbatches=3)
    assert_same(streamed(case), twin(recipe(case), stages=2))


def test_the_delay_matters_and_a_drain_forgets_it() -> None:
    """PipeDream drained after every step has the losses of training without delay; without these drains its losses differ."""
    case = case_of("pipedream", model="dense", pp=3, world=3, microbatches=1)
    plain = twin(recipe(case), stages=1)[0]
    delayed, drained = streamed(case)[0], streamed(case, (1,) * STEPS)[0]
    assert drained == pytest.approx(plain, rel=1e-5)
    assert max(abs(a - b) / b for a, b in zip(delayed, plain, strict=True)) > 1e-4  # ten times the tolerance of equal losses
    half = streamed(case, (3, 4))[0]
    assert half[:3] == pytest.approx(delayed[:3], rel=1e-6)


def test_versions_keep_what_is_still_read_and_no_more() -> None:
    """PipeDream's first of three stages keeps at most three versions of its weights; a backward pass reads its forward pass's version."""
    order = [
        Action(Op.F, 0, 0), Action(Op.F, 0, 1), Action(Op.F, 0, 2), Action(Op.B, 0, 0), Action(Op.U, 0, version=1),
        Action(Op.F, 0, 3, 1), Action(Op.B, 0, 1), Action(Op.U, 0, version=2), Action(Op.B, 0, 2), Action(Op.U, 0, version=3),
        Action(Op.B, 0, 3, 1), Action(Op.U, 0, version=4),
    ]  # fmt: skip
    weight = torch.nn.Parameter(torch.zeros(2))
    versions, seen, counts = Versions([weight], order, 0), [], []
    for action in order:
        if action.op is Op.U:
            versions.update(action.version, lambda: weight.data.add_(1.0))
        else:
            with versions.reading(action.version):
                seen.append(weight[0].item())
        counts.append(versions.count)
    assert seen == [0, 0, 0, 0, 1, 0, 0, 1]
    assert counts == [1, 1, 1, 1, 2, 2, 2, 3, 2, 2, 1, 1] and weight[0].item() == 4


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"pipeline": {"schedule": "pipedream", "microbatches": 2}}, "pipeline.microbatches"),
        ({"sharding": {"kind": "zero"}}, "sharding.kind"),
        ({"precision": {"compute": "fp16", "loss_scale": 8.0}}, "precision.compute"),
        ({"optimizer": {"clip_norm": 1.0}}, "optimizer.clip_norm"),
        ({"model": {"tied_embeddings": True}}, "model.tied_embeddings"),
        ({"pipeline": {"microbatches": 1}}, "pipeline.microbatches"),
    ],
)
def test_what_cannot_be_right_without_a_drain_is_refused(sections: dict[str, Any], what: str) -> None:
    case = case_of("two_bw", model="switch", pp=2, world=2, microbatches=2)
    with pytest.raises(BadInput, match=rf"^{what.replace('.', '[.]')}: got") as refused:
        check_run(recipe(case, **sections), 2)
    assert "\n" not in str(refused.value)


def test_models_layers_are_all_there() -> None:
    """The stages together hold all layers, including all MoE layers."""
    run = recipe(case_of("two_bw", model="switch", pp=3, world=3, microbatches=3))
    model = Transformer(run.model, run.experts, run.router)
    held = [layer for part in layers_of(run, schedule_of(run)) for layer in part]
    assert held == list(range(LAYERS)) and {layer.layer for layer in moe_layers(model)} <= set(held)
