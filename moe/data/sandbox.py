"""Jinja for chat templates: the sandbox and the settings of transformers' apply_chat_template, with limits for a template's work.

A template is part of a downloaded model, so it may do no more than make a text of at most MOST_CHARACTERS with MOST_STEPS steps of loops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, Undefined, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 1 << 26
MOST_STEPS = 1 << 20
_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which mark the assistant's parts while a text is made


def compiled(source: str, date: datetime | None) -> Template:
    """Compile a template. `date`: the result of strftime_now; None: now. Raises many kinds of Exception for a wrong template."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], undefined=_Missing)
    sandbox.filters |= {"tojson": _to_json, "counted": _counted}
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: (date or datetime.now()).strftime(form)}
    tree = sandbox.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
    return sandbox.from_string(tree)


def rendered(template: Template, messages: list[dict[str, Any]], **variables: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the template's text, and (start, end) of each {% generation %} block in it, in characters. Raises TemplateError if the text
    would be too long, and other kinds of Exception that a template can raise."""
    held = json.loads(json.dumps(messages).replace(r"\ufdd0", r"\ufffd").replace(r"\ufdd1", r"\ufffd"))
    parts, length = list[str](), 0
    for part in template.generate(messages=held, **variables, _steps=iter(range(MOST_STEPS))):
        parts.append(part)
        length += len(part)
        if length > MOST_CHARACTERS:
            _refuse(f"a text of more than {MOST_CHARACTERS} characters")
    return _without_marks("".join(parts))


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without marks, and the parts between them."""
    parts, spans, length, start = list[str](), list[tuple[int, int]](), 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN:
            start = length
        elif part == _END:
            spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise numbers that stay short, and repeat texts that stay short."""
        sizes = [len(one) if isinstance(one, Sized) else abs(one) for one in (left, right)]
        if max(sizes) > MOST_CHARACTERS or (sizes[0] * sizes[1] > MOST_CHARACTERS if operator == "*" else sizes[1] > 32):
            _refuse(f"{operator} with a result that is too large")
        return super().call_binop(context, operator, left, right)


class _Missing(Undefined):
    """A name without a value: as text it is empty, but a special token would be lost in silence."""

    def __str__(self) -> str:
        if (self._undefined_name or "").endswith("_token"):
            _refuse(f"{self._undefined_name} is written, but the tokenizer has none")
        return super().__str__()


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: puts marks around the text of the block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a loop, and count a step for each."""
    for item in items:
        if next(context["_steps"], None) is None:
            _refuse(f"loops of more than {MOST_STEPS} steps")
        yield item


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Return JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
