"""Chats for supervised fine-tuning (`data.source: chat`): converts JSON lines and rows of tables to samples in which only the assistant's
tokens are predicted.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}      tools: optional
    {"prompt": [messages], "completion": [messages]}      the assistant's messages in the completion are predicted
    {"prompt": "text", "completion": "text"}              no template; the completion and the id that ends a text are predicted;
                                                          the sample begins with BOS if the tokenizer has one, as in `moe generate --prompt`
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}      ShareGPT's
    {"prompt": ..., "chosen": ..., "rejected": ...}       two chats with one prompt, in one sequence (for a train.loss that compares them)
    {"input_ids": [...], "labels": [...]}                 token ids of another program; an id with the label -100 is not predicted

A content may also be a list of {"type": "text", "text": "..."}, which are joined. An assistant's message with "weight": 0 is not predicted.

A chat is one sample. It becomes several if the template changes answers when later messages follow (moe/data/chat_template.py). A sample
that is longer than a sequence is cut at the end, and left out if it has no predicted token; the log says how many. With this project's own
tokenizers (bytes, bpe), no template can write the id that ends a text. So the sample ends after the assistant's last message, and this id
is appended. moe/data/chats.py stores the samples and packs them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from moe.data import formats
from moe.data.chat_template import ASSISTANT, ChatTemplate, Span
from moe.data.given import IDS, columns_of, ids_of
from moe.data.tokenizer import Bpe, Bytes, Ids, Tokenizer, load
from moe.recipe.sections import Data
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.store.files import UTF_8, read_text, reason, user_path

# value of "from" -> role
_ROLES = {"human": "user", "gpt": ASSISTANT, "system": "system", "user": "user", ASSISTANT: ASSISTANT, "tool": "tool"}
_WEIGHT = "weight 1, or 0 for an assistant's message that is not predicted"
_OTHER_WEIGHTS = ("train", "training", "trainable", "train_on_turn", "loss", "loss_mask")  # other programs' keys for weight
_PART = re.compile("train|test|valid|dev|eval")  # start of a file's name that tells its split, as on the Hugging Face hub
_OTHER_IDS = "tokenize the text with this model's tokenizer"
_SEVERAL = "name several in data.sources"
_FORMS = "messages, or prompt and completion, or conversations, or prompt, chosen and rejected, or input_ids"
_WRITE = 'write {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'


class Text(NamedTuple):
    """A chat as text. `spans`: (start, end) of each predicted part, in characters. `plain`: made without a template."""

    text: str
    spans: list[Span]
    plain: bool = False


class Encoded(NamedTuple):
    """Samples of chats as token ids. ids_N: the ids of all samples, concatenated. predicted_N: whether each id is predicted. starts: index
    of each sample's first id, then the number of all ids. chats: index of the first sample of each chat or pair, then the number of all
    samples. about: summary for the user (numbers of chats and tokens). remark: for the user, if chats have several samples; else "". pairs:
    whether the chats are pairs: sample 2 i has the chosen answer to a prompt, sample 2 i + 1 the rejected one."""

    ids_N: npt.NDArray[np.uint32]
    predicted_N: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    chats: npt.NDArray[np.int64]
    about: str
    remark: str = ""
    pairs: bool = False


@final
class InChats(Tokenizer):
    """The tokenizer `inner` for texts that a chat template has made. No BOS is put before a text, because the template writes it.
    Generation ends at the separator, at eos_token, and at the ids with which the model ends a message."""

    def __init__(self, inner: Tokenizer) -> None:
        super().__init__(inner.token_bytes)
        self._inner, self.separator, chat = inner, inner.separator, inner.chat or {}
        end = inner.encode(chat.get("tokens", {}).get("eos_token", "")).tolist()
        self._ends = frozenset([inner.separator, *chat.get("ends", ()), *(end if len(end) == 1 else ())])

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return self._inner.encode_pieces(parts)

    @property
    def ends(self) -> frozenset[int]:
        return self._ends


@dataclass(frozen=True)
class ChatFiles:
    """Files of chats at the user's `path`: a *.jsonl file, a table (Parquet or Arrow), or a folder of these. field: name of the field that
    has the messages; None: any form that the top of this file lists. encoding: of the JSON lines."""

    path: str
    field: str | None = None
    encoding: str = UTF_8

    def names(self) -> list[Path]:
        """Return the files, sorted. Raises BadInput if there is none, and for a folder with files of several splits (train, test, ...)."""
        named = user_path(self.path, what="data.path")
        inside = [named]
        if named.is_dir():
            shown = (path.relative_to(named) for path in named.rglob("*") if path.is_file())
            kept = sorted(path.as_posix() for path in shown if not any(part.startswith(".") for part in path.parts))
            inside = [named / name for name in formats.saved_files(named, kept)]
        files = [path for path in inside if path.is_file() and (formats.is_jsonl(path.name) or formats.is_table(path.name))]
        if not files:
            needed = "chats: a file *.jsonl, *.parquet or *.arrow, or a folder with such files"
            raise BadInput("data.path", got=self.path, needed=needed, fix="write one chat a line, as JSON")
        parts = {path: found[0] for path in files if (found := _PART.match(path.name))}
        if len(set(parts.values())) > 1:
            got = f"{self.path}, a folder with files of {' and '.join(sorted(set(parts.values())))}"
            raise BadInput("data.path", got=got, needed="files of one split", fix=Set("it", str(next(iter(parts)))) | _SEVERAL)
        return files

    def changed(self) -> datetime:
        """Return the time of the newest file's last change (UTC)."""
        return datetime.fromtimestamp(max(file.stat().st_mtime for file in self.names()), UTC)

    def rows(self) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
        """Yield (file and place, for errors; a JSON line or a table's row)."""
        named = user_path(self.path, what="data.path")
        for file in self.names():
            said = self.path if file == named else str(file)
            if formats.is_table(file.name):
                yield from ((f"{said}, row {number}", _without_nulls(row)) for number, row in enumerate(formats.rows(file), 1))
            else:
                lines = enumerate(formats.lines(file, self.encoding), 1)
                yield from ((f"{said}, line {number}", line) for number, line in lines if line.strip())


