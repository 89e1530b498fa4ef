"""A model's chat template: converts messages to text, and finds the parts of the text that the assistant wrote.

    {% for m in messages %}<|im_start|>{{ m.role }}       Jinja, as in transformers' apply_chat_template (sandbox.py)
    {% generation %}{{ m.content }}<|im_end|>             this block marks the text to train on
    {% endgeneration %}{% endfor %}

Without {% generation %}, an assistant's message is found by rendering twice: first the messages before it with the generation prompt, then
the same messages and this one, without the prompt. The text that the second rendering adds to the first is the assistant's. If later
messages change this text, as with Qwen3's template, which drops the thinking of earlier answers, one text cannot hold all answers:

    user, think A, user, think B        is rendered as        user, A, user, think B
    texts to train on                   user, think A         and        user, A, user, think B        (the last answer of each)
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

    @property
    def has_tags(self) -> bool:
        """Return whether the template has {% generation %} tags."""
        return _GENERATION.search(self.source) is not None

    def marked(self, messages: Sequence[Message], *, tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of the messages, and (start, end) of each part in {% generation %} tags, in characters. `tools`: as in `render`.
        Raises BadInput if the template fails."""
        return self._rendered(messages, tools)

    def answered(self, messages: Sequence[Message], numbers: Sequence[int], *, tools: Any = None) -> list[tuple[str, list[Span]]]:
        """Return the fewest texts in which each answer, messages[n] for the ascending `numbers`, is once as the model writes it, after the
        text that the model then reads. With each text, (start, end) of its answers in characters. It is one text, of all messages, if later
        messages change no answer; otherwise a text ends with its last answer. `tools`: as in `render`. Raises BadInput if the template
        fails, or if an answer does not begin with its generation prompt."""
        found: list[tuple[str, list[Span]]] = []
        for number in numbers:
            before = self.render(messages[:number], tools=tools, prompt=True)
            text = self.render(messages[: number + 1], tools=tools)
            if not text.startswith(before):
                raise self.unmarked(f"the template renders message {number} differently from its generation prompt")
            earlier = found.pop()[1] if found and text.startswith(found[-1][0]) else []
            found.append((text, [*earlier, (len(before), len(text))]))
        whole = self.render(messages, tools=tools)
        if not found or (len(found) == 1 and whole.startswith(found[0][0])):
            return [(whole, found[0][1] if found else [])]
        return found

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
