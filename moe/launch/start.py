"""The parent of a run on several processes: starts the launcher, passes signals on, judges the end, and leaves no process behind.

    start() -> deepspeed | torchrun -> ranks: moe.launch.launch -> <out>/.status/<rank>.json {"exit", "pid", "error"}

Launchers alone do not suffice: `deepspeed` does not pass SIGTERM on, ends its ranks one after another, and can exit with 0
after a rank was killed. So each rank writes down its own end, which decides success; signals go to all ranks at once; and
in every case no process of the launch stays alive. Nothing here imports torch.

Exit codes (moe/launch/exit_codes.py): DONE, every rank finished; STOPPED, every rank saved and stopped for a signal; BAD_INPUT, found
by the ranks; FAILED, all else.
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
from pathlib import Path
from typing import Any, Literal

from moe.launch import status
from moe.launch.arguments import Arguments
from moe.launch.environment import child_environment, devices, port_from
from moe.launch.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from moe.launch.processes import TOKEN, Rank, find_ranks, kill_all, send, wait
from moe.launch.streams import outlive_readers
from moe.recipe.load import run_name
from parallel.errors import BadInput
from parallel.files import read_text
from parallel.lock import HELD, alone_in

Launcher = Literal["deepspeed", "torchrun"]
_POLL_S = 0.1
_FIND_S = 0.5
_LEAVE_S = 5.0  # what is left of a run after a rank failed may say so, and is then ended: launchers wait half a minute for each
_SAME_SIGNAL_S = 1.0  # `timeout` and shells may deliver one request twice


def start(
    recipe: str,
    overrides: Mapping[str, str],
    *,
    nproc: int | None,
    launcher: Launcher = "deepspeed",
    out: Path | None = None,
    fresh: bool = False,
    allow_changes: Sequence[str] = (),
    debug_collectives: bool = False,
    cluster: str | None = None,
    init_from: Path | None = None,
    force: bool = False,
    hostfile: Path | None = None,
    module: str = "moe.launch.launch",
    grace_s: float = 60.0,
) -> int:
    """Run `module` on `nproc` processes (with a hostfile: on each of its hosts). Returns this command's exit code.

    After a signal the ranks have `grace_s` to save; after that, or at a second signal, all are killed. Raises BadInput before
    anything starts. Call it from the main thread, which receives the signals.
    """
    world = world_size(nproc, launcher=launcher, hostfile=hostfile)
    out = out or Path("runs") / run_name(recipe)
    outlive_readers()
    made = status.missing(out)
    with contextlib.suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)
    given = Arguments(
        recipe,
        overrides,
        out=out,
        fresh=fresh,
        allow_changes=tuple(allow_changes),
        init_from=init_from,
        cluster=cluster,
        force=force,
        debug_collectives=debug_collectives,
    )
    with alone_in(out):
        code = _run(given.words(), world, nproc, launcher, out, hostfile, module, grace_s)
    if code not in (DONE, STOPPED):
        status.tidy(out, made)
    return code


def _run(
    words: list[str],
    world: int,
    nproc: int | None,
    launcher: Launcher,
    out: Path,
    hostfile: Path | None,
    module: str,
    grace_s: float,
) -> int:
    """Start the launcher, wait, end what is left, and say how it went. Returns the exit code."""
    folder = status.empty(out)
    token = secrets.token_hex(8)
    env = child_environment(os.environ, nproc or 1) | {TOKEN: token, HELD: str(out.resolve())}
    visible = devices(os.environ, nproc or 1) if launcher == "deepspeed" and hostfile is None else None
    if visible:
        del env["CUDA_VISIBLE_DEVICES"]  # DeepSpeed's launcher sets it again, from its own arguments
    port = port_from(os.environ, local=hostfile is None)
    command = _command(launcher, nproc, hostfile, visible, port=port, module=module, words_of_ranks=folder) + words
    with _caught_signals() as caught:
        print(f"waiting for {launcher} to start {_processes(world)}: it loads torch first, and so does each of them", flush=True)
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            ranks, killed = _watch(process, world, caught, folder, grace_s=grace_s, local=hostfile is None)
            if hostfile is not None and caught:
                status.wait_for(folder, world, grace_s)
        finally:
            for rank in ranks:
                rank.look()
            left = {rank.rank for rank in ranks if rank.ended_at is None}
            stuck = kill_all(process.pid, token)
            process.wait()
    for rank in ranks:
        rank.look()
    asked = caught[0][0] if caught else None
    code, lines = verdict(status.read(folder), ranks, world, process.returncode, asked=asked, killed=killed, ended_here=left)
    lines += [f"process {pid} could not be ended" for pid in stuck]
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return code


def world_size(nproc: int | None, *, launcher: Launcher = "deepspeed", hostfile: Path | None = None) -> int:
    """The number of ranks of a launch: `nproc` on each host of a hostfile; without `nproc`, the hosts' slots. Raises BadInput."""
    if nproc is not None and nproc < 1:
        raise BadInput("--nproc", got=nproc, needed="at least 1 process", fix="--nproc 1")
    if hostfile is None:
        return nproc or 1
    if launcher == "torchrun":
        raise BadInput(
            "--hostfile",
            got="--launcher torchrun",
            needed="--launcher deepspeed",
            fix="start torchrun on every host: docs/use/launching.md",
        )
    hosts = read_hostfile(hostfile)
    return len(hosts) * nproc if nproc else sum(hosts.values())


