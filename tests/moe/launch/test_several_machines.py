"""Training on two machines, which are network namespaces (tests/campaigns/hosts.py) with sshd, pdsh and SLURM's daemons. A sample of
`python -m tests.campaigns machines`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from moe.launch import hosts as remote
from moe.launch import pdsh, start, status
from moe.launch.arguments import Arguments
from moe.launch.exit_codes import STOPPED
from moe.launch.processes import TOKEN, Rank
from moe.launch.verdict import verdict
from parallel.errors import BadInput
from tests.campaigns import hangs, machines, slurm
from tests.campaigns.hosts import PROGRAMS, missing, two_hosts
from tests.campaigns.two_machines import two_machines, why_not

ROOT = machines.ROOT


def needs(programs: Mapping[str, str]) -> None:
    """Skip a test if this machine cannot create network namespaces, or lacks a program."""
    if reason := why_not() or (programs and missing(programs)):
        pytest.skip(reason)


@pytest.mark.packages
@pytest.mark.timeout(280)
def test_a_hostfile_s_ranks_save_at_a_signal_and_go_on_with_the_same_losses() -> None:
    needs(PROGRAMS)
    problem, _ = machines.once(lambda home, hosts: machines.hostfile(home, hosts, resumed="here"))
    assert problem == ""


@pytest.mark.packages
@pytest.mark.timeout(280)
def test_the_batch_script_of_the_page_is_requeued_after_a_signal_and_goes_on_with_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    needs(slurm.SLURM)
    monkeypatch.setenv("PATH", f"{os.defpath}:/usr/sbin:/sbin")  # as without an activated virtual environment
    problem, _ = machines.once(machines.slurm)
    assert problem == ""


@pytest.mark.packages
@pytest.mark.timeout(200)
def test_machines_that_cannot_take_part_are_refused_in_one_line(tmp_path: Path) -> None:
    """A name that does not exist, ssh that refuses, a folder that is not shared: one line each, and the run's folder is removed."""
    needs(PROGRAMS)
    with two_hosts(tmp_path, {}) as hosts:
        (tmp_path / "apart").mkdir()
        (tmp_path / "known").write_text((tmp_path / "known").read_text().replace("worker-0,", "worker-2,"))
        assert hosts.start(1, ["mount", "-t", "tmpfs", "none", f"{tmp_path}/apart"], env=os.environ, cwd=tmp_path).wait(10) == 0
        for said, out, listed in (
            ("worker-9: ssh: Could not resolve hostname worker-9", "run", "worker-1 slots=1\nworker-9 slots=1\n"),
            ("worker-0: Host key verification failed.", "run", "worker-0 slots=2\n"),
            ("worker-1: " + str(tmp_path / "apart" / "run" / ".status") + ": No such file or directory", "apart/run", "worker-1 slots=1\n"),
        ):
            (tmp_path / "hosts.txt").write_text(listed)
            words = ["-m", "moe", "train", "switch_tiny", "--hostfile", "hosts.txt", "--out", out]
            process = hosts.start(0, [sys.executable, *words], env=machines.environment(tmp_path), cwd=tmp_path)
            got, _ = process.communicate(timeout=90)
            assert process.returncode == 2 and got.startswith("error: --hostfile: got ") and len(got.splitlines()) == 1, got
            fix = "fix: --out DIR" if out != "run" else f"fix: make this work: ssh {said.partition(':')[0]} env PYTHONSAFEPATH=1 "
            assert said in got and fix in got and not (tmp_path / "run").exists() and not (tmp_path / "apart" / "run").exists(), got


