"""TokenShard assigns every token of a batch to one rank of each copy, on any mesh; compared with counts over all ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.order import TrainSet, ValidationSet, Windows
from moe.data.token_shard import TokenShard
from moe.nn.vocabulary import PADDING
from moe.train.parts.passes import Tokens, passes_of
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.sequence.order import ORDERS

DEGREES = st.builds(Degrees, dp=st.integers(1, 3), sp=st.integers(1, 4), tp=st.integers(1, 3), pp=st.integers(1, 2))


def shards_of(degrees: Degrees, *, num_sequences: int, length: int, order: str = "contiguous") -> list[TokenShard]:
    meshes = (Mesh.of(degrees, rank) for rank in range(degrees.world))
    return [TokenShard.of(mesh, num_sequences=num_sequences, length=length, order=order) for mesh in meshes]


@given(degrees=DEGREES, each=st.integers(1, 3), tokens=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_token_is_read_once_by_each_copy(degrees: Degrees, each: int, tokens: int) -> None:
    """The ranks of `TokenShard.axes` together read each token of the batch once; the copies are the ranks of tp and pp."""
    num_sequences, length = degrees.dp * each, degrees.sp * tokens
    shards = shards_of(degrees, num_sequences=num_sequences, length=length)
    seen = Counter((sequence, position) for shard in shards for sequence in shard.sequences for position in shard.positions)
    assert set(seen) == {(sequence, position) for sequence in range(num_sequences) for position in range(length)}
    assert set(seen.values()) == {degrees.tp * degrees.pp}
    for rank, shard in enumerate(shards):
        together = {rank}  # the ranks over which sums along all `axes` run
        for axis in (axis.name for axis in shard.axes):
            together = {other for r in together for other in Mesh.of(degrees, r).axis(axis).ranks}
        ours = Counter((s, p) for r in together for s in shards[r].sequences for p in shards[r].positions)
        assert len(ours) == shard.num_tokens and set(ours.values()) == {1}


@given(
    degrees=DEGREES,
    each=st.integers(1, 3),
    tokens=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    step=st.integers(0, 9),
    order=st.sampled_from(ORDERS),
)
@settings(max_examples=60, deadline=None)
def test_data_targets_and_positions_are_those_of_one_process(
    degrees: Degrees, each: int, tokens: int, microbatches: int, step: int, order: str
) -> None:
    num_sequences, length = degrees.dp * each * microbatches, degrees.sp * tokens * (2 if order == "zigzag" else 1)
    text = np.arange(10 * length + 1, dtype=np.uint32)
    train, held_out = (
        TrainSet(Windows(text, length, "train"), seed=3),
        ValidationSet(Windows(text, length, "validation"), np.ones(9999, np.int64)),
    )
    whole = TokenShard.whole(num_sequences, length)
    batch, held = train.batch(step, whole), held_out.held(whole).sequences
    index = torch.arange(num_sequences * length).view(num_sequences, length)
    for shard in shards_of(degrees, num_sequences=num_sequences, length=length, order=order):
        mine = train.batch(step, shard)
        assert mine.shape == shard.shape and np.array_equal(mine, shard.of_batch(batch))
        assert np.array_equal(held_out.held(shard).sequences, shard.of_batch(held))
        rows, columns = slice(shard.sequences.start, shard.sequences.stop), list(shard.positions)
        parts = torch.from_numpy(mine).chunk(microbatches)
        passes = passes_of(parts, Tokens(shard.num_tokens, shard.num_tokens, None), shard)
        assert torch.equal(torch.cat([p.inputs_BL for p in passes]), torch.from_numpy(batch[rows, :-1][:, columns]))
        assert torch.equal(torch.cat([p.targets_BL for p in passes]), torch.from_numpy(batch[rows, 1:][:, columns]))
        assert torch.equal(torch.cat([p.context.position_T for p in passes]), index[rows, columns].flatten())
        for p in passes:
            assert p.context.sequence_B is not None and p.context.place_L is not None
            assert torch.equal(p.context.position_T.view(p.inputs_BL.shape), p.context.sequence_B[:, None] * length + p.context.place_L)
        assert sum(p.share for p in passes) == pytest.approx(shard.targets(mine).size / (num_sequences * length))


def test_counts_over_shards_equal_counts_over_the_batch() -> None:
    """Neighbouring shards of a sequence share a column, which is a target in one and an input in the other. Numbers of inputs, of targets
    and of targets after padding, summed over all shards, equal those of the batch."""
    degrees, num_sequences, length = Degrees(dp=2, sp=3), 4, 6
    batch = torch.arange(num_sequences * (length + 1)).view(num_sequences, length + 1)
    batch[0, 4:] = batch[3, 1:] = PADDING
    batch[2, 2] = PADDING  # padding at the border of two shards, with tokens after it
    parts = [shard.of_batch(batch) != PADDING for shard in shards_of(degrees, num_sequences=num_sequences, length=length)]
    valid = batch != PADDING
    for count in (lambda v: v[:, :-1].sum(), lambda v: v[:, 1:].sum(), lambda v: (v[:, 1:] & ~v[:, :-1]).sum()):
        assert sum(int(count(part)) for part in parts) == int(count(valid))


def test_the_part_of_a_rank_tells_the_batch() -> None:
    for degrees in (Degrees(dp=3, tp=2), Degrees(dp=2, sp=2, pp=2)):
        for rank in range(degrees.world):
            mesh = Mesh.of(degrees, rank)
            shard = TokenShard.of(mesh, num_sequences=6, length=8)
            assert TokenShard.holding(mesh, shard.shape) == shard


@pytest.mark.parametrize(
    ("degrees", "said"),
    [(Degrees(dp=4), "sequences: got 6, needed a multiple of dp=4"), (Degrees(sp=4), "needed a multiple of degrees.sp = 4")],
)
def test_a_batch_that_does_not_divide_is_refused(degrees: Degrees, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        TokenShard.of(Mesh.of(degrees), num_sequences=6, length=6)
