"""Advice that has been tried: the text of a fix is read as changes of the recipe, and changes that do not lead to a run are left out.

    "set degrees.tp to one of [1, 2, 4], or model.num_heads to 8"        on 2 processes
        ->  {degrees.tp: 1}  {degrees.tp: 2}  {degrees.tp: 4} x  {model.num_heads: 8} x        each applied alone, then all checks again
        ->  "set degrees.tp to one of [1, 2]"

If no change works alone, the advice of the next refusal is added: "set degrees.tp to 2, and add --nproc 2". A check thus needs to know
its own reason and no other one. Advice without a value ("check the spelling") is kept as it is.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from moe.checks.together import check_run
from moe.recipe import hash_table
from moe.recipe.idle import COMMAND_LINE, check_read
from moe.recipe.keys import known_keys
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput

_KEY = r"[a-z_]+(?:\.[a-z_0-9]+)+"
_SET = re.compile(rf"^(?:set |use )?(?:({_KEY}|it|stage) )?(?:to )?(.*)$")
_EITHER = re.compile(rf"^set ({_KEY}) or ({_KEY}) to (\S+)$")
_TOLD = re.compile(rf"(?:--({_KEY}) |({_KEY}): )([^\s?]+)")  # did you mean --a.b 1 --c.d x? did you mean a.b: 1 and c.d: x?
_PLAIN = re.compile(r"^(null|true|false|-?[\d.][\w.+-]*|[a-z0-9_]+|\[[\d, ]*\])$")
_MORE = re.compile(r" \(\d+ more wrong values? after this one\)$")
_NO_ADVICE = "no change of one key alone was found that works: see docs/use/recipes.md"
_TRY_S, _FURTHER = 0.3, 3  # seconds for all trials, so that an error comes in under a second; most changes after the first one


@dataclass(frozen=True)
class Proposal:
    """One way to mend the recipe: keys to set, keys to remove, a key to rename, another number of processes."""

    said: str
    values: dict[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    renamed: tuple[str, str] | None = None
    nproc: int | None = None


Origins = Mapping[str, str]


def check_for_user(run: Run, world: int, origins: Origins | None = None) -> Run:
    """Return `check_run`'s result. If it refuses, raise BadInput with advice that has been tried on this recipe and number of processes.

    Also reads the table of experts that the recipe names, if the file exists; a resumed run has it in its checkpoint.
    `origins`: the source of each value of the recipe, so that no advice makes a value that the user gave unread.
    """
    try:
        checked = check_run(run, world)
    except BadInput as bad:
        raise tried(bad, run, world, origins or {}) from None
    hash_table.read(checked, or_none=True)
    return checked


def tried(bad: BadInput, run: Run, world: int, origins: Origins) -> BadInput:
    """Return the same refusal without the advice that does not lead to a run.

    If no single change does, advise several changes; else a change that mends at least this mistake; else say that none was found.
    """
    until = time.process_time() + _TRY_S
    kept: list[str] = []
    failed: list[tuple[Proposal, BadInput]] = []
    for said in alternatives(bad.fix):
        proposed = proposals_of(said, bad)
        again = [(p, _refused(p, run, world, origins)) for p in proposed if time.process_time() < until]
        working = [p for p, refused in again if refused is None]
        failed += [(p, refused) for p, refused in again if refused is not None]
        if working and len(working) < len(proposed):
            kept.append(_said_of(working))
        elif len(working) == len(proposed):  # also if there was nothing to try
            kept.append(said)
    if not failed:
        return bad
    if not any(proposals_of(said, bad) for said in kept):
        found = _further([([p], refused) for p, refused in failed], run, world, origins, until)
        if found is not None:
            kept.insert(0, ", and ".join(_said_of([p]) for p in found))
        else:
            mends = [p for p, refused in failed if refused.what not in (bad.what, *p.values)]  # the recipe has a second mistake
            kept += [_said_of([p]) for p in mends[:1]] or ([] if kept else [_NO_ADVICE])
    return BadInput(bad.what, got=bad.got, needed=bad.needed, fix=_joined(kept))


def _further(ways: list[tuple[list[Proposal], BadInput]], run: Run, world: int, origins: Origins, until: float) -> list[Proposal] | None:
    """Return the fewest changes that lead to a run, each taken from the refusal after the one before; None if none are found."""
    for _ in range(_FURTHER):
        longer: list[tuple[list[Proposal], BadInput]] = []
        for way, refused in ways:
            for p in proposals(refused):
                changed = {key for each in way for key in (*each.values, *each.removed)}
                if changed & {*p.values, *p.removed} or time.process_time() > until:
                    continue
                again = _refused(_together(p.said, [*way, p]), run, world, origins)
                if again is None:
                    return [*way, p]
                longer.append(([*way, p], again))
        ways = longer
    return None


def _refused(proposal: Proposal, run: Run, world: int, origins: Origins) -> BadInput | None:
    """Return the refusal of the recipe with this change, as if the user had typed it; None if it is accepted."""
    try:
        changed = _applied(proposal, run)
        if changed == run and proposal.nproc in (None, world):
            return BadInput("recipe", got="no change", needed="one", fix="another")
        check_run(changed, proposal.nproc or world)
        check_read(changed, origins_with(proposal, origins), file="")
    except BadInput as bad:
        return bad
    return None


def origins_with(proposal: Proposal, origins: Origins) -> dict[str, str]:
    """Return the sources of values after the proposal's have been typed on the command line."""
    return {**origins, **dict.fromkeys(proposal.removed, "default"), **dict.fromkeys(proposal.values, COMMAND_LINE)}


