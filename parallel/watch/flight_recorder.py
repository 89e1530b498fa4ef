"""Finds the ranks for which a hung run waited, from torch's flight recorder: it writes a trace for each rank, with the rank's collectives.

    rank  8   all_to_all ... 44790 done | 44791 entered            waits for rank 9, which is behind
    rank  9   all_to_all ... 44787 done | 44788 entered            is behind, and waits for no rank: the culprit
    rank 10   nothing recorded                                     also a culprit, as is a rank without a trace

In a group, a rank that has entered a collective waits for the ranks that have finished fewer collectives or have not entered this one.
Culprits are the ranks that others wait for and that wait for no rank in any group. If ranks of a group ran a collective with different
kind, dtype or size, this is reported first. Sends and receives are examined only if collectives show nothing.

Traces are JSON or pickles. The pickle reader accepts only plain containers, numbers and text, so it runs no code of the file.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.errors import BadInput

MOST_BYTES = 256 * 2**20  # largest trace that is read: 2,000 entries with stacks take a few megabytes
_UNEVEN = ("all_to_all", "alltoall", "coalesced", "gather_v", "uneven")  # collectives with sizes that may differ between ranks
_PLAIN = (  # names in `pickle` of the opcodes that make only containers, numbers and text
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE"
)
Group = tuple[str, str, tuple[int, ...]]  # name, description, ranks


def _with_plain_keys(load: Any, keys: slice) -> Any:
    """Return `load`, the function of a pickle opcode, with a check that dict keys are text, bytes or integers: hashing deeply nested tuples
    could take for ever. keys: positions of the keys on the unpickler's stack."""

    def checked(reader: Any) -> None:
        if not all(isinstance(key, str | bytes | int) for key in reader.stack[keys]):
            raise pickle.UnpicklingError("keys that are no text")
        load(reader)

    return checked


class _Plain(pickle._Unpickler):
    """Python's unpickler (the one written in Python) without the opcodes that name, call or build objects."""

    dispatch = {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _PLAIN.split()}
    for _opcode, _keys in ((pickle.SETITEM, slice(-2, -1)), (pickle.SETITEMS, slice(0, None, 2)), (pickle.DICT, slice(0, None, 2))):
        dispatch[_opcode[0]] = _with_plain_keys(dispatch[_opcode[0]], _keys)


@dataclass(frozen=True)
class Call:
    """One collective of a rank. number: its sequence number in the group. sent: dtypes and shapes of its inputs. done: it has finished."""

    number: int
    kind: str
    sent: str
    done: bool


@dataclass
class Trace:
    """The record of one rank. calls: group -> (number -> collective with this number). messages: sends and receives that have not ended."""

    rank: int
    calls: dict[Group, dict[int, Call]] = field(default_factory=dict)
    messages: list[tuple[Group, str, int, int]] = field(default_factory=list)  # (group, kind, sender's rank, receiver's rank)


