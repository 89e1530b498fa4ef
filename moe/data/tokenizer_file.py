"""A user's tokenizer.json (`data.tokenizer: FILE.json`), with the special tokens and chat templates of the files next to it.

tokenizer.json          the tokenizer, in the format of the library `tokenizers`
tokenizer_config.json   its eos_token ends a text; not needed if the vocabulary has one of the tokens ENDS
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe.data.tokenizer import Given, Tokenizer
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.store.files import read_text, reason, user_path

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")  # without eos_token, the first of these in the vocabulary ends a text


def read_file(named: str) -> Tokenizer:
    """Return the tokenizer of the tokenizer.json at path `named`. Raises BadInput for a file that cannot be read or used, and for one
    without a token that ends a text."""
    check_file(named)
    model, vocabulary = _content(named)
    folder = user_path(named, what="data.tokenizer").parent
    chat, _ = chat_of(folder, [])
    eos = (chat or {}).get("tokens", {}).get("eos_token")
    end = next((text for text in ([eos] if eos else ENDS) if text in vocabulary), None)
    if end is None:
        needed = f"a token that ends a text: eos_token of tokenizer_config.json, or one of {', '.join(ENDS)}"
        fix = f'write {{"eos_token": "..."}} into {folder / "tokenizer_config.json"}'
        raise BadInput("data.tokenizer", got=f"{named} without {eos or 'eos_token'}", needed=needed, fix=fix)
    try:
        return Given(model, vocabulary[end], chat)
    except BadInput as bad:
        raise _unusable(f"{named}: {bad.got}") from None


def check_file(named: str) -> None:
    """Raise BadInput if the file `named`, the recipe's data.tokenizer, does not exist."""
    if not user_path(named, what="data.tokenizer").is_file():
        needed, fix = "a tokenizer.json that exists", "check the spelling and the folder you are in"
        raise BadInput("data.tokenizer", got=named, needed=needed, fix=fix)


def ids_of(named: str) -> int:
    """Return the number of ids of the tokenizer.json at path `named`, without loading `tokenizers`. Raises BadInput for a
    file that cannot be read."""
    try:
        about = user_path(named, what="data.tokenizer").stat()
    except OSError as error:
        raise _unusable(f"{named}: {reason(error)}") from None
    return _ids_of(named, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=1)
def _ids_of(named: str, changed_ns: int, size_bytes: int) -> int:
    """Parse the file only once in a process, because it may have 30 MB, and a recipe is checked many times. changed_ns, size_bytes: the
    file's modification time and size, so that a changed file is parsed again."""
    return max(_content(named)[1].values()) + 1


def _content(named: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (content of the tokenizer.json at path `named`, token -> id)."""
    try:
        model = json.loads(read_text(user_path(named, what="data.tokenizer")))
        return model, model["model"]["vocab"] | {token["content"]: token["id"] for token in model.get("added_tokens") or ()}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise _unusable(f"{named}: {reason(error) if isinstance(error, OSError) else 'no tokenizer of byte pairs'}") from None


def _unusable(got: str) -> BadInput:
    needed = "the tokenizer.json of a byte-level BPE, or of SentencePiece's BPE with byte_fallback"
    return BadInput("data.tokenizer", got=got, needed=needed, fix="give another tokenizer.json" | Set("data.tokenizer", "bpe"))


def chat_of(source: Path, ends: list[int]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return (value of `Tokenizer.chat` or None, lines to print). The value has the chat templates and special tokens of the folder
    `source`. It has `ends`, the ids that end a text, only if there are several."""
    about = loaded(source / "tokenizer_config.json")
    templates: dict[str, Any] = {}
    for given in (about.get("chat_template"), loaded(source / "chat_template.json").get("chat_template")):
        several = given if isinstance(given, list) else [{"name": "default", "template": given}] if given else []
        templates |= {str(one.get("name")): one.get("template") for one in several if isinstance(one, dict)}
    said = []
    for name, path in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (source / path).is_file():
            try:
                templates[name] = read_text(source / path)
            except (OSError, ValueError) as error:
                said.append(f"{path} is not used ({reason(error)})")
    named = loaded(source / "special_tokens_map.json") | about
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items() if name.endswith("_token")}
    tokens = {name: text for name, text in sorted(texts.items()) if isinstance(text, str)}
    used = {"template": templates.get("default"), "tool_use": templates.get("tool_use")}
    chat = {name: text for name, text in used.items() if isinstance(text, str)} | ({"tokens": tokens} if tokens else {})
    return chat | ({"ends": ends} if len(ends) > 1 else {}) or None, said


def loaded(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file cannot be read or has no object."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
