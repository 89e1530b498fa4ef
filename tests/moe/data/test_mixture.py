"""A mixture of sources has the exact shares of its weights, reads every source in its own order without gaps, and gives the same sequences
on any number of ranks and after any resume. Only these tests detect a source whose sequences come twice or never."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from moe.data import MixedTrain, TrainSet, open_data
from moe.data.mixture import BLOCK, MixedValidation, shares
from moe.data.order import ValidationSet, Windows
from moe.data.token_shard import TokenShard
from moe.recipe.sections import Data
from parallel.mesh.mesh import Degrees, Mesh

LENGTH = 3


def source(first: int, num_windows: int) -> Windows:
    return Windows(np.arange(first, first + num_windows * LENGTH + 1, dtype=np.uint32), LENGTH, "train")


def mixed(weights: tuple[float, ...], sizes: tuple[int, ...], seed: int = 5) -> MixedTrain:
    return MixedTrain(tuple(TrainSet(source(10_000_000 * n, size), seed) for n, size in enumerate(sizes)), weights, seed)


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (0.7, 0.2, 0.1), (1e6, 1.0, 1e-9), (2.0, 2.0, 2.0, 1.0)])
def test_shares_are_hamiltons(weights: tuple[float, ...]) -> None:
    """`shares` equals the largest-remainder method (Hamilton) computed in exact fractions; with a minimum, the sum is still exact."""
    whole = sum(map(Fraction, weights))
    for total in (1, 7, 64, BLOCK):
        exact = [Fraction(w) / whole * total for w in weights]
        expected = [int(e) for e in exact]
        for i in sorted(range(len(weights)), key=lambda i: (-(exact[i] - int(exact[i])), i))[: total - sum(expected)]:
            expected[i] += 1
        assert shares(weights, total) == tuple(expected)
    assert sum(shares(weights, BLOCK, least=1)) == BLOCK and min(shares(weights, BLOCK, least=1)) >= 1


def test_each_block_holds_the_shares_and_each_source_its_own_order() -> None:
    """The first blocks hold exactly the first n sequences of each source, n being its share; blocks are shuffled differently."""
    data = mixed((7.0, 2.0, 1.0), (911, 5000, 37))
    for blocks in (1, 3):
        found, places = data.located(range(blocks * BLOCK))
        for i, share in enumerate((7000, 2000, 1000)):
            assert sorted(places[found == i].tolist()) == list(range(blocks * share))
    first, second = (data.located(range(b * BLOCK, (b + 1) * BLOCK))[0] for b in (0, 1))
    assert (first != second).any() and Counter(first.tolist()) == Counter(second.tolist())
    runs = np.diff(np.flatnonzero(np.diff(first)))
    assert runs.max() < 100, "sources alternate, they do not come one after another"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_and_resumes_read_the_same_sequences(ranks: int) -> None:
    data, batch = mixed((3.0, 1.0), (40, 11)), 8
    expected = data.sequences(range(BLOCK - 20, BLOCK + 20))
    for step in range(
        (BLOCK - 20 + 7) // batch, (BLOCK + 16) // batch
    ):  # steps around the end of the first block, in which the sources have run many epochs
        shards = [TokenShard.of(Mesh.of(Degrees(dp=ranks), r), num_sequences=batch, length=LENGTH) for r in range(ranks)]
        together = np.concatenate([data.batch(step, shard) for shard in shards])
        at = step * batch - (BLOCK - 20)
        assert np.array_equal(together, expected[at : at + batch])


def test_a_sequence_is_the_sources_own() -> None:
    data = mixed((3.0, 1.0), (40, 11))
    found, places = data.located(range(500))
    for i, part in enumerate(data.parts):
        assert np.array_equal(data.sequences(range(500))[found == i], part.sequences(places[found == i]))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_validation_has_the_shares_and_its_bytes_are_those_of_all_ranks(ranks: int) -> None:
    weight_of_id = np.arange(1, 200, dtype=np.int64)
    parts = tuple(ValidationSet(Windows(np.arange(a, a + 40) % 199, LENGTH, "validation"), weight_of_id) for a in (0, 77))
    data = MixedValidation(parts, (4.0, 1.0))
    held = [data.held(TokenShard.of(Mesh.of(Degrees(dp=ranks), r), num_sequences=10, length=LENGTH)) for r in range(ranks)]
    whole = np.concatenate([h.sequences for h in held])
    assert np.array_equal(whole[:8], parts[0].held(TokenShard.whole(8, LENGTH)).sequences)
    assert np.array_equal(whole[8:], parts[1].held(TokenShard.whole(2, LENGTH)).sequences)
    assert {h.bytes_per_token for h in held} == {weight_of_id[whole[:, 1:]].sum() / 30}


def test_weights_whose_sum_is_no_float_are_refused() -> None:
    values = {"sources": [{"path": "a", "weight": 1e308}, {"path": "b", "weight": 1e308}]}
    with pytest.raises(ValidationError, match="less than 1000000000000000000"):
        Data.model_validate(values)
    assert shares((9e17,) * 4, BLOCK) == (2500,) * 4


def test_sources_share_the_first_ones_tokenizer(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"the {name} text of many words and lines\n" * 99)
    values = {"sources": [{"path": str(tmp_path / f"{n}.txt"), "weight": w} for n, w in (("a", 3), ("b", 1))]}
    say = {"max_length": 8, "vocab_size": 300, "seed": 0, "cache": tmp_path / "cache", "log": lambda _: None}
    data = open_data(Data.model_validate(values | {"tokenizer": "bpe", "vocab_size": 270}), **say)
    alone = open_data(Data(path=str(tmp_path / "a.txt"), tokenizer="bpe", vocab_size=270), **say)
    assert data.tokenizer.describe() == alone.tokenizer.describe() and data.key != alone.key
    text = data.tokenizer.decode(data.train.batch(0, TokenShard.whole(64, 8)).reshape(-1))
    assert " a text" in text and " b text" in text
