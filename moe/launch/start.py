"""The parent process of a run on several ranks: starts the launcher, forwards signals to ranks, judges the end, leaves no process alive.

    start() -> deepspeed | torchrun -> ranks: moe.launch.launch -> <out>/.status/<rank>.json {"exit", "pid", "error"}

Launchers alone do not suffice: `deepspeed` does not forward SIGTERM, ends its ranks one after another, and can exit with 0 after a rank was
killed. So each rank writes a status file, from which success or failure is read, and signals are sent to all ranks directly. This file
imports no torch. moe/launch/verdict.py judges the end; moe/launch/restarts.py decides whether the run starts again (`--restarts`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moe.launch import status
from moe.launch.arguments import Arguments
from moe.launch.environment import allow_open_files, child_environment, devices, devices_without, port_from
from moe.launch.exit_codes import DONE, FAILED, INTERRUPTED, STOPPED
from moe.launch.hosts import Hosts, read_hostfile
from moe.launch.processes import STDIN, TOKEN, Rank, find_ranks, kill_all, send, wait
from moe.launch.ready import Forked, Ready
from moe.launch.restarts import End, Restarts
from moe.launch.streams import last_line, log_of, outlive_readers
from moe.launch.verdict import Watched, first_to_fail, in_words, verdict
from moe.recipe.load import run_name
from parallel.errors import BadInput, counted
from parallel.store.lock import HELD, alone_in

Launcher = Literal["deepspeed", "torchrun"]
_POLL_S = 0.1  # time between two checks whether processes have ended
_FIND_S = 0.5  # time between two searches for ranks, or for failures on other machines
_LEAVE_S = 5.0  # after a rank fails, time in which other ranks can write their status files before all are killed
# exit codes of a rank that was killed by one of these signals
_KILLED = [-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)]
_STATUS_S, _ALL_STATUS_S = 5.0, 65.0  # time to wait for status files of other machines: after a failure, after success
_SAME_SIGNAL_S = 1.0  # two signals within this time count as one, because `timeout` and shells may send a signal twice


@dataclass(frozen=True)
class Launch:
    """Settings of one attempt of a run.

    words: arguments of each of the `world` ranks. environment: variables from the user. nproc: number of ranks on this machine, or on each
    machine of `hostfile` (None: its slots). module: program of a rank. grace_s: seconds that ranks have to save after a signal. caught:
    signals received so far, each with its time (time.monotonic). ready: the warm process for quick restarts.
    """

    words: list[str]
    environment: Mapping[str, str]
    world: int
    nproc: int | None
    launcher: Launcher
    out: Path
    hostfile: Path | None
    module: str
    grace_s: float
    caught: list[tuple[int, float]]
    ready: Ready | None = None


def start(
    given: Arguments,
    *,
    nproc: int | None,
    launcher: Launcher = "deepspeed",
    hostfile: Path | None = None,
    module: str = "moe.launch.launch",
    grace_s: float = 60.0,
    restarts: int = 0,
    smaller: Sequence[int] = (),
) -> int:
    """Run `module` with the arguments `given` on `nproc` processes (None: 1), or with a hostfile on `nproc` processes of each host (None:
    its slots). Return the exit code.

    grace_s: seconds that ranks have to save after a signal, before all are killed; a second signal kills them immediately. restarts:
    largest number of restarts in a row without a new checkpoint. smaller: numbers of processes with which to continue if these restarts do
    not help, largest first. Raises BadInput before anything starts. Must be called in the main thread, which receives the signals.
    """
    world = world_size(nproc, launcher=launcher, hostfile=hostfile)
    allow_open_files(world)
    out = given.out or Path("runs") / run_name(given.recipe)
    given = replace(given, out=out)
    outlive_readers()
    again = Restarts(out, limit=restarts, fresh=given.fresh, from_step=given.from_step, smaller=smaller)
    environment = dict(os.environ)
    may_fork = restarts and hostfile is None and module == "moe.launch.launch" and sys.platform.startswith("linux")
    with alone_in(out), _caught_signals() as caught, contextlib.ExitStack() as left:
        ready = left.enter_context(closing(Ready(given.words(), environment, world, wanted=again.saved))) if may_fork else None
        while True:
            words, variables = replace(given, fresh=again.fresh(), from_step=again.from_step()).words(), environment | again.variables()
            end = _run(Launch(words, variables, world, nproc, launcher, out, hostfile, module, grace_s, caught, ready))
            code = end.code if caught else again.after(end)
            if code is not None:
                return code
            if again.processes not in (None, nproc):
                environment |= devices_without(again.gone, environment, world)
                world = nproc = again.processes or world
                if ready is not None:  # end the warm process: its cores and devices are for the old number of ranks
                    ready.close()
            if not again.wait(caught):
                return INTERRUPTED if caught[0][0] == signal.SIGINT else STOPPED


def _run(launch: Launch) -> End:
    """Run one attempt. The status folder is made before it and removed after it. Raises BadInput."""
    token = secrets.token_hex(8)
    with status.removed(launch.out, token) as folder:
        return _attempt(launch, token, folder)


def _attempt(launch: Launch, token: str, folder: Path) -> End:
    """Start the ranks, wait for their end, kill all processes that remain, and print how ranks ended. token: marks all processes of this
    attempt (TOKEN in their environment). folder: the status folder."""
    world, nproc, caught, here = launch.world, launch.nproc, launch.caught, launch.hostfile is None
    env = child_environment(launch.environment, (nproc or 1) if here else None) | {TOKEN: token, HELD: str(launch.out.resolve())}
    hosts = None
    if launch.hostfile is not None:
        slots = read_hostfile(launch.hostfile)
        hosts = Hosts(tuple(slots), token, tuple(nproc or each for each in slots.values()))
        if not hosts.check(folder, no_more=lambda: bool(caught)):
            return _end(launch, [], DONE, how="early")
        env[STDIN] = "1"
    process, ranks = _started(launch, env, folder)
    killed: set[int] = set()  # ranks that are still alive at the end, so this process kills them
    also: list[str] = []
    try:
        how = _watch(launch, process, ranks, folder, hosts=hosts)
        if hosts is not None:
            before = len(caught)
            succeeded = how == "ended" and process.returncode in (DONE, STOPPED)
            # after success, wait for all files: on NFS, they may appear a minute late
            wait_s = 0.0 if how == "early" else _ALL_STATUS_S if succeeded else _STATUS_S
            status.wait_for(folder, world, wait_s, no_more=lambda: len(caught) > before)
            statuses, failed = status.read(folder), status.machines(folder, token)
            ended = {rank for number in failed for rank in hosts.ranks_on(number)}
            killed = set(range(world)) - statuses.keys() - ended if how == "killed" and not caught else set()
            silent = {number: code for number, code in failed.items() if not statuses.keys() >= set(hosts.ranks_on(number))}
            also = [f"the launcher on {hosts.names[number]} ended with {in_words(code)}" for number, code in silent.items()]
    finally:
        for rank in ranks:
            rank.look()
        killed |= {rank.rank for rank in ranks if rank.pid and rank.ended_at is None}
        uncertain = [] if hosts is None else hosts.end()
        if isinstance(process, Forked) and launch.ready is not None:
            stuck = launch.ready.end(process, token)
        else:
            stuck = kill_all(process.pid, token)
        code = process.wait()
    uncertain += [f"process {pid} could not be ended" for pid in stuck]
    return _end(launch, ranks, code, how=how, ended_here=killed, also=also, uncertain=uncertain)


def _started(launch: Launch, env: dict[str, str], folder: Path) -> tuple[subprocess.Popen[bytes] | Forked, list[Rank]]:
    """Fork the ranks from the warm process (`launch.ready`), which has already imported their modules. If there is none or it
    fails, start the launcher. Return (the process that ends after all ranks: their forked parent or the launcher; the ranks, [] if the
    launcher has still to start them). env: variables of the new processes. folder: the status folder."""
    world, nproc, here = launch.world, launch.nproc, launch.hostfile is None
    visible = devices(launch.environment, nproc or 1, launcher=launch.launcher) if here else None
    if visible:
        del env["CUDA_VISIBLE_DEVICES"]  # DeepSpeed's launcher sets it again, from the GPUs in its arguments
    port = port_from(launch.environment, local=here)
    if launch.ready is not None:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}"}
        own |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        forked = launch.ready.begin(launch.words, env | own, world, no_more=lambda: bool(launch.caught))
        if forked is not None:
            return forked, forked.ranks
    command = _command(launch, visible, port=port, folder=folder)
    processes = counted(world, "process")
    print(f"waiting for {launch.launcher} to start {processes}: the launcher and each process load torch first", flush=True)
    # nothing is written to the pipe; when it is closed, remote ranks know that this process has died
    stdin = subprocess.DEVNULL if here else subprocess.PIPE
    return subprocess.Popen(command + launch.words, env=env, stdin=stdin, start_new_session=True), []


def _end(
    launch: Launch,
    ranks: list[Rank],
    launcher_code: int,
    *,
    how: Watched,
    ended_here: Collection[int] = (),
    also: Sequence[str] = (),
    uncertain: Sequence[str] = (),
) -> End:
    """Judge how the attempt ended, and print the verdict. launcher_code: the launcher's exit code. how: result of `_watch`. ended_here:
    ranks that this process killed. also: further lines to print if the run failed. uncertain: lines about processes that may still run."""
    for rank in ranks:
        rank.look()
    number = launch.caught[0][0] if launch.caught else None
    statuses = status.read(launch.out / status.NAME)
    code, lines = verdict(statuses, ranks, launch.world, launcher_code, asked=number and _sent(number), how=how, ended_here=ended_here)
    first = first_to_fail(statuses, ranks, ended_here=ended_here)
    lines += [*(also if code == FAILED else ()), *uncertain]
    if code == FAILED and first is not None and (last := last_line(log := log_of(launch.out, first))):
        lines.append(f"output of rank {first}: {log}" + ("" if any(last in line for line in lines) else f", which ends with: {last}"))
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return End(code, lines, statuses, began=bool(ranks or statuses), stuck=bool(uncertain), first=first)


def world_size(nproc: int | None, *, launcher: Launcher = "deepspeed", hostfile: Path | None = None) -> int:
    """Return the number of ranks of a launch. With a hostfile, each host has `nproc` ranks, or by default its slots. Raises BadInput."""
    if nproc is not None and nproc < 1:
        raise BadInput("--nproc", got=nproc, needed="at least 1 process", fix="--nproc 1")
    if hostfile is None:
        return nproc or 1
    if launcher == "torchrun":
        fix = "start torchrun on every host: docs/use/launching.md"
        raise BadInput("--hostfile", got="--launcher torchrun", needed="--launcher deepspeed", fix=fix)
    hosts = read_hostfile(hostfile)
    return len(hosts) * nproc if nproc else sum(hosts.values())


def _command(launch: Launch, visible: str | None, *, port: int, folder: Path) -> list[str]:
    """Return the launcher's command line, without the ranks' arguments. visible: GPUs to use, as "0,1". folder: the status folder."""
    nproc, hostfile = launch.nproc, launch.hostfile
    if launch.launcher == "torchrun":
        where = ["--nproc_per_node", str(nproc or 1), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        return [sys.executable, "-m", "moe.launch.torchrun", str(folder / "launcher.json"), *where, "-m", launch.module]
    # --log_level critical: with -q the launcher would still print errors, which repeat messages of the ranks and of this process
    runner = ["deepspeed.launcher.runner"] if hostfile is None else ["moe.launch.pdsh", str(folder)]
    command = [sys.executable, "-m", *runner, "--log_level", "critical", "--master_port", str(port), "--no_local_rank"]
    if hostfile is not None:  # --force_multi: use ssh also for a single host; -N: do not print the host's name before each line
        command += ["--hostfile", str(hostfile), "--force_multi", "--launcher_args=-N"]
        command += ["--num_accelerators", str(nproc)] if nproc else []
    else:
        command += ["--include", f"localhost:{visible}"] if visible else ["--num_accelerators", str(nproc or 1)]
        command += ["--hostfile", os.devnull + "/none"]  # a file that does not exist; by default DeepSpeed would read /job/hostfile
    return [*command, "--module", launch.module]


def _watch(
    launch: Launch, process: subprocess.Popen[bytes] | Forked, ranks: list[Rank], folder: Path, *, hosts: Hosts | None = None
) -> Watched:
    """Wait until the launcher (`process`) ends. Meanwhile append each rank that has started to `ranks`, notice when ranks end, and forward
    signals to them. hosts: machines of the hostfile; None without one. Ranks on these machines are looked for only when a signal is
    forwarded. Return "ended"; "killed" if the caller must kill all processes; "early" if a signal came before all ranks had started."""
    world, caught = launch.world, launch.caught
    looked = passed_at = -1.0
    began = time.monotonic()
    seen: dict[object, float] = {}
    while process.poll() is None:
        now = time.monotonic()
        asked = tuple(caught)  # a copy, so that a signal that comes during this iteration is handled in the next
        asked_first = bool(asked) and passed_at < 0
        if hosts is None and len(ranks) < world and (asked_first or now - looked > _FIND_S):
            known = {rank.pid for rank in ranks}
            ranks.extend(rank for rank in find_ranks(process.pid) if rank.pid not in known)
            looked = now
            if len(ranks) == world:
                print(f"{counted(world, 'process')} started after {now - began:.0f} s: waiting for the first output", flush=True)
        if asked_first:
            passed_at = now
            if not _pass_on(launch, ranks, folder, hosts):
                return "early"
        if asked and (_asked_again(asked) or now - passed_at > launch.grace_s):
            return "killed"
        if not asked and hosts is None and _failed_before(ranks, folder, now):
            return "killed"
        if not asked and hosts is not None and now - looked > _FIND_S:
            looked = now
            if _failed_elsewhere(folder, hosts.token, seen, now):
                return "killed"
        if launch.ready is not None and not asked and now - looked > _FIND_S:
            looked = now
            launch.ready.look()
        wait(ranks, _POLL_S)
    return "ended"


def _failed_before(ranks: list[Rank], folder: Path, now: float) -> bool:
    """Return whether a rank failed more than `_leave_s` seconds ago, so that other ranks have had time to write their status files. now:
    time.monotonic()."""
    ended = [(rank, rank.ended_at) for rank in ranks if rank.ended_at is not None]
    statuses = status.read(folder) if ended else {}
    for rank, ended_at in ended:
        found = statuses.get(rank.rank, {})
        failed = found.get("exit", FAILED if rank.code is None else rank.code) not in (DONE, STOPPED)
        if failed and now - ended_at > _leave_s(found, rank.code):
            return True
    return False


def _failed_elsewhere(folder: Path, token: str, seen: dict[object, float], now: float) -> bool:
    """Return whether a rank or launcher on another machine failed more than `_leave_s` seconds ago, so that others have had time to write
    their status files. token: marks the files of this attempt's launchers. seen: rank or "machine N" -> time (time.monotonic) at which its
    status file was first seen; this call adds new ones. now: time.monotonic()."""
    codes: dict[object, tuple[int, float]] = {
        rank: (found.get("exit", FAILED), _leave_s(found)) for rank, found in status.read(folder).items()
    }
    codes |= {f"machine {number}": (code, _LEAVE_S) for number, code in status.machines(folder, token).items()}
    waited = {who: (now - seen.setdefault(who, now), leave_s) for who, (code, leave_s) in codes.items() if code not in (DONE, STOPPED)}
    return any(since > leave_s for since, leave_s in waited.values())


def _leave_s(failed: Mapping[str, Any], code: int | None = None) -> float:
    """Return how many seconds the other ranks get to write their status files after a rank failed. The time is short if they cannot add
    information: all ranks have the same error, or the failed rank was killed by a signal, and the others only see that it is gone. failed:
    status of the failed rank. code: its exit code."""
    return _LEAVE_S / 10 if failed.get("of_all") or (not failed and code in _KILLED) else _LEAVE_S


def _asked_again(caught: Sequence[tuple[int, float]]) -> bool:
    """Return whether a second signal has come, more than _SAME_SIGNAL_S after the first: then all ranks are killed. caught: (signal, time
    in seconds) of each signal."""
    return any(at - caught[0][1] > _SAME_SIGNAL_S for _, at in caught)


def _sent(number: int) -> int:
    """Return the signal to send to ranks after the launcher got signal `number`: SIGTERM for SIGHUP (a closed terminal), else `number`."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _pass_on(launch: Launch, ranks: list[Rank], folder: Path, hosts: Hosts | None) -> bool:
    """Forward the first signal to all ranks. Return False if not all ranks had started: then there is nothing to save."""
    number = launch.caught[0][0]
    name, silent = signal.Signals(number).name, list[str]()
    if hosts is not None:
        found, silent = hosts.send(_sent(number), no_more=lambda: _asked_again(launch.caught))
        # a rank with a status file has started and ended
        ranks.extend(Rank(rank, 0) for rank in sorted(found | status.read(folder).keys()))
        for host in silent:
            print(f"stopping: {name} did not reach {host}, which does not answer", file=sys.stderr, flush=True)
    if len(ranks) < launch.world and not silent:
        print(f"stopping: {name} came before all ranks had started", file=sys.stderr, flush=True)
        return False
    count = send(ranks, _sent(number)) if hosts is None else len(found)
    line = f"stopping: {name} passed to {counted(count, 'rank')}, to save at the next step (a second signal kills them immediately)"
    print(line, file=sys.stderr, flush=True)
    return True


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[tuple[int, float]]]:
    """Yield a list to which each received signal is added with its time. Signals that this process ignores (nohup) stay ignored."""
    caught: list[tuple[int, float]] = []
    numbers = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: caught.append((number, time.monotonic()))) for s in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():  # early.py's handler is not restored: it would say that nothing was trained
            signal.signal(number, signal.SIG_IGN if getattr(handler, "before_training", False) else handler)
