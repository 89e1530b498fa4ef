"""Renders chat templates in a separate process, with the Jinja sandbox and settings of transformers' apply_chat_template.

A template is a program that comes with a downloaded model. For each text, its process may use CPU_SECONDS of processor time and
MEMORY_BYTES of memory, and the kernel enforces both. Requests and answers are lines of JSON:

    {"source": the template, "date": ISO or null, "seconds": CPU_SECONDS}     {}                              or {"error": a line}
    {"messages": [...], other variables of the template}                      {"text": ..., "spans": [...]}   or {"error": a line}

This file is also the program of that process, so it imports no other module of the project.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 10
MEMORY_BYTES = 1 << 31
MOST_CHARACTERS = 1 << 26  # largest length of a rendered text
_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters around each {% generation %} block while a text is rendered


class Sandbox:
    """A process for one template. It starts with this object and ends with it. The first request must give the template."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="ascii")
        self._lock = threading.Lock()  # held from a request to its answer, so that threads do not mix up answers
        weakref.finalize(self, _end, self._process)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer. If the process has ended, the answer is {"error": a line}."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # an earlier request ended the process
                print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        code = self._process.wait()
        return {
            "error": f"more than {CPU_SECONDS} s of work for one text" if code == -signal.SIGXCPU else f"a process that ended with {code}"
        }


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()  # a forked process also runs this finalizer, but cannot kill the sandbox, which is not its child
    process.wait()


def _serve() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    template, seconds = None, CPU_SECONDS
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
        answer: dict[str, Any] = {}
        try:
            request = json.loads(line)
            if template is None:
                seconds, date = request["seconds"], request["date"]
                template = _compiled(request["source"], datetime.fromisoformat(date) if date else None)
            else:
                answer["text"], answer["spans"] = _rendered(template, request)
        except Exception as error:  # a template is a program, which may raise anything
            answer = {"error": _line(error)}
        print(json.dumps(answer), flush=True)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _compiled(source: str, date: datetime | None) -> Template:
    """Compile a template. `date`: the time that strftime_now formats; None: now. Raises many kinds of Exception for a wrong template."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], undefined=_Missing
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: (date or datetime.now()).strftime(form)}
    return sandbox.from_string(source)


def _rendered(template: Template, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return the template's text, and (start, end) of each {% generation %} block in it, in characters. Raises TemplateError if the text
    would be too long, and other kinds of Exception that a template can raise."""
    held = json.loads(json.dumps(variables["messages"]).replace(r"\ufdd0", r"\ufffd").replace(r"\ufdd1", r"\ufffd"))
    parts, length = list[str](), 0
    for part in template.generate(variables | {"messages": held}):
        parts.append(part)
        length += len(part)
        if length > MOST_CHARACTERS:
            _refuse(f"a text of more than {MOST_CHARACTERS} characters")
    return _without_marks("".join(parts))


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without the marks _BEGIN and _END, and (start, end) of each part between them."""
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


class _Missing(Undefined):
    """A variable of a chat template without a value. It is rendered as "", but a special token (such as bos_token) raises an error, because
    the token would be lost."""

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


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Return JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _line(error: Exception) -> str:
    """Return the error as one line."""
    if isinstance(error, MemoryError):
        return f"more than {MEMORY_BYTES >> 30} GiB of memory for one text"
    at = f"line {line}: " if isinstance(error, TemplateSyntaxError) and (line := error.lineno) else ""
    return at + " ".join(f"{type(error).__name__}: {getattr(error, 'message', None) or error}".split())


if __name__ == "__main__":
    _serve()
