"""The parent of a run (`start.start`): in each failure of ranks or parent, the exit code is right and no process stays alive.

Ranks are a few lines without torch. Most tests use a launcher that starts quickly and has the faults of real launchers: it does not send
signals on, and exits with 0 whatever its ranks did. Some tests use torchrun and DeepSpeed's launcher.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from moe.cli import main as cli
from moe.launch import environment, hosts, start, status, torchrun
from moe.launch.arguments import Arguments
from moe.launch.early import early_signals
from moe.launch.launch import main as rank_main
from moe.launch.processes import STDIN, TOKEN, Rank
from moe.launch.verdict import verdict
from moe.train.start.place import asked_to_stop
from parallel.errors import BadInput
from parallel.machine import usable_cores
from parallel.process import extensions

ROOT = Path(__file__).resolve().parents[3]
MARK = "MOE_TEST_MARK"


def forked(work: Callable[[], int]) -> int:
    """Run `work` in a forked process, which exits with its result, or with 99 after an exception. Return the process id."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        code = work()
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


RANK_PROGRAM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from moe.launch.processes import die_with_parent

die_with_parent()
mode, rank = sys.argv[1], int(os.environ["RANK"])
out = Path(sys.argv[sys.argv.index("--out") + 1])
(out / f"args-{rank}.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))

def leave(code, error=None):
    (out / ".status" / f"{rank}.json").write_text(json.dumps({"exit": code, "pid": os.getpid(), "error": error}))
    os._exit(code)

def saved(number, frame):
    (out / f"signal-{rank}").write_text(signal.Signals(number).name)
    time.sleep(0.2)  # as long as saving a checkpoint may take
    leave(75)

if mode == "fine":
    leave(0)
if mode == "wordless":
    os._exit(0) if rank == 1 else leave(0)
if mode == "teardown":
    (out / ".status" / f"{rank}.json").write_text(json.dumps({"exit": 0}))
    os.kill(os.getpid(), signal.SIGSEGV) if rank == 1 else os._exit(0)
def found():
    while not (out / f"found-{rank}").exists():
        time.sleep(0.05)

if mode == "exit3" and rank == 1:
    found()
    leave(3, "ValueError: three")
if mode == "badinput":
    leave(2, "data.path: got a short text")
if mode == "sigkill" and rank == 1:
    found()
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "waits":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, saved)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "300"], start_new_session=True)
(out / f"ready-{rank}").touch()
time.sleep(60)
leave(1, "nobody stopped it")
"""

# the launcher collects its ranks' exit codes (waitpid) late, so that the parent can still read them in /proc
FAULTY_LAUNCHER = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-m", *sys.argv[2:]], env=os.environ | {"RANK": str(r)}) for r in range(int(sys.argv[1]))]
while any(rank.poll() is None for rank in ranks):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    time.sleep(1.0)
    if any(rank.poll() not in (None, 0, 75) for rank in ranks):
        for rank in ranks:
            rank.kill()
    time.sleep(0.3)
"""

DRIVER = """
import signal, sys
from pathlib import Path
from moe.launch import start
from moe.launch.arguments import Arguments

def mark(ranks, wait_s):
    for rank in ranks:
        (out / f"found-{rank.rank}").touch()
    wait(ranks, wait_s)

wait, start.wait = start.wait, mark
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # if pytest runs under nohup, the inherited handler ignores SIGHUP
if sys.argv[2] == "faulty":
    start._command = lambda launch, *_, **__: [sys.executable, sys.argv[3] + "/faulty.py", "2", launch.module]
mode, launcher, out = *sys.argv[1:3], Path(sys.argv[3])
sys.exit(start.start(Arguments(mode, {"train.seed": "-1"}, out=out), nproc=2, launcher=launcher, module="rank_program", grace_s=2.0))
"""


