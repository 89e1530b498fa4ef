"""Opens the store through which a run's process groups are made. If the run cannot start, the error names the ranks that are missing or
that share a GPU.

    rank 0 listens at MASTER_ADDR:MASTER_PORT (or torchrun's agent does)      every rank writes "here", then waits for all others

The store of torchrun's agent outlives the ranks, so it may hold values from earlier starts, and the agents' restart counts may differ. So
rank 0 gives each start a new name, which prefixes the keys. To learn the name, another rank writes a random number into the store. Rank 0
then writes the name under the key "told/NUMBER". A value from an earlier start cannot have this key.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel.errors import BadInput, Ended

_LIMIT = " (five times train.timeout_s)"
_PROBLEM = "missing"  # key in the store; its value says why the run cannot start
_LOOK_S = 0.1  # seconds between two reads of the store
_TELL_S = 60.0  # seconds after which rank 0 prints which ranks it waits for
_MARGIN_S = 10.0  # seconds that the other ranks wait for rank 0's result after rank 0's own time limit
_DEVICES = "devices"  # key that rank 0 writes once all ranks are connected: arguments of a BadInput if their devices are wrong, else {}
_NAME_S = 60.0  # time limit to find the address of MASTER_ADDR, as its machine may be starting at the same time
_HEARD_S = 60.0  # longest time that rank 0, which holds the store, stays until the other ranks have read why the run cannot start
_GONE = (dist.DistNetworkError, dist.DistStoreError)


class NotMet(Ended):
    """Raised if some ranks of a run did not reach the store in time, or if a rank cannot start. The message is one line."""


def meet(rank: int, size: int, *, environment: Mapping[str, str], timeout_s: float, problem: str = "", device: str = "cpu") -> Any:
    """Wait for all ranks, and return the store of this run.

    environment: MASTER_ADDR, MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE are read. problem: why this rank cannot start; "" if it can. If a
    rank has a problem, all ranks raise NotMet with it. device: id of this rank's GPU, or "cpu". Raises NotMet also if ranks do not come
    within `timeout_s`, and BadInput if MASTER_ADDR has no address or the devices do not go together (`unfit`)."""
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait, node = timedelta(seconds=timeout_s), socket.gethostname()
    _check_name(host, node, wait_s=min(timeout_s, _NAME_S))
    here = f"rank {rank} on {node}"
    try:
        store: Any = dist.TCPStore(
            host, port, size, is_master=rank == 0 and not agent, timeout=wait, wait_for_workers=False, multi_tenant=not agent
        )
    except _GONE as error:
        who = "torchrun" if agent else "rank 0"
        verb = "could not listen" if rank == 0 and not agent else f"got no answer from {who}"
        said = str(error).splitlines()[0].partition(" Exception raised")[0]
        raise NotMet(f"{here} {verb} at {host}:{port} within {timeout_s:g} s{_LIMIT}: {said}") from None
    until, answer = time.monotonic() + timeout_s, _nothing
    refused: dict[str, str] = {}
    try:
        if agent:
            name = uuid.uuid4().hex if rank == 0 else _ask(store, rank, until=until)
            if not name:
                raise NotMet(f"rank 0 did not come within {timeout_s:g} s{_LIMIT}: {here} waits at {host}:{port}")
            answer = _answers(store, name, size) if rank == 0 else _nothing
            store = dist.PrefixStore(f"start/{name}", store)
        if problem:
            said = f"{here}: {problem}"
        else:
            store.set(f"device/{rank}", f"{node} {device}")
            store.set(f"here/{rank}", node)
            said = _wait(store, rank, size, until=until, answer=answer, limit=f"within {timeout_s:g} s{_LIMIT}", at=f"{host}:{port}")
            if rank == 0 and not said:
                store.set(_DEVICES, json.dumps(unfit([found.decode() for found in store.multi_get([f"device/{n}" for n in range(size)])])))
            refused = {} if said else json.loads(store.get(_DEVICES))
    except _GONE:
        raise NotMet(f"{here} met the other ranks at {host}:{port}, but their store is gone, because rank 0 has left") from None
    if said or refused:
        with contextlib.suppress(*_GONE):
            store.set(_PROBLEM, said)
            store.set(f"heard/{rank}", "")
            if rank == 0 and not agent:  # the store, from which the other ranks read the reason, is in this process
                _stay(store, size, until=until)
        raise BadInput(**refused) if refused else NotMet(said)
    return store


def unfit(devices: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a BadInput if two ranks share a GPU, which NCCL cannot do, or if only some ranks have one; else {}.
    devices: "HOST GPU" or "HOST cpu" of each rank."""
    hosts, ids = zip(*(device.split(" ", 1) for device in devices), strict=True)
    on_cpu = [rank for rank, found in enumerate(ids) if found == "cpu"]
    if len(on_cpu) == len(ids):
        return {}
    if on_cpu:
        got = f"none on rank {on_cpu[0]} ({hosts[on_cpu[0]]})"
        fix = "run moe doctor there, or train on CPUs: DS_ACCELERATOR=cpu on all ranks"
        return {"what": "GPUs", "got": got, "needed": "one for each rank, or none for all", "fix": fix}
    first: dict[str, int] = {}
    for rank, found in enumerate(ids):
        if first.setdefault(found, rank) != rank:
            here = len({one for host, one in zip(hosts, ids, strict=True) if host == hosts[rank]})
            got = f"ranks {first[found]} and {rank} on the same one ({found} of {hosts[rank]})"
            return {"what": "GPUs", "got": got, "needed": "one for each rank", "fix": f"--nproc {here} (SLURM: also --gpus-per-task=1)"}
    return {}


