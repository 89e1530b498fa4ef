"""The order of sequences: a pure function of (seed, epoch, global index), so resuming is O(1) and exact on any number of ranks.

    tokens    |. a a a a . b b b b b b . c c|      documents a, b, c, a separator (.) before each
    windows   |----0----|                          max_length + 1 tokens at stride max_length: neighbors share one, so each token
                      |----1----|                  is predicted once per epoch (except the last ones, which do not fill a window)
    step s    global indices s*G .. (s+1)*G - 1, G sequences in a batch; a rank reads its TokenShard of them
    index g   epoch = g // num_windows, window = permutation(g % num_windows; seed, epoch)

The permutation's value at one index is computed without its other values. It is a Feistel network (Luby and Rackoff 1988) over the
smallest near-square grid that holds all windows. If it reaches a cell past the last window, it is applied again (cycle walking; Black and
Rogaway 2002). It uses integers only, so every machine computes the same.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moe.data.token_shard import Ints, TokenShard
from parallel.errors import BadInput, counted
from parallel.fixes import Set

ROUNDS = 8


def permutation(places: npt.ArrayLike, *, size: int, seed: int, epoch: int, of: str = "order") -> Ints:
    """Return the images [n] of `places` [n] under a pseudorandom permutation of 0 .. size - 1, which is a function of seed, epoch and `of`.
    `of`: name of the shuffled objects, so that different objects get independent permutations."""
    images: Ints = permutations(places, size=size, seed=seed, epochs=[epoch], of=of)[0]
    return images


def permutations(places: npt.ArrayLike, *, size: int, seed: int, epochs: Sequence[int], of: str) -> Ints:
    """Return the images [len(epochs), n] of `places` [n] under the `permutation` of each epoch."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    grid = np.uint64(rows), np.uint64(columns)
    digests = b"".join(hashlib.sha512(f"{of} {seed} {epoch}".encode()).digest() for epoch in epochs)
    keys = np.frombuffer(digests, dtype="<u8").reshape(-1, ROUNDS)
    cells = np.array(places, dtype=np.uint64).reshape(1, -1)
    found = _feistel(cells, *grid, keys[:, None])
    # The grid has at most `rows` more cells than `size`. Each walk begins at a valid cell (below `size`) and follows a cycle of the grid's
    # permutation. So it reaches a valid cell again, and two walks cannot end in the same cell.
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], *grid, keys[outside.nonzero()[0]])
    return found.astype(np.int64)


