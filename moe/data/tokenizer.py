"""Lossless conversion between text and token ids: plain bytes, or byte-level BPE trained on the training text alone.

    bytes   id = byte                    256 ids, nothing to train
    bpe     id = a frequent byte string  data.vocab_size ids; Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2
    given   a model's own tokenizer.json (moe/convert/huggingface/): its own ids, with its end-of-text id between texts
    ids     no text: token ids from another program (moe/data/ids.py)

In the first two, id 0 separates documents; its text is the NUL character. A NUL inside a text becomes U+FFFD, so that no text can contain a
separator. Everything else is restored exactly, including CRLF and emoji.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from moe.recipe.shapes import SEPARATOR
from parallel.errors import BadInput
from parallel.fixes import Set

SEPARATOR_TEXT = "\0"
PIECE_CHARACTERS = 1 << 20

# Characters that no token may hold: the separator, and half surrogates, which JSON can spell but UTF-8 cannot encode.
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


def pieces(text: str) -> Iterator[str]:
    """Yield a text in the tokenizers' form: cleaned, and cut after line ends, since encoding a very long text whole would cost
    gigabytes."""
    text = _NOT_TEXT.sub("\ufffd", text)
    start = 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


class Tokenizer(ABC):
    """Ids 0 .. vocab_size - 1, each with its byte string in `token_bytes`. The id `separator` separates documents."""

    separator = SEPARATOR
    example = "def "  # start of a trained model's sample text

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = tuple(token_bytes)

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def bytes_per_id(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of each id, [vocab_size], for counting bits per byte. A separator counts as one byte."""
        return np.array([len(held) for held in self.token_bytes], dtype=np.int64)

    @abstractmethod
    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each of many `pieces`, encoded in one call."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return everything that `load` needs, as plain JSON values. Checkpoints keep it."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the ids of a text, [number of tokens] int64."""
        return np.concatenate([np.zeros(0, np.int64), *self.encode_pieces(list(pieces(text)))])

    def beginning(self, prompt: str) -> list[int]:
        """Return the ids to continue from: the prompt's, or the separator for an empty prompt."""
        return self.encode(prompt).tolist() or [self.separator]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids. Bytes that are not UTF-8, and ids past the vocabulary (a model may have more), become U+FFFD."""
        unknown = "\ufffd".encode()
        held = (self.token_bytes[i] if 0 <= i < self.vocab_size else unknown for i in (int(i) for i in ids))
        return b"".join(held).decode("utf-8", errors="replace")


@final
class Bytes(Tokenizer):
    """One id per byte of UTF-8."""

    name = "bytes"

    def __init__(self) -> None:
        super().__init__([bytes([i]) for i in range(256)])

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [np.frombuffer(part.encode(), dtype=np.uint8).astype(np.int64) for part in parts]

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "vocab_size": self.vocab_size, "separator": self.separator}

    @staticmethod
    def for_others() -> dict[str, Any]:
        """Return the same tokenizer as a tokenizer.json: byte-level BPE without merges, and the separator as a special token."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        library = Library(
            models.BPE(vocab={SEPARATOR_TEXT if byte == SEPARATOR else held: byte for held, byte in _BYTE_OF.items()}, merges=[])
        )
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([SEPARATOR_TEXT])
        found: dict[str, Any] = json.loads(library.to_str())
        return found


@final
class Bpe(Tokenizer):
    """Byte-level BPE by the `tokenizers` library, built from that library's own JSON."""

    name = "bpe"

    def __init__(self, model: dict[str, Any]) -> None:
        self._library = _library(model)
        self._model = model
        vocabulary = sorted(self._library.get_vocab().items(), key=lambda item: item[1])
        if [i for _, i in vocabulary] != list(range(len(vocabulary))) or vocabulary[SEPARATOR][0] != SEPARATOR_TEXT:
            raise _bad_description("ids that do not start with the separator or leave gaps")
        try:
            super().__init__([_token_bytes(token) for token, _ in vocabulary])
        except KeyError as error:
            raise _bad_description(f"a token with {error}, which represents no byte") from None

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return _encoded(self._library, parts)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "vocab_size": self.vocab_size, "separator": self.separator, "model": self._model}


