"""Samples that a user's program gives instead of text: `train(run, data=...)`.

    indexable    len(samples), samples[i]       shuffled anew in every epoch, as sequences of a text are
    iterable     for ids in samples             in the order in which it yields them; after its end, it is iterated again

A sample is one sequence of at most max_length + 1 ids: a list, an array, a tensor, or a dict of columns. A shorter sample is padded;
padding is neither predicted nor routed.

    input_ids          5  9  2  7  7
    attention_mask     1  1  1  1  0      optional: zeros only at the end, for padding
    labels          -100 -100 2  7 -100   optional: the same ids, or -100 for an id that is not predicted; other columns are refused

The number of a step alone decides its samples, so a resumed run and any number of ranks train on the same samples. Every rank must be given
all samples, and uses its part. From an iterable, a rank reads all samples and drops those of other ranks; a resumed run first reads the
samples of all earlier steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moe.data.order import TrainSet, ValidationSet
from moe.data.token_shard import Ints, TokenShard
from moe.recipe.shapes import PADDING, marked
from parallel.errors import BadInput, counted
from parallel.fixes import Set

IDS, _MASK, _LABELS = _COLUMNS = ("input_ids", "attention_mask", "labels")
_LOOKED_AT = 8  # number of training samples that are hashed to identify the data


@dataclass(frozen=True)
class Samples:
    """Samples `first` to `first + num_windows - 1` of an indexable source, with the interface of `Sequences` in moe/data/order.py. `name`:
    train or validation, for error messages."""

    source: Any
    max_length: int
    vocab_size: int
    name: str
    first: int
    num_windows: int

    def read(self, windows: Ints, columns: Ints | None = None) -> Ints:
        """Return the samples with the indices `windows` [n], counted from `first`, as ids [n, max_length + 1] int64, or only the given
        columns. Raises BadInput for a sample that `row` cannot convert."""
        rows = [self._row(self.first + int(number)) for number in windows]
        found = np.array(rows, dtype=np.int64).reshape(len(rows), self.max_length + 1)
        return found if columns is None else found[:, columns]

    def _row(self, number: int) -> Ints:
        what = f"data, sample {number} of {self.name}"
        try:
            sample = self.source[number]
        except Exception as error:
            raise BadInput(what, got=_said(error), needed="the ids of this sample", fix="correct the data") from error
        return row(sample, what=what, max_length=self.max_length, vocab_size=self.vocab_size)


@dataclass
class Stream:
    """Endless samples of an iterable, in the iterable's order. After the last sample, iteration starts again. say: prints a line."""

    source: Any
    max_length: int
    vocab_size: int
    say: Callable[[str], object]
    _rows: Iterator[Any] = field(default_factory=lambda: iter(()))
    _at: int = -1  # index of the next sample, not reset when the source is iterated again; -1: the source is not opened
    _read: int = 0  # number of samples read in the current iteration of the source

    def batch(self, step: int, shard: TokenShard) -> Ints:
        """Return one rank's part of the batch of step `step`, int64 of shape `shard.shape`. The first step is 0. Raises BadInput for a
        sample that `row` cannot convert."""
        first = step * shard.num_sequences
        if self._at != first:
            if first:
                self.say(f"data: reads {counted(first, 'sample')} again, up to where the run stopped")
            if self._at:  # if _at is 0, the method `first` has just opened the source
                self._begin()
            for _ in range(first):
                self._next()
        batch = [self._next() for _ in range(shard.num_sequences)]
        mine = batch[shard.sequences.start : shard.sequences.stop]
        return np.stack([self._row(at, sample) for at, sample in enumerate(mine, first + shard.sequences.start)])[:, shard.columns]

    def first(self) -> Ints:
        """Return the first sample, which `batch` will return again. Call this before `batch`."""
        self._begin()
        sample = self._next()
        self._rows, self._at, self._read = chain([sample], self._rows), 0, 0
        return self._row(0, sample)

    def _row(self, number: int, sample: Any) -> Ints:
        return row(sample, what=f"data, sample {number} of train", max_length=self.max_length, vocab_size=self.vocab_size)

    def _begin(self) -> None:
        if self._at >= 0 and iter(self.source) is self.source:
            raise BadInput("data", got="an iterator that was read already", needed="an iterator at its beginning", fix=_ITERABLE)
        self._rows, self._at, self._read = iter(self.source), 0, 0

    def _next(self) -> Any:
        while True:
            try:
                found = next(self._rows)
            except StopIteration:
                self._again()
                continue
            except Exception as error:
                raise BadInput(
                    f"data, sample {self._at} of train", got=_said(error), needed="the ids of this sample", fix="correct the data"
                ) from error
            self._at, self._read = self._at + 1, self._read + 1
            return found

    def _again(self) -> None:
        if not self._read:
            raise BadInput("data", got="an iterable without samples", needed="at least one sample", fix="give an iterable with samples")
        if iter(self.source) is self.source:
            got, needed = f"an iterator that ended after {counted(self._at, 'sample')}", "train.steps * train.global_batch samples"
            raise BadInput("data", got=got, needed=needed, fix=f"{_ITERABLE}, or lower train.steps")
        self._rows, self._read = iter(self.source), 0


