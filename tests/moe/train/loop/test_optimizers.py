"""Muon, Adafactor and SGD on their layouts: weights and states equal one process's, checkpoints are bitwise the same on another layout,
and their bytes are the planner's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from moe.checks.together import check_run
from moe.parallelize.build import build, whole_layouts
from moe.parallelize.engines import optimizer_of
from moe.parallelize.sequence import shard_of
from moe.plan.job.of_recipe import optimizer_bytes, state_bytes, storage_of
from moe.plan.machine.program import OWN
from moe.recipe.changes import check_moments
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import start_executor
from moe.train.parts.learning_rate import learning_rate
from moe.train.start import state
from moe.verify.plain.batches import batch
from parallel.errors import BadInput
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.optim import muon
from parallel.process import process
from parallel.process.process import World
from parallel.store.stored import Reader
from tests.support.ranks import run_on_ranks

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "model": {"num_layers": 2, "d_model": 12, "num_heads": 2, "d_ff": 20, "moe_every": 2, "max_length": 10, "ffn": "swiglu"},
    "experts": {"num_experts": 4, "d_ff": 16, "shared": 1, "shared_gate": True},
    "router": {"preset": "mixtral", "group": "sequence", "balance_scope": "sequence"},
    "train": {"global_batch": 12, "eval_sequences": 12},
}
KINDS: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon", "lr": 0.02},
    "adafactor": {"kind": "adafactor", "lr": 0.05},
    "sgd": {"kind": "sgd", "lr": 0.3},
}


def trained(values: dict[str, Any], folder: Path, steps: int, found: Path | None = None, mesh: Mesh | None = None) -> list[float]:
    """Train up to step `steps`, from the beginning or from the checkpoint in `found`; save in `folder`. Return each step's loss."""
    run = check_run(Run.model_validate(BASE | values), 1 if mesh is None else mesh.axis("world").size)
    mesh = Mesh.of(run.mesh_degrees()) if mesh is None else mesh
    model, layouts = build(run, mesh, device=CPU)
    executor = start_executor(run, model, layouts, mesh)
    scale, counters, recipe = LossScale.of(run.precision.loss_scale), state.Counters(), run.model_dump(mode="json")
    if found is not None:
        held = state.find(found, mesh, log=lambda _: None)
        told: dict[str, Any] = {"counters": counters, "scale": scale, "data": "drawn", "recipe": recipe, "log": lambda _: None}
        whole = whole_layouts(run) if run.degrees.pp > 1 else None
        assert state.resume(held, executor.engine, mesh, whole=whole, **told)
    losses, shard = [], shard_of(run, mesh, 12)
    for step in range(counters.step, steps):
        tokens = shard.of_batch(batch(step, length=run.model.read_length, size=12))
        micro = run.pipeline.microbatches
        numbers = accumulate(executor, tokens, shard=shard, microbatches=micro, seed=0, step=step, loss_scale=scale.value)
        finish(executor.engine, numbers, world=mesh.axis("world"), scale=scale, lr=run.optimizer.lr, clip_norm=1.0, device=CPU)
        losses.append(numbers.loss)
    counters.step = counters.updates = steps
    state.save(folder, executor.engine, mesh, counters=counters, scale=scale, recipe=recipe, tokenizer={}, data="drawn", keep=9)
    return losses


def on_ranks(rank: int, ranks: int, values: dict[str, Any], folder: Path) -> list[float]:
    """Train 3 steps, saved in `ranks`; then load one process's checkpoint in `alone` and save it in `again`. Return the losses."""
    run = check_run(Run.model_validate(BASE | values), ranks)
    mesh = process.connect(run.mesh_degrees(), World(rank, ranks))
    losses = trained(values, folder / "ranks", 3, mesh=mesh)
    assert trained(values, folder / "again", 3, folder / "alone", mesh) == []
    return losses


