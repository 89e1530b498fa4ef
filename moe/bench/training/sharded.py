"""Kinds of data parallelism by short names, and how to start them.

ddp, fsdp, zero1, zero2, zero3             through the recipe's `sharding`
zero2+cpu, zero3+nvme ...                  with optimizer states on the host or disk; +cpu-all, +nvme-all: parameters too
deepspeed1, deepspeed2, deepspeed3         peers: DeepSpeed's engine alone, in bf16 with fp32 master weights, as in the ZeRO paper
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe.checks.sharding import check_sharding
from moe.checks.together import check_run
from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.parallelize.build import build
from moe.parallelize.engines import optimizer_of, prepare, start_engine
from moe.plan.job.states import FP32, FP32_AND_COPY, MIXED, MIXED_FP32_GRADIENTS, Storage
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import Single
from moe.train.parts.numbers import Numbers
from moe.verify.cases import sharding_of
from parallel.data.engine import Engine
from parallel.data.kinds.catalog import ENGINES, planned
from parallel.errors import BadInput, did_you_mean
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.extensions import use_extensions_dir
from parallel.process.process import World

CPU = torch.device("cpu")
PLAIN = planned()


@dataclass(frozen=True)
class ShardedKind:
    """A kind of data parallelism. stage: ZeRO stage, 0 to 3 (moe/plan/job/states.py). sharding: the recipe's section; empty for peers."""

    name: str
    stage: int
    sharding: dict[str, Any]

    def storage(self, precision: str) -> Storage:
        """Return the bytes of a parameter's weight, gradient and optimizer states before sharding. precision: fp32 or bf16."""
        if self.is_peer:
            return MIXED
        if self.sharding["kind"] != "zero":
            return FP32
        return FP32_AND_COPY if precision == "fp32" else MIXED_FP32_GRADIENTS

    @property
    def by_deepspeed(self) -> bool:
        return self.is_peer or bool(self.sharding["kind"] == "zero")

    @property
    def is_peer(self) -> bool:
        """Whether this is DeepSpeed's engine alone, without the recipe."""
        return not self.sharding

    @property
    def place(self) -> str:
        """Where optimizer states are: device, cpu or nvme."""
        return str(self.sharding.get("offload", {}).get("optimizer", "device"))

    @property
    def moves_parameters(self) -> bool:
        return bool(self.sharding.get("offload", {}).get("parameters", "none") != "none")

    def with_path(self, folder: str) -> ShardedKind:
        """Return the kind; if it offloads to disk, with this folder."""
        if self.place != "nvme":
            return self
        return replace(self, sharding=self.sharding | {"offload": self.sharding["offload"] | {"path": folder}})


def kind_of(name: str) -> ShardedKind:
    """Return the kind with this name. Raises BadInput for an unknown one."""
    if name in ("deepspeed1", "deepspeed2", "deepspeed3"):
        return ShardedKind(name, int(name[-1]), {})
    found = re.fullmatch(r"(\w+)(\+(cpu|nvme)(-all)?)?", name)
    if not found or found[1] not in ENGINES or ENGINES[found[1]].threads:
        near = did_you_mean(name, list(PLAIN))
        fix = f"did you mean {near}?" if near else f"--kinds {','.join(PLAIN)}"
        raise BadInput("--kinds", got=name, needed=f"of {', '.join(PLAIN)}, and after some +cpu, +nvme, +cpu-all, +nvme-all", fix=fix)
    return ShardedKind(name, ENGINES[found[1]].stage, sharding_of(name))


def kinds_of(names: str | None) -> list[ShardedKind]:
    """Return the kinds with these comma-separated names; None: all without offload. Raises BadInput for an unknown or refused kind."""
    kinds = [kind_of(name) for name in (names.split(",") if names is not None else PLAIN)]
    for kind in kinds:
        try:
            check_sharding(build_run({"sharding": kind.with_path(tempfile.gettempdir()).sharding}))
        except BadInput as refused:
            needed = f"what a recipe may say ({refused.what}: {refused.needed})"
            raise BadInput("--kinds", got=kind.name, needed=needed, fix=f"--kinds {','.join(PLAIN)}") from refused
    return kinds


