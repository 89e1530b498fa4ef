"""The commands `moe train` and `moe rehearse`: they check the input before processes start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.cli.run import call, check_least
from moe.cli.verbs import Rehearse, Train
from moe.convert.huggingface import PREFIX
from parallel.errors import BadInput
from parallel.store.files import user_path

if TYPE_CHECKING:
    from moe.recipe.sections import Run


def train(flags: Train, overrides: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user
    from moe.checks.begins import check_begins
    from moe.checks.sharding import check_installed
    from moe.launch import launch, start
    from moe.launch.arguments import Arguments
    from moe.recipe.changes import check_allowed
    from moe.recipe.load import load
    from moe.records.tracker import check_trackers

    launcher: start.Launcher = flags.launcher or "deepspeed"
    world = start.world_size(flags.nproc, launcher=launcher, hostfile=flags.hostfile)
    run, origins = load(flags.recipe, overrides)
    if flags.dry_run:
        counted = flags.nproc is not None or flags.hostfile is not None
        if (source := _in_huggingface(flags)) is not None:
            check_model(source, run)
        else:
            check_begins(run, _out(flags), fresh=flags.fresh, source=_named(flags))
        return call("moe.cli.dry_run", run, world=world if counted else None, cluster=flags.cluster, force=flags.force)
    if flags.cluster is not None:
        from moe.plan.machine.cluster import load_cluster

        load_cluster(flags.cluster)  # raises BadInput for an unknown cluster before ranks start; they load it again
    out = None if flags.out is None else user_path(flags.out, what="--out")
    allowed = [key.replace("-", "_") for key in flags.allow_change]
    check_allowed(allowed)
    _check_restarts(flags)
    smaller: list[int] = []
    if flags.elastic is not None and not is_rank():
        run, smaller, dp = _elastic(flags, run, world, origins)
        overrides = overrides | {"degrees.dp": str(dp)}
    alone = world == 1 and flags.launcher is None and flags.hostfile is None and not flags.restarts
    checks = not (alone and is_rank())  # a rank of torchrun, SLURM or mpirun is checked later, when the number of ranks is known
    if checks:
        check_for_user(run, world, origins)
        check_installed(run)
    source = _begins_with(flags, run, overrides)  # after the checks, because it may convert a large model
    if checks:
        check_begins(run, _out(flags), fresh=flags.fresh, source=source)
        if flags.hostfile is None:
            check_trackers(run.train.trackers)
    same = ("recipe", "fresh", "from_step", "cluster", "force", "profile", "debug_collectives", "elastic")
    changed: dict[str, Any] = {"overrides": overrides, "out": out, "allow_changes": tuple(allowed), "init_from": source}
    given = Arguments(**{name: getattr(flags, name) for name in same}, **changed)
    if alone:
        return launch.main(given.words())
    how: dict[str, Any] = {"nproc": flags.nproc, "launcher": launcher, "hostfile": flags.hostfile, "grace_s": run.train.grace_s}
    return start.start(given, restarts=flags.restarts or 0, smaller=smaller, **how)


def _begins_with(flags: Train, run: Run, overrides: dict[str, str]) -> Path | None:
    """Return the folder from which a new run loads its weights (--init_from); None without this flag.
    For hf:PATH, PATH is converted into the folder RUN/base now, unless the run already has a checkpoint. The first samples of the run's
    data are checked first."""
    source, said = _named(flags), str(flags.init_from)
    if source is None or not said.startswith(PREFIX):
        return source

    def convert(base: Path) -> list[str]:
        from moe.convert.huggingface.convert import begin_from

        check_model(source, run)
        return begin_from(source, base, recipe=flags.recipe, overrides=overrides)

    out = _out(flags)
    begin(out, convert, fresh=flags.fresh, what="--init_from", said=said, then="--init_from runs/BASE")
    return out / "base"


def _named(flags: Train) -> Path | None:
    """Return the folder that --init_from names; None without this flag. Raises BadInput for a model's name on the Hugging Face hub, and for
    a path without `hf:` that is not the folder of a run or checkpoint."""
    from moe.recipe.load import of_transformers, refuse_on_hub

    if flags.init_from is None:
        return None
    said = str(flags.init_from)
    refuse_on_hub(said, "--init_from", then="--init_from hf:")
    source = user_path(said.removeprefix(PREFIX), what="--init_from")
    if said.startswith(PREFIX):
        return source
    if not source.is_dir():
        needed, fix = "the folder of a run, of one of its checkpoints, or hf:PATH", "--init_from runs/NAME"
        raise BadInput("--init_from", got=flags.init_from, needed=needed, fix=fix)
    if of_transformers(source):
        raise BadInput("--init_from", got=f"{said}, a model of transformers", needed=f"hf:{said}", fix=f"--init_from hf:{said}")
    return source


def _in_huggingface(flags: Train) -> Path | None:
    """Return PATH of --init_from hf:PATH if the run will begin with this model. None without hf:PATH, or if the run will resume from a
    checkpoint."""
    from moe.checks.begins import has_checkpoint

    if not str(flags.init_from).startswith(PREFIX):
        return None
    return None if has_checkpoint(_out(flags)) and not flags.fresh else _named(flags)


def check_model(source: Path, run: Run) -> None:
    """For a new run with the model of transformers in `source`: raise BadInput if it has no config.json, if the run adds a selection bias
    that the model's files cannot have, if the first samples of the run's data cannot be read, or if chats need a chat template and there is
    none."""
    from moe.checks.begins import check_data
    from moe.convert.huggingface.config import recipe_values
    from moe.convert.huggingface.convert import config_in
    from moe.data.tokenizer_file import chat_of
    from moe.recipe.load import build_run

    theirs = build_run(recipe_values(config_in(source)))
    if run.router.bias_rate is not None and theirs.router.bias_rate is None and run.model.layers_with_experts():
        needed = f"null: {source} has no selection bias, so the trained model could not be converted back"
        raise BadInput("router.bias_rate", got=run.router.bias_rate, needed=needed, fix="--router.bias_rate null")
    check_data(run.data, chat_of(source, [])[0], vocab_size=run.vocab_size)


def begin(out: Path, convert: Callable[[Path], list[str]], *, fresh: bool, what: str, said: str, then: str) -> bool:
    """Convert an hf:PATH model into the folder out/base by `convert`, and print the lines that it returns. Return False, without
    converting, if the run has a checkpoint and `fresh` is False. Raises BadInput on a rank of a launcher. what, said: name and value of the
    argument with hf:PATH, for this error. then: end of the error's fix, after `moe convert SAID runs/BASE, then`."""
    from moe.checks.begins import has_checkpoint
    from parallel.store.lock import alone_in

    if not fresh and has_checkpoint(out):
        return False
    if is_rank():
        needed = "a converted run: ranks of a launcher start at the same time, and only one process may convert"
        raise BadInput(what, got=said, needed=needed, fix=f"moe convert {said} runs/BASE, then {then}")
    with alone_in(out):
        print("\n".join(convert(out / "base")))
    return True