@dataclass(frozen=True)
class Wait:
    """A rank that waits in the collective `call` of a group. behind: the ranks for which it waits."""

    rank: int
    group: Group
    call: Call
    behind: tuple[int, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. culprits: ranks for which the others waited, or whose collective differs. said: the reason, in words.
    waits: all waits in all groups. silent: ranks without a recorded collective."""

    culprits: tuple[int, ...]
    said: str
    waits: tuple[Wait, ...]
    silent: tuple[int, ...]


def read_folder(folder: Path) -> list[Trace]:
    """Read all traces of a folder: the files with names that end with a rank. Raises BadInput if one of them is no trace, if two are of one
    rank, or if there is none."""
    fix = "give the folder of the path in TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    if not folder.is_dir():
        raise BadInput("--trace", got=f"{folder}, which is no folder", needed="a folder of flight recorder traces", fix=fix)
    traces: dict[int, Trace] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise BadInput("--trace", got=f"{folder}: {error.strerror}", needed="a folder that can be read", fix=fix) from None
    for path in paths:
        number = re.search(r"(\d+)(\.json|\.pkl|\.pickle)?$", path.name)
        if number is None or path.is_dir():
            continue
        rank = int(number[1])
        if rank in traces:
            raise BadInput(
                "--trace", got=f"two traces of rank {rank} in {folder}", needed="one trace a rank", fix=f"move {path} to another folder"
            )
        traces[rank] = _trace(rank, _content(path), path)
    if not traces:
        raise BadInput("--trace", got=f"{folder} without a trace", needed="files that end with a rank, such as _dump_0", fix=fix)
    return list(traces.values())


def _content(path: Path) -> Any:
    needed, away = "a trace of torch's flight recorder", f"move {path} to another folder"
    fix = f"make it readable, or {away}"
    try:
        about = path.stat()
    except OSError as error:
        raise BadInput("--trace", got=f"{path}: {error.strerror}", needed=needed, fix=fix) from None
    if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
        got = f"{path}, of {about.st_size} bytes" if stat.S_ISREG(about.st_mode) else f"{path}, which is not a regular file"
        raise BadInput("--trace", got=got, needed=f"{needed}, at most {MOST_BYTES} bytes", fix=away)
    try:
        raw = path.read_bytes()
        return json.loads(raw) if raw.lstrip()[:1] == b"{" else _Plain(io.BytesIO(raw)).load()
    except KeyError as opcode:
        got = f"{path.name}, a pickle that holds more than containers, numbers and text (opcode {opcode})"
        raise BadInput("--trace", got=got, needed=needed, fix=f"do not unpickle it; {away}") from None
    except Exception as error:  # bytes that are no pickle can raise any error
        got = f"{path.name}, which cannot be read ({type(error).__name__})"
        raise BadInput("--trace", got=got, needed=needed, fix=fix) from None


def _trace(rank: int, content: Any, path: Path) -> Trace:
    try:
        members = {_text(c["name"]): _ranks(c["ranks"]) for c in content["pg_config"].values()}
        trace = Trace(rank, {(_text(c["name"]), _text(c["desc"]), _ranks(c["ranks"])): {} for c in content["pg_config"].values()})
        for entry in content["entries"]:
            name, about = map(_text, entry["process_group"])
            group = (name, about, members.get(name, ()))
            kind = _text(entry["profiling_name"]).rpartition(":")[2]
            if entry.get("is_p2p"):
                ends = re.search(r"(\d+)(->|<-)(\d+)", kind)
                if ends and entry["state"] != "completed":
                    here, there = (group[2][int(n)] for n in (ends[1], ends[3]))
                    trace.messages.append((group, kind, *((here, there) if ends[2] == "->" else (there, here))))
                continue
            sizes = ("[" + ", ".join(map(_text, shape)) + "]" for shape in entry["input_sizes"])
            sent = " ".join(_text(dtype) + shape for dtype, shape in zip(entry["input_dtypes"], sizes, strict=False))
            number = int(entry["collective_seq_id"])
            trace.calls.setdefault(group, {})[number] = Call(number, kind, sent, entry["state"] == "completed")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        got = f"{path.name}, whose entries are not as torch writes them ({type(error).__name__}: {error})"
        raise BadInput("--trace", got=got, needed="a trace of torch's flight recorder", fix=f"move {path} to another folder") from None
    return trace


def _text(part: Any) -> str:
    """Return a string or number as text. Refuse other objects: even a small pickle can hold an object whose text exceeds memory."""
    if not isinstance(part, str | int):
        raise TypeError("a value that is neither text nor an integer")
    return str(part)


def _ranks(text: Any) -> tuple[int, ...]:
    return tuple(int(rank) for rank in (json.loads(text) if isinstance(text, str) else text))


def diagnose(traces: list[Trace]) -> Diagnosis:
    """Find the ranks for which a hung run waited. There is no culprit if no rank waits, or if all wait for each other."""
    by_rank = {trace.rank: trace for trace in traces}
    groups = {group for trace in traces for group in trace.calls if len(group[2]) > 1}
    everyone = {rank for group in groups for rank in group[2]} | set(by_rank)
    silent = tuple(sorted(rank for rank in everyone if rank not in by_rank or not any(by_rank[rank].calls.values())))
    waits = tuple(wait for group in sorted(groups) for wait in _waits(group, by_rank))
    differ = next((found for group in sorted(groups) if (found := _differ(group, by_rank))), None)
    if differ is not None:
        return Diagnosis(*differ, waits, silent)
    edges = {(wait.rank, other) for wait in waits for other in wait.behind}
    roots = {to for _, to in edges} - {of for of, _ in edges}
    if not roots:
        edges = set(_unanswered(by_rank))
        roots = {to for _, to in edges} - {of for of, _ in edges}
    return Diagnosis(tuple(sorted(roots)), _words(roots, waits, by_rank), waits, silent)


def _waits(group: Group, by_rank: dict[int, Trace]) -> Iterator[Wait]:
    """Yield the waits of all ranks that have entered a collective of the group and not finished it."""
    first = {
        rank: next((call for _, call in sorted(by_rank[rank].calls[group].items()) if not call.done), None) for rank in _in(group, by_rank)
    }
    finished = {rank: max(by_rank[rank].calls[group], default=-1) if call is None else call.number - 1 for rank, call in first.items()}
    for rank, call in first.items():
        if call is not None:
            behind = [
                other
                for other in group[2]
                if other not in first or finished[other] < call.number - 1 or (finished[other] == call.number - 1 and first[other] is None)
            ]
            yield Wait(rank, group, call, tuple(behind))


def _in(group: Group, by_rank: dict[int, Trace]) -> list[int]:
    return [rank for rank in group[2] if rank in by_rank and by_rank[rank].calls.get(group)]


def _differ(group: Group, by_rank: dict[int, Trace]) -> tuple[tuple[int, ...], str] | None:
    """Return (ranks in the minority, reason in words) for the group's first collective that differs between ranks; None if none does."""
    calls = {rank: by_rank[rank].calls[group] for rank in _in(group, by_rank)}
    for number in sorted({number for made in calls.values() for number in made}):
        made = {rank: each[number] for rank, each in calls.items() if number in each}
        uneven = any(word in call.kind.lower() for call in made.values() for word in _UNEVEN)
        same = {
            r: call.kind if uneven else f"{call.kind} of {call.sent}" if _sizes_agree(call.kind) else call.kind for r, call in made.items()
        }
        often = Counter(same.values()).most_common()
        if len(often) < 2:
            continue
        usual = [text for text, n in often if n == often[0][1]]
        others = {rank: text for rank, text in same.items() if len(usual) > 1 or text != usual[0]}
        each = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(others.items()))
        usually = "" if len(usual) > 1 else f", the others {usual[0]}"
        return tuple(sorted(others)), f"collective {number} over {_name(group)} differs between ranks: {each}{usually}"
    return None


