"""Refuses values that a user sets but that have no effect: keys of experts in a dense model, keys of text if the data are token ids, keys
of AdamW with another optimizer, or a warm-up longer than the run.

    0 default < 1 parent recipe < 2 the recipe's own file < 3 command line        levels of a value, by its origin

A value without effect is refused if its level is at least the level of the setting that disables it: `--router.jitter 0.1` with a dense
recipe. A value of a lower level is kept, because the user disabled it on purpose: `moe train switch_tiny --model.moe_every 0`. A file may
also set a key without effect to its default. The command line may not: the user of `moe train dense_tiny --experts.num_experts 8` expects
experts, although 8 is the default.

A key's field states the conditions under which the key is read (`of` and `off_without`: moe/recipe/section.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from moe.recipe.keys import ABOVE_0, facts, field_of, flat, in_words, known_keys, not_met, settings, value_of
from moe.recipe.sections import Data, Run
from parallel import yaml_text
from parallel.errors import BadInput, counted
from parallel.fixes import Remove, Set, written
from parallel.store.files import user_path

COMMAND_LINE = "command line"
_IsSet = Callable[[str, object, object], bool]  # (key, value, default) -> whether the user set the value


def check_read(run: Run, origins: Mapping[str, str], *, file: str) -> None:
    """Raise BadInput for the first value of the recipe `file` or the command line that has no effect. origins: key -> origin of its value.
    A file that sets nearly every key was written by an earlier run, and includes values without effect. Its values are treated as values
    of a parent recipe."""
    by_run = sum(origin == "default" for origin in origins.values()) < len(origins) / 5
    levels = {file: 1 if by_run else 2, COMMAND_LINE: 3, "default": 0}

    def level(key: str) -> int:
        return levels.get(origins.get(key, "default"), 1)

    def is_set(key: str, value: object, default: object) -> bool:
        return value != default or level(key) == levels[COMMAND_LINE]

    _check_disabled(run, level, is_set)
    _check_ids(run.data, level, is_set)
    steps, warmup = run.train.steps, run.optimizer.warmup_steps
    if run.train.epochs is None and warmup > steps and level("optimizer.warmup_steps") >= max(2, level("train.steps")):
        needed = "at most train.steps: with a longer warm-up, optimizer.lr is never reached"
        fix = Set("optimizer.warmup_steps", steps // 10) | Set("train.steps", 10 * warmup)
        raise BadInput("optimizer.warmup_steps", got=f"{warmup} with train.steps={steps}", needed=needed, fix=fix)


def check_settings(run: Run) -> None:
    """Raise BadInput for a value that differs from its default and has no effect, because a condition in its key's `Key.of` is not met."""
    for key, default in _with_reader():
        if value_of(run, key) != default and (condition := not_met(run, facts(key).of)) is not None:
            raise _refusal(run, key, condition)


@cache
def _with_reader() -> tuple[tuple[str, Any], ...]:
    return tuple((key, field_of(key).default) for key in known_keys() if facts(key).of)


def _check_disabled(run: Run, level: Callable[[str], int], is_set: _IsSet) -> None:
    """Raise BadInput for a value without effect, because a condition in its key's `Key.off_without` is not met.
    level: key -> level of its value (top of this file). is_set(key, value, default): whether the user set the value."""
    values, defaults = flat(run), flat(Run())
    conditions = ((key, not_met(run, facts(key).off_without)) for key in known_keys() if is_set(key, values[key], defaults[key]))
    idle = [
        (key, condition)
        for key, condition in conditions
        if condition is not None and level(key) >= max(2, *(level(other) for other, _ in settings(condition)))
    ]
    if not idle:
        return
    key, condition = idle[0]
    if not condition.startswith("model.moe_every"):
        raise _refusal(run, key, condition)
    more = sum(other == condition for _, other in idle) - 1
    got = "a value" + (f", and {counted(more, 'more key')} of experts," if more else "") + " in a dense model"
    fix = Set("model.moe_every", 2) | "remove them" if more else Remove(key)
    raise BadInput(key, got=got, needed="layers with experts: otherwise this key has no effect", fix=fix)


def _refusal(run: Run, key: str, condition: str) -> BadInput:
    wanted, value = settings(condition), value_of(run, key)
    first, names = wanted[0]
    got = f"{f'{value:g}' if isinstance(value, float) else written(value)} with {first}={written(value_of(run, first))}"
    needed = f"{in_words(condition)}: otherwise this key has no effect"
    fix = f"set {first} {names[0]}" if names[0] == ABOVE_0 else Set(first, yaml_text.load(names[0]))
    return BadInput(key, got=got, needed=needed, fix=fix | Remove(key))


def _check_ids(data: Data, level: Callable[[str], int], is_set: _IsSet) -> None:
    """Raise BadInput if the data are token ids and the user set a key without effect on them: text_key, source, or validation_share for
    folders; val.bin in them has the validation ids. With data.source=chat, only text_key is checked. level, is_set: as in
    `_check_disabled`."""
    paths = [source.path for source in data.sources] or ([] if data.path is None else [data.path])
    if data.tokenizer != "ids" or not paths:
        return
    for number, source in enumerate(data.sources):
        if source.text_key is not None:
            key, got = f"data.sources[{number}].text_key", f"{source.text_key}, but the data are token ids"
            raise BadInput(key, got=got, needed="text: otherwise this key has no effect", fix=Remove(key))
    ids = max(2, level("data.tokenizer"))
    idle = {"text_key": ("text", ids)} | ({} if data.source == "chat" else {"source": ("text", ids)})
    if data.source != "chat" and all(user_path(path, what="data.path").is_dir() for path in paths):
        idle["validation_share"] = ("ids without a val.bin", max(ids, level("data.path"), level("data.sources")))
    for key, (reader, decided) in idle.items():
        value = getattr(data, key)
        if level(f"data.{key}") >= decided and is_set(f"data.{key}", value, Data.model_fields[key].default):
            needed, fix = f"{reader}: otherwise this key has no effect", Remove(f"data.{key}")
            raise BadInput(f"data.{key}", got=f"{value}, but the data are token ids", needed=needed, fix=fix)
