"""Converts tokenizer.json to the tokenizer of a run, and back, with the sentinel tokens of an encoder-decoder (T5's <extra_id_0>, ...).

read_tokenizer(folder, config, run)    returns the tokenizer's description; if it cannot be used, the byte tokenizer's, and the reason
write_tokenizer(folder, described)     writes tokenizer.json and tokenizer_config.json if they are missing, and a changed chat template
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Any

from moe.data.tokenizer import Bpe, Bytes, Given, Ids
from moe.data.tokenizer import load as load_tokenizer
from moe.data.tokenizer_file import chat_of, loaded
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted
from parallel.store.files import read_text


def read_tokenizer(source: Path, config: dict[str, Any], run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return (description of the model's tokenizer, or of the byte tokenizer if the model's cannot be used; lines to print)."""
    room = run.vocab_size - run.num_sentinels
    held = f"a vocabulary of {run.vocab_size}" + (f" with {counted(run.num_sentinels, 'sentinel')}" if run.num_sentinels else "")
    try:
        if not (source / "tokenizer.json").is_file():
            raise BadInput("tokenizer.json", got="no such file", needed="", fix="")  # only `got` is read, below
        content = json_text.loads(read_text(source / "tokenizer.json"))
        known = (content.get("model") or {}).get("vocab") or () if isinstance(content, dict) else ()
        if len(known) > room:  # checked before `tokenizers` reads it, which is slow with millions of ids
            raise BadInput("tokenizer.json", got=f"{counted(len(known), 'id')} for {held}", needed="", fix="")
        content = _without_sentinels(content, run)
        if _is_bytes(content, _ends(source, config)):
            return Bytes().describe(), []
        made = Given(content, _ends(source, config))
        if made.vocab_size > room:
            raise BadInput("tokenizer.json", got=f"{counted(made.vocab_size, 'id')} for {held}", needed="", fix="")
        made.chat, said = chat_of(source, [end for end in _all_ends(source, config) if 0 <= end < made.vocab_size])
        return made.describe(), [*said, *_other_sentinels(content, run)]
    except (BadInput, OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
        why = error.got if isinstance(error, BadInput) else error
        line = f"tokenizer.json is not used ({why}): texts are read as bytes, although the model was not trained on them"
        return Bytes().describe(), [line]


def _is_bytes(tokenizer: dict[str, Any], ends: int | None) -> bool:
    """Return whether `tokenizer` is the tokenizer.json that `write_tokenizer` writes for the byte tokenizer. ends: id that ends
    a text, or None."""
    plain = Bytes.for_others()
    return ends == Bytes.separator and all(tokenizer.get(part) == plain[part] for part in ("model", "normalizer", "pre_tokenizer"))


def _sentinels(run: Run) -> dict[int, str]:
    """Return id -> text in transformers, for each of the run's sentinels; ids ascend."""
    return {run.vocab_size - 1 - n: f"<extra_id_{n}>" for n in reversed(range(run.num_sentinels))}


def _with_sentinels(tokenizer: dict[str, Any], run: Run, separator: int, ends: str) -> dict[str, Any]:
    """Return `tokenizer` with the run's sentinels. If it has no post-processor, add one that appends `ends` (id `separator`) to a text."""
    form = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": spelled} | form for i, spelled in _sentinels(run).items()]
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": ends, "type_id": 0}}
    both = [text, end, {"Sequence": {"id": "B", "type_id": 0}}, end]
    special = {ends: {"id": ends, "ids": [separator], "tokens": [ends]}}
    template: dict[str, Any] = {"type": "TemplateProcessing", "single": [text, end], "pair": both, "special_tokens": special}
    frame = {} if tokenizer.get("post_processor") else {"post_processor": template}
    return tokenizer | {"added_tokens": [*(tokenizer.get("added_tokens") or ()), *added]} | frame


def _without_sentinels(tokenizer: dict[str, Any], run: Run) -> dict[str, Any]:
    """Return `tokenizer` without the sentinels that have the same ids in the run, because the run adds sentinels itself."""
    added, ours = tokenizer.get("added_tokens") or (), _sentinels(run)
    return tokenizer | {"added_tokens": [token for token in added if ours.get(token.get("id")) != token.get("content")]}


def _other_sentinels(tokenizer: dict[str, Any], run: Run) -> list[str]:
    """Return a line to print if sentinels have other ids in the tokenizer than in the run, for example because the vocabulary is padded."""
    added = tokenizer.get("added_tokens") or ()
    theirs = next((token.get("id") for token in added if token.get("content") == "<extra_id_0>"), None)
    last = run.vocab_size - 1
    if not run.num_sentinels or theirs in (None, last):
        return []
    ids = f"<extra_id_0> is {theirs} in the tokenizer and {last}, the vocabulary's last id, in the run"
    return [f"{ids}, so hidden spans get other ids than when the model was trained"]


def _ends(source: Path, config: dict[str, Any]) -> int | None:
    """Return the id that ends a text, from config.json or generation_config.json; None if neither has one."""
    return next(iter(_all_ends(source, config)), None)


def _all_ends(source: Path, config: dict[str, Any]) -> list[int]:
    """Return the ids that end a text: config.json's, then further ones of generation_config.json."""
    given = [found.get("eos_token_id") for found in (config, loaded(source / "generation_config.json"))]
    ids = [end for ends in given for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    return list(dict.fromkeys(ids))


def write_tokenizer(part: Path, described: dict[str, Any], *, came: bool, run: Run) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json into the folder `part` if they are missing. Return lines to print. `described`:
    description of the run's tokenizer. `came`: whether the model was imported from transformers; then a byte tokenizer is not written,
    because the model was not trained with it."""
    tokenizer = load_tokenizer(described)
    if isinstance(tokenizer, Ids) or (came and isinstance(tokenizer, Bytes)):
        reads = "ids" if isinstance(tokenizer, Ids) else "plain bytes"
        return [] if (part / "tokenizer.json").is_file() else [f"no tokenizer.json: this run reads {reads}"]
    assert isinstance(tokenizer, Bytes | Bpe | Given)
    ends = tokenizer.token_bytes[tokenizer.separator].decode()
    if not (part / "tokenizer.json").is_file():
        model = tokenizer.for_others() if isinstance(tokenizer, Bytes) else described["model"]
        # `tokenizers` accepts added tokens only if their ids follow the tokenizer's ids without a gap
        if run.num_sentinels and tokenizer.vocab_size + run.num_sentinels == run.vocab_size:
            model = _with_sentinels(model, run, tokenizer.separator, ends)
        (part / "tokenizer.json").write_text(json_text.dumps(model, ensure_ascii=False) + "\n")
    if not (part / "tokenizer_config.json").is_file():
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends, "clean_up_tokenization_spaces": False}
        (part / "tokenizer_config.json").write_text(json_text.dumps(about, indent=2) + "\n")
    template = (tokenizer.chat or {}).get("template")
    if template is not None and ((chat_of(part, [])[0] or {}).get("template") != template):
        (part / "chat_template.jinja").write_text(template)
    return []
