"""From text on disk to the token sequences of one step. `open_data` is the only entry. NumPy only; nothing here imports torch.

corpus.py  documents, each train or validation    ->  tokenizer.py  text to ids
tokens.py  ids in memory-mapped files, built once ->  order.py      the sequences of each step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.data.corpus import find_corpus
from moe.data.order import Held, TrainSet, ValidationSet, Windows
from moe.data.tokenizer import Tokenizer, load
from moe.data.tokens import cache_folder, open_or_build
from moe.recipe.sections import Data
from parallel.errors import BadInput

__all__ = ["Dataset", "Held", "Tokenizer", "TrainSet", "ValidationSet", "load", "open_data"]


@dataclass(frozen=True)
class Dataset:
    """Opened data: endless training sequences, fixed validation sequences, their tokenizer, and the index of the token files.

    `key` is that of the text and of what the recipe says about it: runs with the same key see the same text.
    """

    train: TrainSet
    validation: ValidationSet
    tokenizer: Tokenizer
    index: dict[str, Any]
    key: str


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
) -> Dataset:
    """Open a recipe's data, and tokenise it first if it is not in the cache. Every rank calls this.

    `max_length` is in tokens; `vocab_size` is the model's; `seed` decides the order. `tokenizer`: the description of the one that a model
    was trained with, which is used whatever the text is now; None trains one where the recipe wants one. `verify` also hashes token
    files that existed already. Raises BadInput for an unusable path or text, text shorter than one sequence, a vocabulary smaller than
    the tokenizer's, and a cache folder that cannot be written.
    """
    corpus, cache = find_corpus(data_config), cache or cache_folder()
    files = open_or_build(corpus, data_config, cache=cache, given=tokenizer, verify=verify, log=log)
    needed = files.tokenizer.vocab_size
    if vocab_size < needed:
        raise BadInput("model.vocab_size", got=vocab_size, needed=f"at least the tokenizer's {needed}", fix="set model.vocab_size to null")
    return Dataset(
        train=TrainSet(Windows(files.train, max_length, "train"), seed),
        validation=ValidationSet(Windows(files.validation, max_length, "validation"), files.tokenizer.bytes_per_id),
        tokenizer=files.tokenizer,
        index=files.index,
        key=files.key,
    )
