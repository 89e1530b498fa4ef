"""Checks of section `sharding`: the stages, engines and offloading that each sharding.kind supports (docs/parallel/data_parallel.md)."""

from __future__ import annotations

import tempfile

from moe.checks.clash import clash
from moe.recipe.sections import Offload, Run
from parallel.data.kinds import offloading
from parallel.errors import BadInput, did_you_mean
from parallel.fixes import Set, all_of, guess
from parallel.process.extensions import missing_for_nvme
from parallel.store.files import user_path


def check_sharding(run: Run) -> None:
    """Raise BadInput for values that the recipe's kind and stage of sharding do not support, and for an unusable offload folder."""
    if "engine" in run.sharding.named.keys:
        _check_zero(run)
    else:
        _check_not_zero(run)
    _check_disk(run.sharding.offload)
    if run.train.save_mode == "async" and "nvme" in (run.sharding.offload.optimizer, run.sharding.offload.parameters):
        why = "asynchronous saving copies all states to host memory at once"
        raise clash(run, "train.save_mode", "states on nvme", "sync", why)


def _check_not_zero(run: Run) -> None:
    for key, place in _places(run.sharding.offload).items():
        if place != "none" and (key, place) not in run.sharding.named.offloads:
            got = f"{place} with sharding.kind={run.sharding.kind}"
            needed = "sharding.kind zero, or fsdp, which offloads only the optimizer and only to cpu"
            fix = Set("sharding.kind", "zero") & Set("sharding.stage", offloading(key, place).stage)
            raise BadInput(f"sharding.offload.{key}", got=got, needed=needed, fix=fix)


def _check_zero(run: Run) -> None:
    s = run.sharding
    if s.carrier().stage != s.named.stage:
        raise clash(run, "sharding.engine", "sharding.stage", "auto", needed="stage 3, the only stage that FSDP supports")
    if s.engine == "deepspeed" and s.named.stage == 0:
        why = "stage 0 shards nothing, which is data parallelism as torch's DDP does it"
        raise clash(run, "sharding.engine", "sharding.stage", "auto", why, Set("sharding.stage", 1, 2, 3))
    if run.precision.master != "fp32" and run.carrier.steps == "elements":
        why = "DeepSpeed's engine keeps fp32 master weights in the partitions, in addition to working weights in precision.compute"
        raise clash(run, "precision.master", "sharding.engine", "fp32", why, Set("sharding.engine", "auto", said="auto, which is FSDP"))
    for key, place in _places(s.offload).items():
        if place == "none":
            continue
        if run.degrees.pp == 1 and run.carrier is not s.named and (key, place) not in run.carrier.offloads:
            got, needed = f"{place} with sharding.engine={run.carrier.name}", "DeepSpeed: FSDP offloads only the optimizer, and only to cpu"
            fix = Set("sharding.engine", "auto") | Set("precision.master", "fp32") | Set(f"sharding.offload.{key}", "none")
            raise BadInput(f"sharding.offload.{key}", got=got, needed=needed, fix=fix)
        if (key, place) not in s.named.offloads:
            lowest, got = offloading(key, place).stage, f"{place} with sharding.stage={s.stage}"
            fix = Set("sharding.stage", lowest) | Set(f"sharding.offload.{key}", "cpu" if key == "optimizer" and s.stage else "none")
            raise BadInput(f"sharding.offload.{key}", got=got, needed=f"stage {'1, 2 or 3' if lowest == 1 else '3'}", fix=fix)


def _places(offload: Offload) -> dict[str, str]:
    return {"optimizer": offload.optimizer, "parameters": offload.parameters}


def _check_disk(o: Offload) -> None:
    if "nvme" not in _places(o).values():
        return
    what = "sharding.offload.path"
    if o.path is None:
        raise BadInput(what, got="null", needed="a folder on the disk to which states are offloaded", fix=f"add --{what} FOLDER")
    path = user_path(o.path, what=what)
    if not path.is_dir():
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else [])
        fix = guess(str(path.parent / near)) if near else f"mkdir -p {o.path}" if not path.exists() else "name a folder"
        raise BadInput(what, got=f"{o.path}, which is {'a file' if path.exists() else 'not there'}", needed="a folder that exists", fix=fix)
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fix = "name a folder that you can write, with room for 12 bytes a parameter, 16 if parameters are offloaded too"
        got = f"{o.path}, where nothing can be written ({error.strerror})"
        raise BadInput(what, got=got, needed="a folder to write in", fix=fix) from error


def check_installed(run: Run) -> None:
    """Raise BadInput if the recipe has states on a disk and this machine lacks a package that DeepSpeed needs to compile async_io. This is
    no part of `check_run`, because `moe plan` and `moe rehearse` check recipes for another machine."""
    on_disk = [f"sharding.offload.{key}" for key, place in _places(run.sharding.offload).items() if place == "nvme"]
    if on_disk and (missing := missing_for_nvme()):
        got, needed = f"nvme without {' and '.join(missing)}", "the packages with which DeepSpeed's async_io is compiled at its first use"
        fix = f"apt-get install {' '.join(missing)}" | all_of(dict.fromkeys(on_disk, "cpu"))
        raise BadInput("sharding.offload", got=got, needed=needed, fix=fix)
