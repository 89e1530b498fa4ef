"""Two machines for real, in namespaces (moe/bench/hosts.py): sshd, pdsh and SLURM's own daemons between them, and ranks that train.

A sample of `moe bench faults --only machines`. It alone would notice a start, a signal or an end that works on one machine only: another
space of processes, no variable that ssh does not carry, shells that read the words again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from moe.bench import hangs, machines, slurm
from moe.bench.hosts import PROGRAMS, missing, two_hosts
from moe.bench.two_machines import two_machines, why_not
from moe.launch import hosts as remote
from moe.launch import pdsh
from moe.launch.start import start
from parallel.errors import BadInput


def needs(programs: Mapping[str, str]) -> None:
    """Skip a test where this machine has no networks of its own to give, or lacks a program."""
    if reason := why_not() or (programs and missing(programs)):
        pytest.skip(reason)


@pytest.mark.timeout(280)
def test_a_hostfile_s_ranks_save_at_a_signal_and_go_on_with_the_same_losses() -> None:
    needs(PROGRAMS)
    problem, _ = machines.once(lambda home, hosts: machines.hostfile(home, hosts, resumed="here"))
    assert problem == ""


@pytest.mark.timeout(280)
def test_the_batch_script_of_the_page_is_requeued_after_a_signal_and_goes_on_with_the_same_losses() -> None:
    needs(slurm.SLURM)
    problem, _ = machines.once(machines.slurm)
    assert problem == ""


@pytest.mark.timeout(200)
def test_machines_that_cannot_take_part_are_refused_in_one_line(tmp_path: Path) -> None:
    """No such name; ssh that does not let in; a folder that is not the same there. Nothing is left of the run's folder."""
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
            assert said in got and not (tmp_path / "run").exists() and not (tmp_path / "apart" / "run").exists(), got


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("interface", "said"),
    [
        ("eth7", r"GLOO_SOCKET_IFNAME: got eth7, needed interfaces of this machine \(lo, m"),
        ("lo", r"does not connect to them over lo \("),
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


# --- without machines --------------------------------------------------------------------------------------------------


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


def test_a_machine_without_pdsh_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts.txt").write_text("worker-0 slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="--hostfile: got no pdsh here.*apt install pdsh"):
        start("switch_tiny", {}, nproc=None, hostfile=tmp_path / "hosts.txt", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