def _feistel(cells: npt.NDArray[np.uint64], rows: np.uint64, columns: np.uint64, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Permute the cells of a grid of `rows` x `columns`: each round adds a hash of one coordinate and a key to the other coordinate.
    keys: [..., ROUNDS], of each cell, or of all cells of a row."""
    row, column = cells // columns, cells % columns
    for n in range(ROUNDS):
        if n % 2:
            column = (column + _mix(row + keys[..., n]) % columns) % columns
        else:
            row = (row + _mix(column + keys[..., n]) % rows) % rows
    return row * columns + column


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer, modulo 2^64 (Steele, Lea and Flood 2014): each input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sequences(Protocol):
    """Sequences of max_length + 1 tokens, which are read by index: windows of a text, chats, or a program's samples."""

    @property
    def max_length(self) -> int: ...

    @property
    def num_windows(self) -> int: ...

    def read(self, windows: Ints, columns: Ints | None = None) -> Ints: ...


@dataclass(frozen=True)
class Windows:
    """Tokens [num_tokens] of any integer type, read as windows of max_length + 1 tokens. A window's last token is the next one's first.
    Raises BadInput if there are too few tokens for one window. `num_ids`: size of the vocabulary; reading an id outside it raises BadInput.
    For error messages: `name`: train or validation; `as_key(n)`: the recipe's model.max_length if windows have n + 1 tokens."""

    tokens: npt.NDArray[np.integer]
    max_length: int
    name: str
    as_key: Callable[[int], int] = int
    num_ids: int = 2**63

    def __post_init__(self) -> None:
        if len(self.tokens) < self.max_length + 1:
            key = self.as_key(self.max_length)
            longer = "" if key == self.max_length else f", {self.max_length + 1} for model.max_length {key}"
            more = "give more text" if self.name == "train" else "give more text, or a larger data.validation_share"
            most = self.as_key(len(self.tokens) - 1)
            shorter = Set("model.max_length", most, said=f"at most {most}")
            needed = f"at least one sequence{longer or f', model.max_length + 1 = {self.max_length + 1}'}"
            fix = more | shorter if len(self.tokens) > 2 else more
            raise BadInput(f"{self.name} text", got=counted(len(self.tokens), "token"), needed=needed, fix=fix)

    @property
    def num_windows(self) -> int:
        return (len(self.tokens) - 1) // self.max_length

    def read(self, windows: Ints, columns: Ints | None = None) -> Ints:
        """Return the windows with these indices as tokens [n, max_length + 1] int64: inputs are [:, :-1], targets [:, 1:]. Raises BadInput
        for ids outside the vocabulary. `columns`: the columns to return, ascending; None: all."""
        places = windows[:, None] * self.max_length + (np.arange(self.max_length + 1) if columns is None else columns)
        file = whole_file(self.tokens)
        found: Ints = self.tokens[places].astype(np.int64)
        if found.size and not 0 <= found.min() <= found.max() < self.num_ids:
            wrong = int(found.max() if found.min() >= 0 else found.min())
            place = int(places.reshape(-1)[(found == wrong).reshape(-1).argmax()])
            where = self.name if file is None else file.filename
            needed = f"ids from 0 to {self.num_ids - 1}, the ids of the tokenizer"
            fix = "start again: the file is then checked. If the error recurs, make the file again (token cache: remove the folder)"
            raise BadInput(f"token {place} in {where}", got=f"the id {wrong}", needed=needed, fix=fix)
        return found


def whole_file(tokens: npt.NDArray[np.integer]) -> np.memmap[Any, Any] | None:
    """Return the memory map of which these tokens are a view; None if they are in memory. Raises BadInput if the file was truncated after
    it was mapped: reading beyond its end would kill the process with SIGBUS."""
    file: Any = tokens
    while file is not None and not isinstance(getattr(file, "base", None), mmap.mmap):
        file = getattr(file, "base", None)
    if file is not None and (size := file.base.size()) < (mapped := len(file.base)):
        fix = "do not change it while a run reads it, and start again; token files of the cache are then made again"
        got = f"{size:,} bytes: it was cut while it was read"
        raise BadInput(f"data file {file.filename}", got=got, needed=f"{mapped:,} bytes", fix=fix)
    found: np.memmap[Any, Any] | None = file
    return found


@dataclass(frozen=True)
class TrainSet:
    """Endless training sequences: epoch after epoch, each shuffled anew by the seed."""

    windows: Sequences
    seed: int

    @property
    def num_windows(self) -> int:
        """Return the number of sequences in one epoch."""
        return self.windows.num_windows

    def order(self, global_indices: npt.ArrayLike) -> Ints:
        """Return the index of the window at each of these global indices: [n] -> [n]."""
        epochs, places = np.divmod(np.array(global_indices, dtype=np.int64).reshape(-1), self.num_windows)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):  # two epochs if one ends inside the batch
            here = epochs == epoch
            found[here] = permutation(places[here], size=self.num_windows, seed=self.seed, epoch=int(epoch))
        return found

    def sequences(self, global_indices: npt.ArrayLike, columns: Ints | None = None) -> Ints:
        """Return the sequences with these global indices: [n] -> [n, max_length + 1] int64, or only the given columns."""
        return self.windows.read(self.order(global_indices), columns)

    def batch(self, step: int, shard: TokenShard) -> Ints:
        """Return one rank's part of the batch of step `step`, int64 of shape `shard.shape`. The first step is 0."""
        return self.sequences(shard.places(step), shard.columns)


@dataclass(frozen=True)
class Held:
    """One rank's part of the validation sequences, int64 of shape `shard.shape`. bytes_per_token: mean number of bytes of text per
    predicted token, over all ranks; bits per byte = loss in nats / ln 2 / bytes_per_token."""

    sequences: Ints
    bytes_per_token: float


@dataclass(frozen=True)
class ValidationSet:
    """Held-out sequences, the same in every evaluation, spread evenly over the validation text. `bytes_per_id`: number of bytes of text of
    each id; None: each id counts as one byte."""

    windows: Sequences
    bytes_per_id: Ints | None

    def held(self, shard: TokenShard) -> Held:
        """Return the windows that one rank reads. All ranks together read `shard.num_sequences` windows. If the text has fewer, they are
        repeated, each about equally often."""
        chosen = shard.spread(self.windows.num_windows)
        mine = self.windows.read(chosen[shard.sequences.start : shard.sequences.stop], shard.columns)
        text_bytes, tokens = self.predicted(chosen)
        return Held(mine, text_bytes / tokens)

    def predicted(self, chosen: Ints) -> tuple[int, int]:
        """Return (bytes of text, number of tokens) of the predicted tokens in the windows with the indices `chosen`. These are all
        ranks' windows, so every rank gets the same result."""
        if self.bytes_per_id is None:
            return (len(chosen) * self.windows.max_length,) * 2
        text_bytes = tokens = 0
        for part in np.array_split(chosen, -(-len(chosen) // 256)) if len(chosen) else []:
            ids = self.windows.read(part)[:, 1:]
            ids = ids[ids >= 0]  # below 0: padding, or tokens without loss, such as a chat's prompt
            text_bytes, tokens = text_bytes + int(self.bytes_per_id[ids].sum()), tokens + len(ids)
        return text_bytes, tokens