def _out(flags: Train) -> Path:
    from moe.recipe.load import run_name

    return Path("runs") / run_name(flags.recipe) if flags.out is None else user_path(flags.out, what="--out")


def _check_restarts(flags: Train) -> None:
    if not flags.restarts:
        return
    if flags.restarts < 0:
        raise BadInput("--restarts", got=flags.restarts, needed="at least 0", fix="--restarts 3")
    if is_rank():
        got = "--restarts on a rank of another launcher; only that launcher can restart its ranks"
        fix = "torchrun --max-restarts N, or #SBATCH --requeue: a rank that is started again resumes"
        raise BadInput("--restarts", got=got, needed="moe train to start the ranks itself", fix=fix)
    if flags.hostfile is not None:
        needed = "ranks on this machine only: ranks of other machines cannot be killed reliably from here"
        fix = "torchrun --max-restarts N on every host, or let the batch system queue the job again"
        raise BadInput("--restarts", got="--restarts with --hostfile", needed=needed, fix=fix)


def _elastic(flags: Train, run: Run, world: int, origins: dict[str, str]) -> tuple[Run, list[int], object]:
    """Return (the recipe for `world` processes, smaller numbers of processes with which the run can continue, degrees.dp of the full run).
    Raises BadInput if --elastic is below 1 or comes without --restarts, or if no smaller number is possible."""
    from moe.checks.advice import check_for_user
    from moe.launch import elastic

    assert flags.elastic is not None
    check_least(flags, elastic=1)
    if not flags.restarts:
        needed = "--restarts N too: the run continues with fewer processes after N restarts without a new checkpoint"
        raise BadInput("--elastic", got="--elastic without --restarts", needed=needed, fix=f"--restarts 3 --elastic {flags.elastic}")
    whole = elastic.whole(run, world)
    check_for_user(run, world if run.degrees.dp == "auto" else elastic.size(whole), origins)
    find = elastic.check_smaller if world == elastic.size(whole) else elastic.smaller
    smaller = find(whole, below=world, least=flags.elastic)
    left = elastic.for_world(whole, world, least=flags.elastic)
    numbers = f"{elastic.listed(smaller)} of {world} processes"
    print(f"--elastic {flags.elastic}: if restarts do not help, the run continues with {numbers}", flush=True)
    return left, smaller, whole.degrees.dp


def is_rank() -> bool:
    """Return whether a launcher started this process as one of its ranks."""
    return "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ or os.environ.get("SLURM_NTASKS", "1") != "1"


def rehearse(flags: Rehearse, overrides: dict[str, str]) -> int:
    from moe.checks.advice import check_for_user
    from moe.recipe.load import load

    run, origins = load(flags.recipe, overrides)
    if flags.world is None or flags.world < 1:
        got = "nothing" if flags.world is None else flags.world
        raise BadInput("--world", got=got, needed="the number of ranks that the run would have", fix="--world 8")
    try:
        check_for_user(run, flags.world, origins)
    except BadInput as bad:
        raise BadInput(bad.what, got=bad.got, needed=bad.needed, fix=str(bad.fix).replace("--nproc", "--world")) from None
    given: dict[str, Any] = {name: value for name in ("rank", "device") if (value := getattr(flags, name)) is not None}
    return call("moe.rehearse", run, recipe=flags.recipe, world=flags.world, json=flags.json, **given)