def tensors(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Return all whole tensors of the newest checkpoint, by (parameter, kind)."""
    reader = Reader(max(folder.glob("step-*"), key=lambda path: int(path.name[5:])))
    shapes = {(name, kind): reader.names(kind)[name] for name, kind in reader.entries}
    return {(name, kind): reader.region(name, kind, tuple(slice(0, n) for n in shape)) for (name, kind), shape in shapes.items()}


FSDP = {"kind": "fsdp"}
HALVES: dict[str, Any] = {
    "model": BASE["model"] | {"kind": "encoder_decoder", "num_layers": 3, "encoder_layers": 1, "positions": "t5", "vocab_size": 262},
    "data": {"objective": "span_corruption"},
}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("muon", 2, {"degrees": {"dp": 2, "ep": 2}}),
    ("muon", 4, {"degrees": {"dp": 2, "tp": 2, "ep": 2, "etp": 2}}),
    ("muon", 4, {"degrees": {"dp": 2, "tp": 2, "ep": 1, "etp": 2}, "sharding": {"kind": "zero", "stage": 1}}),
    ("muon", 3, {"degrees": {"dp": 3, "ep": 1}}),
    ("muon", 2, {"degrees": {"dp": 1, "pp": 2, "ep": 1}, "pipeline": {"microbatches": 2}}),
    ("adafactor", 2, {"degrees": {"dp": 2, "ep": 2}}),
    ("adafactor", 4, {"degrees": {"dp": 2, "tp": 2, "ep": 1, "etp": 2}, "sharding": FSDP}),
    ("sgd", 2, {"degrees": {"dp": 2, "ep": 1}, "sharding": FSDP}),
    ("sgd", 2, HALVES | {"degrees": {"dp": 1, "tp": 2, "ep": 2}}),
]


@pytest.mark.parametrize(("kind", "world", "layout"), LAYOUTS)
def test_a_layout_trains_like_one_process_and_loads_its_checkpoint(kind: str, world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    """Losses, weights and states agree after three steps; a checkpoint of one process, loaded and saved by the ranks, is bitwise equal.

    Muon's tolerance is wider: its Newton-Schulz iteration enlarges rounding errors up to 3.44^5 = 480 times.
    """
    model = {section: layout[section] for section in ("model", "data") if section in layout}
    plain = trained(model | {"optimizer": KINDS[kind]}, tmp_path / "alone", 3)
    for losses in run_on_ranks(on_ranks, world, world, layout | {"optimizer": KINDS[kind]}, tmp_path, timeout_s=100):
        assert losses == pytest.approx(plain, rel=1e-5)
    expected, found, again = (tensors(tmp_path / name) for name in ("alone", "ranks", "again"))
    assert expected.keys() == found.keys() == again.keys()
    bound = {"rtol": 2e-3, "atol": 2e-5} if kind == "muon" else {"rtol": 2e-4, "atol": 2e-6}
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, **bound, msg=lambda text, key=key: f"{key}: {text}")
        assert torch.equal(again[key], tensor), key


FP16, BF16 = {"compute": "fp16", "loss_scale": 1024.0}, {"compute": "bf16", "master": "bf16"}


@pytest.mark.parametrize(("kind", "precision"), [("muon", {}), ("muon", BF16), ("adafactor", FP16), ("adafactor", BF16), ("sgd", {})])
def test_a_run_that_is_resumed_goes_on_to_the_bit(kind: str, precision: dict[str, Any], tmp_path: Path) -> None:
    values = {"optimizer": KINDS[kind], "precision": precision}
    whole = trained(values, tmp_path / "whole", 5)
    first = trained(values, tmp_path / "first", 3)
    assert first + trained(values, tmp_path / "second", 5, tmp_path / "first") == whole and whole[-1] < whole[0]
    expected = tensors(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors(tmp_path / "second").items())


def _in_bf16(rank: int, folder: Path) -> None:
    for name, sharding in {"ddp": {}, "zero": {"kind": "zero", "stage": 1}}.items():
        values = {"degrees": {"dp": 2, "ep": 1}, "model": BASE["model"] | {"moe_every": 0}, "precision": BF16, "sharding": sharding}
        run = check_run(Run.model_validate(BASE | values), 2)
        trained(values, folder / name, 3, mesh=process.connect(run.mesh_degrees(), World(rank, 2)))


def test_master_weights_in_bf16_take_the_same_steps_with_zero_as_with_ddp(tmp_path: Path) -> None:
    run_on_ranks(_in_bf16, 2, tmp_path, timeout_s=100)
    found = tensors(tmp_path / "zero")
    for key, tensor in tensors(tmp_path / "ddp").items():
        allowed = 2 * torch.finfo(torch.bfloat16).eps * float(tensor.abs().max())
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=allowed, msg=lambda text, key=key: f"{key}: {text}")


PLANNED: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": False, "positions": "t5", "num_kv_heads": 1, "ffn": "gelu", "moe_every": 0},
    {"latent": {"key_rank": 7, "rotary_size": 4, "value_size": 5}},
    {"latent": {"key_rank": 7, "query_rank": 9, "rotary_size": 2}, "moe_every": 0},
]


@pytest.mark.parametrize("kind", ["adamw", *KINDS])
@pytest.mark.parametrize("more", [*PLANNED, HALVES["model"]], ids=["sparse", "dense", "latents", "latents of queries", "halves"])
def test_the_planner_counts_the_bytes_that_an_optimizer_keeps(kind: str, more: dict[str, Any]) -> None:
    model = BASE["model"] | more
    data = HALVES["data"] if "kind" in more else {}
    run = check_run(Run.model_validate(BASE | {"model": model, "optimizer": {"kind": kind}, "data": data}), 1)
    module, layouts = build(run, Mesh.of(run.mesh_degrees()), device=CPU)
    rule, held = optimizer_of(run.optimizer), {"dense": [0, 0], "expert": [0, 0]}
    for name, parameter in module.named_parameters():
        of = held["expert" if layouts[name].family == "expert" else "dense"]
        for dim in rule.kept(name, parameter.ndim).values():
            shape = parameter.shape if dim is None else layouts[name].without(dim).shape
            of[0] += 4 * torch.Size(shape).numel()
        of[1] += parameter.numel()
    found = optimizer_bytes(run)
    for (kept, elements), each in zip(held.values(), found, strict=True):
        assert each * elements == pytest.approx(kept) or not elements
    assert state_bytes(run) == pytest.approx(sum(8 * elements + kept for kept, elements in held.values()))  # fp32 weights and gradients


@pytest.mark.parametrize("more", [*PLANNED, HALVES["model"]], ids=["sparse", "dense", "latents", "latents of queries", "halves"])
def test_the_planner_counts_the_products_of_muons_update(more: dict[str, Any]) -> None:
    data = HALVES["data"] if "kind" in more else {}
    run = check_run(Run.model_validate(BASE | {"model": BASE["model"] | more, "optimizer": KINDS["muon"], "data": data}), 1)
    module, layouts = build(run, Mesh.of(run.mesh_degrees()), device=CPU)
    rule, elements = optimizer_of(run.optimizer), {"dense": 0, "expert": 0}
    for name, parameter in module.named_parameters():
        parameter.grad = torch.randn_like(parameter)
        elements["expert" if layouts[name].family == "expert" else "dense"] += parameter.numel()
    with FlopCounterMode(display=False) as counted:
        rule.build(rule.groups(module.named_parameters())).step()
    flops = storage_of(run).update.flops
    found = sum(each * number for each, number in zip(flops, elements.values(), strict=True))
    assert found == pytest.approx(counted.get_total_flops())


@pytest.mark.parametrize(("kind", "reads"), [("sgd", 1), ("muon", 2), ("adafactor", 2)])
def test_the_planner_counts_the_bytes_that_an_update_moves(kind: str, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """reads: how often the update reads the gradient."""
    without_decay = KINDS[kind] | {"weight_decay": 0.0}
    run = Run.model_validate(BASE | {"optimizer": without_decay})
    rule, weight = optimizer_of(run.optimizer), nn.Parameter(torch.ones(400, 300))
    weight.grad = torch.ones_like(weight)
    monkeypatch.setattr(muon, "ITERATIONS", 0)
    optimizer = rule.build(rule.groups([("layers.0.attention.q.weight", weight)]))
    optimizer.step()
    with Moved() as counted:
        optimizer.step()
    moved = OWN.updates.moved(replace(storage_of(run).update, own=(1.0, 1.0)))[0]  # the weight is a matrix
    assert counted.bytes / weight.numel() == pytest.approx(moved + 4 * reads, rel=0.01)


class Moved(TorchDispatchMode):
    """Counts the bytes of the inputs and results of each operator that computes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.view_copy not in func.tags and not func.is_view and "empty" not in func._opname:
            self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, made)) if isinstance(t, Tensor))
        return made