def _sizes_agree(kind: str) -> bool:
    """Return whether all ranks must pass inputs of equal shape to this kind of collective. In scatter and gather, the root's input
    differs."""
    return not kind.lower().startswith(("scatter", "gather", "send", "recv", "barrier"))


def _unanswered(by_rank: dict[int, Trace]) -> Iterator[tuple[int, int]]:
    """Yield (waiting rank, other rank) for each send or receive that the other rank has not started."""
    pending = {(rank, source, to) for rank, trace in by_rank.items() for _, _, source, to in trace.messages}
    for rank, source, to in pending:
        other = to if rank == source else source
        if (other, source, to) not in pending:
            yield rank, other


def _words(roots: set[int], waits: tuple[Wait, ...], by_rank: dict[int, Trace]) -> str:
    if not roots:
        return "no rank is behind the others" if waits else "no rank waits in a collective"
    said = []
    for rank in sorted(roots):
        own = next((wait for wait in waits if wait.rank == rank), None)
        missed = next((wait for wait in waits if rank in wait.behind), None)
        calls = by_rank[rank].calls if rank in by_rank else None
        at = (
            f"has not finished {_call(own)}" if own is not None
            else "has no trace" if calls is None
            else "has recorded nothing" if not any(calls.values())
            else f"has not entered {_call(missed)}" if missed is not None
            else "has not begun a send or receive that another rank waits for"
        )  # fmt: skip
        said.append(f"rank {rank} {at}")
    held = [wait for wait in waits if roots & set(wait.behind)]
    waiting = sorted({wait.rank for wait in held})
    who = f"ranks {' '.join(map(str, waiting))} wait" if len(waiting) > 1 else f"rank {waiting[0]} waits" if waiting else ""
    at = f"; {who}, rank {held[0].rank} at {_call(held[0])}" if held else ""
    return ", ".join(said) + at


def _call(wait: Wait) -> str:
    return f"{wait.call.kind} {wait.call.number} over {_name(wait.group)}"


def _name(group: Group) -> str:
    return group[1] or group[0]
