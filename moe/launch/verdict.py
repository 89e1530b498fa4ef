"""Judges the end of a run on several processes from its ranks' status files, the order in which they died, and the launcher's exit code."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from typing import Any, Literal

from moe.launch import status
from moe.launch.early import NOTHING_LOST
from moe.launch.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from moe.launch.processes import Rank

_LIKELY: dict[int, str] = {
    signal.SIGKILL: " (by kill -9, or by the kernel because memory ran out: see dmesg)",
    signal.SIGBUS: " (a mapped file, such as train.bin of the data or token cache, was truncated; or its disk failed, or /dev/shm is full)",
}
Watched = Literal["ended", "killed", "early"]
Statuses = Mapping[int, Mapping[str, Any]]  # rank -> content of its status file (moe/launch/status.py)


def verdict(
    statuses: Statuses,
    ranks: list[Rank],
    world: int,
    launcher_code: int,
    *,
    asked: int | None = None,
    how: Watched = "ended",
    ended_here: Collection[int] = (),
) -> tuple[int, list[str]]:
    """Return (exit code, lines to print). If ranks failed, there is a line for each, in the order in which they died; ranks that one error
    ended together share a line. For bad input, the only line is its message, and none if rank 0 has printed it. statuses: status files; a
    rank without one did not finish. ranks: the ranks' processes, as far as this process found them. launcher_code: the launcher's exit
    code. asked: the signal that was sent to the ranks, or None. how: "ended" if the launcher ended by itself; "killed" if this process had
    to kill the ranks; "early" if a signal came before all ranks had started. ended_here: ranks that this process killed."""
    killed = how != "ended"
    exits = [statuses.get(rank, {}).get("exit") for rank in range(world)]
    if all(code == STOPPED for code in exits):
        early = all(statuses[rank].get("error") == status.TOO_EARLY for rank in range(world))
        said = f"a signal came before training began, and {NOTHING_LOST}" if early else "every rank saved and stopped for a signal"
        return STOPPED, [f"exit code {STOPPED}: {said}"]
    if all(code == DONE for code in exits) and launcher_code == DONE:
        return DONE, []
    if all(code in (DONE, STOPPED) for code in exits):
        return FAILED, [f"every rank finished, with exit codes {exits}, but the launcher ended with {in_words(launcher_code)}"]
    if _too_early(statuses, ranks, world, launcher_code, asked, how):
        code = INTERRUPTED if asked == signal.SIGINT else STOPPED
        name = "a signal" if asked is None else signal.Signals(asked).name
        return code, [f"exit code {code}: {name} came before training began, and {NOTHING_LOST}"]
    # excluded: this process killed all, but no signal came. Then another machine's launcher failed, and ranks may have started there
    if not statuses and not ranks and (asked is not None or not killed):
        alone = f"no rank started: the launcher ended with {in_words(launcher_code)}; its own message is above"
        return FAILED, ["no rank had started" if killed else alone]
    failed = [rank for rank in range(world) if exits[rank] not in (DONE, STOPPED)]
    seen = {rank.rank: rank for rank in ranks}
    bad = [rank for rank in failed if _was_bad_input(statuses.get(rank), seen.get(rank), launcher_code)]
    if bad:  # rank 0 prints its message itself; the message of another rank is returned
        silent = f"rank {bad[0]} ended with {in_words(BAD_INPUT)}, and could not write the reason: is the disk full?"
        error = statuses.get(bad[0], {}).get("error") or silent
        return BAD_INPUT, [] if bad[0] == 0 else [f"error: {error}"]
    # time of death of failed ranks that are not in `ranks`: inf (listed last) if this process killed the rank; else 0 (listed first)
    late = {rank: float("inf" if rank in ended_here else 0) for rank in failed}
    ended_at = {rank: seen[rank].ended_at or float("inf") if rank in seen else late[rank] for rank in failed}
    groups: list[tuple[str, list[int]]] = []
    for rank in sorted(failed, key=ended_at.__getitem__):
        codes = (exits[rank], seen[rank].code if rank in seen else None, launcher_code if len(failed) == 1 else None)
        last = next((c for c in codes if c not in (None, DONE)), None)
        end = f"ended with {in_words(last)}"
        unreported = "pid" not in statuses.get(rank, {})
        if unreported and asked is not None and (killed or last == -asked):
            end = "was killed, because it had not stopped in time" if killed else f"ended with {in_words(last)}, before it could save"
        elif unreported and rank in ended_here:
            end = "was killed by moe train after the others"
        elif unreported and groups and last in (-signal.SIGTERM, -signal.SIGKILL):
            end = "was then killed by the launcher"
        error = statuses.get(rank, {}).get("error")
        text, of_all = f"{end}{f': {error}' if error else ''}", statuses.get(rank, {}).get("of_all")
        same = next((who for said, who in groups if of_all and said == text), None)
        if same is None:
            groups.append((text, [rank]))
        else:
            same.append(rank)
    lines = [f"rank{'s' if len(who) > 1 else ''} {' '.join(map(str, sorted(who)))} {text}" for text, who in groups]
    return FAILED, lines


def _was_bad_input(found: Mapping[str, Any] | None, seen: Rank | None, launcher_code: int) -> bool:
    """Return whether a rank ended with BAD_INPUT. found: content of the rank's status file, or None. seen: the rank's process, or None.
    Without a status file, the exit code of the process decides; if that is unknown, the launcher's."""
    if found is not None:
        return found.get("exit") == BAD_INPUT
    return seen is not None and (launcher_code if seen.code is None else seen.code) == BAD_INPUT


