"""Converts text to token ids and back, by one of four kinds of tokenizer:

    bytes   id = byte                    256 ids, nothing to train
    bpe     id = a frequent byte string  data.vocab_size ids, trained on the training text alone; Sennrich et al., arXiv 1508.07909, on
                                         bytes as in GPT-2
    given   the tokenizer.json of an imported model (moe/convert/huggingface/), with its end-of-text id between texts
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
PIECE_CHARACTERS = 1 << 20  # maximum length of a piece of text that is encoded at once (`pieces`)

# Characters that no token may have: the separator, and surrogates, which JSON can spell but UTF-8 cannot encode.
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces, at ends of lines if possible: encoding a long text at once takes gigabytes. Characters in _NOT_TEXT become
    U+FFFD."""
    text = _NOT_TEXT.sub("\ufffd", text)
    start = 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


class Tokenizer(ABC):
    """Base class: ids 0 .. vocab_size - 1, each with its byte string in `token_bytes`. The id `separator` separates documents. `chat` is
    None or a dict with any of {"template": a chat template, "tool_use": a template for chats with tools, "tokens": name -> text of special
    tokens, "ends": ids that end an assistant's message}."""

    name: str
    separator = SEPARATOR
    chat: dict[str, Any] | None = None
    example = "def "  # prompt for the sample text that a run generates at its end

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = tuple(token_bytes)

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def bytes_per_id(self) -> npt.NDArray[np.int64]:
        """Number of bytes of each id's text, [vocab_size], for bits per byte. The separator counts as one byte."""
        return np.array([1 if i == self.separator else len(held) for i, held in enumerate(self.token_bytes)], dtype=np.int64)

    @abstractmethod
    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each text in `parts`, int64 [n]. Each part must come from `pieces`."""

    def describe(self) -> dict[str, Any]:
        """Return everything that `load` needs to make this tokenizer again, as JSON values. Checkpoints store it."""
        about = {"kind": self.name, "vocab_size": self.vocab_size, "separator": self.separator}
        return about | ({"chat": self.chat} if self.chat else {})

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a generated text."""
        return frozenset([self.separator])

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the ids of a text, int64 [n]."""
        return np.concatenate([np.zeros(0, np.int64), *self.encode_pieces(list(pieces(text)))])

    def encode_with_places(self, text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the ids of a text, int64 [n], and the range [start, end) of characters that each id represents, int64 [n, 2]."""
        raise BadInput("data.tokenizer", got=self.name, needed="a tokenizer of text", fix=Set("data.tokenizer", "bytes"))

    def beginning(self, prompt: str) -> list[int]:
        """Return the ids that generation continues: the prompt's, or the separator for an empty prompt."""
        return self.encode(prompt).tolist() or [self.separator]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD, and so do ids beyond this tokenizer's vocabulary (a model's
        vocabulary may be larger)."""
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

    def encode_with_places(self, text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        text = _NOT_TEXT.sub("\ufffd", text)
        places = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return self.encode_pieces([text])[0], np.stack((places, places + 1), axis=1)

    @staticmethod
    def for_others() -> dict[str, Any]:
        """Return a tokenizer.json that gives the same ids, for other programs: byte-level BPE without merges, with the separator as a
        special token."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        vocabulary = {SEPARATOR_TEXT if byte == SEPARATOR else character: byte for character, byte in _BYTE_OF.items()}
        library = Library(models.BPE(vocab=vocabulary, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([SEPARATOR_TEXT])
        found: dict[str, Any] = json.loads(library.to_str())
        return found


class _OfLibrary(Tokenizer):
    """A tokenizer of the `tokenizers` library, made from its JSON. `spelled`: returns a token's bytes; raises KeyError if it has none."""

    def __init__(self, model: dict[str, Any], spelled: Callable[[str], bytes]) -> None:
        self._library, self._model = _library(model), model
        vocabulary = self._library.get_vocab()
        largest = max(vocabulary.values(), default=-1)
        if largest > _MOST_IDS:
            raise _bad_description(f"the id {largest}")
        held = [b""] * (largest + 1)  # b"" for ids without a token, which encoding never returns
        try:
            for token, i in vocabulary.items():
                held[i] = spelled(token)
        except KeyError as error:
            raise _bad_description(f"a token with {error}, which represents no byte") from None
        super().__init__(held)

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        found = self._encoded(lambda: self._library.encode_batch_fast(list(parts), add_special_tokens=False))
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def encode_with_places(self, text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        found = self._encoded(lambda: self._library.encode(_NOT_TEXT.sub("\ufffd", text), add_special_tokens=False))
        return np.array(found.ids, dtype=np.int64), np.array(found.offsets, dtype=np.int64).reshape(-1, 2)

    def _encoded(self, encode: Callable[[], Any]) -> Any:
        try:
            return encode()
        except BaseException as error:  # a panic in Rust, as by a runaway regular expression, does not derive from Exception
            if not _from_library(error):
                raise
            raise _bad_description(f"one that cannot encode this text ({error})") from None

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"model": self._model}


@final
class Bpe(_OfLibrary):
    """Byte-level BPE that this project has trained."""

    name = "bpe"

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__(model, lambda token: token.encode() if token == SEPARATOR_TEXT else _of_characters(token))
        gaps = b"" in self.token_bytes or self._library.get_vocab_size() != self.vocab_size
        if gaps or self.token_bytes[:1] != (SEPARATOR_TEXT.encode(),):
            raise _bad_description("ids with gaps, or a first id that is not the separator")


@final
class Given(_OfLibrary):
    """A tokenizer.json from any source. `separator`: the id that ends a text. Text that spells a special token becomes that token."""

    name = "given"

    def __init__(self, model: dict[str, Any], separator: int | None, chat: dict[str, Any] | None = None) -> None:
        if separator is None:
            raise _bad_description("no eos_token_id")
        spelled, special = _spelled_by(model), {token["content"] for token in model.get("added_tokens") or ()}
        super().__init__(model, lambda token: token.encode() if token in special else spelled(token))
        if not 0 <= separator < self.vocab_size:
            raise _bad_description(f"separator {separator} of {self.vocab_size} ids")
        self.separator, self.chat = separator, chat

    def beginning(self, prompt: str) -> list[int]:
        """Return the prompt's ids, preceded by the tokenizer's prefix (BOS) unless the prompt begins with it."""
        ids: list[int] = self.encode(prompt).tolist()
        before = self._before_a_text()
        return ids if before and ids[: len(before)] == before else [*before, *ids] or [self.separator]

    def _before_a_text(self) -> list[int]:
        text, framed = (self._library.encode("a", add_special_tokens=special).ids for special in (False, True))
        return next((framed[:at] for at in range(len(framed)) if framed[at : at + len(text)] == text), [])


_MOST_IDS = 2**24  # largest token id that a tokenizer.json may have
_MOST_GROWTH = 16  # largest factor by which a tokenizer.json's normalizer may lengthen a text


def _library(model: dict[str, Any]) -> Any:
    """Load the library's tokenizer from its JSON. Raises BadInput for invalid JSON, and if its normalizer makes texts much longer."""
    from tokenizers import Tokenizer as Library

    try:
        if (growth := _growth(model.get("normalizer"))) > _MOST_GROWTH:
            raise ValueError(f"replacements that make a text {growth:.2g} times as long")
        library = Library.from_str(json.dumps(model))
        library.no_truncation()  # the JSON may set truncation, which would lose text, and padding, which would add ids
        library.no_padding()
        return library
    except BaseException as error:  # a panic in Rust does not derive from Exception
        if not _from_library(error):
            raise
        raise _bad_description(error) from None


def _growth(normalizer: Any) -> float:
    """Return the largest factor by which a normalizer makes a text longer; factors of successive replacements are multiplied."""
    if not isinstance(normalizer, dict):
        return 1.0
    found = math.prod(_growth(each) for each in normalizer.get("normalizers") or ())
    if normalizer.get("type") == "Replace":
        replaced = normalizer["pattern"].get("String") or "."
        found *= max(1.0, len(normalizer["content"]) / len(replaced))
    return found


def _from_library(error: BaseException) -> bool:
    """Return whether the library raised this error: an Exception, or a panic in Rust, which has a class that cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _spelled_by(model: dict[str, Any]) -> Callable[[str], bytes]:
    """Return a function that converts a token of a tokenizer.json to its bytes. Raises BadInput unless tokens have one of two forms:
    GPT-2's characters for bytes, or SentencePiece's text, in which <0xE2> is the token of one byte."""
    if any('"ByteLevel"' in json.dumps(model.get(part)) for part in ("pre_tokenizer", "decoder")):
        return _of_characters
    if isinstance(model.get("model"), dict) and model["model"].get("byte_fallback"):
        return lambda token: bytes([int(token[3:5], 16)]) if _BYTE.fullmatch(token) else token.replace("\u2581", " ").encode()
    raise _bad_description("tokens that spell neither bytes nor SentencePiece's pieces")


_BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's token of one byte


@final
class Ids(Tokenizer):
    """Tokenizer for token ids that another program wrote. Their texts are unknown, so ids are shown as numbers: 17 92 3. No id separates
    documents."""

    name = "ids"
    separator, example = -1, "0"

    def __init__(self, vocab_size: int) -> None:
        super().__init__([b"%d " % i for i in range(vocab_size)])

    @property
    def bytes_per_id(self) -> npt.NDArray[np.int64]:
        return np.ones(self.vocab_size, dtype=np.int64)

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids in each piece of text, which are numbers with spaces between them. Raises BadInput for other text."""
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
        return super().describe() | {"separator": None}


def check_separator(tokenizer: Tokenizer, separator: int | None) -> None:
    """Raise BadInput if the tokenizer's separator of documents is not the id that the model expects: `separator` (None: SEPARATOR)."""
    if isinstance(tokenizer, Ids) or tokenizer.separator == (SEPARATOR if separator is None else separator):
        return
    needed, fix = f"{tokenizer.separator}, which separates the documents of this tokenizer", Set("it", tokenizer.separator)
    raise BadInput("model.document_separator", got="null (0)" if separator is None else separator, needed=needed, fix=fix)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Bpe:
    """Train BPE with `vocab_size` ids, including the separator and the 256 bytes; fewer if the text has no more pairs to merge. Equal texts
    give equal tokenizers in every process: the most frequent pair is merged, and of equally frequent pairs the one with the lowest ids."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()  # for other programs that read this JSON
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[SEPARATOR_TEXT], initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Bpe(json.loads(library.to_str()))


def load(description: Any) -> Tokenizer:
    """Make a tokenizer from its `description`, the result of `Tokenizer.describe`. Raises BadInput for anything else."""
    held = description if isinstance(description, dict) else {"kind": description}
    made = _loaded(held)
    made.chat = _chat(held.get("chat"))
    return made


def _loaded(held: dict[str, Any]) -> Tokenizer:
    kind, size, separator, model = (held.get(name) for name in ("kind", "vocab_size", "separator", "model"))
    if kind == Bytes.name:
        return Bytes()
    if kind == Ids.name and isinstance(size, int) and 0 < size < 2**31:
        return Ids(size)
    if kind == Bpe.name and isinstance(model, dict):
        return Bpe(model)
    if kind == Given.name and isinstance(model, dict):
        if not isinstance(separator, int):
            raise _bad_description(f"separator {separator!r}")
        return Given(model, separator)
    raise _bad_description(f"kind {kind!r}")


def _chat(held: Any) -> dict[str, Any] | None:
    """Check and return the value of `Tokenizer.chat` in a description. Raises BadInput for values of wrong types."""
    if held is None:
        return None
    tokens, ends = (held.get("tokens", {}), held.get("ends", [])) if isinstance(held, dict) else (None, None)
    if not isinstance(tokens, dict) or not isinstance(ends, list) or not all(isinstance(end, int) for end in ends):
        raise _bad_description("a chat template of another form")
    if not all(isinstance(text, str) for text in (*tokens.values(), *(held[name] for name in ("template", "tool_use") if name in held))):
        raise _bad_description("a chat template of another form")
    return dict(held)


def _bad_description(got: object) -> BadInput:
    needed = "one written by this program (kind bytes, bpe, given or ids)"
    return BadInput(
        "tokenizer description", got=str(got)[:120], needed=needed, fix="restore its file: checkpoint, token cache or tokenizer.json"
    )


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's characters for bytes: a printable Latin-1 character represents itself, other bytes use the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _of_characters(token: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in token)
