"""One rank's work on which all must agree: where it raises on one of them, all of them learn it, in the same line, instead of waiting.

    rank 0   work() ----------------------------------.   largest: did any fail, and which first?   -> None: go on
    rank 1   work() raises ValueError: boom ----------'   sum: that rank's line, in bytes           -> the same line on all ranks

Two small collectives where something failed, one where nothing did.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from parallel.collectives import largest, sum_over
from parallel.errors import BadInput, cut, where
from parallel.mesh import Axis

T = TypeVar("T")
_LONGEST = 40_000  # bytes of a line: four fields as cut() leaves them, each character up to 12 bytes of JSON


@dataclass(frozen=True)
class Failure:
    """`line`: what the first rank that failed said; `rank`: its place on the axis; `error`: what was raised here, if anything was."""

    line: str
    rank: int
    error: BaseException | None


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """`value` where no rank failed."""

    value: T | None
    failure: Failure | None


def agree(work: Callable[[], T], world: Axis, *, said: Callable[[BaseException], str]) -> Outcome[T]:
    """Do this rank's work; `said`: an error of it in one line. Collective."""
    value, error = None, None
    try:
        value = work()
    except (Exception, SystemExit) as raised:
        error = raised
    first = world.size - int(largest(0.0 if error is None else float(world.size - world.index), world))
    if first == world.size:
        return Outcome(value, None)
    mine = said(error) if error is not None and first == world.index else ""
    return Outcome(None, Failure(_told(mine, world), first, error))


def of_all(work: Callable[[], T], world: Axis, *, what: str) -> T:
    """What this rank's work gives. Raises BadInput on every rank where it raises on any; `what` it was, where it said nothing itself."""

    def said(error: BaseException) -> str:
        if isinstance(error, BadInput):
            return json.dumps([cut(part) for part in (error.what, error.got, error.needed, error.fix)])
        return json.dumps([what, where(error), "no exception", "mend it"])

    outcome = agree(work, world, said=said)
    if outcome.failure is not None:
        about, got, needed, fix = json.loads(outcome.failure.line)
        raise BadInput(about, got=got, needed=needed, fix=fix) from outcome.failure.error
    return cast(T, outcome.value)


def _told(mine: str, world: Axis) -> str:
    """The one line that is not empty, on every rank. Collective."""
    nccl = world.size > 1 and dist.get_backend(world.group) == "nccl"
    text = mine.encode(errors="backslashreplace")[:_LONGEST]  # half a character has no bytes
    sent = torch.zeros(_LONGEST, dtype=torch.int32, device="cuda" if nccl else "cpu")
    sent[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
    return bytes(sum_over(sent, world).tolist()).rstrip(b"\0").decode(errors="replace")
