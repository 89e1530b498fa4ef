"""A process reads its rank from the variables of any launcher. Without a launcher it is a world of one process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from glob import glob
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe.launch.environment import free_port
from parallel.errors import BadInput
from parallel.numerics.precision import multiplies
from parallel.process import process
from parallel.process.process import World, _not_connected, gpu_of, interface_to, read_environment, share_cores, start, wrong_interface
from parallel.watch.meet import NotMet, meet, unfit
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
    with pytest.raises(BadInput, match="would be rank 0|on rank") as refused:
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
    with pytest.raises(BadInput, match="MASTER_ADDR: got no.such.host.invalid, which .* cannot resolve .*needed a name or address"):
        meet(1, 2, environment=here, timeout_s=0.2)
    assert capfd.readouterr() == ("", "")


def test_rank_0_says_once_which_ranks_it_waits_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As in a batch script of two tasks that starts one process without srun, which otherwise waits in silence for ten minutes."""
    monkeypatch.setattr("parallel.watch.meet._TELL_S", 0.2)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.raises(NotMet, match="ranks 1 2 did not come within"):
        meet(0, 3, environment=here, timeout_s=1.0)
    assert capfd.readouterr().err.count("waiting: ranks 1 2 did not come yet: the others, on ") == 1


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


GPUS = {  # what each of the ranks of one machine sees -> the GPU of each, or the error
    "one for all ranks": ((["a", "b"], ["a", "b"]), ["a", "b"]),
    "more than ranks": ((["a", "b", "c"],) * 2, ["a", "b"]),
    "one for each task (SLURM)": ((["a"], ["b"]), ["a", "b"]),
    "two for each task": ((["a", "b"], ["c", "d"], ["e", "f"]), ["a", "d", "e"]),
    "fewer than ranks": ((["a", "b"],) * 3, "ranks 0 and 2 on the same one (a of host), needed one for each rank; fix: --nproc 2 "),
    "one, and two ranks": ((["a"],) * 2, "ranks 0 and 1 on the same one (a of host), needed one for each rank; fix: --nproc 1 "),
    "none": (([],) * 2, ["cpu", "cpu"]),
    "none on one rank": ((["a"], []), "none on rank 1 (host), needed one for each rank, or none for all; fix: run moe doctor there"),
}


@pytest.mark.parametrize("case", GPUS)
def test_each_rank_takes_a_gpu_of_its_own_or_all_are_refused(case: str) -> None:
    seen, expected = GPUS[case]
    taken = [ids[gpu_of(rank, len(ids))] if ids else "cpu" for rank, ids in enumerate(seen)]
    refused = unfit([f"host {found}" for found in taken])
    assert str(BadInput(**refused)).startswith(f"GPUs: got {expected}") if refused else taken == expected


@pytest.mark.parametrize(("hidden", "device"), [(False, "cuda:1"), (True, "cpu")])
def test_the_world_takes_the_gpus_that_torch_sees_unless_the_cpu_is_asked_for(
    hidden: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This suite hides GPUs by the same variable (tests/conftest.py)."""
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if not hidden:
        monkeypatch.delenv("DS_ACCELERATOR")
    assert World(3, 4, 3, 4).device == torch.device(device) and World(3, 4, 3, 4, place="cpu").device == torch.device("cpu")


def test_two_ranks_of_one_gpu_end_with_the_same_line() -> None:
    """As in `make train NPROC=2` on a machine with one GPU. Rank 0, which holds the store, waits until rank 1 has read all devices."""
    said: list[str] = []
    port = str(free_port())

    def come(rank: int) -> None:
        with pytest.raises(BadInput) as refused:
            meet(rank, 2, environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, timeout_s=20, device="GPU-1")
        said.append(str(refused.value))

    first = threading.Thread(target=come, args=(0,))
    first.start()
    come(1)
    first.join()
    assert len(said) == 2 and len(set(said)) == 1 and "ranks 0 and 1 on the same one (GPU-1 of " in said[0]


@pytest.mark.parametrize(("found", "named"), [("eth0", "=eth0"), ("lo", None), (None, None)])
def test_a_rank_takes_its_gpu_and_nccl_the_interface_to_the_master(
    found: str | None, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: torch's answers are made up, and the start ends before the process group."""
    taken: list[object] = []

    def stop(*_: object, **__: object) -> None:
        raise NotMet("far enough")

    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid of {device}"))
    monkeypatch.setattr(process, "meet", lambda *_, device, **__: taken.append(device))
    monkeypatch.setattr(process, "gpus", lambda: 1)
    monkeypatch.setattr(process, "interface_to", lambda _: found)
    monkeypatch.setattr(process.watchdog, "Watchdog", stop)
    with pytest.raises(NotMet, match="far enough"):
        start(World(1, 2, 1, 2))
    assert taken == [torch.device("cuda", 0), "uuid of cuda:0"] and os.environ.get("NCCL_SOCKET_IFNAME") == named


NAMED = {("gloo", "lo"): True, ("gloo", "lo,eth7"): False, ("nccl", "l"): True, ("nccl", "eth7,=lo"): False, ("nccl", "=lo"): True}
NAMED |= {("nccl", "^eth7"): True, ("nccl", "=l"): False, ("nccl", "eth7,lo"): True, ("nccl", ""): True}


@pytest.mark.parametrize(("backend", "asked"), NAMED)
def test_an_interface_that_is_not_there_is_refused(backend: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    said = wrong_interface({f"{backend.upper()}_SOCKET_IFNAME": asked, "MASTER_ADDR": "127.0.0.1"}, backend)
    assert (
        said.startswith(f"{backend.upper()}_SOCKET_IFNAME: got {asked}, needed interfaces of this machine (lo, eth0)")
        != NAMED[backend, asked]
    )


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


def test_containers_that_allow_tf32_do_not_change_products_of_one_process() -> None:
    code = "import torch; from parallel.process import process as p; p.start(p.World()); print(torch.get_float32_matmul_precision())"
    environment = os.environ | {
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout == "highest\n"
