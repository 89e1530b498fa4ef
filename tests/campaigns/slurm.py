"""SLURM's own daemons on the two hosts of hosts.py, for `python -m tests.campaigns machines`.

worker-0   munged  slurmctld  slurmd      worker-1   munged  slurmd      users' commands work as on any cluster
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.hosts import NAMES, PROGRAMS, Hosts, path

SLURM = PROGRAMS | {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
_START_S = 60.0
_CONFIG = """ClusterName=moe
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
NodeName={names} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:8
"""


class Cluster:
    """The commands of a cluster's user, on its first host, in `folder`."""

    def __init__(self, hosts: Hosts, folder: Path, env: dict[str, str]) -> None:
        self.hosts, self.folder, self.env = hosts, folder, env

    def do(self, *words: str) -> str:
        """Run a command; return its output. Raises OSError if it fails."""
        process = self.hosts.start(0, words, env=self.env, cwd=self.folder)
        said, _ = process.communicate(timeout=60)
        if process.returncode:
            raise OSError(process.returncode, f"{words}: {said.strip()}")
        return said

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job` for a job."""
        return dict(word.split("=", 1) for word in self.do("scontrol", "--oneliner", "show", "job", number).split() if "=" in word)

    def reach(self, number: str, *states: str, limit_s: float = 60.0) -> str:
        """Wait until a job is in one of the states or the limit is over. Returns its state."""
        until = time.monotonic() + limit_s
        while (state := self.job(number)["JobState"]) not in states and time.monotonic() < until:
            time.sleep(0.3)
        return state


@contextlib.contextmanager
def cluster(hosts: Hosts, home: Path, folder: Path, env: dict[str, str]) -> Iterator[Cluster]:
    """Run the daemons until both nodes are ready for jobs. They end with their hosts at the latest."""
    env = env | {"PATH": path(env)}  # the user's path comes first: `python` in a batch script is the user's
    (home / "state").mkdir()
    (home / "slurm").mkdir()
    (home / "slurm" / "slurm.conf").write_text(_CONFIG.format(first=NAMES[0], home=home, names=",".join(NAMES)))
    (home / "munge.key").write_bytes(secrets.token_bytes(64))
    (home / "munge.key").chmod(0o400)
    os.chown(home / "munge.key", 0, 0)
    munged = f"munged --force --key-file={home}/munge.key --seed-file=/run/seed --log-file=/run/munged.log"
    started: list[subprocess.Popen[str]] = []
    try:
        for host in range(2):
            script = (
                f"mount --bind {home}/slurm /etc/slurm && mkdir -p /run/munge && chmod 755 /run/munge && {munged} && "
                f"{{ {'slurmctld -D & ' if host == 0 else ''} exec slurmd -D; }} >{home}/slurm-{host}.log 2>&1"
            )
            started.append(hosts.start(host, ["sh", "-c", script], env=env, cwd=home))
        found = Cluster(hosts, folder, env)
        until = time.monotonic() + _START_S
        while not _idle(found):
            if time.monotonic() > until:
                raise OSError(0, f"SLURM did not start: {(home / 'slurm-0.log').read_text()[-500:]}")
            time.sleep(0.2)
        yield found
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _idle(found: Cluster) -> bool:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return found.do("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NAMES)
    return False
