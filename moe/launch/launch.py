"""The program of a rank, started by a launcher (deepspeed, torchrun, srun) or by hand:

torchrun --nproc_per_node 2 -m moe.launch.launch switch_tiny --degrees.ep 2
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moe.launch import status
from moe.launch.early import early_signals, number_of_rank
from moe.launch.environment import allow_open_files, set_before_torch
from moe.launch.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from moe.launch.processes import TOKEN, die_with_parent
from moe.launch.streams import Log, log_of, logged, outlive_readers
from parallel.errors import BadInput, Ended
from parallel.mesh.debug_collectives import DEBUG, TIMEOUT_S
from parallel.process.extensions import use_extensions_dir
from parallel.store.lock import is_held

if TYPE_CHECKING:
    from moe.launch.arguments import Arguments
    from moe.recipe.sections import Run

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK", "OMPI_COMM_WORLD_RANK")  # set by torchrun, DeepSpeed's launcher, and Open MPI
_SAID = ".moe-said-"  # prefix of files in the temporary folder, one for each error message that a rank on this machine has printed
_KEPT_S = 600.0  # seconds after which the files of _SAID are removed


@dataclass
class RankRun:
    """A rank's number, its recipe (None until it has been read), and the folder for its status file and log. place: [that
    folder, the run's own] once the recipe has been read, if a parent `moe train` reads status files there; otherwise []."""

    rank: int = 0
    place: list[Path] = field(default_factory=list)
    run: Run | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank with the arguments `argv`, by default the command line's. Return its exit code."""
    return run_as_rank(lambda rank_run: _from_words(argv, rank_run))


def script(work: Callable[[], object]) -> NoReturn:
    """Run a user's training code, and then exit Python as `moe train` does: script(lambda: train(run, callbacks=[Best()])). Errors that the
    user can fix are printed by one rank, in one line. All ranks exit, with the codes in moe/launch/exit_codes.py."""
    sys.exit(run_as_rank(lambda rank_run: carried_out(work)))


def run_as_rank(work: Callable[[RankRun], int]) -> int:
    """Run `work` as one rank, and return its exit code. work(rank_run): returns an exit code; writes the recipe and the folder into
    `rank_run` as soon as they are known. An exception is printed; if all ranks have the same, one rank prints it. How the rank ended is
    written to the status file, if a parent `moe train` reads it."""
    die_with_parent()
    use_extensions_dir()
    set_before_torch(os.environ)
    outlive_readers()
    rank = number_of_rank()
    rank_run = RankRun(rank)

    def leave() -> None:
        for out in rank_run.place:
            status.leave(out, rank, STOPPED, status.TOO_EARLY)

    with early_signals(prints=TOKEN not in os.environ and rank == 0, leave=leave):
        return _ended(work, rank_run, rank)


def _from_words(argv: Sequence[str] | None, rank_run: RankRun) -> int:
    from moe.launch.arguments import parse  # here and below: imported only after early signals are handled
    from moe.recipe.load import load, run_name

    given = parse(list(sys.argv[1:] if argv is None else argv))
    _refuse_fresh_again(given, os.environ)
    if given.debug_collectives:
        os.environ.setdefault(DEBUG, f"{TIMEOUT_S:g}")
    run, origins = load(given.recipe, given.overrides)
    if given.elastic is not None:
        run, origins = _for_present_world(run, origins, given.elastic)
    name = run_name(given.recipe)
    out = given.out or Path("runs") / name
    if Path(given.recipe).parent == out / "base":  # started by `moe train hf:DIR`, which has converted the model to this folder
        name = out.resolve().name
    rank_run.run = run
    rank_run.place += [out] if is_held(out) else []
    if not rank_run.place:
        return _train(run, origins, name, out, given, [], Log())
    with logged(log_of(out, rank_run.rank)) as log:
        return _train(run, origins, name, out, given, rank_run.place, log)


def _ended(work: Callable[[RankRun], int], rank_run: RankRun, rank: int) -> int:
    error: str | None = None
    code, of_all, repeats = FAILED, False, False
    try:
        code = work(rank_run)
    except BadInput as bad:
        code, error = BAD_INPUT, str(bad)
        if _prints(bad, rank):
            print(f"error: {error}", file=sys.stderr, flush=True)
    except Ended as ended:  # the message names rank and collective, so no stack trace is printed
        error, of_all = str(ended), True
        if ended.prints and TOKEN not in os.environ:  # if TOKEN is set, the parent `moe train` prints the message
            print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:  # raised only before training: later, Ctrl-C makes the trainer save and stop
        code, error = INTERRUPTED, "interrupted"
    except BaseException as failure:  # any exception must be in the status file for the parent
        error = None if rank_run.run is None else _did_not_fit(failure, rank_run.run)
        if error is None:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            repeats = True
            print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    for out in rank_run.place:
        status.leave(out, rank, code, error, of_all=of_all, repeats=repeats)
    if error is not None and TOKEN not in os.environ:
        _tell_torchrun(error)
    return code