class Launch:
    """`start.start` in its own process. All processes of the launch have a mark in their environment, by which they are found."""

    def __init__(self, out: Path, mode: str, launcher: str, cwd: Path | None = None) -> None:
        out.mkdir(exist_ok=True)
        (out / "rank_program.py").write_text(RANK_PROGRAM)
        (out / "faulty.py").write_text(FAULTY_LAUNCHER)
        self.out, self.mark = out, uuid.uuid4().hex
        env = os.environ | {MARK: self.mark, "PYTHONPATH": f"{out}{os.pathsep}{ROOT}"}
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", *environment.BEFORE_TORCH):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", DRIVER, mode, launcher, str(out)],
            env=env,
            cwd=cwd,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout_s: float = 40.0) -> tuple[int, str]:
        """Wait until the command and all processes that it started have ended. Return (exit code, stderr)."""
        self.said, error = self.process.communicate(timeout=timeout_s)
        assert self.family() == []
        return self.process.returncode, error

    def ready(self, timeout_s: float = 40.0) -> None:
        until = time.monotonic() + timeout_s
        while not all((self.out / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until and self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def family(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[type]:
    started: list[Launch] = []

    def make(mode: str, launcher: str = "faulty", cwd: Path | None = None) -> Launch:
        started.append(Launch(tmp_path / "run", mode, launcher, cwd))
        return started[-1]

    yield make
    for one in started:
        for pid in one.family():
            os.kill(pid, signal.SIGKILL)
        one.process.communicate()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("fine", 0, r"^$"),
        ("wordless", 1, r"rank 1 "),
        ("teardown", 0, r"^$"),  # a crash after the rank's status file says that it finished: the run has succeeded
        ("exit3", 1, r"^rank 1 ended with exit code 3: ValueError: three$"),
        ("badinput", 2, r"^$"),
        ("sigkill", 1, r"^rank 1 ended with signal SIGKILL"),
    ],
)
def test_exit_code_is_what_the_ranks_did(launch, mode: str, code: int, said: str) -> None:
    got, error = launch(mode).end()
    assert (got, bool(re.search(said, error.splitlines()[0] if error else ""))) == (code, True), error


@pytest.mark.alone
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "received"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGHUP, "SIGTERM")])
def test_every_rank_receives_the_signal_at_once_and_saves(launch, number: signal.Signals, received: str) -> None:
    run = launch("waits")
    run.ready()
    run.process.send_signal(number)
    code, error = run.end()
    assert code == 75 and "exit code 75: every rank saved" in error
    at = [(run.out / f"signal-{rank}").stat().st_mtime for rank in range(2)]
    assert [(run.out / f"signal-{rank}").read_text() for rank in range(2)] == [received] * 2
    assert abs(at[0] - at[1]) < 0.5


@pytest.mark.timeout(60)
def test_deaf_ranks_and_their_children_are_killed_after_the_grace(launch) -> None:
    run = launch("deaf")
    run.ready()
    sent = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code, error = run.end()
    assert code == 1 and "rank 0 was killed, because it had not stopped in time" in error
    assert 2.0 <= time.monotonic() - sent < 8.0


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_a_second_signal_ends_at_once_but_an_echo_of_the_first_does_not(launch) -> None:
    run = launch("waits")
    run.ready()
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGINT)  # a second time, as `timeout` does: it signals the process, then its process group
    assert run.end()[0] == 75

    deaf = launch("deaf")
    (deaf.out / "ready-0").unlink(), (deaf.out / "ready-1").unlink()
    deaf.ready()
    deaf.process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    sent = time.monotonic()
    deaf.process.send_signal(signal.SIGTERM)
    assert deaf.end()[0] == 1 and time.monotonic() - sent < 1.5