class Given(NamedTuple):
    """A program's samples for training and validation, and a key that identifies them."""

    train: TrainSet | Stream
    validation: ValidationSet
    key: str


def open_given(given: Any, *, max_length: int, vocab_size: int, validation_share: float, seed: int, say: Callable[[str], object]) -> Given:
    """Open `given`: samples, or {"train": samples, "validation": samples}. Raises BadInput for anything else, and for too few samples.
    `validation_share`: share of the samples, at the end, that is held out if none are given for validation. `say` prints a line."""
    sides = dict(given) if isinstance(given, Mapping) else {"train": given}
    if "train" not in sides or sides.keys() - {"train", "validation"}:
        needed, fix = "a dict of train, or of train and validation", 'write {"train": samples, "validation": samples}'
        raise BadInput("data", got=f"a dict of {', '.join(map(str, sides)) or 'nothing'}", needed=needed, fix=fix)
    train, held = sides["train"], sides.get("validation")
    lengths = {name: _length(name, side) for name, side in sides.items() if side is not None}

    def samples(name: str, source: Any, first: int, count: int) -> Samples:
        return Samples(source, max_length, vocab_size, name, first, count)

    if held is not None:
        if lengths["validation"] is None:
            needed = "samples with len() and [], because each evaluation reads the same ones"
            raise BadInput("data, validation", got=f"a {type(held).__name__}", needed=needed, fix="give a list of samples")
        validation = samples("validation", held, 0, lengths["validation"])
    count = lengths["train"]
    if count is None:
        if held is None:
            got, fix = f"a {type(train).__name__}, which has no len() and []", 'give {"train": it, "validation": a list of samples}'
            raise BadInput("data", got=got, needed="samples of which the last can be held out for validation", fix=fix)
        key = _key(type(train).__qualname__, [], validation)
        return Given(Stream(train, max_length, vocab_size, say), ValidationSet(validation, None), key)
    if held is None:
        if count < 2:
            raise BadInput("data", got=counted(count, "sample"), needed="at least 2, of which one is held out", fix="give more samples")
        kept_back = min(count - 1, max(1, round(count * validation_share)))
        count -= kept_back
        validation = samples("train", train, count, kept_back)
    inside = samples("train", train, 0, count)
    some = [inside.read(np.array([at * (count - 1) // (_LOOKED_AT - 1)])) for at in range(_LOOKED_AT)]
    return Given(TrainSet(inside, seed), ValidationSet(validation, None), _key(f"{count}", some, validation))


def _length(name: str, side: Any) -> int | None:
    """Return the length of an indexable source; None for an iterable. Raises BadInput for anything else, or an empty source."""
    if hasattr(side, "__getitem__") and hasattr(side, "__len__") and not isinstance(side, str | bytes | Mapping):
        count = len(side)
        if count < 1:
            raise BadInput(f"data, {name}", got="no samples", needed="at least one", fix="give samples")
        return count
    if not hasattr(side, "__iter__") or isinstance(side, str | bytes | Mapping):
        needed = "samples: an object with len() and [], or an iterable"
        raise BadInput(f"data, {name}", got=f"a {type(side).__name__}", needed=needed, fix="give for example a list of lists of ids")
    if hasattr(side, "dataset") and hasattr(side, "batch_size"):
        fix = f"give the dataset that it loads: data={type(side).__name__}(...).dataset"
        raise BadInput(f"data, {name}", got=f"a {type(side).__name__}, which makes batches", needed="samples, one sequence each", fix=fix)
    return None


def row(sample: Any, *, what: str, max_length: int, vocab_size: int) -> Ints:
    """Return a sample as ids [max_length + 1] int64, padded with PADDING. An id that is not predicted becomes -101 - id, which is below 0.
    `what`: the sample's name in error messages. Raises BadInput unless the sample has 2 to max_length + 1 ids of the vocabulary,
    and at least one after the first is predicted."""
    columns = columns_of(sample, what)
    count = len(columns[IDS])
    if not 2 <= count <= max_length + 1:
        fix = "cut it" | Set("model.max_length", count - 1) if count > 1 else _NOTHING
        raise BadInput(what, got=counted(count, "id"), needed=f"2 to model.max_length + 1 = {max_length + 1}", fix=fix)
    ids, predicted = ids_of(columns, what, vocab_size=vocab_size)
    if not predicted[1:].any():  # the first id is never predicted, because no id precedes it
        raise BadInput(f"{what}, {_LABELS}", got=f"only {PADDING}", needed="at least one id after the first label", fix=_NOTHING)
    found = np.full(max_length + 1, PADDING, dtype=np.int64)
    found[:count] = np.where(predicted, ids, marked(ids))
    return found


def columns_of(sample: Any, what: str) -> dict[str, Ints]:
    """Return column name -> column of a sample, without the padding that attention_mask shows. A sequence alone is the column input_ids.
    `what`: the sample's name in error messages. Raises BadInput for other columns, unequal lengths, and values that are no whole
    numbers."""
    columns = {name: _numbers(column, f"{what}, {name}") for name, column in _columns(sample, what).items()}
    count = len(columns[IDS])
    for name, column in columns.items():
        if len(column) != count:
            raise BadInput(f"{what}, {name}", got=counted(len(column), "number"), needed=f"{count}, one for each id", fix=f"correct {name}")
    kept = _unmasked(columns, what) if _MASK in columns else count
    return {name: column[:kept] for name, column in columns.items()}


def ids_of(columns: Mapping[str, Ints], what: str, *, vocab_size: int, other: str | None = None) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return a sample's ids, int64 [n], and whether each is predicted: its label is not PADDING. `columns`: from `columns_of`. `what`: the
    sample's name in error messages. `other`: fix for an id that is too large; None: a larger data.vocab_size. Raises BadInput for an id
    outside the vocabulary, and for a label that is neither PADDING nor the id at its position."""
    ids = columns[IDS].astype(np.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        larger = Set("data.tokenizer", "ids") & Set("data.vocab_size", wrong + 1, said=f"at least {wrong + 1}")
        got, needed = f"the id {wrong}", f"ids from 0 to {vocab_size - 1}"
        raise BadInput(what, got=got, needed=needed, fix="give ids of the vocabulary" if wrong < 0 else other or larger)
    labels = columns.get(_LABELS, ids)
    predicted = labels != PADDING
    if len(shifted := np.flatnonzero(predicted & (labels != ids))):
        at = int(shifted[0])
        got, needed = f"{labels[at]} at index {at}, where input_ids has {ids[at]}", f"the same id, or {PADDING}"
        raise BadInput(f"{what}, {_LABELS}", got=got, needed=needed, fix="do not shift labels: each id is predicted from the ids before it")
    return ids, predicted


_NOTHING = "leave the sample out: nothing is predicted in it"
_ITERABLE = "give the object that iter() was called with"


def _columns(sample: Any, what: str) -> dict[str, Any]:
    """Return column name -> column of a sample; a sequence alone is the column input_ids. `what`: the sample's name in error messages.
    Raises BadInput for missing and unknown columns."""
    if not (isinstance(sample, Mapping) or (hasattr(sample, "keys") and hasattr(sample, "__getitem__"))):
        return {IDS: sample}
    names = list(sample.keys())
    if IDS not in names:
        fix = "name the column with the ids input_ids"
        raise BadInput(what, got=f"a row of {', '.join(map(str, names))}", needed="ids, or a row with input_ids", fix=fix)
    unread = [str(name) for name in names if name not in _COLUMNS]
    if unread:
        needed = f"only the columns {', '.join(_COLUMNS)}"
        kept = ", ".join(f'"{name}"' for name in _COLUMNS if name in names)
        raise BadInput(what, got=f"a row with {', '.join(unread)}", needed=needed, fix=f"give rows with only {kept}")
    return {name: sample[name] for name in names}


def _numbers(column: Any, what: str) -> Ints:
    what = what.removesuffix(f", {IDS}")
    try:
        found = np.asarray(column)
    except Exception as error:
        raise BadInput(what, got=_said(error), needed="a list of ids", fix="give ids as a list, an array or a tensor") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        got = f"numbers of shape {list(found.shape)} and {found.dtype}" if found.dtype.kind in "iufb" else f"a {type(column).__name__}"
        fix = "give one sequence of token ids for each sample" + (", not a batch of them" if found.ndim == 2 else "")
        raise BadInput(what, got=got, needed="whole numbers in one dimension", fix=fix)
    return found


def _unmasked(columns: dict[str, Ints], what: str) -> int:
    """Return the number of ids before the padding. `columns`: a sample's. `what`: the sample's name in error messages. Raises BadInput for
    a mask with zeros before ones, and for a label in the padding."""
    mask = columns[_MASK]
    count = int(np.count_nonzero(mask))
    if not np.array_equal(mask, np.arange(len(mask)) < count):
        wrong = next((int(one) for one in mask if one not in (0, 1)), None)
        got = "a zero before a one" if wrong is None else f"the number {wrong}"
        fix = "pad at the end (padding_side right), or leave padding out"
        raise BadInput(f"{what}, {_MASK}", got=got, needed="ones, then zeros for the padding", fix=fix)
    if _LABELS in columns and (columns[_LABELS][count:] != PADDING).any():
        needed = f"{PADDING} wherever attention_mask is 0: padding is not predicted"
        raise BadInput(f"{what}, {_LABELS}", got="a label in the padding", needed=needed, fix=f"write {PADDING} for the padding")
    return count


def _key(about: str, some: list[Ints], validation: Samples) -> str:
    digest = hashlib.sha256(f"given {about} {validation.num_windows}".encode())
    for rows in (*some, validation.read(np.array([0]))):
        digest.update(rows.tobytes())
    return digest.hexdigest()[:24]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