def load_engines(kinds: list[ShardedKind]) -> None:
    """Import the modules of these kinds once, before ranks are forked."""
    if any(kind.by_deepspeed for kind in kinds):
        from parallel.data.deepspeed import load_deepspeed

        use_extensions_dir()
        load_deepspeed()
    if any(kind.sharding.get("kind") == "fsdp" for kind in kinds):
        importlib.import_module("parallel.data.fsdp")  # imported now, so that its 40 MB of modules do not count as the model's memory


@dataclass(frozen=True)
class Started:
    """An engine with its model, on running ranks."""

    run: Run
    mesh: Mesh
    model: Transformer
    layouts: dict[str, Layout]
    engine: Engine

    def accumulate(self, tokens: Tensor, *, step: int, microbatches: int = 1) -> Numbers:
        """Run this rank's tokens [sequences, length + 1] forward and backward, as in the trainer."""
        shard = TokenShard.holding(self.mesh, tokens.shape)
        return accumulate(Single(self.engine), tokens, shard=shard, microbatches=microbatches, seed=0, step=step)

    def step(self, tokens: Tensor, *, step: int) -> Numbers:
        """Take a training step with this rank's tokens [sequences, length + 1], as in the trainer."""
        numbers, o = self.accumulate(tokens, step=step), self.run.optimizer
        world, scale = self.mesh.axis("world"), LossScale.of("none")
        finish(self.engine, numbers, world=world, scale=scale, lr=o.lr, clip_norm=o.clip_norm, device=CPU)
        return numbers


def start(kind: ShardedKind, values: dict[str, Any], rank: int, ranks: int) -> Started:
    """Return the recipe's model in its engine, as in the trainer; for a peer, in the peer's engine. Collective."""
    run = check_run(build_run(values), ranks)
    mesh = process.connect(run.mesh_degrees(), World(rank, ranks))
    prepare(run, print)
    model, layouts = build(run, mesh, device=CPU)
    if kind.is_peer:
        alone = DeepSpeedAlone(run, model.to(torch.bfloat16), layouts, stage=kind.stage)
        return Started(run, mesh, model, layouts, cast(Engine, alone))  # it has the methods that a training step calls
    return Started(run, mesh, model, layouts, start_engine(run, model, layouts, mesh))


def adamw_of(run: Run, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the recipe's AdamW over parameters by name, at its learning rate."""
    rule = optimizer_of(run.optimizer)
    optimizer = rule.build(rule.groups(parameters))
    for group in optimizer.param_groups:
        group["lr"] = run.optimizer.lr
    return optimizer


class DeepSpeedAlone:
    """DeepSpeed's engine with its own settings around a bf16 model. Averages gradients and does not clip them."""

    pipeline = None

    def __init__(self, run: Run, model: nn.Module, layouts: dict[str, Layout], *, stage: int) -> None:
        from parallel.data.deepspeed import start_deepspeed
        from parallel.data.zero import BUCKET_ELEMENTS

        self.module, self.layouts = model, layouts
        zero = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
        settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": run.pipeline.microbatches}
        settings |= {"bf16": {"enabled": True}, "zero_optimization": zero}
        optimizer = adamw_of(run, model.named_parameters())
        self.engine, *_ = start_deepspeed().initialize(model=model, optimizer=optimizer, dist_init_required=False, config=settings)

    def forward(self, *args: Any, last: bool) -> Any:
        return self.engine(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # only counts the micro-batch, if it is not the last one

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for parts in self.engine.optimizer.averaged_gradients.values():
            yield from (("dense", part) for part in parts or ())

    def scale_gradients(self, factor: float) -> None:
        pass

    def step(self, lr: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()


def tokens_of(rank: int, *, sequences: int, length: int, step: int = 0) -> Tensor:
    """Return random byte tokens of a rank and step, int64 [sequences, length + 1]."""
    return torch.randint(256, (sequences, length + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