def _check_name(host: str, node: str, *, wait_s: float) -> None:
    """Raise BadInput if `host` has no address after `wait_s`. torch would print its C++ stack again and again until its time limit."""
    until = time.monotonic() + wait_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until or isinstance(error, UnicodeError):
                got = f"{host}, which {node} cannot resolve ({getattr(error, 'strerror', None) or error})"
                needed = "a name or address of rank 0's machine that can be resolved"
                fix = "set it to an address that `hostname -I` prints on rank 0's machine"
                raise BadInput("MASTER_ADDR", got=got, needed=needed, fix=fix) from None
        time.sleep(_LOOK_S)


def _stay(store: Any, size: int, *, until: float) -> None:
    """Keep the store alive until every rank has read why the run cannot start, but at most _HEARD_S, because some ranks may never come."""
    now = time.monotonic()
    last = max(now + 1.0, min(until, now + _HEARD_S))
    while not store.check([f"heard/{rank}" for rank in range(size)]) and time.monotonic() < last:
        time.sleep(_LOOK_S)


def _ask(store: Any, rank: int, *, until: float) -> str:
    """Ask rank 0 for the name of this start of the run, the prefix of the start's keys in torchrun's store. Return "" if rank 0 does not
    answer in time. The answer's key contains the question, a random number, so an earlier start's answer is not read."""
    question = uuid.uuid4().hex
    store.set(f"asks/{rank}", question)
    while not store.check([f"told/{question}"]):
        if time.monotonic() > until:
            return ""
        time.sleep(_LOOK_S)
    return str(store.get(f"told/{question}").decode())


def _answers(store: Any, name: str, size: int) -> Callable[[], None]:
    """Return a function that rank 0 calls while it waits: it answers `_ask` with `name` for each rank that has asked since the last
    call."""
    told: set[str] = set()

    def answer() -> None:
        for asks in (f"asks/{rank}" for rank in range(1, size)):
            if store.check([asks]) and (question := store.get(asks).decode()) not in told:
                store.set(f"told/{question}", name)
                told.add(question)

    return answer


def _nothing() -> None: ...


def _wait(store: Any, rank: int, size: int, *, until: float, answer: Callable[[], None], limit: str, at: str) -> str:
    """Wait until all ranks have come, and return "". If a rank cannot start, or at the time limit, return the reason instead. Only rank 0
    reads the keys of all ranks; the others wait for rank 0's result. So the number of reads grows linearly with the number of ranks.
    answer: called between two reads. limit: the time limit in words. at: address of the store."""
    keys, until = ([f"here/{n}" for n in range(size)], until) if rank == 0 else ([_DEVICES], until + _MARGIN_S)
    tell = time.monotonic() + _TELL_S if rank == 0 else math.inf
    while not store.check(keys):  # store.wait with a time limit would fill the output with torch's warnings
        if store.check([_PROBLEM]):
            return str(store.get(_PROBLEM).decode())
        if time.monotonic() > until:
            return _missing(store, size, limit, at) if rank == 0 else f"rank 0 gave no answer {limit} at {at}"
        if time.monotonic() > tell:
            tell = math.inf
            print(f"waiting: {_missing(store, size, 'yet', at)}", file=sys.stderr, flush=True)
        answer()
        time.sleep(_LOOK_S)
    return ""


def _missing(store: Any, size: int, limit: str, at: str) -> str:
    absent = [rank for rank in range(size) if not store.check([f"here/{rank}"])]
    nodes = sorted({store.get(f"here/{rank}").decode() for rank in range(size) if rank not in absent})
    shown = " ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    return f"rank{'s' if len(absent) > 1 else ''} {shown} did not come {limit}: the others, on {' '.join(nodes[:8])}, wait at {at}"
