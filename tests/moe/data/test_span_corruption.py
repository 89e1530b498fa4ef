"""Span corruption has the numbers of T5's rule, inputs and targets together give the text back, and rows do not depend on the ranks.

Only these tests detect a lost hidden token, a span too many, sentinels in another order, and spans that depend on the rank.
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moe.data import open_data
from moe.data.mixture import MixedTrain
from moe.data.order import TrainSet, ValidationSet, Windows
from moe.data.span_corruption import CorruptedTrain, CorruptedValidation, SpanCorruption, WithSentinels, strange
from moe.data.token_shard import TokenShard
from moe.data.tokenizer import Bytes
from moe.recipe.sections import Data
from moe.recipe.shapes import inputs_within, spans_of
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh

V, END = 300, 7


def objective(inputs: int, *, seed: int = 3) -> SpanCorruption:
    return SpanCorruption(spans_of(inputs), V, END, seed)


def train_of(inputs: int, *, tokens: int = 5000) -> CorruptedTrain:
    stream = np.random.default_rng(0).integers(8, 200, tokens)
    return CorruptedTrain(TrainSet(Windows(stream, spans_of(inputs).text, "train"), seed=3), objective(inputs))


def test_the_published_lengths() -> None:
    """For 512 inputs, T5's published pretraining has texts of 568 tokens and 114 targets."""
    s = spans_of(512)
    assert (s.text, s.hidden, s.num_spans, s.inputs, s.targets) == (568, 85, 28, 512, 114)


def test_every_length_of_inputs_has_a_text() -> None:
    for inputs in range(3, 1500):
        s = spans_of(inputs)
        assert s.inputs == inputs and s.text + 2 * s.num_spans + 2 == s.inputs + s.targets
        assert abs(s.hidden - 0.15 * s.text) <= 0.85 and 1 <= s.num_spans <= s.hidden < s.text


def put_together(row: np.ndarray, inputs: int) -> list[int]:
    """Return the text of a row: its inputs, with each sentinel replaced by the tokens that follow it in the targets."""
    read, start, written = row[:inputs].tolist(), row[inputs], row[inputs + 1 :].tolist()
    assert start == 0 and read.pop() == END and written.pop() == END
    spans: dict[int, list[int]] = {}
    for token in written:
        if token >= 200:
            spans[token] = []
        else:
            spans[max(spans, key=lambda sentinel: -sentinel)].append(token)
    sentinels = [token for token in read if token >= 200]
    assert sentinels == list(spans) == [V - 1 - n for n in range(len(sentinels))] and all(spans.values())
    return [t for token in read for t in (spans[token] if token >= 200 else [token])]


@pytest.mark.parametrize("inputs", [5, 33, 128])
def test_inputs_and_targets_together_are_the_text(inputs: int) -> None:
    data, s = train_of(inputs), spans_of(inputs)
    shard = TokenShard.whole(12, inputs + s.targets, source=inputs)
    for step in (0, 7, 1000):
        rows = data.batch(step, shard)
        assert rows.shape == shard.shape
        assert isinstance(data.inner, TrainSet)
        texts = data.inner.batch(step, TokenShard.whole(12, s.text))[:, :-1]
        assert [put_together(row, inputs) for row in rows] == texts.tolist()