@pytest.mark.timeout(60)
def test_ranks_die_with_the_parent_that_was_killed(launch) -> None:
    run = launch("deaf")
    run.ready()
    ranks = {pid for pid in run.family() if psutil.Process(pid).cmdline()[1:3] == ["-m", "rank_program"]}
    assert len(ranks) == 2
    run.process.kill()
    until = time.monotonic() + 10
    while ranks & set(run.family()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not ranks & set(run.family())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_real_launchers_pass_arguments_and_stop_on_sigterm(launch, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has files named like this project's packages and the launcher's. They are not imported, and launchers write no
    files there."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    users = tmp_path / "mine"
    users.mkdir()
    for name in ("moe", "parallel", "recipes", "deepspeed", "torch"):
        (users / f"{name}.py").write_text("raise SystemExit('the working folder stands for a package')")
    run = launch("waits", launcher, users)
    run.ready(80)
    run.process.send_signal(signal.SIGTERM)
    code, error = run.end(80)
    assert code == 75, error
    lines = error.splitlines()
    assert re.search(r"^2 processes started after \d+ s: waiting for the first output$", run.said, flags=re.M), run.said
    assert len(lines) == 2 and lines[0].startswith("stopping: SIGTERM passed to 2 ranks"), error
    assert not [path.name for path in (tmp_path / "tmp").iterdir() if "elastic" in path.name]
    for rank in range(2):
        words, env = json.loads((run.out / f"args-{rank}.json").read_text())
        assert words == ["waits", "--train.seed=-1", "--out", str(run.out)]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
        assert Path(env["TORCH_EXTENSIONS_DIR"]) == extensions.extensions_dir()
        assert environment.BEFORE_TORCH.items() <= env.items()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_real_launchers_never_hide_a_rank_that_was_killed(launch, launcher: str) -> None:
    run = launch("sigkill", launcher)
    code, error = run.end(80)
    assert code == 1
    assert re.match(r"rank 1 ended with signal SIGKILL", error), error
    assert "Traceback" not in error and len(error.splitlines()) <= 2, error


@pytest.mark.timeout(120)
def test_a_deepspeed_launcher_that_is_killed_is_a_failure(launch) -> None:
    """If DeepSpeed's launch.py is killed, its runner exits with 0 while ranks continue. The run must fail, and all ranks be killed."""
    run = launch("waits", "deepspeed")
    run.ready(80)
    inner = [pid for pid in run.family() if "deepspeed.launcher.launch" in psutil.Process(pid).cmdline()]
    assert len(inner) == 1
    os.kill(inner[0], signal.SIGKILL)
    assert run.end()[0] == 1


# --- functions without a launch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "launcher_code", "code", "said"),
    [
        ({0: {"exit": 0}, 1: {"exit": 0}}, 0, 0, ""),
        ({0: {"exit": 75}, 1: {"exit": 75}}, 75, 75, "every rank saved"),
        ({0: {"exit": 0}, 1: {"exit": 0}}, 247, 1, "the launcher ended with signal SIGKILL"),
        ({0: {"exit": 0}, 1: {"exit": 75}}, 0, 1, "[0, 75]"),
        ({0: {"exit": 0}}, 0, 1, "rank 1 ended with no status file"),
        ({0: {"exit": 0}}, 247, 1, "rank 1 ended with signal SIGKILL"),
        ({0: {"exit": 75}}, 139, 1, "rank 1 ended with signal SIGSEGV"),
        ({}, 1, 1, "no rank started: the launcher ended with exit code 1"),
        ({0: {"exit": 1, "error": "x"}, 1: {"exit": 2, "error": "data.path: y"}}, 1, 2, "error: data.path: y"),
    ],
)
def test_verdict_is_zero_only_if_every_rank_said_so(status, launcher_code: int, code: int, said: str) -> None:
    got, lines = verdict(status, [], 2, launcher_code)
    assert got == code and said in "\n".join(lines)


def test_a_signal_before_training_asks_for_another_go_and_claims_no_save() -> None:
    early = [Rank(1, 5, ended_at=1.0, code=-15)]
    code, lines = verdict({0: {"exit": -15}}, early, 2, 1, asked=signal.SIGTERM)
    assert code == 75 and "came before training began" in lines[0] and "saved" not in lines[0]
    code, lines = verdict({0: {"exit": 75, "error": status.TOO_EARLY, "pid": 4}}, early, 2, 1, asked=signal.SIGTERM)
    assert code == 75 and "nothing is lost" in lines[0]
    assert verdict({0: {"exit": -2}}, [Rank(1, 5, ended_at=1.0, code=-2)], 2, 1, asked=signal.SIGINT)[0] == 130
    # rank 1 is already in its first step, and fails because rank 0 has left, with or without a signal of its own
    first = {0: {"exit": 75, "error": status.TOO_EARLY, "pid": 4}, 1: {"exit": 1, "error": "rank 0 has left", "pid": 5, "of_all": True}}
    for asked in (signal.SIGTERM, None):
        code, lines = verdict(first, [Rank(1, 5, ended_at=1.0, code=1)], 2, 1, asked=asked)
        assert code == 75 and "nothing is lost" in lines[0]
    gone = [Rank(0, 4, ended_at=1.0, code=-2), Rank(1, 5, ended_at=1.1, code=1)]
    assert verdict({1: first[1]}, gone, 2, 1, asked=signal.SIGINT)[0] == 130
    assert verdict({1: first[1]}, gone, 2, 1)[0] == 1  # no signal was sent to the parent
    # a rank that hung or failed was not ended by an early signal, so training may be lost
    assert verdict({}, [Rank(0, 4, ended_at=1.0, code=-9), *early], 2, 1, asked=signal.SIGTERM, how="killed")[0] == 1
    failed = {0: {"exit": 1, "error": "ValueError", "pid": 4}}
    assert verdict(failed, early, 2, 1, asked=signal.SIGTERM)[0] == 1


@pytest.mark.parametrize("words", [["moe", "train"], ["moe", "train", "--nproc=2"], ["rank"]], ids=str)
@pytest.mark.parametrize("folder", ["a" * 5000, "~nosuchuser/x"], ids=["long", "of nobody"])
def test_a_run_folder_that_cannot_be_is_one_line(words: list[str], folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["switch_tiny", f"--out={folder}"]
    assert (rank_main(given) if words == ["rank"] else cli.main([words[1], *given, *words[2:]])) == 2
    assert re.fullmatch(r"error: --out: got .*\n", capsys.readouterr().err)


def test_a_rank_beyond_its_world_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert rank_main(["switch_tiny", "--out", str(tmp_path / "run")]) == 2
    assert re.fullmatch(r"error: RANK, WORLD_SIZE, LOCAL_RANK on rank 5: got .*\n", capsys.readouterr().err)


def test_the_summary_of_torchrun_has_the_error_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert rank_main(["no_such_recipe", "--out", str(tmp_path / "run")]) == 2
    summary = str(ChildFailedError("moe", {0: ProcessFailure(0, os.getpid(), 2, str(tmp_path / "error.json"))}))
    assert "recipe: got no_such_recipe" in summary and "To enable traceback" not in summary
    full = tmp_path / "full.json"  # a disk without room
    full.symlink_to("/dev/full")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(full))
    assert rank_main(["no_such_recipe", "--out", str(tmp_path / "run")]) == 2 and not full.exists()


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "by hand", "a parent"])
def test_what_the_user_can_mend_is_said_once_by_whichever_rank_has_it(launcher: str, tmp_path: Path) -> None:
    variables = {"torchrun": {"TORCHELASTIC_RUN_ID": "none"}, "deepspeed": {"CROSS_RANK": "0"}, "a parent": {TOKEN: "x"}}.get(launcher, {})

    def rank(number: int, line: str) -> int:
        os.dup2(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (until it ends)
        os.environ |= variables | {"RANK": str(number), "WORLD_SIZE": "3", "TMPDIR": str(tmp_path)}
        tempfile.tempdir = None
        return rank_main([line])  # the recipe does not exist

    def said(lines: dict[int, str]) -> list[str]:
        for number, line in lines.items():
            assert exit_code(forked(lambda number=number, line=line: rank(number, line))) == 2  # type: ignore[misc]
        found = [line.split()[3].rstrip(",") for line in (tmp_path / "said").read_text().splitlines()]
        (tmp_path / "said").unlink()
        return found

    shared = {0: "of_all", 1: "of_all", 2: "of_one"}
    expected = {"by hand": ["of_all", "of_all", "of_one"], "a parent": ["of_all"]}  # the parent prints rank 2's error from its status file
    assert said(shared) == expected.get(launcher, ["of_all", "of_one"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_before_training_ends_a_rank_that_waits_in_c(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The handler runs although the main thread is in C code, as it is for minutes while it waits in torch's store. Here it waits forever
    for a mutex that is locked twice."""

    def waits() -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with early_signals(prints=False):
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            (tmp_path / "waits").touch()
            while True:
                libc.pthread_mutex_lock(mutex)

    pid = forked(waits)
    while not (tmp_path / "waits").exists():
        time.sleep(0.01)
    os.kill(pid, number)
    assert exit_code(pid) == code


@pytest.mark.parametrize(
    ("words", "imported", "number", "code", "lines"),
    [
        ("moe train switch_tiny", "moe.cli.main", signal.SIGTERM, 75, 1),
        ("moe train switch_tiny", "pydantic", signal.SIGHUP, 75, 1),
        ("moe train switch_tiny", "moe.cli.main", signal.SIGINT, -signal.SIGINT, 0),
        ("moe show switch_tiny", "moe.cli.main", signal.SIGTERM, -signal.SIGTERM, 0),
        ("moe show switch_tiny", "moe.cli.main", signal.SIGINT, -signal.SIGINT, 0),
        ("moe.launch.launch switch_tiny", "moe.launch.arguments", signal.SIGTERM, 75, 1),
        ("moe.launch.launch switch_tiny", "pydantic", signal.SIGTERM, 75, 1),
    ],
)
def test_a_signal_while_the_program_is_imported(words: str, imported: str, number: signal.Signals, code: int, lines: int) -> None:
    """The process sends the signal to itself when it begins to import the module `imported`."""
    program = f"""if True:
        import os, runpy, signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        class Import:
            def find_spec(self, name, *_):
                if name == {imported!r}:
                    os.kill(os.getpid(), {int(number)})
        sys.meta_path.insert(0, Import())
        sys.argv = {words.split()}
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == code and len(ended.stderr.splitlines()) == lines, ended.stderr
    assert "nothing is lost: start it again" in ended.stderr or not lines


def test_a_child_has_its_signals_for_itself(tmp_path: Path) -> None:
    """A signal to a child that a rank forks before training, such as a data loader, ends the child by the signal's default effect. The rank
    continues, and no status file is written."""

    def child(told: int) -> int:
        os.write(told, b".")  # the fork is over: Python drops a signal that comes during it
        time.sleep(60)
        return 0

    def rank() -> int:
        with early_signals(prints=False):
            codes = []
            for number in (signal.SIGTERM, signal.SIGUSR1):
                up, told = os.pipe()
                pid = forked(lambda told=told: child(told))  # type: ignore[misc]
                os.read(up, 1)
                os.kill(pid, number)
                codes.append(exit_code(pid))
            time.sleep(0.2)  # time in which the second thread would end the rank if it received the child's signals
            return 0 if codes == [-signal.SIGTERM, -signal.SIGUSR1] else 1

    assert exit_code(forked(rank)) == 0 and not (tmp_path / status.NAME).exists()


def test_a_signal_after_training_is_not_taken_for_an_early_one(tmp_path: Path) -> None:
    def rank() -> int:
        with early_signals(prints=False):
            with asked_to_stop():
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            return 0

    assert exit_code(forked(rank)) == 0


def test_a_signal_while_ranks_are_looked_for_is_passed_on_before_grace_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes during an iteration of `_watch` is sent to ranks in the next one. Only then does the grace period begin."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.7)"]) as launcher:
        rank = Rank(0, launcher.pid)
        caught: list[tuple[int, float]] = []

        def find(_: int) -> list[Rank]:
            caught.append((signal.SIGCONT, time.monotonic()))
            return [rank]

        monkeypatch.setattr(start, "find_ranks", find)
        found: list[Rank] = []
        launch = start.Launch([], {}, 1, 1, "deepspeed", tmp_path, None, "m", 30.0, caught)
        assert start._watch(launch, launcher, found, tmp_path) == "ended" and found == [rank]
        assert caught and launcher.returncode == 0


def test_ranks_that_this_command_ended_are_not_blamed_on_the_kernel() -> None:
    ranks = [Rank(0, 1, ended_at=9.0, code=-11), Rank(1, 2, ended_at=9.5, code=-9), Rank(2, 3, ended_at=9.6, code=-9)]
    _, lines = verdict({}, ranks, 3, 1, ended_here={2})
    assert "SIGSEGV" in lines[0] and "by the launcher" in lines[1] and "by moe train" in lines[2]
    assert not any("memory" in line for line in lines[1:])


def test_the_first_rank_to_die_is_named_first() -> None:
    ranks = [Rank(0, 1, ended_at=9.0, code=-15), Rank(1, 2, ended_at=8.0, code=-11), Rank(2, 3, ended_at=9.5, code=-15)]
    _, lines = verdict({}, ranks, 3, 1)
    assert [line.split()[1] for line in lines] == ["1", "0", "2"] and "SIGSEGV" in lines[0]


def test_a_busy_master_port_is_replaced_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        asked = busy.getsockname()[1]
        port = environment.port_from({"MASTER_PORT": str(asked)})
        assert port != asked and f"MASTER_PORT {asked} cannot be used" in capsys.readouterr().err
    assert environment.port_from({"MASTER_PORT": str(port)}) == port and capsys.readouterr().err == ""
    with pytest.raises(BadInput, match="MASTER_PORT: got 70000"):
        environment.port_from({"MASTER_PORT": "70000"})


def test_extensions_are_kept_apart_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    one = extensions.extensions_dir({"XDG_CACHE_HOME": "/c"})
    monkeypatch.setattr(extensions, "version_of", lambda package: "9.9")
    other = extensions.extensions_dir({"XDG_CACHE_HOME": "/c"})
    assert one != other and one.parent == other.parent == Path("/c/moe-parallel/extensions")


def test_only_locks_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    held, stale = tmp_path / "held" / "lock", tmp_path / "stale" / "lock"
    for path in (held, stale):
        path.parent.mkdir()
    stale.touch()
    with held.open("w"):
        assert extensions.remove_stale_locks(tmp_path) == [stale]
    assert held.exists() and not stale.exists()


def test_a_start_that_came_to_nothing_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a start that fails, status files and folders that it made are removed. Folders that existed before stay unchanged."""
    rank = "import json, sys; open(sys.argv[1] + '/0.json', 'w').write(json.dumps({'exit': int(sys.argv[2]), 'error': 'said'}))"
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "metrics.jsonl").touch()
    (users := tmp_path / "users").mkdir()
    for out, code in ((tmp_path / "runs" / "new", 2), (users, 2), (earlier, 0)):

        def command(*_: object, folder: Path, code: int = code, **__: object) -> list[str]:
            return [sys.executable, "-S", "-c", rank, str(folder), str(code)]

        monkeypatch.setattr(start, "_command", command)
        assert start.start(Arguments("recipe", out=out), nproc=1) == code
    said = "waiting for deepspeed to start 1 process: the launcher and each process load torch first"
    assert capsys.readouterr().out.splitlines() == [said] * 3
    assert sorted(tmp_path.rglob("*")) == [earlier, earlier / "metrics.jsonl", users]


def test_a_run_whose_folder_is_renamed_ends_in_its_words_and_leaves_no_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, moved = tmp_path / "run", tmp_path / "moved"
    out.mkdir()
    rank = "import os, sys; from pathlib import Path; from moe.launch import status; os.rename(*sys.argv[1:3]); "
    rank += "status.leave(Path(sys.argv[1]), 0, 2, 'said')"
    monkeypatch.setattr(start, "_command", lambda *_, **__: [sys.executable, "-c", rank, str(out), str(moved)])
    assert start.start(Arguments("recipe", out=out), nproc=1) == 2
    assert not out.exists() and not (moved / status.NAME).exists() and moved.is_dir()


def test_the_words_of_another_launch_are_neither_written_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status.leave` and `status.delete` do not touch a status folder of another launch. This happens if a run's folder is renamed and
    another run begins under the old name."""
    folder = status.empty(tmp_path, "the other")
    monkeypatch.setenv(TOKEN, "this")
    status.leave(tmp_path, 0, 1, "an error")
    status.delete(folder, "this")
    assert [path.name for path in folder.iterdir()] == [status.STARTED]
    status.delete(folder, "the other")
    assert not folder.exists()


def test_bad_input_on_a_full_disk_is_told_by_exit_codes() -> None:
    """`verdict` without status files returns code 2 if a rank exited with 2. Rank 0 has printed its own message; for another rank, the line
    says that the reason is not known."""
    ended = [Rank(0, 4, ended_at=1.0, code=2), Rank(1, 5, ended_at=1.1, code=1)]
    assert verdict({}, ended, 2, 1) == (2, [])
    assert verdict({}, [Rank(0, 4, ended_at=1.0), Rank(1, 5, ended_at=1.1)], 2, 2) == (2, [])
    code, (line,) = verdict({}, [Rank(0, 4, ended_at=1.1, code=1), Rank(1, 5, ended_at=1.0, code=2)], 2, 2)
    assert code == 2 and re.match(r"error: rank 1 ended with exit code 2, and could not write the reason", line)
    assert verdict({}, [Rank(0, 4, ended_at=1.0, code=-9), Rank(1, 5, ended_at=1.1, code=1)], 2, 1)[0] == 1


@pytest.mark.parametrize("code", [2, 1])
def test_torchrun_ends_as_its_ranks_also_where_it_can_write_nothing(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    given: list[str] = []

    def run(words: list[str]) -> None:
        given.extend(words)
        raise ChildFailedError("module", {0: ProcessFailure(local_rank=0, pid=5, exitcode=code, error_file="none")})

    monkeypatch.setattr(torch.distributed.run, "main", run)
    for folder, written in ((tmp_path, True), (tmp_path / "gone", False)):
        monkeypatch.setattr(sys, "argv", ["torchrun", str(folder / "launcher.json"), "-m", "module"])
        assert torchrun.main() == code
        assert (folder / "launcher.json").exists() == written
        assert given[-4:] == ["--log_dir", str(folder / "launcher"), "-m", "module"]
    logging.disable(logging.NOTSET)


def test_children_do_not_look_for_modules_where_the_user_works() -> None:
    env = environment.import_path({"PYTHONPATH": f"{ROOT}{os.pathsep}{os.pathsep}elsewhere"})
    assert env == {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}elsewhere"}


def test_children_get_their_share_of_cores_and_no_rank_of_an_outer_launcher() -> None:
    outer = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "PATH": "p", STDIN: "1"}
    env = environment.child_environment(outer, nproc=10**6)
    assert env["OMP_NUM_THREADS"] == "1" and env["PATH"] == "p"
    assert not outer.keys() - {"PATH"} & env.keys()
    assert environment.child_environment({"OMP_NUM_THREADS": "7"}, nproc=2)["OMP_NUM_THREADS"] == "7"
    elsewhere = environment.child_environment(outer, nproc=None)
    assert elsewhere.keys() <= {"PATH", "MOE_LAUNCH_PARENT", "PYTHONSAFEPATH", "PYTHONPATH", "DS_ACCELERATOR"}  # no cores, no folders


def test_what_torchs_libraries_read_is_set_in_every_process_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """`BEFORE_TORCH` is set in ranks of `moe train`, in ranks of another launcher, and in a command that computes in its own process."""
    ours = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32", "GOMP_SPINCOUNT": "10000"}
    ours["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    users = {"LRU_CACHE_CAPACITY": "7", "GOMP_SPINCOUNT": "5", "PYTORCH_ALLOC_CONF": "backend:native"}
    policy = {"OMP_WAIT_POLICY": "active", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}  # ours would override them

    def rank(given: dict[str, str]) -> Mapping[str, str]:
        return environment.child_environment(given, nproc=2)

    def here(run: Callable[[list[str]], int]) -> Callable[[dict[str, str]], Mapping[str, str]]:
        def env(given: dict[str, str]) -> Mapping[str, str]:
            for name in ours | policy:
                monkeypatch.setenv(name, "")  # so that monkeypatch restores the variable after the test
                monkeypatch.delenv(name)
            for name, value in given.items():
                monkeypatch.setenv(name, value)
            assert run(["no_such_recipe"]) == 2
            return os.environ

        return env

    for made in (rank, here(rank_main), here(lambda words: cli.main(["train", *words]))):
        assert ours.items() <= made({}).items()
        assert (ours | users).items() <= made(users).items()
        env = made(policy)
        assert policy.items() <= env.items() and not {"GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF"} & env.keys()


@pytest.mark.parametrize("hard", [20, 500])
def test_too_few_open_files_are_raised_or_refused_before_ranks_wait_for_each_other(hard: int, tmp_path: Path) -> None:
    def begins() -> int:
        os.dup2(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (until it ends)
        os.closerange(3, 4096)  # other tests' files count too
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard))
        environment.allow_open_files(1)
        start._attempt = lambda *_: start.End(0, [], {})  # type: ignore[assignment]
        code = cli.main(["train", "switch_tiny", "--nproc=2", f"--out={tmp_path / 'run'}"])
        return code or resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    assert exit_code(forked(begins)) == (2 if hard == 20 else 136) and not (tmp_path / "run").exists()
    said = "error: ulimit -n: got 20, needed at least 136 open files a process for 2 ranks; fix: raise nofile"
    assert (tmp_path / "said").read_text().startswith(said if hard == 20 else "")
    assert len((tmp_path / "said").read_text().splitlines()) == (hard == 20)


def test_deepspeed_gets_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_gpu", lambda _: True)
    assert environment.devices({"CUDA_VISIBLE_DEVICES": "2,3,5"}, 2) == "2,3"
    assert environment.devices({}, 2) is None
    with pytest.raises(BadInput, match="at most the 1 GPU of"):
        environment.devices({"CUDA_VISIBLE_DEVICES": "2"}, 2)
    for names in ("GPU-1,GPU-2", "MIG-1,MIG-2"):
        named = {"CUDA_VISIBLE_DEVICES": names}
        with pytest.raises(BadInput, match="--launcher torchrun"):
            environment.devices(named, 1)
        assert environment.devices(named, 1, launcher="torchrun") is None
    with pytest.raises(BadInput, match="at most the 1 GPU of CUDA_VISIBLE_DEVICES=MIG-1,MIG-2; fix: --nproc 1"):
        environment.devices(named, 2, launcher="torchrun")


def test_without_a_visible_gpu_all_processes_of_a_launch_use_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES again, so ranks would find GPUs that the user has hidden, but for DS_ACCELERATOR."""
    monkeypatch.setattr(environment, "version_of", lambda _: "2.13.0")
    monkeypatch.setattr("pathlib.Path.exists", lambda _: True)
    assert environment.has_gpu({}) and not environment.has_gpu({"DS_ACCELERATOR": "cpu"})
    for hidden in ("", "-1"):
        assert environment.child_environment({"CUDA_VISIBLE_DEVICES": hidden}, 2)["DS_ACCELERATOR"] == "cpu"


def test_hostfile_counts_the_world(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two machines\nworker-0 slots=4\n\nworker-1 slots=2  # smaller\n")
    assert hosts.read_hostfile(path) == {"worker-0": 4, "worker-1": 2}
    assert start.world_size(None, hostfile=path) == 6 and start.world_size(2, hostfile=path) == 4
    launch = start.Launch([], {}, 6, None, "deepspeed", tmp_path, path, "m", 30.0, [])
    command = start._command(launch, None, port=5, folder=tmp_path)
    assert command[command.index("--hostfile") + 1] == str(path) and "--num_accelerators" not in command
