"""Diagnoses a hang from the ranks' progress reports (Record.answer in parallel/mesh/record.py). The result is a line that names the ranks
that hold up the others, or None.

failed    an error ended a rank
silent    a rank sends no report: it is stopped, killed, or behind a broken link
differ    ranks of a group ran different n-th collectives (the first such n is named), or had run unequal numbers of collectives at the
          same point of the step
behind    a rank waits for no other, but another rank waits for it: for a collective that it has not run, or a message that it has not sent
circle    ranks wait for each other
lost      a message was sent, but its receiver still waits for it
engine    ranks wait inside a library's own collectives, which are not recorded; their lines of Python code show which ranks differ
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parallel.mesh.debug_collectives import Call, other_splits

ABORTED = "SIGABRT: a library ended the process"
Kind = Literal["failed", "silent", "differ", "behind", "circle", "lost", "engine"]
Answers = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Finding:
    """A diagnosis. kind: see the top of this file. ranks: the ranks that hold up the others. line: the message."""

    kind: Kind
    ranks: tuple[int, ...]
    line: str


def diagnose(answers: Answers, silent: Mapping[int, str], *, limit_s: float, share: float = 1.0, settled: bool = False) -> Finding | None:
    """Find the ranks that hold up the others. Return None if the reports do not show them. Unless a rank waits long enough, the search is
    only for failed and differing ranks.

    answers: rank -> its report. silent: rank without a report -> text about its last sign of life. limit_s: the watchdog's time limit.
    share: a rank counts as waiting after this fraction of `limit_s`. 0: every rank that does not compute counts as waiting, and
    silent ranks are found even if none waits.
    settled: all ranks are at the same point of the step, so they must have run equally many collectives."""
    waiting = {r for r, a in answers.items() if a["waits"] != "no" and a["idle"] >= share * limit_s * a["patience"]}
    found = _differ(answers, settled=settled)
    if found is not None:
        return found
    failed = {r: a["failed"] for r, a in answers.items() if a["failed"]}
    if failed and all(word.startswith(ABORTED) for word in failed.values()):  # gloo and NCCL also abort if another rank sends wrong data
        found = _behind(answers, {r for r, a in answers.items() if a["waits"] != "no"})
        if found is not None and found.kind == "circle":
            return found
    if failed:
        first = min(failed)
        line = f"{_ranks(failed)} failed in {_at(answers[first])}: {failed[first]}"
        return Finding("failed", tuple(sorted(failed)), line)
    if silent and (waiting or share == 0):
        words = "; ".join(f"rank {rank}: {word}" for rank, word in list(sorted(silent.items()))[:4])
        who = f"{_ranks(silent)} {'is' if len(silent) == 1 else 'are'} missing"
        return Finding("silent", tuple(sorted(silent)), f"{who} (no answer; {words}){_waits(waiting, answers)}")
    if not waiting:
        return None
    return _behind(answers, waiting) or _lost(answers, waiting) or _engine(answers, waiting)


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    shown = " ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return f"rank{'s' if len(found) > 1 else ''} {shown}"


def _at(answer: Mapping[str, Any]) -> str:
    return f"{answer['phase']}{' of step ' + str(answer['step']) if answer['step'] else ''}"


def _latest(answer: Mapping[str, Any]) -> Call | None:
    lane = answer["lanes"].get(answer["latest"])
    return _call(lane, lane["calls"][-1]) if lane and lane["calls"] else None


def _call(lane: Mapping[str, Any], call: list[Any]) -> Call:
    number, name, label, shape, dtype, send, receive, _ = call
    return Call(name, lane["axis"], label, shape, dtype, send, receive, number)


def _named(answer: Mapping[str, Any]) -> str:
    """Return in words the rank's last recorded collective, phase and step. answer: Record.answer() of the rank."""
    call = _latest(answer)
    what = f"{call.name} {call.number} over {call.axis}{f' in {call.label}' if call.label else ''}, " if call else ""
    return f"{what}{_at(answer)}"


def _waits(waiting: Iterable[int], answers: Answers) -> str:
    """Return in words the waiting ranks, the longest wait, and where the rank that waits longest is; "" if none waits."""
    found = sorted(waiting)
    if not found:
        return ""
    longest = max(found, key=lambda rank: answers[rank]["idle"])
    many = f"{_ranks(found)} wait{'s' if len(found) == 1 else ''}, rank {longest} for {answers[longest]['idle']:.0f} s"
    return f": {many}, at {_named(answers[longest])} ({answers[longest]['place']})"


