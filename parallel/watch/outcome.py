"""Raises an error of one rank on all ranks, with the same message, so that no rank waits for a failed rank.

    rank 0   work() ----------------------------------.   a maximum over ranks finds the first rank that failed; if none did: continue
    rank 1   work() raises ValueError: boom ----------'   a sum over ranks sends the bytes of its line to all ranks, which raise it

One small collective if no rank fails, two otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from parallel.errors import BadInput, cut, where
from parallel.mesh.collectives import device_of, largest, sum_over
from parallel.mesh.mesh import Axis

T = TypeVar("T")
_LONGEST = 40_000  # most bytes of a line: 4 fields of a BadInput, each of at most 800 characters (`cut`), each of at most 12 bytes in JSON


@dataclass(frozen=True)
class Failure:
    """A failed call. line: message of the first failed rank. rank: its index on the axis. error: this rank's own exception, or None."""

    line: str
    rank: int
    error: BaseException | None


def agree(work: Callable[[], T], world: Axis, *, said: Callable[[BaseException], str]) -> T | Failure:
    """Return work(). If work() raises on any rank, return a Failure on every rank. said: turns an exception into one line. Collective."""
    error: BaseException | None = None
    try:
        value = work()
    except (Exception, SystemExit) as raised:
        error = raised
    first = world.size - int(largest(0.0 if error is None else float(world.size - world.index), world))
    if first == world.size:
        return value
    line = said(error) if error is not None and first == world.index else ""
    return Failure(_to_all(line, world), first, error)


def of_all(work: Callable[[], T], world: Axis, *, what: str) -> T:
    """Return work(). If it raises on any rank, raise BadInput on every rank. what: name of the work, used if the error is no BadInput.

    Example: `of_all(lambda: read(path), everyone(world), what="reading the tokens")`. Collective."""

    def said(error: BaseException) -> str:
        if isinstance(error, BadInput):
            return json.dumps([cut(part) for part in (error.what, error.got, error.needed, error.fix)])
        return json.dumps([what, where(error), "no exception", "correct it"])

    found = agree(work, world, said=said)
    if isinstance(found, Failure):
        about, got, needed, fix = json.loads(found.line)
        raise BadInput(about, got=got, needed=needed, fix=fix) from found.error
    return found


def _to_all(line: str, world: Axis) -> str:
    """Send one rank's line to all ranks, and return it. All other ranks pass "". Collective."""
    text = line.encode(errors="backslashreplace")[:_LONGEST]  # a lone surrogate has no encoding
    sent = torch.zeros(_LONGEST, dtype=torch.int32, device=device_of(world))
    sent[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
    return bytes(sum_over(sent, world).tolist()).rstrip(b"\0").decode(errors="replace")
