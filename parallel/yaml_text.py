"""Loads YAML text from any source safely: plain values only, and limits on their number and depth.

    text -> events, counted -> values      {a: &x [1, 1], b: [*x, *x]}     counts as 13 values, with keys, lists and written-out aliases

A few aliases can mean more values than fit into memory, and deeply nested brackets overflow the parser's stack. Both are found in the
parser's events, before any value is made. Repeated keys are refused too (PyYAML would keep the last).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST_VALUES, DEEPEST = 300_000, 64
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: dates such as 2024-13-45
_NOT_DECIMAL = re.compile(r"[-+]?(0[0-7_]+$|.*:)")  # YAML reads 0755 as octal 493, and 1:30 in base 60 as 90


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's loader is ten times as fast
    """PyYAML's safe loader, which makes only plain values. This subclass also refuses repeated keys, and numbers that YAML reads as octal
    or in base 60."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else repr(key.value)
            if name in seen:
                raise _refused(f"{name} twice", key.start_mark)
            seen.add(name)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made

    def construct_number(self, node: yaml.ScalarNode) -> float:
        if _NOT_DECIMAL.match(node.value):
            raise _refused(f"{node.value}, which YAML reads as another number", node.start_mark)
        made: float = self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)
        return made


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def load(text: str) -> Any:
    """Return the data of a YAML text. Raise one of NOT_YAML if the text is no YAML, has more than MOST_VALUES values, or is
    nested more than DEEPEST deep."""
    _check_size(text)
    return yaml.load(text, _Loader)


def _check_size(text: str) -> None:
    """Raise an error for recursive aliases, too many values or too deep nesting."""
    whole = 0
    sizes: dict[str, int] = {}  # anchor -> number of its values, with aliases written out
    open_: list[tuple[str | None, int]] = []  # for each unclosed collection: (anchor, number of values before it)
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, _ in open_]:
                raise _refused(f"*{event.anchor} inside of its own value", event.start_mark)
            whole += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            whole += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, whole))
            whole += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = whole - before
        if whole > MOST_VALUES:
            raise _refused(f"more than {MOST_VALUES:,} values, with aliases written out", event.start_mark)
        if len(open_) > DEEPEST:
            raise _refused(f"values nested more than {DEEPEST} deep", event.start_mark)


def _refused(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
