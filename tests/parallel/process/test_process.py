"""A process reads its rank from the variables of any launcher. Without a launcher it is a world of one process."""

from __future__ import annotations

import os
import threading
import time
from glob import glob
from pathlib import Path

import pytest
import torch

from moe.launch.environment import free_port
from parallel.errors import BadInput
from parallel.numerics.precision import multiplies
from parallel.process.process import World, _not_connected, interface_to, read_environment, share_cores, start
from parallel.watch.meet import NotMet, meet
from tests.campaigns.two_machines import two_machines, why_not

LAUNCHERS = {
    "deepspeed": {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"},
    "torchrun": {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"},
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_the_same_place(launcher: str) -> None:
    assert read_environment(LAUNCHERS[launcher]) == World(rank=3, size=4, local_rank=1, local_size=2)


def test_the_launcher_counts_before_the_job_it_runs_in() -> None:
    assert read_environment(LAUNCHERS["srun"] | {"RANK": "0", "WORLD_SIZE": "2"}) == World(0, 2, 1, 2)


@pytest.mark.parametrize("environment", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_JOB_ID": "7"}, {"WORLD_SIZE": ""}])
def test_a_process_that_nobody_started_is_alone(environment: dict[str, str]) -> None:
    assert read_environment(environment) == World()


def test_a_rank_that_is_no_number_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput) as refused:
        read_environment({"RANK": "first", "WORLD_SIZE": "2"})
    assert "whole numbers" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("environment", [{"RANK": "", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "LOCAL_RANK": ""}], ids=str)
def test_half_of_a_place_is_refused_in_one_line(environment: dict[str, str]) -> None:
    """Incomplete variables of a launcher are refused. Otherwise each process would train alone as rank 0, all in one folder."""
    with pytest.raises(BadInput, match="on rank") as refused:
        read_environment(environment)
    assert "; fix: start with moe train --nproc N" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("port", ["abc", "99999999", "0", "", "-1", "²"])
def test_a_port_that_is_none_is_refused_before_anybody_waits_there(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="MASTER_PORT on rank 1: got .*, needed a port from 1 to 65535"):
        start(World(1, 2, 1, 2, place="cpu"))


def test_a_master_without_an_address_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    here = {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"}
    with pytest.raises(BadInput, match="MASTER_ADDR: got no.such.host.invalid, needed a name or address of rank 0's machine"):
        meet(1, 2, environment=here, timeout_s=0.2)
    assert capfd.readouterr() == ("", "")


def test_rank_0_stays_until_the_others_have_read_its_problem() -> None:
    """Rank 0, which holds the store, waits with its error until a rank that comes 2 s later has read it. Otherwise that rank would wait
    for minutes for a store."""
    said: list[str] = []
    port = free_port()

    def come(rank: int, problem: str) -> None:
        with pytest.raises(NotMet) as refused:
            meet(rank, 2, environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, timeout_s=20, problem=problem)
        said.append(str(refused.value))

    first = threading.Thread(target=come, args=(0, "got eth7"))
    first.start()
    time.sleep(2)
    come(1, "")
    first.join()
    assert len(set(said)) == 1 and said[0].endswith(": got eth7")


def test_what_nccl_says_is_kept_and_no_message_is_one_too() -> None:
    gpu, cpu = World(1, 2, 1, 2, place="cuda"), World(1, 2, 1, 2, place="cpu")
    said = "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error\nLast error:\nsocketStartConnect: Connect to 10.0.0.1<4> failed"
    assert str(_not_connected(RuntimeError(said), gpu)).endswith("error; Last error:; socketStartConnect: Connect to 10.0.0.1<4> failed")
    assert str(_not_connected(RuntimeError("[enforce fail at pair.cc] timed out connecting\nframe #0"), cpu)).endswith(
        ": timed out connecting"
    )
    assert str(_not_connected(RuntimeError(""), cpu)).endswith(": RuntimeError")


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [
        ("flags : sse2 avx2 avx512f", False, False),
        ("flags : avx2 amx_bf16", True, False),
        ("flags : avx512_bf16 avx512_fp16", True, True),
        ("Features : fp asimd bf16 i8mm", True, False),
        ("Features : fp asimd asimdhp", False, True),
    ],
)
def test_16_bits_are_known_by_the_processors_own_flags(flags: str, bf16: bool, fp16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.read_text", lambda self, **_: flags)
    assert multiplies(torch.bfloat16, torch.device("cpu")) is bf16
    assert multiplies(torch.float16, torch.device("cpu")) is fp16


def test_the_interface_is_the_one_by_which_the_master_is_reached() -> None:
    assert interface_to("127.0.0.1") == "lo"
    if Path("/proc/net/if_inet6").exists():
        assert interface_to("::1") == "lo"
    assert interface_to("no.such.host.invalid") is None


@pytest.mark.packages
def test_two_machines_meet_by_the_cable_between_them() -> None:
    """two_machines() makes two network namespaces joined by a link. They reach each other, and the host's own network does not change."""
    if reason := why_not():
        pytest.skip(reason)

    def seen() -> list[str]:
        return sorted([*os.listdir("/sys/class/net"), *glob("/run/netns/*")])

    before = seen()
    with two_machines() as machines:
        assert seen() == before
        for machine in (0, 1):
            reads, writes = os.pipe()
            if not (pid := os.fork()):
                try:
                    machines.enter(machine)
                    os.write(writes, str(interface_to(machines.addresses[0])).encode())
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            os.close(writes)
            assert os.read(reads, 64).decode() == machines.ends[machine]
            os.close(reads)


def test_ranks_share_the_cores_of_a_containers_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quota of 3 of 8 cores, each of two ranks gets one thread."""
    threads: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("pathlib.Path.read_text", lambda self, **_: "300000 100000")
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    share_cores(World(0, 2, local_size=2))
    assert threads == [1]