def _command(
    launcher: Launcher, nproc: int | None, hostfile: Path | None, visible: str | None, *, port: int, module: str, words_of_ranks: Path
) -> list[str]:
    """The launcher's command line, up to the arguments for the ranks."""
    if launcher == "torchrun":
        codes = str(words_of_ranks / "launcher.json")
        where = ["--nproc_per_node", str(nproc or 1), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        return [sys.executable, "-m", "moe.launch.torchrun", codes, *where, "-m", module]
    # "-q" still shows the launcher's own errors, which repeat what the ranks and this process say
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical", "--master_port", str(port), "--no_local_rank"]
    if hostfile is not None:
        command += ["--hostfile", str(hostfile), *(["--num_accelerators", str(nproc)] if nproc else [])]
    else:
        command += ["--include", f"localhost:{visible}"] if visible else ["--num_accelerators", str(nproc or 1)]
        command += ["--hostfile", os.devnull + "/none"]  # else /job/hostfile would decide, if a cluster has one
    return [*command, "--module", module]


def _watch(
    process: subprocess.Popen[bytes], world: int, caught: list[tuple[int, float]], folder: Path, *, grace_s: float, local: bool
) -> tuple[list[Rank], bool]:
    """Wait until the launcher ends; meanwhile find ranks, note their ends, pass signals on. Returns (ranks, whether to kill the rest)."""
    ranks: list[Rank] = []
    looked = passed_at = -1.0
    began = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        asked = tuple(caught)  # a signal can come at any line of this round: it is for the next one
        asked_first = bool(asked) and passed_at < 0
        if local and len(ranks) < world and (asked_first or now - looked > _FIND_S):
            _add(ranks, find_ranks(process.pid))
            looked = now
            if len(ranks) == world:
                print(f"{_processes(world)} started after {now - began:.0f} s: waiting for the first to speak", flush=True)
        if asked_first:
            passed_at = now
            if not _pass_on(process, ranks, world, asked[0][0], local=local):
                return ranks, True
        again = any(at - asked[0][1] > _SAME_SIGNAL_S for _, at in asked)
        if asked and (again or now - passed_at > grace_s):
            return ranks, True
        if not asked and _failed_before(ranks, folder, now):
            return ranks, True
        wait(ranks, _POLL_S)
    return ranks, False


def _failed_before(ranks: list[Rank], folder: Path, now: float) -> bool:
    """Whether a rank failed so long ago that the others have said what they had to; at once, where it spoke for all of them."""
    ended = [rank for rank in ranks if rank.ended_at is not None]
    left = status.read(folder) if ended else {}
    for rank in ended:
        assert rank.ended_at is not None
        word = left.get(rank.rank, {})
        failed = word.get("exit", FAILED if rank.code is None else rank.code) not in (DONE, STOPPED)
        if failed and now - rank.ended_at > (_LEAVE_S / 10 if word.get("of_all") else _LEAVE_S):
            return True
    return False


def _processes(world: int) -> str:
    return f"{world} process{'es' if world > 1 else ''}"


def _add(ranks: list[Rank], found: list[Rank]) -> None:
    known = {rank.pid for rank in ranks}
    ranks.extend(rank for rank in found if rank.pid not in known)


def _pass_on(process: subprocess.Popen[bytes], ranks: list[Rank], world: int, number: int, *, local: bool) -> bool:
    """Send the signal to all ranks at once. False if not all of them have started, so that there is nothing to wait for."""
    name = signal.Signals(number).name
    if not local:  # DeepSpeed's launcher for several hosts does pass SIGTERM on
        process.send_signal(signal.SIGTERM)
        return True
    if len(ranks) < world:
        print(f"stopping: {name} came before all ranks had started", file=sys.stderr, flush=True)
        return False
    count = send(ranks, signal.SIGTERM if number == signal.SIGHUP else number)
    print(f"stopping: {name} passed to {count} ranks, which save at the next step (once more: end at once)", file=sys.stderr, flush=True)
    return True


def verdict(
    left: Mapping[int, Mapping[str, Any]],
    ranks: list[Rank],
    world: int,
    launcher_code: int,
    *,
    asked: int | None = None,
    killed: bool = False,
    ended_here: Collection[int] = (),
) -> tuple[int, list[str]]:
    """(exit code, one line for each rank that failed, the first to die first). A rank without a status has not finished.

    `asked`: the signal that was passed on. `killed`: whether the processes left after it were killed. `ended_here`: ranks that this
    process killed because others had ended.
    """
    exits = [left.get(rank, {}).get("exit") for rank in range(world)]
    if all(code == STOPPED for code in exits):
        early = all(left[rank].get("error") == status.TOO_EARLY for rank in range(world))
        said = f"a signal came before training began, and {status.NOTHING_LOST}" if early else "every rank saved and stopped for a signal"
        return STOPPED, [f"exit code {STOPPED}: {said}"]
    if all(code == DONE for code in exits) and launcher_code == DONE:
        return DONE, []
    if all(code in (DONE, STOPPED) for code in exits):
        return FAILED, [f"every rank finished, with exit codes {exits}, but the launcher ended with {_said(launcher_code)}"]
    if asked is not None and all(_came_too_early(left.get(rank), rank, ranks, asked, killed) for rank in range(world)):
        code = INTERRUPTED if asked == signal.SIGINT else STOPPED
        return code, [f"exit code {code}: {signal.Signals(asked).name} came before training began, and {status.NOTHING_LOST}"]
    if not left and not ranks:
        return FAILED, [
            "no rank had started"
            if killed
            else f"no rank started: the launcher ended with {_said(launcher_code)}; its own message is above"
        ]
    failed = [rank for rank in range(world) if exits[rank] not in (DONE, STOPPED)]
    bad = [rank for rank in failed if exits[rank] == BAD_INPUT]
    if bad:  # rank 0 prints its own
        return BAD_INPUT, [] if exits[0] == BAD_INPUT else [f"error: {left[bad[0]].get('error')}"]
    seen = {rank.rank: rank for rank in ranks}
    ended_at = {rank: seen[rank].ended_at or float("inf") if rank in seen else 0.0 for rank in failed}  # never seen: it died too fast
    groups: list[tuple[str, list[int]]] = []
    for rank in sorted(failed, key=ended_at.__getitem__):
        codes = (exits[rank], seen[rank].code if rank in seen else None, launcher_code if len(failed) == 1 else None)
        last = next((c for c in codes if c not in (None, DONE)), None)
        how = f"ended with {_said(last)}"
        wordless = "pid" not in left.get(rank, {})
        if wordless and asked is not None and (killed or last == -asked):
            how = "was killed: it had not stopped" if killed else f"ended with {_said(last)}: it had not come as far as to save"
        elif wordless and rank in ended_here:
            how = "was ended here, after the others"
        elif wordless and groups and last in (-signal.SIGTERM, -signal.SIGKILL):
            how = "was ended by the launcher after that"
        error = left.get(rank, {}).get("error")
        text, of_all = f"{how}{f': {error}' if error else ''}", left.get(rank, {}).get("of_all")
        same = next((who for said, who in groups if of_all and said == text), None)
        if same is None:
            groups.append((text, [rank]))
        else:
            same.append(rank)
    lines = [f"rank{'s' if len(who) > 1 else ''} {' '.join(map(str, sorted(who)))} {text}" for text, who in groups]
    return FAILED, lines


def _came_too_early(left: Mapping[str, Any] | None, rank: int, ranks: list[Rank], asked: int, killed: bool) -> bool:
    """Whether a rank ended for the signal before it could have trained: it said so, had not started, or did not catch signals yet."""
    if left is not None:
        return left.get("error") == status.TOO_EARLY or left.get("exit") == -asked
    seen = next((r for r in ranks if r.rank == rank), None)
    return killed if seen is None else seen.code in (-asked, STOPPED)


def _said(code: int | None) -> str:
    """An exit code in words. Launchers give a signal as -9, 137 or (DeepSpeed) 247."""
    if code is None:
        return "no word: its exit code is not known"
    number = -code if code < 0 else 256 - code if code > 192 else code - 128 if code > 128 else 0
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    return f"signal {name}" + (" (by kill -9, or by the kernel where memory runs out: see dmesg)" if number == signal.SIGKILL else "")


def read_hostfile(path: Path) -> dict[str, int]:
    """{host: slots} from DeepSpeed's hostfile, which has one `host slots=N` per line and # for comments. Raises BadInput."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            "--hostfile",
            got=f"{path}: {getattr(error, 'strerror', None) or error}",
            needed="a text file",
            fix="write one line for each host: worker-0 slots=8",
        ) from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 and words[1].startswith("slots=") else ""
        if not slots.isdecimal() or int(slots) < 1 or words[0] in hosts:
            got = f"{words[0]} twice" if words[0] in hosts else line.strip()
            raise BadInput(f"{path}, line {number}", got=got, needed="HOST slots=N, each host once", fix="for example: worker-0 slots=8")
        hosts[words[0]] = int(slots)
    if not hosts:
        raise BadInput("--hostfile", got=f"{path} without a host", needed="HOST slots=N lines", fix="for example: worker-0 slots=8")
    return hosts


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[tuple[int, float]]]:
    """The signals received, each with its time. Signals that are ignored in this process (nohup) stay ignored."""
    caught: list[tuple[int, float]] = []
    numbers = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: caught.append((number, time.monotonic()))) for s in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
