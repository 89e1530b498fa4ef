"""Chats for supervised fine-tuning, `data.source: chat`: JSON lines to samples in which only the assistant's tokens are predicted.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}      tools: optional
    {"prompt": [messages], "completion": [messages]}      the completion's assistant is predicted
    {"prompt": "text", "completion": "text"}              no template; the completion and the id that ends a text are predicted
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}      ShareGPT's

A chat is one sample. What is longer than a sequence is cut off at its end; a chat of which no predicted token is left is left out, and a
line says how many. All samples are held in memory by each rank: 5 bytes a token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moe.data import formats
from moe.data.chat_template import ASSISTANT, ChatTemplate, Span
from moe.data.tokenizer import Tokenizer
from moe.recipe.shapes import PADDING
from parallel.errors import BadInput, counted
from parallel.store.files import read_text, user_path

_ROLES = {"human": "user", "gpt": ASSISTANT, "system": "system", "user": "user", ASSISTANT: ASSISTANT, "tool": "tool"}
NO_TEMPLATE = "a template, because this model came with none"
_FORMS = "messages, or prompt and completion, or conversations"


class Text(NamedTuple):
    """A chat as text. `spans`: (start, end) of each predicted part, in characters. `ends`: a separator follows, which is predicted."""

    text: str
    spans: list[Span]
    ends: bool = False


@dataclass(frozen=True)
class Chats:
    """Samples with the columns input_ids and labels, int64 (moe/data/given.py). ids_N: all samples' ids, one after another. predicted_N:
    whether an id is predicted. starts: index of each sample's first id, and the number of all ids. key: hash of the chats and settings."""

    ids_N: npt.NDArray[np.uint32]
    predicted_N: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    key: str

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> dict[str, npt.NDArray[np.int64]]:
        some = slice(self.starts[number], self.starts[number + 1])
        ids = self.ids_N[some].astype(np.int64)
        return {"input_ids": ids, "labels": np.where(self.predicted_N[some], ids, PADDING)}


def read_chats(path: str, tokenizer: Tokenizer, template: str | None, *, max_length: int, log: Callable[[str], object]) -> Chats:
    """Read a file *.jsonl (also .gz or .zst) of chats. `template`: path of a Jinja file; None: the model's own. Samples have at most
    max_length + 1 ids. `log` prints a line. Raises BadInput, which names the line, for another form, and for a file without chats."""
    file = user_path(path, what="data.path")
    if not file.is_file() or not formats.unpacked_name(file.name).endswith(".jsonl"):
        raise BadInput("data.path", got=path, needed="a file *.jsonl of chats", fix="write one chat a line, as JSON")
    chat = template_of(template, tokenizer)
    digest = hashlib.sha256(f"chats {max_length} {chat} {json.dumps(tokenizer.describe(), sort_keys=True)}".encode())
    ids, predicted, lengths, cut, left_out = list[Any](), list[Any](), [0], 0, 0
    for number, line in enumerate(formats.lines(file), 1):
        if not line.strip():
            continue
        digest.update(line)
        found, shown = _encoded(_text(line, f"{path}, line {number}", chat), tokenizer)
        cut += len(found) > max_length + 1
        found, shown = found[: max_length + 1], shown[: max_length + 1]
        if not shown[1:].any():
            left_out += 1
            continue
        ids.append(found)
        predicted.append(shown)
        lengths.append(len(found))
    if not ids:
        got = f"{path} with no chat that has a predicted token" if left_out else f"{path}, which has no lines"
        raise BadInput("data.path", got=got, needed=f"lines with {_FORMS}", fix="give chats that an assistant answers")
    starts = np.cumsum(lengths)
    made = Chats(np.concatenate(ids).astype(np.uint32), np.concatenate(predicted), starts, digest.hexdigest()[:24])
    dropped = f", {counted(left_out, 'chat')} left out without a predicted token" if left_out else ""
    cuts = f", {counted(cut, 'chat')} cut to model.max_length" if cut else ""
    log(f"data: {path}: {counted(len(made), 'chat')}, {starts[-1]} tokens, {made.predicted_N.sum()} of them predicted{cuts}{dropped}")
    return made


def template_of(given: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template in the file `given`, else the tokenizer's own, with its special tokens; None if there is none. Raises BadInput
    for a file that cannot be read."""
    own: Mapping[str, Any] = getattr(tokenizer, "chat", None) or {}
    tokens = tuple(sorted((own.get("tokens") or {}).items()))
    if given is None:
        return ChatTemplate(own["template"], tokens) if "template" in own else None
    path = user_path(given, what="data.chat_template")
    try:
        return ChatTemplate(read_text(path), tokens)
    except (OSError, ValueError) as error:
        raise BadInput("data.chat_template", got=f"{given}: {error}", needed="a Jinja file", fix="check the path") from None


def _text(line: bytes, where: str, template: ChatTemplate | None) -> Text:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(where, got=f"no JSON ({error})", needed="one object", fix="mend this line") from None
    if not isinstance(row, dict):
        raise BadInput(where, got=f"a {type(row).__name__}", needed="one object", fix="mend this line")
    given = next((row[name] for name in ("messages", "conversations", "prompt") if name in row), None)
    if given is None or (given is row.get("prompt") and "completion" not in row):
        raise BadInput(where, got=f"an object with {', '.join(row) or 'nothing'}", needed=_FORMS, fix="name the messages so")
    if isinstance(given, str) and isinstance(row.get("completion"), str):
        whole = given + row["completion"]
        return Text(whole, [(len(given), len(whole))], ends=True)
    first = _messages(given, where)
    after = _messages(row["completion"], where) if given is row.get("prompt") else []
    if template is None:
        fix = "--data.chat_template FILE.jinja, or begin with a model that has one (--init_from)"
        raise BadInput("data.chat_template", got="null", needed=NO_TEMPLATE, fix=fix)
    try:
        text, spans = template.marked([*first, *after], tools=row.get("tools"))
        begin = len(template.render(first, tools=row.get("tools"))) if after else 0
    except BadInput as bad:
        raise BadInput(f"{where}, {bad.what}", got=bad.got, needed=bad.needed, fix=bad.fix) from None
    return Text(text, [span for span in spans if span[0] >= begin])


def _messages(given: Any, where: str) -> list[dict[str, Any]]:
    """Return messages with role and content. ShareGPT's from and value are renamed. Raises BadInput for another form."""
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise BadInput(where, got="no list of messages", needed="a list of objects with role and content", fix="mend this line")
    return [dict(_message(message, where)) for message in given]


def _message(message: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in message.items():
        yield {"from": "role", "value": "content"}.get(key, key), _ROLES.get(value, value) if key == "from" else value
    if not isinstance(message.get("role", message.get("from")), str):
        raise BadInput(where, got=f"a message with {', '.join(message)}", needed="role and content", fix="mend this line")


def _encoded(text: Text, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the text's ids [n], and whether each is predicted: it has a character of a predicted part."""
    ids, places = tokenizer.encode_with_places(text.text)
    predicted = np.zeros(len(ids), dtype=bool)
    for start, end in text.spans:
        predicted |= (places[:, 0] < end) & (places[:, 1] > start)
    if text.ends:
        ids, predicted = np.concatenate((ids, [tokenizer.separator])), np.concatenate((predicted, [True]))
    return ids, predicted
