"""Weights, gradients and optimizer states that each kind of data parallelism can shard and offload. All else is refused in one line.

kind zero   stage 0  nothing is sharded: DDP          offload: nothing
            1, 2     by DeepSpeed                     optimizer: cpu
            3        by DeepSpeed, or FSDP            optimizer, parameters: cpu or nvme (DeepSpeed)

The checks run before torch is imported.
"""

from __future__ import annotations

import tempfile

from moe.recipe.sections import Offload, Run, Sharding
from parallel.errors import BadInput, did_you_mean
from parallel.process.extensions import missing_for_nvme
from parallel.store.files import user_path


def check_sharding(run: Run) -> None:
    """Refuse values that the recipe's kind and stage of sharding cannot carry out. Raises BadInput."""
    if run.sharding.kind == "zero":
        _check_zero(run)
    else:
        _check_not_zero(run.sharding)
    _check_fsdp(run.sharding)
    _check_disk(run.sharding.offload)
    if run.train.save_mode == "async" and "nvme" in (run.sharding.offload.optimizer, run.sharding.offload.parameters):
        raise BadInput(
            "train.save_mode",
            got="async with states on nvme",
            needed="sync: asynchronous saving copies all states to host memory at once",
            fix="set train.save_mode to sync",
        )


def _check_not_zero(s: Sharding) -> None:
    """Refuse zero's keys with another kind: they would have no effect."""
    if (idle := s.changed("stage", "engine")) is not None:
        raise BadInput(
            f"sharding.{idle}",
            got=f"{getattr(s, idle)} with sharding.kind={s.kind}",
            needed="sharding.kind zero",
            fix=f"set sharding.kind to zero, or leave sharding.{idle} out",
        )
    for key in ("optimizer", "parameters"):
        place = getattr(s.offload, key)
        if place != "none":
            raise BadInput(
                f"sharding.offload.{key}",
                got=f"{place} with sharding.kind={s.kind}",
                needed="sharding.kind zero: others keep their states on the device",
                fix=f"set sharding.kind to zero and sharding.stage to {1 if (key, place) == ('optimizer', 'cpu') else 3}",
            )


def _check_fsdp(s: Sharding) -> None:
    """Refuse fsdp's keys with another kind: they would have no effect."""
    if s.kind == "fsdp" or (s.kind == "zero" and s.stage == 3 and s.engine == "fsdp"):
        return
    if (key := s.changed("reshard", "prefetch")) is not None:
        raise BadInput(
            f"sharding.{key}",
            got=f"{str(getattr(s, key)).lower()} with sharding.kind={s.kind}",
            needed="sharding.kind fsdp, which gathers weights block by block",
            fix=f"set sharding.kind to fsdp, or leave sharding.{key} out",
        )


def _check_zero(run: Run) -> None:
    s, o = run.sharding, run.sharding.offload
    if s.engine == "fsdp" and s.stage != 3:
        raise BadInput(
            "sharding.engine", got=f"fsdp with sharding.stage={s.stage}", needed="stage 3, which is what FSDP does", fix="set it to auto"
        )
    if s.engine == "deepspeed" and s.stage == 0:
        raise BadInput(
            "sharding.engine",
            got="deepspeed with sharding.stage=0",
            needed="auto: stage 0 shards nothing, which is data parallelism as torch's DDP does it",
            fix="set sharding.engine to auto, or sharding.stage to 1, 2 or 3",
        )
    if run.precision.master != "fp32" and s.stage > 0:
        raise BadInput(
            "precision.master",
            got=f"{run.precision.master} with sharding.kind=zero",
            needed="fp32: its engine keeps fp32 master weights in the partitions, in addition to working weights in precision.compute",
            fix="set precision.master to fp32, or sharding.kind to ddp",
        )
    for key in ("optimizer", "parameters"):
        place = getattr(o, key)
        lowest = 1 if (key, place) == ("optimizer", "cpu") else 3
        if place == "none":
            continue
        if s.engine == "fsdp":
            raise BadInput(
                f"sharding.offload.{key}",
                got=f"{place} with sharding.engine=fsdp",
                needed="DeepSpeed, which is what offloads here",
                fix="set sharding.engine to auto",
            )
        if s.stage < lowest:
            raise BadInput(
                f"sharding.offload.{key}",
                got=f"{place} with sharding.stage={s.stage}",
                needed=f"stage {'1, 2 or 3' if lowest == 1 else '3'}",
                fix=f"set sharding.stage to {lowest}, or sharding.offload.{key} to {'cpu' if key == 'optimizer' and s.stage else 'none'}",
            )


def _check_disk(o: Offload) -> None:
    """Check the folder for states offloaded to disk: it must be named, exist and be writable. Raises BadInput."""
    if "nvme" not in (o.optimizer, o.parameters):
        if o.path is not None:
            raise BadInput(
                "sharding.offload.path",
                got=f"{o.path}, with nothing on nvme",
                needed="null",
                fix="leave it out, or set sharding.offload.optimizer to nvme",
            )
        return
    if o.path is None:
        raise BadInput(
            "sharding.offload.path", got="null", needed="a folder on the disk that states go to", fix="add --sharding.offload.path FOLDER"
        )
    path = user_path(o.path, what="sharding.offload.path")
    if not path.is_dir():
        beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise BadInput(
            "sharding.offload.path",
            got=f"{o.path}, which is {'a file' if path.exists() else 'not there'}",
            needed="a folder that exists",
            fix=f"did you mean {path.parent / near}?" if near else f"mkdir -p {o.path}" if not path.exists() else "name a folder",
        )
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise BadInput(
            "sharding.offload.path",
            got=f"{o.path}, where nothing can be written ({error.strerror})",
            needed="a folder to write in",
            fix="name a folder of yours, with room for 12 bytes a parameter and 4 more where parameters go there too",
        ) from error


def check_installed(run: Run) -> None:
    """Refuse to train with states on a disk if this machine lacks a package that DeepSpeed's async_io is compiled with. Raises BadInput.

    Not part of `check_run`: a recipe is right or wrong on any machine, and `moe plan` and `moe rehearse` read it for another machine.
    """
    if "nvme" not in (run.sharding.offload.optimizer, run.sharding.offload.parameters):
        return
    if missing := missing_for_nvme():
        raise BadInput(
            "sharding.offload",
            got=f"nvme without {' and '.join(missing)}",
            needed="the packages that DeepSpeed's async_io is compiled with, once",
            fix=f"apt-get install {' '.join(missing)}, or set it to cpu",
        )
