"""Turns text on disk into the token sequences of each step; other packages call `open_data`. It uses NumPy and does not import torch.

text            corpus.py: documents, each for train or validation -> tokenizer.py: ids -> tokens.py: memory-mapped files, built once
chats           chat.py: ids, and whether each is predicted -> chats.py: files; several chats packed into a sequence
token ids       ids.py: files of other programs, read in place; given.py: samples from a user's program
every step      order.py: the sequences that it reads; mixture.py: several sources with weights; span_corruption.py: hidden spans
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moe.data.chat import ChatFiles, messages_field, with_template
from moe.data.chats import open_chats, sequences_of
from moe.data.corpus import find_corpus
from moe.data.given import Stream, open_given
from moe.data.ids import open_ids
from moe.data.mixture import MixedTrain, MixedValidation
from moe.data.order import TrainSet, ValidationSet, Windows
from moe.data.remarks import with_left_out
from moe.data.span_corruption import CorruptedTrain, CorruptedValidation, SpanCorruption
from moe.data.tokenizer import Bytes, Ids, Tokenizer, load
from moe.data.tokenizer_file import read_file
from moe.data.tokens import cache_folder, open_or_build
from moe.recipe.plugin import is_plugin, load_plugin
from moe.recipe.sections import Data
from moe.recipe.shapes import START, inputs_within, spans_of
from parallel.errors import BadInput, counted, where
from parallel.fixes import Set
from parallel.store.files import named_encoding

__all__ = [
    "CorruptedTrain", "CorruptedValidation", "Dataset", "MixedTrain", "MixedValidation", "Stream", "Tokenizer", "TrainSet", "ValidationSet",
    "load", "open_data",
]  # fmt: skip


@dataclass(frozen=True)
class Dataset:
    """Opened data: endless training sequences, fixed validation sequences, and their tokenizer. `index`: contents of the token files'
    index.json (sizes, hashes, remarks); for several sources, {"sources": [one index a source], ...}. `key`: hash of the text and the
    recipe's settings for it; runs with the same key read the same text."""

    train: TrainSet | MixedTrain | CorruptedTrain | Stream
    validation: ValidationSet | MixedValidation | CorruptedValidation
    tokenizer: Tokenizer
    index: dict[str, Any]
    key: str

    @property
    def has_pairs(self) -> bool:
        """Whether a source has pairs of a chosen and a rejected answer."""
        return any(index.get("pairs") for index in self.index.get("sources", [self.index]))


def open_data(
    data_config: Data,
    *,
    max_length: int,
    vocab_size: int,
    seed: int,
    cache: Path | None = None,
    tokenizer: dict[str, Any] | None = None,
    verify: bool = False,
    log: Callable[[str], object] = print,
    as_key: Callable[[int], int] = int,
    given: Any = None,
    text_key_set_by: str = "data.text_key",
) -> Dataset:
    """Open a recipe's data, and tokenize it first if the cache does not have it. Every rank calls this.

    `max_length`: tokens of a sequence; for span corruption, of the encoder's input. `vocab_size`: of the model. `seed` decides the order.
    `tokenizer`: description of a trained model's tokenizer, used for any text; None: the recipe's, which is trained if needed. `verify`:
    hash large token files too, although their times are unchanged. `log` prints a line. `given`: samples from a user's program
    (moe/data/given.py), for data.source given. For error messages: `as_key(length)` returns the model.max_length that gives sequences of
    `length` tokens, and `text_key_set_by` names the setting with the key of the text in JSON or a table.

    Raises BadInput for an unusable path or text, text shorter than one sequence, a vocabulary smaller than the tokenizer's, and a cache
    folder that cannot be read or written.
    """
    if is_plugin(data_config.source) or (data_config.source == "given" and data_config.path is None and not data_config.sources):
        return _given(data_config, given, max_length=max_length, seed=seed, log=log)
    if tokenizer is None and data_config.tokenizer_file is not None:
        tokenizer = read_file(data_config.tokenizer_file).describe()
    cache = cache or cache_folder()
    opened = partial(open_data, seed=seed, cache=cache, verify=verify, log=log)
    if data_config.objective == "span_corruption":
        spans, plain = spans_of(max_length), data_config.model_copy(update={"objective": "next_token"})
        made = opened(plain, max_length=spans.text, vocab_size=vocab_size - spans.num_spans, tokenizer=tokenizer, as_key=inputs_within)
        objective = SpanCorruption(spans, vocab_size, max(made.tokenizer.separator, START), seed)
        assert isinstance(made.train, TrainSet | MixedTrain) and isinstance(made.validation, ValidationSet | MixedValidation)
        return replace(made, train=CorruptedTrain(made.train, objective), validation=CorruptedValidation(made.validation, objective))
    if data_config.sources:
        each: list[Dataset] = []
        for one, named in data_config.each():  # all sources use the tokenizer of the first source
            tokenizer = each[0].tokenizer.describe() if each else tokenizer
            sized = partial(opened, one, max_length=max_length, vocab_size=vocab_size)
            each.append(sized(tokenizer=tokenizer, as_key=as_key, text_key_set_by=named))
        if len({bool(one.index.get("pairs")) for one in each}) > 1:
            of_pairs = ", ".join(s.path for s, one in zip(data_config.sources, each, strict=True) if one.index.get("pairs"))
            one_kind = "either pairs or single chats: a loss reads only one of the two"
            raise BadInput("data.sources", got=f"pairs in {of_pairs}, and single chats", needed=one_kind, fix="train in two runs")
        return _mixed(each, tuple(source.weight for source in data_config.sources), seed)
    if data_config.source == "chat":
        return _chats(data_config, tokenizer, max_length=max_length, vocab_size=vocab_size, seed=seed, cache=cache, log=log)
    if data_config.tokenizer == "ids":
        files = open_ids(data_config, cache=cache, log=log)
    else:
        corpus = find_corpus(data_config, text_key_set_by=text_key_set_by)
        if data_config.text_key != "text" and not any(corpus.by_lines(name) or corpus.by_rows(name) for name in corpus.names):
            log(f"data: {text_key_set_by} {data_config.text_key} is not read: {corpus.label} has no JSONL file and no table")
        files = open_or_build(corpus, data_config, cache=cache, given=tokenizer, verify=verify, log=log)
        files = replace(files, index=with_left_out(files.index, label=corpus.label, left_out=corpus.left_out))
    needed = files.tokenizer.vocab_size
    if vocab_size < needed:
        raise BadInput("model.vocab_size", got=vocab_size, needed=f"at least the tokenizer's {needed}", fix=Set("model.vocab_size", None))
    sides = (("train", files.train), ("validation", files.validation))
    train, held_out = (Windows(tokens, max_length, name, as_key, needed) for name, tokens in sides)
    held = ValidationSet(held_out, files.tokenizer.bytes_per_id)
    return Dataset(train=TrainSet(train, seed), validation=held, tokenizer=files.tokenizer, index=files.index, key=files.key)


