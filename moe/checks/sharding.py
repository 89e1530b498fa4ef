"""Weights, gradients and optimizer states that each kind of data parallelism can shard and offload. All else is refused in one line.

kind zero   stage 0  nothing is sharded: DDP          offload: nothing
            1, 2     by DeepSpeed                     optimizer: cpu
            3        by DeepSpeed, or FSDP            optimizer, parameters: cpu or nvme (DeepSpeed)

The checks run before torch is imported.
"""

from __future__ import annotations

import tempfile

from moe.recipe.sections import Offload, Run, Sharding
from parallel.data.kinds.catalog import offloading
from parallel.errors import BadInput, did_you_mean
from parallel.fixes import Set, all_of, guess
from parallel.process.extensions import missing_for_nvme
from parallel.store.files import user_path


def check_sharding(run: Run) -> None:
    """Refuse values that the recipe's kind and stage of sharding cannot carry out. Raises BadInput."""
    if "engine" in run.sharding.named.keys:
        _check_zero(run)
    else:
        _check_not_zero(run.sharding)
    _check_disk(run.sharding.offload)
    if run.train.save_mode == "async" and "nvme" in (run.sharding.offload.optimizer, run.sharding.offload.parameters):
        raise BadInput(
            "train.save_mode",
            got="async with states on nvme",
            needed="sync: asynchronous saving copies all states to host memory at once",
            fix=Set("train.save_mode", "sync"),
        )


def _check_not_zero(s: Sharding) -> None:
    """Refuse offloading with another kind: it would have no effect."""
    for key in ("optimizer", "parameters"):
        place = getattr(s.offload, key)
        if place != "none":
            raise BadInput(
                f"sharding.offload.{key}",
                got=f"{place} with sharding.kind={s.kind}",
                needed="sharding.kind zero: others keep their states on the device",
                fix=Set("sharding.kind", "zero") & Set("sharding.stage", offloading(key, place).stage),
            )


def _check_zero(run: Run) -> None:
    s, o = run.sharding, run.sharding.offload
    if s.carrier().stage != s.named.stage:
        raise BadInput(
            "sharding.engine", got=f"fsdp with sharding.stage={s.stage}", needed="stage 3, which is what FSDP does", fix=Set("it", "auto")
        )
    if s.engine == "deepspeed" and s.named.stage == 0:
        raise BadInput(
            "sharding.engine",
            got="deepspeed with sharding.stage=0",
            needed="auto: stage 0 shards nothing, which is data parallelism as torch's DDP does it",
            fix=Set("sharding.engine", "auto") | Set("sharding.stage", 1, 2, 3),
        )
    if run.precision.master != "fp32" and s.named.stage > 0:
        raise BadInput(
            "precision.master",
            got=f"{run.precision.master} with sharding.kind=zero",
            needed="fp32: its engine keeps fp32 master weights in the partitions, in addition to working weights in precision.compute",
            fix=Set("precision.master", "fp32") | Set("sharding.kind", "ddp"),
        )
    for key in ("optimizer", "parameters"):
        place = getattr(o, key)
        if place == "none":
            continue
        if s.carrier() is not s.named:
            raise BadInput(
                f"sharding.offload.{key}",
                got=f"{place} with sharding.engine=fsdp",
                needed="DeepSpeed, which is what offloads here",
                fix=Set("sharding.engine", "auto"),
            )
        if (key, place) not in s.named.offloads:
            lowest = offloading(key, place).stage
            raise BadInput(
                f"sharding.offload.{key}",
                got=f"{place} with sharding.stage={s.stage}",
                needed=f"stage {'1, 2 or 3' if lowest == 1 else '3'}",
                fix=Set("sharding.stage", lowest) | Set(f"sharding.offload.{key}", "cpu" if key == "optimizer" and s.stage else "none"),
            )


def _check_disk(o: Offload) -> None:
    """Check the folder for states offloaded to disk: it must be named, exist and be writable. Raises BadInput."""
    if "nvme" not in (o.optimizer, o.parameters):
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
            fix=guess(str(path.parent / near)) if near else f"mkdir -p {o.path}" if not path.exists() else "name a folder",
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
    places = {f"sharding.offload.{key}": getattr(run.sharding.offload, key) for key in ("optimizer", "parameters")}
    if "nvme" not in places.values():
        return
    if missing := missing_for_nvme():
        raise BadInput(
            "sharding.offload",
            got=f"nvme without {' and '.join(missing)}",
            needed="the packages that DeepSpeed's async_io is compiled with, once",
            fix=f"apt-get install {' '.join(missing)}" | all_of({key: "cpu" for key, place in places.items() if place == "nvme"}),
        )