def test_another_optimizers_state_is_refused() -> None:
    runs = {kind: Run.model_validate(BASE | {"optimizer": {"kind": kind}}) for kind in ("adamw", "kfac", *KINDS)}
    for before, after in (("adamw", "muon"), ("muon", "adafactor"), ("sgd", "kfac")):
        with pytest.raises(
            BadInput, match=f"optimizer.kind: got {after}, needed {before}, whose optimizer states step-3 has; fix: add --optimizer.kind"
        ):
            check_moments(runs[before], runs[after], where="step-3")
    check_moments(runs["adamw"], runs["kfac"], where="step-3")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"kind": "sgd", "muon": {"momentum": 0.9}}}, "optimizer.muon.momentum: got 0.9 with optimizer.kind=sgd"),
    ({"optimizer": {"kind": "muon"}, "sharding": {"kind": "zero", "engine": "deepspeed"}}, "needed adamw: .* sharding.engine to auto"),
    ({"optimizer": {"kind": "adafactor"}, "tiling": {"head": 2}}, "tiling.head: got 2 with optimizer.kind=adafactor, needed 1"),
    ({"optimizer": {"kind": "muon"}, "tiling": {"ffn": 2}}, "tiling.ffn: got 2 with optimizer.kind=muon, needed 1: a tile is a part"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED)
def test_what_an_optimizer_cannot_do_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        check_run(Run.model_validate(BASE | values), 2)
    assert "fix: set " in str(refused.value) and "\n" not in str(refused.value)


def test_rates_by_name() -> None:
    settings = Run.model_validate({"optimizer": {"lr": 2.0, "warmup_steps": 4, "min_lr_share": 0.25, "schedule": "linear"}}).optimizer
    assert [learning_rate(n, settings, total=8) for n in (0, 3, 4, 6, 8, 99)] == [0.5, 2.0, 2.0, 1.25, 0.5, 0.5]
    root = settings.model_copy(update={"schedule": "inverse_sqrt"})
    assert [learning_rate(n, root, total=8) for n in (0, 3, 15, 63)] == [0.5, 2.0, 1.0, 0.5]
