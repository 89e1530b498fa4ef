"""The program of every rank, for all launchers: deepspeed, torchrun, srun, or plain python.

    deepspeed --num_accelerators 2 --module moe.launch.launch switch_tiny --degrees.ep 2
    torchrun --nproc_per_node 2 -m moe.launch.launch switch_tiny
    python -m moe.launch.launch switch_tiny

Exit codes (moe/launch/exit_codes.py): DONE; BAD_INPUT with one line; STOPPED by a signal after saving; FAILED, anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from moe.checks.advice import check_for_user
from moe.checks.sharding import check_installed
from moe.launch import elastic, status
from moe.launch.arguments import Arguments, parse
from moe.launch.environment import allow_open_files, set_before_torch
from moe.launch.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from moe.launch.processes import TOKEN, die_with_parent
from moe.launch.streams import outlive_readers
from moe.recipe.load import load, run_name
from moe.recipe.sections import Run
from moe.records.redone import Restart
from parallel.errors import BadInput, Ended
from parallel.mesh.debug_collectives import DEBUG, TIMEOUT_S
from parallel.process.extensions import use_extensions_dir
from parallel.store.lock import is_held

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK", "OMPI_COMM_WORLD_RANK")  # set by torchrun, DeepSpeed's launcher and Open MPI's
_SAID = ".moe-said-"  # prefix of files in the system's temporary folder, one for each line that a rank of a launch has printed
_KEPT_S = 600.0


@dataclass
class RankRun:
    """Facts about a rank's run so far. `place`: its folder, once known, if a parent reads the rank's status there. `run`: its recipe."""

    place: list[Path] = field(default_factory=list)
    run: Run | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank from its arguments. Returns its exit code."""
    return run_as_rank(lambda rank_run: _from_words(argv, rank_run))


def script(work: Callable[[], object]) -> NoReturn:
    """Run a script's own code around `train`, and exit Python as `moe train` does. Errors that the user can fix are one line, printed once.
    Exit codes are those in moe/launch/exit_codes.py, and ranks leave together.

        script(lambda: train(run, callbacks=[Best()]))
    """
    sys.exit(run_as_rank(lambda rank_run: _carried_out(work)))


def run_as_rank(work: Callable[[RankRun], int]) -> int:
    """Run `work` as one rank, and return its exit code. An exception is printed, noted for the parent, and converted to an exit code."""
    die_with_parent()
    use_extensions_dir()
    set_before_torch(os.environ)
    outlive_readers()
    number = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    rank = int(number) if number.isdecimal() else 0  # anything else is refused below, in one line
    rank_run = RankRun()
    with _early_signals(rank_run.place, rank):
        return _ended(work, rank_run, rank)


def _from_words(argv: Sequence[str] | None, rank_run: RankRun) -> int:
    given = parse(list(sys.argv[1:] if argv is None else argv))
    _refuse_fresh_again(given, os.environ)
    if given.debug_collectives:
        os.environ.setdefault(DEBUG, f"{TIMEOUT_S:g}")
    run, origins = load(given.recipe, given.overrides)
    if given.elastic is not None:
        run, origins = _for_those_left(run, origins, given.elastic)
    name = run_name(given.recipe)
    out = given.out or Path("runs") / name
    rank_run.run = run
    rank_run.place += [out] if is_held(out) else []
    return _train(run, origins, name, out, given, rank_run.place)


def _ended(work: Callable[[RankRun], int], rank_run: RankRun, rank: int) -> int:
    """Return the exit code of `work`. Prints how it ended, and writes it to the status in the run's folder for the parent."""
    error: str | None = None
    code, of_all, repeats = FAILED, False, False
    try:
        code = work(rank_run)
    except BadInput as bad:
        code, error = BAD_INPUT, str(bad)
        if _is_to_say(bad, rank):
            print(f"error: {error}", file=sys.stderr, flush=True)
    except Ended as ended:  # the message names rank and collective, so a stack trace adds nothing
        error, of_all = str(ended), True
        if ended.prints and TOKEN not in os.environ:  # else the parent prints it once for all
            print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:  # before training began; during it, a signal saves and stops
        code, error = INTERRUPTED, "interrupted"
    except BaseException as failure:  # the other ranks and the parent must learn of any exception
        error = None if rank_run.run is None else _did_not_fit(failure, rank_run.run)
        if error is None:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            repeats = True
            print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    for out in rank_run.place:
        status.leave(out, rank, code, error, of_all=of_all, repeats=repeats)
    return code


def _is_to_say(bad: BadInput, rank: int) -> bool:
    """Return whether this rank prints a BadInput, so that an error of one rank or of all is printed once."""
    if TOKEN in os.environ:  # the parent has all ranks' status, and prints errors that rank 0 does not
        return rank == 0
    if bad.prints is not None:
        return bad.prints
    task = os.environ.get("SLURM_NTASKS", "1") != "1"
    return not (task or any(name in os.environ for name in _LAUNCHERS)) or _first_here(str(bad))  # by hand, each has its own terminal


def _first_here(line: str) -> bool:
    """Return whether no other child of this process's launcher has printed this line. The first one creates an empty file named by its
    hash."""
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