@final
class Given(Tokenizer):
    """A tokenizer.json of the `tokenizers` library, from any source. Text that spells a special token becomes that token."""

    name = "given"

    def __init__(self, model: dict[str, Any], separator: int) -> None:
        self._library = _library(model)
        self._model = model
        vocabulary = self._library.get_vocab()
        if (largest := max(vocabulary.values(), default=0)) > _MOST_IDS:
            raise _bad_description(f"the id {largest}")
        spelled = _spelled_by(model)
        special = {token["content"] for token in model.get("added_tokens") or ()}
        held = [b""] * (max(vocabulary.values(), default=-1) + 1)  # unused ids never occur
        try:
            for token, i in vocabulary.items():
                held[i] = token.encode() if token in special else spelled(token)
        except KeyError as error:
            raise _bad_description(f"a token with {error}, which represents no byte") from None
        if not 0 <= separator < len(held):
            raise _bad_description(f"separator {separator} of {len(held)} ids")
        super().__init__(held)
        self.separator = separator

    def beginning(self, prompt: str) -> list[int]:
        """Return the ids to continue from, after the tokenizer's prefix (BOS), unless the prompt spells it."""
        ids: list[int] = self.encode(prompt).tolist()
        before = self._before_a_text()
        return ids if before and ids[: len(before)] == before else [*before, *ids] or [self.separator]

    def _before_a_text(self) -> list[int]:
        text, framed = (self._library.encode("a", add_special_tokens=special).ids for special in (False, True))
        return next((framed[:at] for at in range(len(framed)) if framed[at : at + len(text)] == text), [])

    @staticmethod
    def read(model: dict[str, Any], ends: int | None) -> Given:
        """Make the tokenizer of a model whose texts end with the id `ends`. Raises BadInput if it cannot be used."""
        if ends is None:
            raise _bad_description("no eos_token_id")
        return Given(model, ends)

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return _encoded(self._library, parts)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "vocab_size": self.vocab_size, "separator": self.separator, "model": self._model}


_MOST_IDS = 2**24
_MOST_GROWTH = 16


def _library(model: dict[str, Any]) -> Any:
    """Load the library's tokenizer from this JSON. Raises BadInput if it is invalid, or if its replacements can grow a text without
    bound."""
    from tokenizers import Tokenizer as Library

    try:
        if (growth := _growth(model.get("normalizer"))) > _MOST_GROWTH:
            raise ValueError(f"replacements that make a text {growth:.2g} times as long")
        library = Library.from_str(json.dumps(model))
        library.no_truncation()  # a file may set either for its model; truncation would lose text, and padding would add ids
        library.no_padding()
        return library
    except BaseException as error:  # the library raises plain Exception for any error in its JSON; its panic is no Exception
        if not _from_library(error):
            raise
        raise _bad_description(error) from None


def _growth(normalizer: Any) -> float:
    """Return the maximum growth factor of a text's length: successive replacements multiply."""
    if not isinstance(normalizer, dict):
        return 1.0
    found = math.prod(_growth(each) for each in normalizer.get("normalizers") or ())
    if normalizer.get("type") == "Replace":
        replaced = normalizer["pattern"].get("String") or "."
        found *= max(1.0, len(normalizer["content"]) / len(replaced))
    return found