def _applied(proposal: Proposal, run: Run) -> Run:
    return build_run(apply(proposal, run.model_dump()))


def _said_of(working: list[Proposal]) -> str:
    """Return the text of one alternative's proposals that work: one change, or the values of one key."""
    first = working[0]
    if first.nproc is not None:
        return f"add --nproc {first.nproc}"
    if not first.values:
        return first.said
    texts = [_text(p.values) for p in working]
    if len(working) == 1:
        return f"set {texts[0]}"
    key = next(iter(first.values))
    return f"set {key} to one of {[p.values[key] for p in working]}"


def _text(values: dict[str, Any]) -> str:
    return " and ".join(f"{key} to {_yaml(value)}" for key, value in values.items())


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _joined(parts: list[str]) -> str:
    """Join alternatives by "or". The verb of an alternative that is left out is put back in front of the next one."""
    bare = rf"^({_KEY}|it) to "
    return ", or ".join(
        f"set {part}" if re.match(bare, part) and (at == 0 or not parts[at - 1].startswith("set ")) else part
        for at, part in enumerate(parts)
    )


def proposals(bad: BadInput) -> list[Proposal]:
    """Return the line's proposals, all that can be applied without a guess."""
    return [each for said in alternatives(bad.fix) for each in proposals_of(said, bad)]


def apply(proposal: Proposal, values: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's plain values with the proposal's changes."""
    made = copy.deepcopy(values)
    for key in proposal.removed:
        take(made, key)
    if proposal.renamed is not None:
        old, new = proposal.renamed
        value = take(made, old)
        if isinstance(value, dict) and isinstance(made.get(new), dict):
            value = made[new] | value
        put(made, new, value)
    for key, value in proposal.values.items():
        put(made, key, value)
    return made


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key."""
    *outer, last = key.split(".")
    for name in outer:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[last] = value


def take(values: dict[str, Any], key: str) -> Any:
    """Remove a dotted key. Returns its value, or None if it does not exist."""
    *outer, last = key.split(".")
    for name in outer:
        values = values.get(name) or {}
    return values.pop(last, None)


def alternatives(fix: str) -> list[str]:
    """Split a fix into its alternatives, at each "or" outside brackets."""
    parts = re.split(r"(?:, |; )or (?![^\[(]*[\])])", _MORE.sub("", fix))
    return [part.strip() for part in parts if part.strip()]


def proposals_of(said: str, bad: BadInput) -> list[Proposal]:
    """Return the proposals of one alternative: several for "one of [1, 2]", none if it names no value."""
    return list(_read(said, bad))


def _read(said: str, bad: BadInput) -> Iterator[Proposal]:
    text = re.sub(r"\s*\([^)]*\)$", "", said)
    if ", and " in text:  # found by `_further`
        each = [proposals_of(part, bad) for part in text.split(", and ")]
        if all(each):
            yield _together(said, [found[0] for found in each])
    elif text.startswith("did you mean ") and (told := _TOLD.findall(text)):
        yield Proposal(said, {typed or written: _value(value) for typed, written, value in told}, removed=(bad.what,))
    elif meant := re.match(rf"^did you mean ({_KEY}|[\w./-]+)\?$", text):
        wrong_key = "does not exist" in str(bad.got)
        yield Proposal(said, renamed=(bad.what, meant[1])) if wrong_key else Proposal(said, {bad.what: meant[1]})
    elif gone := re.match(rf"^(?:remove|leave) ({_KEY}|it)(?: out)?$", text):
        yield Proposal(said, removed=(bad.what if gone[1] == "it" else gone[1],))
    elif started := re.search(r"--nproc (\d+)$", text):
        yield Proposal(said, nproc=int(started[1]))
    elif either := _EITHER.match(text):
        yield from (Proposal(said, {key: _value(either[3])}) for key in either.groups()[:2])
    else:
        pairs = [_pair(part, bad.what) for part in re.split(r" and ", text)]
        if all(values for _, values in pairs):
            (key, first), section = pairs[0], pairs[0][0].rpartition(".")[0]
            rest = {other if "." in other else f"{section}.{other}": values[0] for other, values in pairs[1:]}
            yield from (Proposal(said, {key: value, **rest}) for value in first)


def _together(said: str, parts: list[Proposal]) -> Proposal:
    """Return several changes as one."""
    values = {key: value for p in parts for key, value in p.values.items()}
    removed = tuple(key for p in parts for key in p.removed)
    return Proposal(said, values, removed, nproc=next((p.nproc for p in reversed(parts) if p.nproc), None))


def _pair(part: str, what: str) -> tuple[str, list[Any]]:
    """Return the key and the values of an instruction like "degrees.ep to one of [1, 2]"; no values if the text names none."""
    match = _SET.match(part.strip())
    assert match is not None
    key, text = (
        what if match[1] in (None, "it") else match[1],
        match[2].strip().removeprefix("a value like ").removeprefix("a multiple of "),
    )
    if "." in key and key not in known_keys():
        return key, []
    text = re.sub(r",? (?:for|to follow|which) .*$", "", text)
    listed = re.match(r"^one of (\[.*\])", text)
    if listed:
        return key, list(yaml.safe_load(listed[1]))
    fewer = re.match(r"^(\d+) or less$", text)
    if fewer:
        return key, [n for n in range(int(fewer[1]), 0, -1)][:16]
    words = text.removesuffix(" or more").split(" or ")
    return key, [_value(word) for word in words] if all(map(_PLAIN.match, words)) else []


def _value(text: str) -> Any:
    return float(text) if re.fullmatch(r"-?\d+(\.\d*)?e-?\d+", text) else yaml.safe_load(text)