@dataclass(frozen=True)
class _TooEarly:
    """Signal handler for the time before training, which does not restore it afterwards (moe/train/start/place.py).

    It acts for one process: a forked child ends by the signal's default and prints nothing for the rank.
    """

    place: list[Path]
    rank: int
    process: int
    before_training = True

    def __call__(self, number: int, _: object) -> None:
        if number == signal.SIGINT or os.getpid() != self.process:  # ends by the signal's default
            ctypes.CDLL(None).signal(number, 0)  # the default; Python would allow it in the main thread alone
            os.kill(os.getpid(), number)
        if self.place:
            status.leave(self.place[0], self.rank, STOPPED, status.TOO_EARLY)
        if TOKEN not in os.environ and self.rank == 0:
            os.write(2, f"exit code {STOPPED}: a signal came before training began, and {status.NOTHING_LOST}\n".encode())
        os._exit(STOPPED)


@contextlib.contextmanager
def _early_signals(place: list[Path], rank: int) -> Iterator[None]:
    """End this process on SIGTERM, SIGUSR1 and SIGHUP before training catches them, with the message that nothing is lost. Ctrl-C in a rank
    also ends it, without a message.

    No exception is raised, because it could interrupt an import, after which some libraries do not work. `place`: the run's folder, once
    known.
    """

    stop = _TooEarly(place, rank, os.getpid())
    heard = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    with contextlib.suppress(ValueError):  # not the main thread: a library caller keeps its own handlers
        for number in heard:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, stop)
    try:
        with _heard_at_once(stop):
            yield
    finally:
        for number in heard:
            if signal.getsignal(number) is stop:
                signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _heard_at_once(stop: _TooEarly) -> Iterator[None]:
    """Let a thread call the handler too. Python's own call waits while the main thread is in C code, such as waiting for missing ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    hears = [told]

    # Makes Python write each signal's number to fd (-1: nowhere). A fork needs -1: a child's signals would reach this process by the pipe.
    def hear(fd: int) -> None:
        if hears:
            with contextlib.suppress(ValueError):  # another thread than the main one forks
                signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    os.register_at_fork(before=lambda: hear(-1), after_in_parent=lambda: hear(told), after_in_child=lambda: hear(-1))

    def listen() -> None:
        while number := os.read(heard, 1):
            now: object = signal.getsignal(number[0])
            if now is stop:
                stop(number[0], None)
        os.close(heard)

    threading.Thread(target=listen, daemon=True, name="early-signals").start()
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield
    finally:
        hears.clear()
        signal.set_wakeup_fd(before)
        os.close(told)


def _refuse_fresh_again(given: Arguments, environment: Mapping[str, str]) -> None:
    """Refuse --fresh and --from_step under torchrun's restarts. It repeats the same arguments, which would set newer checkpoints aside.
    Raises BadInput."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    flag = "--fresh" if given.fresh else "--from_step" if given.from_step is not None else None
    if flag and restarts.isdecimal() and int(restarts) > 0:
        other = "start with another --out and without --fresh" if given.fresh else "start without --max-restarts"
        fix = f"{other}, or let moe train --restarts start it again"
        raise BadInput(flag, got=f"it with torchrun --max-restarts {restarts}", needed="a start that may be repeated", fix=fix)


def _for_those_left(run: Run, origins: dict[str, str], least: int) -> tuple[Run, dict[str, str]]:
    """Return the recipe for the present number of processes, and the origins of its values. Raises BadInput."""
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


def _train(run: Run, origins: dict[str, str], name: str, out: Path, given: Arguments, place: list[Path]) -> int:
    from parallel.process import process  # it imports torch, so only after the recipe has been read

    world = process.read_environment()
    check_for_user(run, world.size, origins)
    check_installed(run)
    allow_open_files(world.size)

    def work() -> None:
        from moe.train.loop.trainer import train

        process.share_cores(world)
        process.start(world, timeout_s=run.train.timeout_s, end=_last_word(place, world.rank))
        train(
            run,
            name=name,
            out=out,
            origins=origins,
            fresh=given.fresh,
            from_step=given.from_step,
            allow_changes=given.allow_changes,
            world=world,
            cluster=given.cluster,
            init_from=given.init_from,
            force=given.force,
            restart=Restart.of(os.environ),
            profile=given.profile,
        )

    return _carried_out(work)


def _carried_out(work: Callable[[], object]) -> int:
    """Do the training `work`, stop the process groups, and return the exit code. If another rank caused this rank's error, its error is
    raised instead."""
    from moe.train.loop.trainer import Stopped
    from parallel.process import process
    from parallel.watch import watchdog

    try:
        work()
    except Stopped:
        return STOPPED
    except Exception as failure:
        _ignore_signals()  # torchrun sends one as soon as a rank has died: that is no signal before training
        ended = watchdog.ended_by(failure)
        if ended is not None:
            raise ended from None
        if isinstance(failure, BadInput):
            failure.prints = watchdog.prints_line()
        raise
    finally:
        # launchers end the other ranks when the first has left: a rank that is still leaving must be able to report how it ended
        _ignore_signals()
        process.stop()
    return DONE


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _last_word(place: list[Path], rank: int) -> Callable[[str, bool], None]:
    """Return the function that the watchdog calls before it ends this process. The main thread is stuck then."""

    def end(line: str, prints: bool) -> None:
        for out in place:
            status.leave(out, rank, FAILED, line, of_all=True)
        if prints and TOKEN not in os.environ:
            os.write(2, f"error on rank {rank}: {line}\n".encode())
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h")  # a live display hides the cursor

    return end


def _did_not_fit(failure: BaseException, run: Run) -> str | None:
    """Return the line for a run out of memory, with the next thing to try; None for any other failure."""
    from moe.train.start.out_of_memory import did_not_fit
    from parallel.process import process

    world = process.read_environment()
    return did_not_fit(failure, run, world=world.size, cpu=world.device.type == "cpu")


if __name__ == "__main__":
    sys.exit(main())