def first_to_fail(statuses: Statuses, ranks: list[Rank], *, ended_here: Collection[int]) -> int | None:
    """Return the rank that was the first to fail by itself: neither by an error that ended all ranks together (`of_all` in its status
    file), nor killed by this process. If none did, return the rank for which the others waited: the first in `ended_here` without a status
    file. If there is none either, return None. ended_here: ranks that this process killed."""
    own = [rank for rank in ranks if not statuses.get(rank.rank, {}).get("of_all") and rank.ended_at is not None]
    failed = [rank for rank in own if rank.rank not in ended_here and statuses.get(rank.rank, {}).get("exit") not in (DONE, STOPPED)]
    waited_for = [rank for rank in own if rank.rank in ended_here and "pid" not in statuses.get(rank.rank, {})]
    found = min(failed or waited_for, key=lambda rank: rank.ended_at or 0.0, default=None)
    return None if found is None else found.rank


def _too_early(statuses: Statuses, ranks: list[Rank], world: int, launcher_code: int, asked: int | None, how: Watched) -> bool:
    """Return whether a signal ended the run before training: the signal ended some ranks, and all others failed because these ranks
    were missing. `verdict` explains the arguments."""
    seen = {rank.rank: rank for rank in ranks}

    def by_signal(rank: int) -> bool:
        if rank in statuses:
            return statuses[rank].get("error") == status.TOO_EARLY or (asked is not None and statuses[rank].get("exit") == -asked)
        if asked is None or how == "early" or rank not in seen:
            return asked is not None and how == "early"
        if not seen[rank].pid:  # on another machine, where only the launchers' largest exit code is known
            return how == "ended" and launcher_code == 256 - asked
        return seen[rank].code in (-asked, STOPPED)

    early = set(filter(by_signal, range(world)))
    return bool(early) and all(statuses.get(rank, {}).get("of_all") for rank in range(world) if rank not in early)


def in_words(code: int | None) -> str:
    """Format an exit code: "exit code 1", or "signal SIGKILL (likely cause)" for -9, 137 or, from DeepSpeed's launcher, 247."""
    if code is None:
        return "no status file: its exit code is not known"
    number = -code if code < 0 else 256 - code if code > 192 else code - 128 if code > 128 else 0
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    return f"signal {name}{_LIKELY.get(number, '')}"
