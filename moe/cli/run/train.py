"""moe train and moe rehearse: what is checked before processes start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.cli.run.call import call, text
from moe.cli.verbs import Rehearse, Train
from parallel.errors import BadInput
from parallel.store.files import user_path

if TYPE_CHECKING:
    from moe.recipe.sections import Run


def train(flags: Train, overrides: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user
    from moe.checks.begins import check_begins
    from moe.checks.sharding import check_installed
    from moe.launch import start
    from moe.recipe.changes import check_allowed
    from moe.recipe.load import load
    from moe.records.tracker import check_trackers

    launcher: start.Launcher = flags.launcher or "deepspeed"
    world = start.world_size(flags.nproc, launcher=launcher, hostfile=flags.hostfile)
    run, origins = load(flags.recipe, overrides)
    if flags.dry_run:
        counted = flags.nproc is not None or flags.hostfile is not None
        return call("moe.cli.dry_run", run, world=world if counted else None, cluster=flags.cluster, force=flags.force)
    if flags.cluster is not None:
        from moe.plan.machine.cluster import load_cluster

        load_cluster(flags.cluster)  # raises BadInput now for an unknown cluster; the ranks load it again
    source = _begins_with(flags, overrides)
    out = None if flags.out is None else user_path(flags.out, what="--out")
    allowed = [key.replace("-", "_") for key in flags.allow_change]
    check_allowed(allowed)
    _check_restarts(flags)
    smaller: list[int] = []
    if flags.elastic is not None and not _is_rank(os.environ):
        run, smaller, dp = _elastic(flags, run, world, origins)
        overrides = overrides | {"degrees.dp": str(dp)}
    alone = world == 1 and flags.launcher is None and flags.hostfile is None and not flags.restarts
    if not (alone and _is_rank(os.environ)):  # a rank that another launcher started checks against that launcher's world size
        check_for_user(run, world, origins)
        check_installed(run)
        check_begins(run, _out(flags), fresh=flags.fresh, source=source)
        if flags.hostfile is None:
            check_trackers(run.train.trackers)
    if not alone:
        return start.start(
            flags.recipe,
            overrides,
            nproc=flags.nproc,
            launcher=launcher,
            out=out,
            fresh=flags.fresh,
            from_step=flags.from_step,
            allow_changes=allowed,
            hostfile=flags.hostfile,
            debug_collectives=flags.debug_collectives,
            cluster=flags.cluster,
            init_from=source,
            force=flags.force,
            profile=flags.profile,
            grace_s=run.train.grace_s,
            restarts=flags.restarts or 0,
            elastic=flags.elastic,
            smaller=smaller,
        )
    return _as_one_process(flags, overrides, out=out, allowed=allowed, source=source)


def _as_one_process(flags: Train, overrides: dict[str, str], *, out: Path | None, allowed: list[str], source: Path | None) -> int:
    """Train in this process, without a launcher."""
    from moe.launch import launch
    from moe.launch.arguments import Arguments

    given = Arguments(
        flags.recipe,
        overrides,
        out=out,
        fresh=flags.fresh,
        from_step=flags.from_step,
        allow_changes=tuple(allowed),
        init_from=source,
        cluster=flags.cluster,
        force=flags.force,
        profile=flags.profile,
        debug_collectives=flags.debug_collectives,
        elastic=flags.elastic,
    )
    return launch.main(given.words())


def _begins_with(flags: Train, overrides: dict[str, str]) -> Path | None:
    """The folder of weights that --init_from names, or None.

    For hf:PATH this is RUN/base, a run that is converted from PATH here. It is not converted again if the run already has a checkpoint.
    """
    from moe.checks.begins import has_checkpoint
    from moe.recipe.load import ON_HUB, download_of, of_transformers

    if flags.init_from is None:
        return None
    said = str(flags.init_from)
    if (hub := download_of(said)) is not None:
        fix = f"{hub[0]}, then --init_from {hub[1]}"
        raise BadInput("--init_from", got=f"{said}{ON_HUB}", needed="a folder of this machine", fix=fix)
    if not said.startswith("hf:"):
        source = user_path(flags.init_from, what="--init_from")
        if not source.is_dir():
            needed, fix = "the folder of a run, of one of its checkpoints, or hf:PATH", "--init_from runs/NAME"
            raise BadInput("--init_from", got=flags.init_from, needed=needed, fix=fix)
        if of_transformers(source):
            raise BadInput("--init_from", got=f"{said}, a model of transformers", needed=f"hf:{said}", fix=f"--init_from hf:{said}")
        return source
    out = _out(flags)
    base = out / "base"
    if not flags.fresh and has_checkpoint(out):
        return base
    if _is_rank(os.environ):
        needed = "a run, because all ranks of a launcher read it at the same time"
        raise BadInput("--init_from", got=said, needed=needed, fix=f"moe convert {said} runs/BASE, then --init_from runs/BASE")
    from moe.convert.huggingface.convert import begin_from
    from parallel.store.lock import alone_in

    source = user_path(said.removeprefix("hf:"), what="--init_from")
    with alone_in(out):
        print("\n".join(begin_from(source, base, recipe=flags.recipe, overrides=overrides)))
    return base


def _out(flags: Train) -> Path:
    from moe.recipe.load import run_name

    return Path("runs") / run_name(flags.recipe) if flags.out is None else user_path(flags.out, what="--out")


def _check_restarts(flags: Train) -> None:
    """Raise BadInput for --restarts if another launcher started this rank, or if ranks run on other machines and cannot be killed from
    here.
    """
    if not flags.restarts:
        return
    if flags.restarts < 0:
        raise BadInput("--restarts", got=flags.restarts, needed="at least 0", fix="--restarts 3")
    if _is_rank(os.environ):
        got = "it on a rank of another launcher; only that launcher can restart its ranks"
        fix = "torchrun --max-restarts N, or #SBATCH --requeue: a rank that is started again resumes"
        raise BadInput("--restarts", got=got, needed="moe train as the parent of its ranks", fix=fix)
    if flags.hostfile is not None:
        needed = "ranks on this machine only: ranks of other machines cannot be killed reliably from here"
        fix = "torchrun --max-restarts N on every host, or let the batch system queue the job again"
        raise BadInput("--restarts", got="it with --hostfile", needed=needed, fix=fix)


def _elastic(flags: Train, run: Run, world: int, origins: dict[str, str]) -> tuple[Run, list[int], object]:
    """The recipe for the number of processes available now, the smaller numbers it can fall back to, and dp of the whole recipe.

    Raises BadInput if --elastic is below 1, comes without --restarts, or leaves no legal layout.
    """
    from moe.checks.advice import check_for_user
    from moe.launch import elastic

    assert flags.elastic is not None
    if flags.elastic < 1:
        raise BadInput("--elastic", got=flags.elastic, needed="the minimum number of processes, at least 1", fix="--elastic 1")
    if not flags.restarts:
        needed = "--restarts N too: the run continues with fewer processes after N restarts without a new checkpoint"
        raise BadInput("--elastic", got="it without --restarts", needed=needed, fix=f"--restarts 3 --elastic {flags.elastic}")
    whole = elastic.whole(run, world)
    check_for_user(run, world if run.degrees.dp == "auto" else elastic.size(whole), origins)
    find = elastic.check_smaller if world == elastic.size(whole) else elastic.smaller
    smaller = find(whole, below=world, least=flags.elastic)
    left = elastic.for_world(whole, world, least=flags.elastic)
    print(
        f"--elastic {flags.elastic}: if restarts do not help, the run continues with {elastic.listed(smaller)} of {world} processes",
        flush=True,
    )
    return left, smaller, whole.degrees.dp


def _is_rank(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment or environment.get("SLURM_NTASKS", "1") != "1"


def rehearse(flags: Rehearse, overrides: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user
    from moe.recipe.load import load

    run, origins = load(flags.recipe, overrides)
    if flags.world is None or flags.world < 1:
        raise BadInput(
            "--world",
            got="nothing" if flags.world is None else flags.world,
            needed="the number of ranks that the run would have",
            fix="--world 8",
        )
    try:
        check_for_user(run, flags.world, origins)
    except BadInput as bad:
        raise BadInput(bad.what, got=bad.got, needed=bad.needed, fix=str(bad.fix).replace("--nproc", "--world")) from None
    given: dict[str, Any] = {name: value for name in ("rank", "device") if (value := getattr(flags, name)) is not None}
    return call("moe.rehearse.rehearse", run, recipe=flags.recipe, world=flags.world, json=text(flags.json), **given)
