"""Values that a user writes and nothing reads: keys of experts in a dense model, of text with token ids, of AdamW with another optimizer,
or a warm-up longer than the run.

    default < parent < the recipe's own file < command line        levels of a value's origin

A value is refused if its level is at least the level of the setting that makes it idle: `--router.jitter 0.1` with a dense recipe. A
value of a lower level stays, because the nearer setting turned it off on purpose: `moe train switch_tiny --model.moe_every 0`. A file's
value that equals the default stays, too. On the command line it is refused: `moe train dense_tiny --experts.num_experts 8` would not
give a model with 8 experts.

The conditions under which a key is read are in its field (`of` and `off_without` of moe/recipe/section.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from moe.recipe.keys import ABOVE_0, facts, field_of, flat, in_words, known_keys, not_met, settings, value_of
from moe.recipe.sections import Data, Run
from parallel import yaml_text
from parallel.errors import BadInput
from parallel.fixes import Remove, Set, written
from parallel.store.files import user_path

COMMAND_LINE = "command line"
_Said = Callable[[str, object, object], bool]


def check_read(run: Run, origins: Mapping[str, str], *, file: str) -> None:
    """Raise BadInput for the first value of the recipe `file` or the command line that has no effect. `origins`: key -> origin.

    A file with nearly every key was written by a run, which writes idle values, too. Its values have the level of a parent.
    """
    by_run = sum(origin == "default" for origin in origins.values()) < len(origins) / 5
    level = {file: 1 if by_run else 2, COMMAND_LINE: 3, "default": 0}

    def nearness(key: str) -> int:
        return level.get(origins.get(key, "default"), 1)

    def said(key: str, value: object, default: object) -> bool:
        return value != default or nearness(key) == level[COMMAND_LINE]

    _check_switched_off(run, nearness, said)
    _check_ids(run.data, nearness, said)
    steps, warmup = run.train.steps, run.optimizer.warmup_steps
    if warmup > steps and nearness("optimizer.warmup_steps") >= max(2, nearness("train.steps")):
        needed = "at most the steps: the learning rate would never be reached"
        fix = Set("optimizer.warmup_steps", steps // 10) | Set("train.steps", 10 * warmup)
        raise BadInput("optimizer.warmup_steps", got=f"{warmup} with train.steps={steps}", needed=needed, fix=fix)


def check_settings(run: Run) -> None:
    """Raise BadInput for a value, of any origin, that nothing reads because a condition of its key (`Key.of`) does not hold."""
    for key, default in _with_reader():
        if value_of(run, key) != default and (condition := not_met(run, facts(key).of)) is not None:
            raise _refusal(run, key, condition)


@cache
def _with_reader() -> tuple[tuple[str, Any], ...]:
    return tuple((key, field_of(key).default) for key in known_keys() if facts(key).of)


def _check_switched_off(run: Run, nearness: Callable[[str], int], said: _Said) -> None:
    """Raise BadInput for a value that nothing reads because its part of the recipe is switched off (`Key.off_without`).

    `nearness`: returns the level of a key's value. `said(key, value, default)`: returns whether the user wrote it.
    """
    values, defaults = flat(run), flat(Run())
    conditions = ((key, not_met(run, facts(key).off_without)) for key in known_keys() if said(key, values[key], defaults[key]))
    idle = [
        (key, condition)
        for key, condition in conditions
        if condition is not None and nearness(key) >= max(2, *(nearness(reader) for reader, _ in settings(condition)))
    ]
    if not idle:
        return
    key, condition = idle[0]
    if not condition.startswith("model.moe_every"):
        raise _refusal(run, key, condition)
    more = sum(other == condition for _, other in idle) - 1
    got = "a value" + (f", and {more} more of experts," if more else "") + " in a dense model"
    fix = Set("model.moe_every", 2) | "remove them" if more else Remove(key)
    raise BadInput(key, got=got, needed="layers with experts, which alone read it", fix=fix)


def _refusal(run: Run, key: str, condition: str) -> BadInput:
    """Return the error for a key that nothing reads because this condition of it does not hold."""
    wanted, value = settings(condition), value_of(run, key)
    first, names = wanted[0]
    got = f"{f'{value:g}' if isinstance(value, float) else written(value)} with {first}={written(value_of(run, first))}"
    needed = f"{in_words(condition)}, which alone {'read' if wanted[1:] or names[1:] else 'reads'} it"
    fix = f"set {first} {names[0]}" if names[0] == ABOVE_0 else Set(first, yaml_text.load(names[0]))
    return BadInput(key, got=got, needed=needed, fix=fix | Remove(key))


def _check_ids(data: Data, nearness: Callable[[str], int], said: _Said) -> None:
    """Raise BadInput for keys of text if the data are token ids, and for validation_share if folders have files for validation."""
    paths = [source.path for source in data.sources] or ([] if data.path is None else [data.path])
    if data.tokenizer != "ids" or not paths:
        return
    for number, source in enumerate(data.sources):
        if source.text_key is not None:
            key, got = f"data.sources[{number}].text_key", f"{source.text_key} with token ids"
            raise BadInput(key, got=got, needed="text, which alone reads it", fix=Remove(key))
    ids = max(2, nearness("data.tokenizer"))
    idle = {"source": ("text", ids), "text_key": ("text", ids)}
    if all(user_path(path, what="data.path").is_dir() for path in paths):
        idle["validation_share"] = ("ids without a val.bin", max(ids, nearness("data.path"), nearness("data.sources")))
    for key, (reader, decided) in idle.items():
        value = getattr(data, key)
        if nearness(f"data.{key}") >= decided and said(f"data.{key}", value, Data.model_fields[key].default):
            needed, fix = f"{reader}, which alone reads it", Remove(f"data.{key}")
            raise BadInput(f"data.{key}", got=f"{value} with token ids", needed=needed, fix=fix)