def _tell_torchrun(error: str) -> None:
    """Write this rank's error to the file that torchrun names. torchrun prints it in its summary, after its own traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            Path(path).write_text(json.dumps({"message": {"message": error, "extraInfo": {"timestamp": f"{time.time():.0f}"}}}))
        except OSError:
            Path(path).unlink(missing_ok=True)  # a half-written file is not valid JSON, and torchrun would fail to read it


def _prints(bad: BadInput, rank: int) -> bool:
    """Return whether this rank prints `bad`, which it raised. If several ranks raise the same error, only one prints it."""
    if TOKEN in os.environ:  # rank 0 prints its own error, the parent `moe train` prints errors that only other ranks have
        return rank == 0
    if bad.prints is not None:
        return bad.prints
    launched = os.environ.get("SLURM_NTASKS", "1") != "1" or any(name in os.environ for name in _LAUNCHERS)
    return not launched or _first_here(str(bad))  # a rank without a launcher was started by hand, in a separate terminal


def _first_here(line: str) -> bool:
    """Return whether this is the first of the launcher's ranks on this machine to print this line. The first rank creates an empty file,
    with a hash of the line and the launcher as its name; other ranks find that file."""
    began = Path(f"/proc/{os.getppid()}/stat")
    with contextlib.suppress(OSError):
        parent = f"{os.getppid()} {began.read_text().rpartition(')')[2].split()[19]}"
        said = hashlib.sha256(f"{parent} {os.environ.get('TORCHELASTIC_RESTART_COUNT')} {line}".encode()).hexdigest()[:32]
        folder = Path(tempfile.gettempdir())
        for old in folder.glob(f"{_SAID}*"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _KEPT_S:
                    old.unlink()
        try:
            os.close(os.open(folder / f"{_SAID}{said}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
    return True


def _refuse_fresh_again(given: Arguments, environment: Mapping[str, str]) -> None:
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    flag = "--fresh" if given.fresh else "--from_step" if given.from_step is not None else None
    if flag and restarts.isdecimal() and int(restarts) > 0:
        other = "start with another --out and without --fresh" if given.fresh else "start without --max-restarts"
        fix = f"{other}, or let moe train --restarts start it again"
        raise BadInput(
            flag,
            got=f"the flag with torchrun --max-restarts {restarts}",
            needed=f"a start without {flag}: each restart by torchrun would have the flag again",
            fix=fix,
        )


def _for_present_world(run: Run, origins: dict[str, str], least: int) -> tuple[Run, dict[str, str]]:
    """Return (the recipe with degrees and micro-batches for the present number of processes; `origins` with --elastic as the source of
    these values). origins: recipe key -> source of its value. Raises BadInput for fewer than `least` processes (MIN of --elastic)."""
    from moe.checks.advice import check_for_user
    from moe.launch import elastic
    from parallel.process import process

    world = process.read_environment()
    run = elastic.whole(run, None)
    check_for_user(run, elastic.size(run), origins)
    left = elastic.for_world(run, world.size, least=least)
    if left == run:
        return run, origins
    if world.rank == 0:
        print(f"--elastic: {world.size} of {elastic.size(run)} processes: {elastic.layout(left.resolve(world.size))}", flush=True)
    return left, origins | dict.fromkeys(("degrees.dp", "degrees.ep", "pipeline.microbatches"), elastic.ORIGIN)


def _train(run: Run, origins: dict[str, str], name: str, out: Path, given: Arguments, place: list[Path], log: Log) -> int:
    """Train, and return the exit code. given: the rank's command line. place: as in `RankRun`. log: the rank's log. Its new lines are
    removed if the run had already finished, because then nothing was trained."""
    from moe.checks.advice import check_for_user
    from moe.checks.sharding import check_installed
    from parallel.process import process  # imported late, so that a wrong recipe is refused before torch is imported, which takes seconds

    world = process.read_environment()
    check_for_user(run, world.size, origins)
    check_installed(run)
    allow_open_files(world.size)

    def work() -> None:
        from moe.records.metrics import read_summary
        from moe.records.redone import Restart
        from moe.train.loop.trainer import train

        process.share_cores(world)
        process.start(world, timeout_s=run.train.timeout_s, end=_before_watchdog_ends(place, world.rank))
        same = ("fresh", "from_step", "allow_changes", "cluster", "init_from", "force", "profile")
        flags: dict[str, Any] = {name: getattr(given, name) for name in same}
        before = None
        with contextlib.suppress(BadInput):  # raised if summary.json is damaged; training will replace it
            before = read_summary(out)
        summary = train(run, name=name, out=out, origins=origins, world=world, restart=Restart.of(os.environ), **flags)
        log.kept = summary != before

    return carried_out(work)


def carried_out(work: Callable[[], object]) -> int:
    """Run `work`, which trains; then destroy the process groups and return the exit code. If this rank failed only because another rank
    did, raise that rank's error instead."""
    from moe.train.loop.trainer import Stopped
    from parallel.process import process
    from parallel.watch import watchdog

    try:
        work()
    except Stopped:
        return STOPPED
    except Exception as failure:
        _ignore_signals()  # torchrun sends SIGTERM when a rank has died, which must not be taken for the user's signal
        ended = watchdog.ended_by(failure)
        if ended is not None:
            raise ended from None
        if isinstance(failure, BadInput):
            failure.prints = watchdog.prints_line()
        raise
    finally:
        _ignore_signals()  # launchers send SIGTERM when the first rank has ended, but all ranks must still write their status files
        process.stop()
    return DONE


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _before_watchdog_ends(place: list[Path], rank: int) -> Callable[[str, bool], None]:
    """Return the function that the watchdog calls before it kills this process in a hang. Its arguments: error message, whether this rank
    prints it. place: a list with the run's folder, or empty, as in `RankRun`."""

    def end(line: str, prints: bool) -> None:
        for out in place:
            status.leave(out, rank, FAILED, line, of_all=True)
        if prints and TOKEN not in os.environ:
            os.write(2, f"error on rank {rank}: {line}\n".encode())
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h")  # shows the cursor again, which the live display has hidden

    return end


def _did_not_fit(failure: BaseException, run: Run) -> str | None:
    from moe.train.start.prediction import did_not_fit
    from parallel.process import process

    world = process.read_environment()
    return did_not_fit(failure, run, world=world.size, cpu=world.device.type == "cpu")


if __name__ == "__main__":
    sys.exit(main())