def _differ(answers: Answers, *, settled: bool) -> Finding | None:
    """Return a finding about the first collective of a group that differs between ranks; None if all agree. It names the ranks in the
    minority."""
    best: tuple[int, Finding] | None = None
    for name in sorted({name for a in answers.values() for name in a["lanes"]}):
        held = {r: a["lanes"][name] for r, a in answers.items() if name in a["lanes"]}
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, lane in held.items():
            groups.setdefault(tuple(lane["ranks"]), []).append(rank)
        for ranks in groups.values():
            lanes = {rank: held[rank] for rank in ranks}
            found = _first_difference(lanes) or (_other_number(lanes, answers) if settled else None)
            if found is not None and (best is None or len(ranks) < best[0]):  # prefer the smallest group, to name few innocent ranks
                best = len(ranks), found
    return None if best is None else best[1]


def _first_difference(lanes: Mapping[int, Mapping[str, Any]]) -> Finding | None:
    calls = {rank: {call[0]: call for call in lane["calls"]} for rank, lane in lanes.items()}
    numbers = set.intersection(*(set(found) for found in calls.values())) if calls else set()
    for number in sorted(numbers):
        at = {rank: _call(lanes[rank], found[number]) for rank, found in calls.items()}
        ranks = tuple(sorted(at))
        bad = list(other_splits(at, next(iter(lanes.values()))["ranks"]))
        chains = Counter(found[number][-1] for found in calls.values())
        if len(chains) > 1:
            few, others = _parted({rank: found[number][-1] for rank, found in calls.items()})
            if not few:
                return Finding("differ", ranks, f"{_ranks(ranks)} differ: {_both(at)}")
            line = f"{_ranks(few)} made another collective {number} over {at[few[0]].axis}: {at[few[0]].text()}"
            return Finding("differ", tuple(few), f"{line}, where {_ranks(others)} made {at[others[0]].text()}")
        if bad:
            return _split_finding(bad, at)
    return None


def _other_number(lanes: Mapping[int, Mapping[str, Any]], answers: Answers) -> Finding | None:
    """Return the finding for ranks of a group with more or fewer collectives than most; None if all have run equally many. lanes: rank ->
    its report about the group."""
    made = {rank: lanes[rank]["number"] if rank in lanes else 0 for rank in next(iter(lanes.values()))["ranks"] if rank in answers}
    if len(set(made.values())) == 1:
        return None
    few, others = _parted(made)
    named = [*(few or sorted(made))[:2], *others[:1]]
    last = {rank: f", the last {_call(lanes[rank], lanes[rank]['calls'][-1]).text()}" if made[rank] else "" for rank in named}
    shown = "; ".join(f"rank {rank} made {made[rank]}{last[rank]}" for rank in named)
    return Finding("differ", tuple(few or sorted(made)), f"{_ranks(few or made)} made more or fewer collectives of a group: {shown}")


