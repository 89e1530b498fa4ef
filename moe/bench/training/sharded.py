"""Names the kinds of data parallelism that are measured, and starts training with one.

ddp, fsdp, zero1, zero2, zero3             engines of this project: values of the recipe's section `sharding`
zero2+cpu, zero3+nvme ...                  the same with optimizer states on the host or on disk; +cpu-all, +nvme-all: also parameters
deepspeed1, deepspeed2, deepspeed3         peers: DeepSpeed's own engine, in bf16 with fp32 master weights, as in the ZeRO paper
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe.calibrate.own_step import Peer, Training
from moe.checks.sharding import check_sharding
from moe.parallelize.engines import optimizer_of
from moe.plan.job.states import FP32, FP32_AND_COPY, MIXED, MIXED_FP32_GRADIENTS, Storage
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.verify.cases import sharding_of
from parallel.data.kinds import ENGINES, planned
from parallel.errors import BadInput, did_you_mean
from parallel.mesh.layout import Layout
from parallel.process.extensions import use_extensions_dir
from parallel.process.process import World

PLAIN = planned()  # names of the kinds that are measured by default: engines of this project, without offload


@dataclass(frozen=True)
class ShardedKind:
    """A kind of data parallelism. stage: ZeRO stage, 0 to 3 (moe/plan/job/states.py). sharding: the recipe's section `sharding`; {} for
    DeepSpeed's own engine."""

    name: str
    stage: int
    sharding: dict[str, Any]

    def storage(self, precision: str) -> Storage:
        """Return the bytes of one parameter's weight, gradient and optimizer states, unsharded. precision: fp32 or bf16."""
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
        """Whether this is DeepSpeed's own engine, used without this project's engines."""
        return not self.sharding

    @property
    def place(self) -> str:
        """Place of the optimizer states: device, cpu or nvme."""
        return str(self.sharding.get("offload", {}).get("optimizer", "device"))

    @property
    def moves_parameters(self) -> bool:
        return bool(self.sharding.get("offload", {}).get("parameters", "none") != "none")

    def with_path(self, folder: str) -> ShardedKind:
        """Return this kind with `folder` as the folder of offloaded files; unchanged if it does not offload to disk."""
        if self.place != "nvme":
            return self
        return replace(self, sharding=self.sharding | {"offload": self.sharding["offload"] | {"path": folder}})


def kind_of(name: str) -> ShardedKind:
    """Return the kind with this name. Raises BadInput for an unknown name."""
    if name in ("deepspeed1", "deepspeed2", "deepspeed3"):
        return ShardedKind(name, int(name[-1]), {})
    found = re.fullmatch(r"(\w+)(\+(cpu|nvme)(-all)?)?", name)
    if not found or found[1] not in ENGINES or ENGINES[found[1]].threads:
        near = did_you_mean(name, list(PLAIN))
        fix = f"did you mean {near}?" if near else f"--kinds {','.join(PLAIN)}"
        needed = f"one of {', '.join(PLAIN)}, with +cpu, +nvme, +cpu-all or +nvme-all if the kind can offload"
        raise BadInput("--kinds", got=name, needed=needed, fix=fix)
    return ShardedKind(name, ENGINES[found[1]].stage, sharding_of(name))


def kinds_of(names: str | None) -> list[ShardedKind]:
    """Return the kinds with these comma-separated names; None: all without offload. Raises BadInput for an unknown or impossible kind."""
    kinds = [kind_of(name) for name in (names.split(",") if names is not None else PLAIN)]
    for kind in kinds:
        try:
            check_sharding(build_run({"sharding": kind.with_path(tempfile.gettempdir()).sharding}))
        except BadInput as refused:
            needed = f"a kind that a recipe can have ({refused.what}: {refused.needed})"
            raise BadInput("--kinds", got=kind.name, needed=needed, fix=f"--kinds {','.join(PLAIN)}") from refused
    return kinds


def load_engines(kinds: list[ShardedKind]) -> None:
    """Import the modules of these kinds. Called once, before ranks are forked, so that not every rank imports them."""
    if any(kind.by_deepspeed for kind in kinds):
        from parallel.data.deepspeed import load_deepspeed

        use_extensions_dir()
        load_deepspeed()
    if any(kind.sharding.get("kind") == "fsdp" for kind in kinds):
        importlib.import_module("parallel.data.fsdp")  # before ranks measure memory, which would otherwise include the module's 40 MB


def start(kind: ShardedKind, values: dict[str, Any], rank: int, ranks: int) -> Training:
    """Start training on this rank with a recipe (section -> key -> value): with DeepSpeed's own engine if `kind.is_peer`, else with
    an engine of this project. Collective."""
    peer = partial(DeepSpeedAlone, stage=kind.stage) if kind.is_peer else None
    world = World(rank, ranks, place="cpu")
    return Training.start(values, world, peer=cast(Peer | None, peer))  # DeepSpeedAlone is no Engine, but has the methods that a step calls


def adamw_of(run: Run, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the recipe's AdamW, with its learning rate, over (name, parameter) pairs."""
    rule = optimizer_of(run.optimizer)
    optimizer = rule.build(rule.groups(parameters))
    for group in optimizer.param_groups:
        group["lr"] = run.optimizer.lr
    return optimizer


class DeepSpeedAlone:
    """DeepSpeed's own engine around the model in bf16. It averages gradients over ranks and does not clip them."""

    pipeline = None

    def __init__(self, run: Run, model: nn.Module, layouts: dict[str, Layout], *, stage: int) -> None:
        from parallel.data.deepspeed import start_deepspeed
        from parallel.data.zero import BUCKET_ELEMENTS

        self.module, self.layouts = model.to(torch.bfloat16), layouts
        zero = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
        settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": run.pipeline.microbatches}
        settings |= {"bf16": {"enabled": True}, "zero_optimization": zero}
        optimizer = adamw_of(run, model.named_parameters())
        package = start_deepspeed(torch.device("cpu"))
        self.engine, *_ = package.initialize(model=model, optimizer=optimizer, dist_init_required=False, config=settings)

    def forward(self, *args: Any, last: bool) -> Any:
        return self.engine(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the micro-batch; DeepSpeed updates only at the last one

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for parts in self.engine.optimizer.averaged_gradients.values():
            yield from (("dense", part) for part in parts or ())

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()


def tokens_of(rank: int, *, sequences: int, length: int, step: int = 0) -> Tensor:
    """Return random token ids below 256 for one rank and step, int64 [sequences, length + 1]."""
    return torch.randint(256, (sequences, length + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