def _given(data: Data, given: Any, *, max_length: int, seed: int, log: Callable[[str], object]) -> Dataset:
    """Open samples from a user's program: `given`, or the result of the function that data.source names. `log`: prints a line."""
    if is_plugin(data.source):
        make = load_plugin("data.source", data.source, arguments=1)
        try:
            given = make(data)
        except Exception as error:
            fix = "correct this function; its argument is the section `data` of the recipe"
            raise BadInput("data.source", got=f"{data.source}, which raised {where(error)}", needed="samples", fix=fix) from error
    if given is None:
        needed = "samples from the user's program: train(run, data=...)"
        raise BadInput(
            "data.source", got="'given' without samples", needed=needed, fix="add --data.path FILE, a file of text or of token ids"
        )
    tokenizer = Ids(data.vocab_size) if data.tokenizer == "ids" else Bytes()
    share, ids = data.validation_share, tokenizer.vocab_size
    found = open_given(given, max_length=max_length, vocab_size=ids, validation_share=share, seed=seed, say=log)
    return Dataset(found.train, found.validation, tokenizer, {"key": found.key}, found.key)


def _chats(
    data: Data,
    description: dict[str, Any] | None,
    *,
    max_length: int,
    vocab_size: int,
    seed: int,
    cache: Path,
    log: Callable[[str], object],
) -> Dataset:
    """Open a file of chats. `description`: `describe()` of a trained model's tokenizer; None: the recipe's tokenizer. `cache`: folder for
    encoded chats. `log`: prints a line."""
    assert data.path is not None  # checked with the recipe
    if description is None and data.tokenizer == "bpe":
        needed = "bytes for a new model; bpe only if --init_from gives a model with its tokenizer"
        raise BadInput("data.tokenizer", got="bpe with data.source=chat", needed=needed, fix=Set("it", "bytes") | "add --init_from MODEL")
    new = Ids(data.vocab_size) if data.tokenizer == "ids" else Bytes()
    tokenizer = with_template(new if description is None else load(description), data.chat_template)
    if vocab_size < tokenizer.vocab_size:
        needed = f"at least the tokenizer's {tokenizer.vocab_size}"
        raise BadInput("model.vocab_size", got=vocab_size, needed=needed, fix=Set("model.vocab_size", None))
    files = ChatFiles(data.path, messages_field(data.text_key), named_encoding(data.encoding))
    chats = open_chats(files, tokenizer, max_length=max_length, cache=cache, log=log)
    train, held = sequences_of(chats, max_length=max_length, validation_share=data.validation_share, packing=data.packing)
    alone = "pair" if chats.encoded.pairs else "sample" if chats.encoded.remark else "chat"
    holds = (
        f"packed into {counted(train.num_windows + held.num_windows, 'sequence')}"
        if data.packing
        else f"each {alone} is padded to a sequence"
    )
    size, padding = max_length + 1, 1 - chats.encoded.starts[-1] / ((train.num_windows + held.num_windows) * (max_length + 1))
    epoch = f"an epoch is {counted(train.num_windows, 'sequence')}"
    wasted = f"; {padding:.0%} of the tokens are padding: data.packing true joins chats" if padding > 0.5 and alone != "pair" else ""
    log(f"data: {holds} of {counted(size, 'token')} (model.max_length + 1); {epoch}{'' if data.packing else wasted}")
    index = {"key": chats.key, "pairs": chats.encoded.pairs}
    return Dataset(TrainSet(train, seed), ValidationSet(held, tokenizer.bytes_per_id), tokenizer, index, chats.key)


def _mixed(made: list[Dataset], weights: tuple[float, ...], seed: int) -> Dataset:
    train = tuple(data.train for data in made if isinstance(data.train, TrainSet))
    validation = tuple(data.validation for data in made if isinstance(data.validation, ValidationSet))
    index = {"sources": [data.index for data in made], "weights": weights}
    key = hashlib.sha256(json.dumps([[data.key for data in made], weights]).encode()).hexdigest()[:24]
    return Dataset(MixedTrain(train, weights, seed), MixedValidation(validation, weights), made[0].tokenizer, index, key)