def _parted(values: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """Return (minority, majority): ranks without and with the value that more than half have; ([], all ranks) if there is no majority."""
    common, many = Counter(values.values()).most_common(1)[0]
    if 2 * many <= len(values):
        return [], sorted(values)
    return sorted(r for r in values if values[r] != common), sorted(r for r in values if values[r] == common)


def _both(at: Mapping[int, Call]) -> str:
    """Return in words two ranks and their different collectives; used if there is no majority. at: rank -> its collective."""
    first, *others = sorted(at)
    found = next((r for r in others if at[r].text() != at[first].text()), None)
    number = at[first].number
    if found is None:
        return f"in a collective over {at[first].axis} before number {number}; their records no longer contain it"
    return f"at collective {number} rank {first} made {at[first].text()}, but rank {found} {at[found].text()}"


def _split_finding(bad: list[tuple[int, int, int, int]], at: Mapping[int, Call]) -> Finding:
    """Return the finding for pairs of ranks that disagree about the number of rows. It names the ranks that are in all pairs, or all
    senders if no rank is."""
    common = set.intersection(*({sender, receiver} for sender, receiver, *_ in bad))
    culprits = tuple(sorted(common or {sender for sender, *_ in bad}))
    sender, receiver, sent, expected = bad[0]
    call = at[sender]
    where = f"{call.name} {call.number} over {call.axis}{f' in {call.label}' if call.label else ''}"
    who = f"{_ranks(culprits)} {'has' if len(culprits) == 1 else 'have'} other splits at {where}"
    return Finding("differ", culprits, f"{who}: rank {sender} sends {sent} rows to rank {receiver}, which expects {expected}")


def _edges(answers: Answers, waiting: Iterable[int]) -> dict[int, set[int]]:
    """Return rank -> the ranks for which it waits: they have run fewer collectives of a group, or not sent a message that it awaits."""
    edges: dict[int, set[int]] = {}
    for rank in waiting:
        owed: set[int] = set()
        for name, lane in answers[rank]["lanes"].items():
            for other in lane["ranks"]:
                theirs = answers[other]["lanes"].get(name) if other in answers else None
                if other != rank and other in answers and (theirs is None or theirs["number"] < lane["number"]):
                    owed.add(other)
        for key, (number, _) in answers[rank]["messages"].items():
            source, target = map(int, key.split(">"))
            if target == rank and answers.get(source, {}).get("messages", {}).get(key, [0])[0] < number:
                owed.add(source)
        edges[rank] = owed
    return edges


def _behind(answers: Answers, waiting: set[int]) -> Finding | None:
    edges = _edges(answers, {r for r, a in answers.items() if a["waits"] != "no"})
    owed = {other for rank in waiting for other in edges[rank]}
    reached, more = set(owed), set(owed)
    while more:  # add the ranks for which the ranks in `more` wait, until there are no new ones
        more = {other for rank in more for other in edges.get(rank, ())} - reached
        reached |= more
    if not reached:
        return None
    roots = sorted(rank for rank in reached if not edges.get(rank))
    if not roots:
        owing = Counter(other for rank in reached for other in edges[rank])
        (worst, most), *rest = owing.most_common(2)
        if len(reached) > 2 and (not rest or most > rest[0][1]):  # the rank for which most others wait has left out a collective
            where = f"rank {worst} is at {_named(answers[worst])} ({answers[worst]['place']})"
            return Finding("circle", (worst,), f"rank {worst} is missing ({where}){_waits(waiting - {worst}, answers)}")
        shown = sorted(reached)[:3]
        where = "; ".join(f"rank {rank} is at {_named(answers[rank])}" for rank in shown)
        return Finding("circle", tuple(sorted(reached)), f"{_ranks(reached)} wait for each other: {where}")
    lost = _lost(answers, {rank for rank in roots if answers[rank]["waits"] != "no"})
    if lost is not None:
        return lost
    where = "; ".join(f"rank {r} has been at {_named(answers[r])} {_idle(answers[r])} ({answers[r]['place']})" for r in roots[:3])
    who = f"{_ranks(roots)} {'is' if len(roots) == 1 else 'are'} missing ({where})"
    return Finding("behind", tuple(roots), f"{who}{_waits(waiting - set(roots), answers)}")


def _idle(answer: Mapping[str, Any]) -> str:
    return f"for {answer['idle']:.0f} s"


def _lost(answers: Answers, waiting: Iterable[int]) -> Finding | None:
    for rank in sorted(waiting):
        for key, (number, label) in answers[rank]["messages"].items():
            source, target = map(int, key.split(">"))
            sent = answers.get(source, {}).get("messages", {}).get(key, [0])[0]
            if target == rank and answers[rank]["awaited"] == key and number <= sent:
                line = f"message {number} from rank {source} to rank {rank} ({label}) is lost: it was sent, but did not arrive"
                return Finding("lost", (source, rank), f"{line}{_waits([rank], answers)}")
    return None


def _engine(answers: Answers, waiting: set[int]) -> Finding | None:
    """Return a finding for ranks that wait although no recorded collective is missing. They wait in a library's own collective, or a link
    between machines is broken."""
    sure = {rank for rank in waiting if answers[rank]["waits"] == "yes"}
    if not sure:
        return None
    others = sorted(set(answers) - {r for r, a in answers.items() if a["waits"] == "yes"})
    if others:
        where = "; ".join(f"rank {r} has been in {_at(answers[r])} {_idle(answers[r])} ({answers[r]['place']})" for r in others[:3])
        who = f"{_ranks(others)} {'is' if len(others) == 1 else 'are'} missing ({where})"
        return Finding("engine", tuple(others), f"{who}{_waits(sure, answers)}")
    places = Counter(a["place"] for a in answers.values())
    common, many = places.most_common(1)[0]
    few = sorted(r for r, a in answers.items() if a["place"] != common) if 2 * many > len(answers) else []
    if few:
        where = f"{_at(answers[few[0]])} ({answers[few[0]]['place']})"
        return Finding(
            "engine",
            tuple(few),
            f"{_ranks(few)} {'waits' if len(few) == 1 else 'wait'} elsewhere, in {where}{_waits(waiting - set(few), answers)}",
        )
    hosts = sorted({a["host"] for a in answers.values()})
    line = f"every rank is here, but nothing arrives between {' and '.join(hosts[:4])}{_waits(sure, answers)}"
    return Finding("engine", tuple(sorted(answers)), line)
