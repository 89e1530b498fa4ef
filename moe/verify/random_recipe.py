"""Draws random tiny recipes for `moe verify --draws`. Keys, types, bounds and choices are read from the schema of recipes, so a new key
is drawn without a change here.

    a layout of 2 to N processes + some keys with random values -> refused? apply a fix of the refusal, and check again -> accepted

Needs no torch.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from moe.checks.advice import applied, nproc
from moe.checks.together import check_run
from moe.recipe.frozen import PARTS
from moe.recipe.keys import ABOVE_0, facts, field_at, field_of, flat, known_keys, not_met, section_of, settings
from moe.recipe.load import build_run
from moe.recipe.section import choices_of, takes_number
from moe.recipe.sections import Run
from parallel import yaml_text
from parallel.errors import BadInput
from parallel.fixes import Fix, put, take
from parallel.mesh.mesh import divisors
from parallel.pipeline.schedules import SCHEDULES

Values = dict[str, Any]  # a recipe's nested values

# sizes differ from each other, so that swapped dims fail. eps is large: otherwise the first step of a parameter whose gradient is nearly 0
# would depend on the sign of a rounding error
_TINY: Values = {
    "model": {"num_layers": 2, "d_model": 24, "num_kv_heads": 2, "d_ff": 20, "max_length": 12, "init_scale": 0.5, "tied_embeddings": False},
    "optimizer": {"lr": 0.003, "eps": 0.1, "clip_norm": 0.5},
    "sharding": {"allow_slow": True},
    "train": {"global_batch": 4, "eval_sequences": 4},
    # with a preset's own values of these keys, results may depend on the layout by definition
    "router": {"allow_noncausal": True, "group": "sequence", "balance_scope": "sequence"},
}
_NOT_DRAWN = ("data.", "train.", "dispatch.busiest", "degrees.")  # `_layout` draws degrees; the other keys hardly change a step
_DRAWN = ("data.objective", "train.seed", "train.deterministic", "train.audit_every", "train.freeze")  # drawn in spite of _NOT_DRAWN
_NEVER = ("given", "triton", "triton_persistent")  # an optimizer object, which YAML cannot hold; kernels that need a GPU
# axis -> key that `_layout` may draw if the axis has several ranks
_KINDS = {"pp": "pipeline.schedule", "tp": "tensor.kind", "sp": "sequence.kind", "ep": "dispatch.kind"}
_FEWEST, _MOST = 3, 12  # number of keys with random values, in addition to degrees and _KINDS
_ROUNDS = 40  # largest number of refusals of one recipe


@dataclass(frozen=True)
class Refusal:
    """A refusal of a drawn recipe by the checks of recipes. fix: the change that was applied; "" if none of the fixes in the error led to a
    new recipe."""

    bad: BadInput
    fix: str

    @property
    def reason(self) -> str:
        """The refused key and the values that it needs. Digits are replaced by N, so that equal reasons are counted together."""
        return f"{self.bad.what}: needed {''.join('N' if c.isdigit() else c for c in self.bad.needed)}"


@dataclass(frozen=True)
class Draw:
    """An accepted recipe for `world` processes. refusals: the refusals of its earlier versions, in order."""

    values: Values
    world: int
    refusals: list[Refusal]

    @property
    def text(self) -> str:
        """The recipe as YAML for `moe verify --recipe`."""
        return yaml.safe_dump(self.values, sort_keys=False)


def draw(seed: str, most: int) -> Draw:
    """Return a recipe of up to `most` processes. Equal arguments give equal recipes."""
    rng = random.Random(seed)
    values, world = _layout(rng, most)
    sections: dict[str, list[str]] = {}
    for key in known_keys():
        if key in _DRAWN or not key.startswith(_NOT_DRAWN):
            sections.setdefault(key.rpartition(".")[0], []).append(key)
    for _ in range(rng.randint(_FEWEST, _MOST)):
        _set(rng, values, rng.choice(sections[rng.choice(list(sections))]))
    return mended(rng, values, world, most)


def _layout(rng: random.Random, most: int) -> tuple[Values, int]:
    """Return (values of a tiny model with random degrees, number of processes)."""
    values, world = copy.deepcopy(_TINY), rng.randint(2, most)
    rest, degrees = world, {}
    for axis in rng.sample(("pp", "tp", "sp"), 3):
        degrees[axis] = rng.choice(divisors(rest)) if rng.random() < 0.4 else 1
        rest //= degrees[axis]
    sparse = rng.random() < 0.75
    degrees["ep"] = rng.choice(divisors(world // degrees["pp"])) if sparse else 1
    degrees["etp"] = rng.choice(divisors(world // degrees["pp"] // degrees["ep"])) if sparse and rng.random() < 0.2 else 1
    microbatches = rng.choice((1, 2, 3, 5))
    sequences = rest * microbatches * rng.choice((1, 2))
    put(values, "model.num_layers", max(2, degrees["pp"]) + rng.choice((0, 0, 1)))
    put(values, "model.moe_every", rng.choice((1, 2)) if sparse else 0)
    put(values, "experts.num_experts", degrees["ep"] * rng.choice((2, 3) if degrees["ep"] < 3 else (1, 2)))
    put(values, "pipeline.microbatches", microbatches)
    values |= {"degrees": degrees, "train": {"global_batch": sequences, "eval_sequences": sequences}}
    kinds = [key for axis, key in _KINDS.items() if degrees[axis] > 1] + ["sharding.kind", "sharding.stage"] + ["router.preset"] * sparse
    for key in kinds:
        if rng.random() < 0.6:
            _set(rng, values, key)
    return values, world


def _set(rng: random.Random, values: Values, key: str) -> None:
    """Give the key a random value. If other settings make the key ineffective, usually leave it unchanged; sometimes change these settings
    too."""
    for condition in facts(key).of:
        if not_met(_run_or_default(values), (condition,)) is not None:
            if rng.random() < 0.85:
                return
            reader, names = rng.choice(settings(condition))
            if names == [ABOVE_0]:
                _set(rng, values, reader)
            else:
                put(values, reader, yaml_text.load(rng.choice(names)))
    held = _at(values, key)
    base = field_of(key).default if held is None else held
    for value in (_value(rng, key, base) for _ in range(20)):
        if _is_legal(key, value):
            put(values, key, value)
            return


def _value(rng: random.Random, key: str, base: Any) -> Any:
    """Return a random value of the key's type, near `base` if that is a number."""
    kind = field_of(key).annotation
    options: list[Any] = [yaml_text.load(name) for name in choices_of(kind) if name not in _NEVER]
    if key == "pipeline.schedule":
        options = list(SCHEDULES)
    if key == "train.freeze":
        options = [*PARTS, "layers.0"]
    if _holds(kind, bool):
        options += [not base]
    if _holds(kind, tuple) and options:
        return rng.sample(options, rng.randint(1, len(options)))
    if _holds(kind, tuple):
        return sorted(rng.sample(range(4), rng.randint(1, 3)))
    if takes_number(kind) and (not options or rng.random() < 0.3):
        return _number(rng, base, whole=not _holds(kind, float))
    return rng.choice(options or [None])


