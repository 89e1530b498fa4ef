"""A model's chat template: converts messages to text, and finds the parts of the text that the assistant wrote.

    {% for m in messages %}<|im_start|>{{ m.role }}       Jinja, as in transformers' apply_chat_template (sandbox.py)
    {% generation %}{{ m.content }}<|im_end|>             this block marks the text to train on
    {% endgeneration %}{% endfor %}

Without {% generation %}, an assistant's message is found by rendering twice: first the messages before it with the generation prompt, then
the same messages and this one, without the prompt. The text that the second rendering adds to the first is the assistant's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from parallel.errors import BadInput

ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template. `tokens`: pairs (name, text) of special tokens that templates use, such as bos_token. `date`: time that
    the template's strftime_now formats; None: now. `tool_use`: another template, for chats with tools."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    date: datetime | None = None
    tool_use: str | None = None

    def for_tools(self, tools: Any) -> ChatTemplate:
        """Return the template for a chat: `tool_use` if it is set and the chat has tools, else this one."""
        return self if tools is None or self._with_tools is None else self._with_tools

    def render(self, messages: Sequence[Message], *, tools: Any = None, prompt: bool = False) -> str:
        """Return the text of the messages. `tools`: descriptions of tools for the template, or None. With `prompt`, the generation
        prompt (beginning of an assistant's message) follows. Raises BadInput if the template refuses the messages or is not valid Jinja."""
        return self._rendered(messages, tools, prompt=prompt)[0]

    def marked(self, messages: Sequence[Message], *, tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of the messages, and (start, end) of each part that the assistant wrote, in characters. `tools`: as in `render`.
        Raises BadInput if the template fails, and if these parts cannot be found."""
        text, spans = self._rendered(messages, tools)
        if _GENERATION.search(self.source):
            return text, spans
        for number, message in enumerate(messages):
            if message.get("role") == ASSISTANT:
                before = self.render(messages[:number], tools=tools, prompt=True)
                after = self.render(messages[: number + 1], tools=tools)
                if not text.startswith(after):
                    raise self.unmarked(f"the template renders message {number} differently when later messages follow")
                if not after.startswith(before):
                    raise self.unmarked(f"the template renders message {number} differently from its generation prompt")
                spans.append((len(before), len(after)))
        return text, spans

    @staticmethod
    def unmarked(got: str) -> BadInput:
        """Return the error for a template with which the assistant's parts cannot be found. `got`: what is wrong with it."""
        fix = "give a template with {% generation %} around the assistant's text: --data.chat_template FILE.jinja"
        return BadInput("chat template", got=got, needed="a template that marks the text to train on", fix=fix)

    def _rendered(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> tuple[str, list[Span]]:
        variables = {"tools": tools, "documents": None, "add_generation_prompt": prompt} | dict(self.tokens)
        found = self._sandbox.ask(messages=[dict(message) for message in messages], **variables)
        if "error" in found:
            fix = "give messages that the template takes, or another data.chat_template"
            raise BadInput("chat template", got=found["error"], needed="a template that turns the messages into text", fix=fix)
        return found["text"], [(start, end) for start, end in found["spans"]]

    @cached_property
    def _sandbox(self) -> Any:
        from moe.data.sandbox import CPU_SECONDS, Sandbox

        made = Sandbox()
        answer = made.ask(source=self.source, date=self.date and self.date.isoformat(), seconds=CPU_SECONDS)
        if "error" in answer:
            fix = "correct it, or give another data.chat_template"
            raise BadInput("chat template", got=answer["error"], needed="a Jinja template", fix=fix)
        return made

    @cached_property
    def _with_tools(self) -> ChatTemplate | None:
        return None if self.tool_use is None else ChatTemplate(self.tool_use, self.tokens, self.date)
