"""A model's chat template: messages to text, and the parts of the text that the assistant wrote.

    {% for m in messages %}<|im_start|>{{ m.role }}       Jinja, in the sandbox and with the settings of transformers'
    {% generation %}{{ m.content }}<|im_end|>             apply_chat_template; this block marks what is trained on
    {% endgeneration %}{% endfor %}

Without {% generation %}, an assistant's message is what the template adds to the messages before it and its generation prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from parallel.errors import BadInput

ASSISTANT = "assistant"
_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which mark the assistant's parts while a text is made
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template. `tokens`: name -> text of special tokens, such as bos_token, which templates use."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Sequence[Message], *, tools: Any = None, prompt: bool = False) -> str:
        """Return the text of the messages. `prompt`: followed by the beginning of an assistant's message. Raises BadInput if the template
        refuses the messages or cannot be read."""
        return self._rendered(messages, tools, prompt=prompt).translate({ord(_BEGIN): None, ord(_END): None})

    def marked(self, messages: Sequence[Message], *, tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of the messages, and (start, end) of each part that an assistant wrote, in characters. Raises BadInput, also if
        the template does not show these parts."""
        text = self._rendered(messages, tools)
        if _GENERATION.search(self.source):
            return _without_marks(text)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") == ASSISTANT:
                before = self.render(messages[:number], tools=tools, prompt=True) if number else ""
                after = self.render(messages[: number + 1], tools=tools)
                if not (text.startswith(after) and after.startswith(before)):
                    got = f"a template that writes message {number} otherwise if others follow, or its prompt otherwise"
                    raise BadInput("chat template", got=got, needed="one that marks what is trained on", fix=_MARK)
                spans.append((len(before), len(after)))
        return text, spans

    def _rendered(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        held = json.loads(json.dumps([dict(message) for message in messages]).replace(r"\ufdd0", r"\ufffd").replace(r"\ufdd1", r"\ufffd"))
        try:
            return str(self._template.render(messages=held, tools=tools, documents=None, add_generation_prompt=prompt, **dict(self.tokens)))
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError, OverflowError) as error:
            fix = "give messages that the template takes, or another data.chat_template"
            raise BadInput("chat template", got=f"{type(error).__name__}: {error}", needed="a text", fix=fix) from None

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateSyntaxError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """{% generation %} ... {% endgeneration %}: puts marks around the text of the block."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

            def _marked(self, caller: Any) -> str:
                return f"{_BEGIN}{caller()}{_END}"

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            got = f"line {error.lineno}: {error.message}"
            raise BadInput("chat template", got=got, needed="a Jinja template", fix="mend it, or give another data.chat_template") from None


_MARK = "give a template with {% generation %} around the assistant's text: --data.chat_template FILE.jinja"


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Return JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Return the text without marks, and the parts between them."""
    parts, spans, length, start = list[str](), list[Span](), 0, 0
    for part in _pieces(text):
        if part == _BEGIN:
            start = length
        elif part == _END:
            spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans


def _pieces(text: str) -> Iterator[str]:
    return (part for part in re.split(f"([{_BEGIN}{_END}])", text) if part)