def drawn(place: int, size: int, seed: int, draw: int) -> int:
    """One image of `permutation`, in Python's integers."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = struct.unpack("<8Q", hashlib.sha512(f"spans {seed} {draw}".encode()).digest())
    while True:
        row, column = divmod(place, columns)
        for n, key in enumerate(keys):
            x = (row if n % 2 else column) + key & 2**64 - 1
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
            x = (x ^ x >> 27) * 0x94D049BB133111EB & 2**64 - 1
            x ^= x >> 31
            row, column = (row, (column + x) % columns) if n % 2 else ((row + x) % rows, column)
        place = row * columns + column
        if place < size:
            return place


def one_by_one(text: list[int], inputs: int, place: int, side: int, *, seed: int) -> list[int]:
    """Return the row of one text: its parts, cut and joined one after another."""
    s = spans_of(inputs)
    lengths = []
    for tokens, draw in ((s.text - s.hidden, 4 * place + 2 * side), (s.hidden, 4 * place + 2 * side + 1)):
        ends = sorted(drawn(n, tokens - 1, seed, draw) + 1 for n in range(s.num_spans - 1))
        lengths.append([end - start for start, end in zip([0, *ends], [*ends, tokens], strict=True)])
    read: list[int] = []
    written: list[int] = []
    for number, (kept, hidden) in enumerate(zip(*lengths, strict=True)):
        read += [*text[:kept], V - 1 - number]
        written += [V - 1 - number, *text[kept : kept + hidden]]
        text = text[kept + hidden :]
    return [*read, END, 0, *written, END]


@pytest.mark.parametrize("inputs", [5, 16, 33, 128, 512])
def test_a_batch_of_texts_is_cut_as_one_text_after_another(inputs: int) -> None:
    """The rows are functions of seed and index that no release may change: a resumed run goes on with the same spans."""
    draw = np.random.default_rng(inputs)
    for count in (0, 1, 7):
        texts, places = draw.integers(8, 200, (count, spans_of(inputs).text)), draw.integers(0, 10**6, count)
        for side in (0, 1):
            want = [one_by_one(t, inputs, p, side, seed=3) for t, p in zip(texts.tolist(), places.tolist(), strict=True)]
            assert objective(inputs).rows(texts, places, side=side).tolist() == want


def test_a_sequence_hides_other_spans_each_time_it_is_read() -> None:
    data = train_of(33, tokens=2 * spans_of(33).text + 1)  # two windows, each read about 20 times
    rows = data.batch(0, TokenShard.whole(40, 33 + spans_of(33).targets, source=33))
    assert len({tuple(row) for row in rows}) > 30
    assert len({tuple(np.flatnonzero(row[:33] >= 200)) for row in rows}) > 15  # different places of sentinels; 29 are possible


def test_where_spans_begin_is_spread_evenly() -> None:
    """Each inner position of a text is hidden in about 15 % of 400 rows. The first position is never hidden, the last always."""
    made = objective(128)
    s = made.spans
    rows = made.rows(np.tile(np.arange(8, 8 + s.text), (400, 1)), np.arange(400))
    shown = np.array([np.isin(np.arange(8, 8 + s.text), row[:128]) for row in rows])
    assert shown[:, 0].all() and not shown[:, -1].any()
    hidden = 1 - shown[:, 8:-8].mean(0)
    assert abs(hidden.mean() - 0.15) < 0.02 and hidden.min() > 0.06 and hidden.max() < 0.26


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_together_read_what_one_reads(mixed: bool) -> None:
    data, s = train_of(33), spans_of(33)
    if mixed:
        assert isinstance(data.inner, TrainSet)
        other = TrainSet(Windows(np.arange(8, 150), s.text, "train"), seed=3)
        data = CorruptedTrain(MixedTrain((data.inner, other), (3.0, 1.0), seed=3), objective(33))
    length = 33 + s.targets
    whole = data.batch(5, TokenShard.whole(12, length, source=33))
    parts = [data.batch(5, TokenShard.of(Mesh.of(Degrees(dp=4), rank), num_sequences=12, length=length, source=33)) for rank in range(4)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_rank_of_sequence_parallelism_reads_its_positions_of_both_halves() -> None:
    length, data = 12 + spans_of(12).targets, train_of(12)
    whole, shards = data.batch(5, TokenShard.whole(3, length, source=12)), []
    for rank in range(2):
        shard = TokenShard.of(Mesh.of(Degrees(sp=2), rank), num_sequences=3, length=length, order="zigzag", source=12)
        assert np.array_equal(shard.inputs(data.batch(5, shard)), whole[:, list(shard.positions)]) and shard.source == 6
        shards += shard.positions
    assert sorted(shards) == list(range(length))


def test_evaluation_is_the_same_each_time_and_on_any_ranks() -> None:
    s = spans_of(33)
    stream = np.random.default_rng(1).integers(8, 200, 3000)
    held = ValidationSet(Windows(stream, s.text, "validation"), np.full(200, 2, dtype=np.int64))
    data, length = CorruptedValidation(held, objective(33)), 33 + s.targets
    whole = data.held(TokenShard.whole(8, length, source=33))
    parts = [data.held(TokenShard.of(Mesh.of(Degrees(dp=2), rank), num_sequences=8, length=length, source=33)) for rank in range(2)]
    assert np.array_equal(np.concatenate([part.sequences for part in parts]), whole.sequences)
    assert whole.bytes_per_token == parts[1].bytes_per_token == 2 * s.hidden / s.targets


def test_the_length_advised_for_a_short_text_fits_it_and_no_longer_one_does() -> None:
    """For a text that is too short, the proposed model.max_length is the longest with which the text has a window."""
    for tokens in range(4, 201):
        with pytest.raises(BadInput, match="set model.max_length to at most") as refused:
            Windows(np.zeros(tokens, np.int64), tokens, "train", inputs_within)
        advised = int(str(refused.value.fix).split()[-1])
        assert Windows(np.zeros(tokens, np.int64), spans_of(advised).text, "train", inputs_within).num_windows >= 1
        with pytest.raises(BadInput, match=f"to at most {advised}$"):
            Windows(np.zeros(tokens, np.int64), spans_of(advised + 1).text, "train", inputs_within)


def test_targets_are_what_the_decoder_writes() -> None:
    shard = TokenShard.whole(1, 6, source=4)
    row = np.array([[11, 12, 13, 14, 0, 21, 22]])
    assert shard.inputs(row).tolist() == [[11, 12, 13, 14, 0, 21]] and shard.targets(row).tolist() == [[21, 22]]


def test_sentinels_are_text_and_back() -> None:
    tokenizer = WithSentinels(Bytes(), vocab_size=270, num_sentinels=3)
    text = "de\u00e9 <extra_id_0>(x):<extra_id_2><extra_id_3> <extra_id_x>"
    ids = tokenizer.encode(text).tolist()
    assert ids[5] == 269 and ids.count(267) == 1 and 268 not in ids and tokenizer.decode(ids) == text
    assert tokenizer.beginning(text) == [*ids, 0] and tokenizer.vocab_size == 270 and tokenizer.decode([260, 266]) == ""
    assert tokenizer.beginning("") == [0]
    assert (strange(["", text], 3), strange([text], 4)) == ("<extra_id_3>", None)
    for no_sentinel in ("1" * 5000, "\u0661"):  # more digits than int() accepts; an Arabic digit
        assert tokenizer.decode(tokenizer.encode(f"<extra_id_{no_sentinel}>").tolist()) == f"<extra_id_{no_sentinel}>"


def test_a_text_that_is_too_short_is_told_the_length_that_fits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghi\n" * 20)
    open_it = partial(open_data, Data(path=str(tmp_path / "a.txt"), objective="span_corruption"), seed=0, cache=tmp_path / "cache")
    with pytest.raises(BadInput, match="set model.max_length to at most") as refused:
        open_it(max_length=190, vocab_size=300, log=lambda _: None)
    fitting = int(str(refused.value).split()[-1])
    with pytest.raises(BadInput, match="train text"):
        open_it(max_length=fitting + 1, vocab_size=300, log=lambda _: None)
    with pytest.raises(BadInput, match="validation text"):
        open_it(max_length=fitting, vocab_size=300, log=lambda _: None)
    data = open_it(max_length=9, vocab_size=257, log=lambda _: None)
    assert (
        data.train.batch(0, TokenShard.whole(4, 9 + spans_of(9).targets, source=9)).max() == 256
    )  # the first sentinel is the last id of the vocabulary