def _number(rng: random.Random, base: Any, *, whole: bool) -> float:
    """Return a random number within a factor of 2 of `base`. If `base` is 0 or not a number, return a small random number."""
    known = isinstance(base, int | float) and not isinstance(base, bool) and base != 0
    if whole:
        return rng.randint(math.ceil(base / 2), 2 * base) if known and base > 8 else rng.choice((1, 2, 3, 4, 5, 6, 8))
    return float(f"{base * 2 ** rng.uniform(-1, 1) if known else rng.uniform(0.05, 0.5) if base == 0 else rng.uniform(0.3, 3):.3g}")


def _holds(kind: Any, wanted: type) -> bool:
    """Return whether a field of this type accepts values of the type `wanted`."""
    return kind is wanted or getattr(kind, "__origin__", None) is wanted or any(_holds(each, wanted) for each in get_args(kind))


def _is_legal(key: str, value: Any) -> bool:
    *sections, name = key.split(".")
    section = section_of(field_at(sections))
    assert section is not None
    try:
        section.model_validate({name: value})
    except (ValidationError, BadInput):
        return False
    return True


def _run_or_default(values: Values) -> Run:
    try:
        return build_run(values)
    except BadInput:
        return Run()


# --- refusals ---------------------------------------------------------------------------------------------------------------