def _without_nulls(value: Any) -> Any:
    """Return a table's value without null fields: in a table, every row has all fields, and null in fields that JSON lines leave out."""
    if isinstance(value, dict):
        return {name: _without_nulls(held) for name, held in value.items() if held is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def encode_chats(files: ChatFiles, tokenizer: Tokenizer, *, max_length: int) -> Encoded:
    """Read and encode chats. A row has one chat or a pair (chosen, rejected). A sample has at most max_length + 1 ids, a pair's half of
    them. Templates get the date of the files' last change (UTC) as the current date. Raises BadInput for a row of another form
    (the message names it), for both pairs and single chats, and for files without chats."""
    path, template = files.path, template_of(tokenizer, files.changed())
    ids, predicted, lengths, chats, split, cut, left_out, each = bytearray(), bytearray(), list[int](), [0], list[list[int]](), 0, 0, 0
    least = math.inf  # smallest model.max_length with which one of the left-out samples would be kept
    for where, line in files.rows():
        row = _row(line, where, files.field)
        if IDS in row:
            made = [_sample(row, where, tokenizer)]
        elif isinstance(tokenizer, Ids):
            raise _no_ids(row, where)
        else:
            made = [_encoded(text, tokenizer) for text in _texts(row, where, template)]
        size = 2 if _is_pair(row) else 1  # number of samples that are kept or left out together
        each = each or size
        if size != each:
            said = "pairs" if each == 2 else "single chats"
            raise BadInput(where, got=f"another form than the {said} before", needed="one form in all lines", fix="use a file per form")
        room = (max_length + 1) // each
        cut += sum(len(found) > room for found, _ in made)
        for some in (made[first : first + each] for first in range(0, len(made), each)):
            if not all(shown[1:room].any() for _, shown in some):
                left_out += each
                if all(shown[1:].any() for _, shown in some):  # with a larger `room`, every sample would have a predicted token
                    least = min(least, each * max(2 + int(shown[1:].argmax()) for _, shown in some) - 1)
                continue
            for found, shown in some:
                ids += found[:room].astype(np.uint32).tobytes()
                predicted += shown[:room].tobytes()
                lengths.append(len(found[:room]))
        if len(made) > each:
            split.append(lengths[chats[-1] :])
        if len(lengths) > chats[-1]:
            chats.append(len(lengths))
    if not lengths and least < math.inf:
        got = f"{max_length}, which cuts each chat of {path} before its answer"
        raise BadInput("model.max_length", got=got, needed=f"at least {least}", fix=Set("it", least))
    if not lengths:
        got = f"{path} with no chat that has a predicted token" if left_out else f"{path}, which has no lines"
        raise BadInput("data.path", got=got, needed=f"lines with {_FORMS}", fix="give chats that an assistant answers")
    shown, noun = np.frombuffer(predicted, np.bool_), "sample" if split else "chat"
    dropped = f", {counted(left_out, noun)} left out without a predicted token" if left_out else ""
    cuts = f", {counted(cut, noun)} cut to {'half of ' * (each == 2)}model.max_length" if cut else ""
    of = f" of {counted(len(chats) - 1, 'chat')}" if split else " in pairs" * (each == 2)
    sizes = f"{counted(len(lengths), noun)}{of}, {counted(len(shown), 'token')}, {shown.sum()} of them predicted{cuts}{dropped}"
    about = f"{sizes}; the longest {noun} has {counted(max(lengths), 'token')}"
    starts = np.cumsum([0, *lengths])
    return Encoded(np.frombuffer(ids, np.uint32), shown, starts, np.array(chats), about, _several(split), each == 2)


def _several(split: list[list[int]]) -> str:
    """Return a remark on the chats that became several samples. split: of each of these chats, its kept samples' numbers of tokens."""
    if not split:
        return ""
    tokens, longest = sum(map(sum, split)), sum(max(sizes, default=0) for sizes in split)
    more = f"{tokens:,} tokens, {tokens / max(1, longest):.1f} times those of each chat's longest sample"
    samples = f"{counted(len(split), 'chat')} became {counted(sum(map(len, split)), 'sample')} ({more})"
    return f"the chat template changes answers when later messages follow: {samples}, each up to an answer as the model writes it"


def check_first(files: ChatFiles, chat: dict[str, Any] | None, given: str | None, *, vocab_size: int, only_ids: bool) -> None:
    """Raise BadInput if one of the first chats of `files` cannot be read or rendered, or needs a template and there is none. chat: value of
    `Tokenizer.chat` of the model. given: the recipe's data.chat_template. vocab_size: of the model. only_ids: whether data.tokenizer is
    ids. Also raises BadInput for a template's file that cannot be read."""
    tokenizer = with_template(load(Bytes().describe() | ({} if chat is None else {"chat": chat})), given)
    template = template_of(tokenizer, files.changed())
    for where, line in islice(files.rows(), formats.FIRST):
        row = _row(line, where, files.field)
        if IDS in row:
            ids_of(columns_of(row, where), where, vocab_size=vocab_size, other=None if only_ids else _OTHER_IDS)
        elif only_ids:
            raise _no_ids(row, where)
        else:
            _texts(row, where, template)


def messages_field(text_key: str) -> str | None:
    """Return the name of the field that has the messages: data.text_key. Return None if data.text_key has its default: then a line may have
    any known form."""
    return None if text_key == Data.model_fields["text_key"].default else text_key


def with_template(tokenizer: Tokenizer, given: str | None) -> Tokenizer:
    """Return the tokenizer with its chat template replaced by the one in the file `given`; None: unchanged. Raises BadInput for a file
    that cannot be read."""
    if given is None:
        return tokenizer
    try:
        text = read_text(user_path(given, what="data.chat_template"))
    except (OSError, ValueError) as error:
        raise BadInput("data.chat_template", got=f"{given}: {reason(error)}", needed="a Jinja file", fix="check the path") from None
    kept = {name: value for name, value in (tokenizer.chat or {}).items() if name != "tool_use"}
    return load(tokenizer.describe() | {"chat": kept | {"template": text}})


def template_of(tokenizer: Tokenizer, date: datetime | None = None) -> ChatTemplate | None:
    """Return the tokenizer's template with its special tokens, or None. `date`: current time that the template gets; None: now."""
    own = tokenizer.chat or {}
    tokens = tuple(sorted(own.get("tokens", {}).items()))
    return ChatTemplate(own["template"], tokens, date, own.get("tool_use")) if "template" in own else None


def _no_ids(row: dict[str, Any], where: str) -> BadInput:
    fix = "write the token ids" | Set("data.tokenizer", "bytes")
    return BadInput(where, got=f"an object with {', '.join(row) or 'nothing'}", needed=f"{IDS}, because data.tokenizer is ids", fix=fix)


def _sample(row: dict[str, Any], where: str, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the ids [n] of a row that another program has tokenized, and whether each is predicted."""
    return ids_of(columns_of(row, where), where, vocab_size=tokenizer.vocab_size, other=None if isinstance(tokenizer, Ids) else _OTHER_IDS)


def _texts(row: dict[str, Any], where: str, template: ChatTemplate | None) -> list[Text]:
    """Return the samples of a row's chat, or of its pair of a chosen and a rejected one. `where`: file and line, for errors. `template`:
    None if the model has none. Raises BadInput for another form, and for an answer of a pair that is several samples."""
    if not _is_pair(row):
        return _samples(row, where, template)
    both = [row["chosen"], row["rejected"]]
    if not isinstance(row.get("prompt"), type(row["chosen"])):  # no separate prompt: it is the common beginning of both chats
        given = [_messages(messages, where) for messages in both]
        same = next((n for n, (one, other) in enumerate(zip(*given, strict=False)) if one != other), min(map(len, given)))
        row, both = row | {"prompt": given[0][:same]}, [messages[same:] for messages in given]
    kept = {name: row[name] for name in ("prompt", "tools") if name in row}
    made = [_samples(kept | {"completion": completion}, where, template) for completion in both]
    if most := max(len(samples) - 1 for samples in made):
        got = f"a pair with {most + 1} assistant's messages, of which the chat template changes earlier ones when later ones follow"
        fix = 'give the earlier ones "weight": 0, or a pair for each'
        raise BadInput(where, got=got, needed="one predicted message in chosen and rejected", fix=fix)
    return [samples[0] for samples in made]


def _is_pair(row: dict[str, Any]) -> bool:
    return IDS not in row and {"chosen", "rejected"} <= row.keys()


def _row(line: bytes | dict[str, Any], where: str, field: str | None) -> dict[str, Any]:
    """Return a line's JSON object, or a table's row, without null fields. field: name of the field that holds the messages. If given,
    the result has only this field, renamed to "messages", and "tools" if the row has it. Raises BadInput for a line that is not a JSON
    object or lacks this field."""
    try:
        row = line if isinstance(line, dict) else json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(where, got=f"no JSON ({error})", needed="one object", fix="correct this line") from None
    if not isinstance(row, dict):
        raise BadInput(where, got=f"a {type(row).__name__}", needed="one object", fix="correct this line")
    row = {name: value for name, value in row.items() if value is not None}
    if field is not None:
        if field not in row:
            fix = "name the field with the messages, or remove this key"
            raise BadInput(
                where, got=f"an object with {', '.join(row) or 'nothing'}", needed=f"{field}, which data.text_key names", fix=fix
            )
        row = {"messages": row[field]} | {name: row[name] for name in ("tools",) if name in row}
    return row


def _samples(row: dict[str, Any], where: str, template: ChatTemplate | None) -> list[Text]:
    given = next((row[name] for name in ("messages", "conversations", "prompt") if name in row), None)
    if given is None or (given is row.get("prompt") and "completion" not in row):
        raise BadInput(where, got=f"an object with {', '.join(row) or 'nothing'}", needed=_FORMS, fix=_WRITE)
    if isinstance(given, str) and isinstance(row.get("completion"), str):
        whole = given + row["completion"]
        return [Text(whole, [(len(given), len(whole))], plain=True)]
    first = _messages(given, where)
    after = _messages(row["completion"], where) if given is row.get("prompt") else []
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadInput(where, got="tools of another form", needed="null or a list of objects", fix="correct this line")
    if template is None:
        fix = "--data.chat_template FILE.jinja, or start from a model that has one (--init_from)"
        raise BadInput("data.chat_template", got="null", needed="a template, because this model came with none", fix=fix)
    try:
        return _rendered(template.for_tools(tools), first, after, tools)
    except BadInput as bad:
        raise BadInput(f"{where}, {bad.what}", got=bad.got, needed=bad.needed, fix=bad.fix) from None


def _rendered(template: ChatTemplate, first: list[dict[str, Any]], after: list[dict[str, Any]], tools: Any) -> list[Text]:
    """Return the samples of the messages `first` and `after`. Predicted: the assistant's messages in `after`, or in `first` if `after` is
    []. `tools`: descriptions of tools for the template, or None."""
    messages = [*first, *after]
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not template.has_tags:
        given = [number for number in answers if messages[number].get("weight", 1) and number >= len(first) * bool(after)]
        return [Text(text, spans) for text, spans in template.answered(messages, given, tools=tools)]
    text, spans = template.marked(messages, tools=tools)
    spans = _weighted(spans, [messages[number] for number in answers], template)
    before = template.render(first, tools=tools) if after else ""
    if not text.startswith(before):
        raise template.unmarked("the template renders a prompt differently when its completion follows")
    return [Text(text, [span for span in spans if span[0] >= len(before)])]


def _weighted(spans: list[Span], answers: list[dict[str, Any]], template: ChatTemplate) -> list[Span]:
    """Return the spans of the assistant's messages (`answers`), except those of weight 0. Raises BadInput if a message has weight 0
    while the numbers of spans and messages differ."""
    if all(answer.get("weight", 1) for answer in answers):
        return spans
    if len(spans) != len(answers):
        raise template.unmarked(f"{counted(len(spans), 'part')} to train on in {counted(len(answers), 'answer')}, one of weight 0")
    return [span for span, answer in zip(spans, answers, strict=True) if answer.get("weight", 1)]


def _messages(given: Any, where: str) -> list[dict[str, Any]]:
    """Return messages with role and content; ShareGPT's keys `from` and `value` are renamed to these. Raises BadInput for another form.
    `where`: file and line, for errors."""
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise BadInput(where, got="no list of messages", needed="a list of objects with role and content", fix="correct this line")
    return [_message(message, where) for message in given]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    found = {{"from": "role", "value": "content"}.get(key, key): value for key, value in message.items()}
    if "from" in message:
        if not isinstance(message["from"], str) or message["from"] not in _ROLES:
            raise BadInput(where, got=f"from {message['from']!r}", needed=f"one of {', '.join(_ROLES)}", fix="correct this line")
        found["role"] = _ROLES[message["from"]]
    if not isinstance(found.get("role"), str):
        raise BadInput(where, got=f"a message with {', '.join(message)}", needed="role and content", fix="correct this line")
    if other := next((key for key in _OTHER_WEIGHTS if key in found), None):
        raise BadInput(where, got=f"a message with {other}", needed=_WEIGHT, fix=f"write weight instead of {other}")
    if found.get("weight", 1) not in (0, 1):
        raise BadInput(where, got=f"a message of weight {found['weight']!r}", needed=_WEIGHT, fix="correct this line")
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = found["content"] = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and found.get("tool_calls")):
        wrong = "is missing" if content is None else f"has the type {type(content).__name__}"
        got = f"a message of {found['role']} whose content {wrong}"
        raise BadInput(where, got=got, needed="a text; null only with tool_calls", fix="write the content as one text")
    return found


def _encoded(text: Text, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the text's ids [n], and whether each is predicted. An id is predicted if one of its characters is in a predicted part."""
    ends = bool(text.spans) and (text.plain or isinstance(tokenizer, Bytes | Bpe))
    whole = text.text[: text.spans[-1][1]] if ends else text.text
    ids, places = tokenizer.encode_with_places(whole)
    predicted = np.zeros(len(ids), dtype=bool)
    for start, end in text.spans:
        predicted |= (places[:, 0] < end) & (places[:, 1] > start)
    if text.plain:
        prompt = whole[: text.spans[0][0]]
        begin = tokenizer.beginning(prompt)
        begin = begin[: len(begin) - len(tokenizer.encode(prompt))]
        ids, predicted = np.concatenate((begin, ids)).astype(np.int64), np.concatenate((np.zeros(len(begin), bool), predicted))
    if ends:
        ids, predicted = np.concatenate((ids, [tokenizer.separator])), np.concatenate((predicted, [True]))
    return ids, predicted
