"""The keys of a recipe's sections, explained for `moe show --keys SECTION`: value, possible values, meaning."""

from __future__ import annotations

import json
import textwrap
from typing import Any, get_args

from moe.recipe.keys import choices, facts, field_of, flat, in_words, known_keys
from moe.recipe.load import ALL
from moe.recipe.plugin import WORDS, Plugin
from moe.recipe.section import facts_of, takes_number
from moe.recipe.sections import Run
from parallel.errors import BadInput, did_you_mean, some

_WIDTH = 110
_RESUMED: dict[str | None, str] = {"shape": "fixed for a run", "function": "a resumed run changes it with --allow-change alone"}
_INDENT: dict[str, Any] = {"initial_indent": "    ", "subsequent_indent": "      "}


def keys_of_section(section: str, run: Run | None) -> list[str]:
    """Return lines on each key of a section such as model or model.rope, or of all sections: its value in `run`, else its default.

    Raises BadInput for a section that does not exist.
    """
    name = section.replace("-", "_")
    keys = [key for key in known_keys() if name == ALL or key.startswith(f"{name}.") or key == name]
    if not keys:
        near = did_you_mean(name, Run.model_fields)
        fix = f"did you mean {near}?" if near else f"moe show --keys {ALL}"
        needed = f"a section of a recipe: {some(Run.model_fields, rest=f'moe show --keys {ALL}')}"
        raise BadInput("--keys", got=section, needed=needed, fix=fix)
    values = flat(run or Run())
    return [line for key in keys for line in _lines(key, values[key])]


def _lines(key: str, value: Any) -> list[str]:
    field, names = field_of(key), choices(key)
    kinds = [*names, "a number"] if names and takes_number(field.annotation) else names
    kinds = [*kinds, WORDS] if Plugin in get_args(field.annotation) else kinds
    told = [f"one of {', '.join(kinds)}"] if kinds else []
    told += [field.description] if field.description else []
    own = facts_of(field)
    told += [f"read with {in_words(condition)} alone" for condition in (*own.of, *own.off_without)]
    told += [_RESUMED[alters]] if (alters := facts(key).alters) in _RESUMED else []
    return [f"{key}: {json.dumps(value)}", *(line for text in told for line in textwrap.wrap(text, _WIDTH, **_INDENT))]