def _encoded(library: Any, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """Return the ids of each part. Raises BadInput if the library gives up, such as on a pattern with an endless search."""
    try:
        found = library.encode_batch_fast(list(parts), add_special_tokens=False)
    except BaseException as error:
        if not _from_library(error):
            raise
        raise _bad_description(f"one that cannot encode this text ({error})") from None
    return [np.array(one.ids, dtype=np.int64) for one in found]


def _from_library(error: BaseException) -> bool:
    """Return whether the library raised it. A Rust panic is no Exception, and its class cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _spelled_by(model: dict[str, Any]) -> Callable[[str], bytes]:
    """Return the byte decoding of a tokenizer.json: GPT-2's characters, or SentencePiece's, with <0xE2> for a byte that no token holds."""
    if any('"ByteLevel"' in json.dumps(model.get(part)) for part in ("pre_tokenizer", "decoder")):
        return lambda token: bytes(_BYTE_OF[character] for character in token)
    if isinstance(model.get("model"), dict) and model["model"].get("byte_fallback"):
        return lambda token: bytes([int(token[3:5], 16)]) if _BYTE.fullmatch(token) else token.replace("\u2581", " ").encode()
    raise _bad_description("tokens that spell neither bytes nor SentencePiece's pieces")


_BYTE = re.compile("<0x[0-9A-F]{2}>")


@final
class Ids(Tokenizer):
    """Ids from another program: their texts are their numbers. Their separator and byte lengths are unknown."""

    name = "ids"
    separator, example = -1, "0"

    def __init__(self, vocab_size: int) -> None:
        super().__init__([b"%d " % i for i in range(vocab_size)])

    @property
    def bytes_per_id(self) -> npt.NDArray[np.int64]:
        return np.ones(self.vocab_size, dtype=np.int64)

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Parse ids. Raises BadInput for a text that is no list of ids."""
        words = [part.split() for part in parts]
        wrong = next((word for held in words for word in held if not word.isdecimal() or int(word) >= self.vocab_size), None)
        if wrong is not None or not any(words):
            needed = f"ids from 0 to {self.vocab_size - 1}, with spaces between: the model was trained on ids"
            raise BadInput("prompt", got=wrong or "no ids", needed=needed, fix='--prompt "17 92 3"')
        return [np.array(held, dtype=np.int64) for held in words]

    def beginning(self, prompt: str) -> list[int]:
        ids: list[int] = self.encode_pieces([prompt])[0].tolist()
        return ids

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "vocab_size": self.vocab_size, "separator": None}


def check_separator(tokenizer: Tokenizer, separator: int | None) -> None:
    """Refuse a model with attention within documents if it expects another separator than this tokenizer's. Raises BadInput."""
    if isinstance(tokenizer, Ids) or tokenizer.separator == (SEPARATOR if separator is None else separator):
        return
    needed, fix = f"{tokenizer.separator}, which separates the documents of this tokenizer", Set("it", tokenizer.separator)
    raise BadInput("model.document_separator", got="null (0)" if separator is None else separator, needed=needed, fix=fix)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Bpe:
    """Learn `vocab_size` ids from texts. These include the separator and the 256 bytes; fewer if the text has no more pairs to merge.

    The same texts give the same tokenizer in every process: counts decide, and ties go to the pair with the lower ids.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()  # for other programs that read this JSON
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Bpe(json.loads(library.to_str()))


def load(description: Any) -> Tokenizer:
    """Return the tokenizer of a `describe` result. Raises BadInput for anything else."""
    kind = description.get("kind") if isinstance(description, dict) else description
    if kind == Bytes.name:
        return Bytes()
    if kind == Ids.name and isinstance(description.get("vocab_size"), int) and 0 < description["vocab_size"] < 2**31:
        return Ids(description["vocab_size"])
    if kind == Bpe.name and isinstance(description.get("model"), dict):
        return Bpe(description["model"])
    if kind == Given.name and isinstance(description.get("model"), dict):
        separator = description.get("separator")
        if not isinstance(separator, int):
            raise _bad_description(f"separator {separator!r}")
        return Given(description["model"], separator)
    raise _bad_description(f"kind {kind!r}")


def _bad_description(got: object) -> BadInput:
    return BadInput(
        "tokenizer description",
        got=str(got)[:120],
        needed="one written by this program (kind bytes, bpe, given or ids)",
        fix="restore that file",
    )


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's characters for bytes: a printable Latin-1 character represents itself, other bytes use the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _token_bytes(token: str) -> bytes:
    return token.encode() if token == SEPARATOR_TEXT else bytes(_BYTE_OF[character] for character in token)
