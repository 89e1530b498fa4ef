"""Where the ranks of a run meet: the store through which process groups are made, and one line about who does not come.

    rank 0 listens at MASTER_ADDR:MASTER_PORT (or torchrun's agent does)      every rank: "here", then waits until all are

torch waits for a count of ranks, and says only the count when it is short.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel.errors import Ended

_PROBLEM, _LOOK_S = "missing", 0.1


class NotMet(Ended):
    """Ranks that were started did not come to where all of them meet; the message is one line."""


def meet(rank: int, size: int, *, environment: Mapping[str, str], timeout_s: float) -> Any:
    """The store of this run, once every rank has come to it. Raises NotMet."""
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait, node = timedelta(seconds=timeout_s), socket.gethostname()
    here = f"rank {rank} on {node}"
    try:
        store: Any = dist.TCPStore(
            host, port, size, is_master=rank == 0 and not agent, timeout=wait, wait_for_workers=False, multi_tenant=not agent
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        who = "torchrun" if agent else "rank 0"
        verb = "could not listen" if rank == 0 and not agent else f"got no answer from {who}"
        said = str(error).splitlines()[0].partition(" Exception raised")[0]
        raise NotMet(f"{here} {verb} at {host}:{port} within {timeout_s:g} s (train.timeout_s): {said}") from None
    if agent:  # the agent's store outlives an attempt
        store = dist.PrefixStore(f"worker/attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        store.set(f"here/{rank}", node)
        problem = _wait(store, size, until=time.monotonic() + timeout_s)
    except (dist.DistNetworkError, dist.DistStoreError):
        raise NotMet(f"{here} met others at {host}:{port}, and their store is gone: rank 0 has left") from None
    if problem:
        store.set(_PROBLEM, problem)
        if rank == 0 and not agent:  # the others read it here
            time.sleep(1.0)
        raise NotMet(f"{problem} within {timeout_s:g} s (train.timeout_s): {here} waits at {host}:{port}")
    return store


def _wait(store: Any, size: int, *, until: float) -> str:
    """Until every rank is here: nothing, or which are not when the time is up for this rank or another."""
    everyone = [f"here/{rank}" for rank in range(size)]
    while not store.check(everyone):  # a wait with a time limit would fill the output with torch's warnings
        if store.check([_PROBLEM]):
            return str(store.get(_PROBLEM).decode())
        if time.monotonic() > until:
            return _missing(store, size)
        time.sleep(_LOOK_S)
    return ""


def _missing(store: Any, size: int) -> str:
    absent = [rank for rank in range(size) if not store.check([f"here/{rank}"])]
    nodes = sorted({store.get(f"here/{rank}").decode() for rank in range(size) if rank not in absent})
    shown = " ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    return f"rank{'s' if len(absent) > 1 else ''} {shown} did not come (the others are on {' '.join(nodes[:8])})"