def mended(rng: random.Random, values: Values, world: int, most: int) -> Draw:
    """Apply a fix of each refusal, until the recipe is accepted. A fix that needs more than `most` processes is not applied. Fixes in
    prose, which code cannot apply, and fixes that lead back to an earlier recipe are skipped. If none is left, reset the refused key to its
    value in _TINY, or else its section, or else the whole recipe. Raises AssertionError if the recipe is never accepted."""
    seen = {_as_text(values, world)}
    refusals: list[Refusal] = []
    for _ in range(_ROUNDS):
        bad = refused(values, world)
        if bad is None:
            return Draw(_completed(values), world, refusals)
        ways = bad.fix.ways(bad.what)
        changes = list(_changes(rng.sample(ways, len(ways)), values, world, most))
        changes += [("", _without(values, key), world) for key in (bad.what, bad.what.partition(".")[0])]
        new = (change for change in changes if _as_text(*change[1:]) not in seen)
        fix, values, world = next(new, ("", copy.deepcopy(_TINY), world))
        refusals.append(Refusal(bad, fix))
        seen.add(_as_text(values, world))
    raise AssertionError(f"none of {_ROUNDS} fixes led to an accepted recipe, the last refusal is: {bad}")


def _changes(ways: list[Fix], values: Values, world: int, most: int) -> Iterator[tuple[str, Values, int]]:
    """Yield (text of a fix, recipe's values after it, number of processes) for each fix in `ways` that needs at most `most` processes."""
    for way in ways:
        if 1 <= (processes := nproc(way, world)) <= most:
            yield str(way), applied(way, values), processes


def _without(values: Values, key: str) -> Values:
    """Return a copy of the values in which the key, or all keys of a section, have the values in _TINY."""
    changed, tiny = copy.deepcopy(values), _at(_TINY, key)
    take(changed, key)
    if tiny is not None:
        put(changed, key, copy.deepcopy(tiny))
    return changed


def _at(values: Values, key: str) -> Any:
    """Return the value of a dotted key in nested values, or None."""
    held: Any = values
    for name in key.split("."):
        held = held.get(name) if isinstance(held, dict) else None
    return held


def refused(values: Values, world: int) -> BadInput | None:
    """Return the refusal of a recipe, or None if it is accepted."""
    try:
        check_run(build_run(values), world)
    except BadInput as bad:
        return bad
    return None


def _completed(values: Values) -> Values:
    """Replace two settings in place that would make a comparison useless, and return the values. With a dynamic loss scale, the first steps
    overflow and are skipped. With a sliding window of one token, gradients of queries and keys are only rounding errors."""
    if values.get("model", {}).get("sliding_window") == 1:
        values["model"]["sliding_window"] = 2
    if values.get("precision", {}).get("loss_scale", "none") != "none":
        values["precision"]["loss_scale"] = 1024.0
    return values


def _as_text(values: Values, world: int) -> str:
    return json.dumps([values, world], sort_keys=True, default=str)


def smaller(values: Values, world: int) -> Iterator[Values]:
    """Yield copies of `values` in which one key has its value in _TINY, if the checks accept the copy on `world` ranks. The search for the
    smallest recipe that fails tries them."""
    held, tiny = flat(build_run(values)), flat(build_run(_TINY))
    for key in known_keys():
        if held[key] != tiny[key] and (changed := _without(values, key)) != values and refused(changed, world) is None:
            yield changed