@pytest.mark.packages
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("interface", "said"),
    [
        ("eth7", r"GLOO_SOCKET_IFNAME: got eth7, needed interfaces of this machine \(lo, m"),
        ("lo", r"cannot connect to the other ranks over lo \("),
    ],
)
def test_an_interface_that_does_not_lead_to_the_others_is_named(
    interface: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs({})
    hangs.warm_up(tmp_path, deepspeed=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    case = hangs.Case("interface", hangs.nothing, said, world=2)
    with two_machines() as both:
        problem, _ = hangs.once(case, 0, tmp_path, both, slack_s=30)
    assert problem == ""


# --- on this machine alone ---------------------------------------------------------------------------------------------


def test_words_reach_a_shell_behind_pdsh_as_they_were() -> None:
    words = ["a b", "$HOME", "%n %h %%", "it's", '"q"', "`ls`", "*", "x;y", "\\", ""]
    shell = " ".join(["printf", "'%s\\n'", *(remote.quoted(word).replace("%%", "%") for word in words)])
    assert subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines() == words
    assert remote.quoted("100%") == "100%%"


def test_answers_are_told_apart_where_pdsh_cuts_names() -> None:
    names = ("root@worker-0.a.org", "worker-1.b.org", "10.0.0.3")
    assert remote.answered(names, "worker-1: 1 here\nworker-0: 0 0 2 5\n10.0.0.3: 2 \n") == {
        names[1]: "here",
        names[0]: "0 2 5",
        names[2]: "",
    }


def test_other_machines_get_what_ranks_need_and_nothing_of_this_machine() -> None:
    given = {"MOE_LAUNCH": "t", "MOE_LAUNCH_PARENT": "7", "GLOO_SOCKET_IFNAME": "eth0", "HOME": "/root", "PYTHONPATH": "/x"}
    assert pdsh.passed(given) == {"MOE_LAUNCH": "t", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": "/x"}


PDSH = """#!/bin/sh
[ -z "$SLOW" ] || exec sleep 60
while [ "$1" != env ]; do if [ "$1" = -w ]; then hosts=$2; fi; shift; done
number=0
for host in $(echo "$hosts" | tr , ' '); do
  sh -c "$(echo "$*" | sed "s/%n/$number/g; s/%%/%/g")" | sed "s/^/$host: /"
  number=$((number + 1))
done
"""


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a hostfile with two names. pdsh is replaced by a script that runs the commands for both on this machine."""
    (tmp_path / "bin").mkdir()
    for name, text in (("pdsh", PDSH), ("ssh", '#!/bin/sh\nexec "$@"\n')):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    return tmp_path / "hosts"


def launched(program: str, hostfile: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of `start.start` with this short Python program as its launcher."""
    monkeypatch.setattr(start, "_command", lambda *_, folder, **__: [sys.executable, "-S", "-c", program, str(folder)])
    monkeypatch.setattr(start, "_LEAVE_S", 0.3)
    monkeypatch.setattr(start, "_STATUS_S", 0.1)
    return start.start(Arguments("recipe", out=hostfile.parent / "run"), nproc=None, hostfile=hostfile)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("file", "word", "said"),
    [
        ("1.json", '{"exit": 1, "pid": 5, "error": "ValueError: x"}', "rank 1 ended with exit code 1: ValueError: x"),
        ("machine-{token}-1.json", "247", "rank 1 ended with no status file: its exit code is not known"),
    ],
)
def test_a_rank_that_fails_on_another_machine_ends_those_that_wait_for_it(
    file: str, word: str, said: str, pretended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import sys, time; token = open(sys.argv[1] + '/started').read().strip(); "
    program += f"open(sys.argv[1] + f'/{file}', 'w').write('{word}'); time.sleep(40)"
    assert launched(program, pretended, monkeypatch) == 1
    first, *more = capsys.readouterr().err.splitlines()
    assert first == said
    after = ["rank 0 was killed by moe train after the others"]
    after += ["the launcher on worker-1 ended with signal SIGKILL (by kill -9, or by the kernel because memory ran out: see dmesg)"]
    assert more == after[: 2 if "machine" in file else 1]


@pytest.mark.timeout(60)
def test_words_that_come_late_are_waited_for_where_all_ranks_have_ended_well(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "[open(f'{sys.argv[1]}/{rank}.json', 'w').write('{\"exit\": 0, \"pid\": 5}') for rank in range(2)]"
    assert launched(f"import os, sys, time; os.fork() and os._exit(0); time.sleep(1); {late}", pretended, monkeypatch) == 0


@pytest.mark.timeout(40)
def test_a_signal_while_machines_are_asked_ends_it_at_once(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW", "1")
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    began = time.monotonic()
    assert launched("", pretended, monkeypatch) == STOPPED and time.monotonic() - began < 10


def test_a_machine_shares_the_folder_if_it_sees_the_token_of_the_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = status.empty(tmp_path, "a1")
    for token in ("a1", str(os.getpid())):
        assert remote.main(["1", "check", str(folder), token]) == 0
    assert capsys.readouterr().out.splitlines() == ["1 here", f"1 {folder} is another folder there"]


@pytest.mark.parametrize(
    ("host", "needed"),
    [
        *((host, "NAME slots=N") for host in ("worker-[0-2]", "^hosts", "a,b")),
        *((host, "a name, or an IPv4 address: .*; fix: give an IPv6") for host in ("exec:worker-0", "::1", "me@2001:db8::1")),
    ],
)
def test_a_host_is_one_and_pdsh_takes_it_for_nothing_else(host: str, needed: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{host} slots=1\n")
    with pytest.raises(BadInput, match=f"line 1: got .*, needed {needed}"):
        remote.read_hostfile(tmp_path / "hosts")


def test_a_signal_that_ends_a_rank_on_another_machine_before_it_trains_asks_for_another_go() -> None:
    """`verdict` returns STOPPED for it. The rank is known only by its launcher's exit code: 241 for SIGTERM."""
    ranks, early = [Rank(0, 0), Rank(1, 0)], {0: {"exit": 75, "error": status.TOO_EARLY, "pid": 4}}
    assert verdict(early, ranks, 2, 241, asked=signal.SIGTERM)[0] == STOPPED
    assert verdict({}, ranks[:1], 2, 1, asked=signal.SIGTERM, how="early")[0] == STOPPED  # all were killed, because rank 1 had not started
    assert verdict(early, ranks, 2, 247, asked=signal.SIGTERM)[0] == 1  # 247: SIGKILL from another process, perhaps during training
    assert verdict(early, ranks, 2, 1, asked=signal.SIGTERM, how="killed")[0] == 1


@pytest.mark.timeout(60)
def test_what_a_shell_on_another_machine_gets(pretended: Path, tmp_path: Path) -> None:
    """Variables, also those in .deepspeed_env, and arguments arrive unchanged in the remote shell; PYTHONPATH is not sent for an installed
    project; the launcher's exit code is written to the status folder."""
    (tmp_path / "pdsh").write_text('#!/bin/sh\nwhile [ "$1" != -N ]; do shift; done\nshift\necho "$*"\n')
    (tmp_path / "pdsh").chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text('A=\'a $b\'\nB=x y "%"\n\n# C=1\nexport D=$HOME/d\nE="$HOME"\n')
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "MOE_X": "$HOME", TOKEN: "a1", "UCX_Y": f"{tmp_path}:z"}
    words = ["--hostfile", str(pretended), "--force_multi", "--launcher_args=-N", "--no_ssh_check", "--master_addr=h"]
    words += ["--log_level", "critical", "--module", "m", "$x"]
    program = (
        f"import sys; sys.path.append({str(ROOT)!r}); sys.argv[1:] = {[str(tmp_path), *words]}; from moe.launch import pdsh; pdsh.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    line = done.stdout.replace(sys.executable, "shown").replace("%n", "1").replace("%%", "%")
    assert "PYTHONPATH" not in line
    names = "A B D E MOE_X UCX_Y"
    shown = (
        f'shown() {{ for name in {names}; do eval "echo \\"\\$$name\\""; done; for word; do last=$word; done; echo "$last"; return 9; }}; '
    )
    there = subprocess.run(["sh", "-c", shown + line], env={"HOME": "/there"}, capture_output=True, text=True)
    assert there.stdout.splitlines() == ["a $b", 'x y "%"', "/there/d", "/there", "$HOME", f"{tmp_path}:z", "$x"], done.stdout
    assert there.returncode == 9 and status.machines(tmp_path, "a1") == {1: 9} and not status.machines(tmp_path, "a2")


def test_a_machine_without_pdsh_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts.txt").write_text("worker-0 slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="--hostfile: got no pdsh here.*apt install pdsh"):
        start.start(Arguments("switch_tiny", out=tmp_path / "run"), nproc=None, hostfile=tmp_path / "hosts.txt")
    assert not (tmp_path / "run").exists()
