"""Mixes several data sources by weights. A sequence's source depends only on its global index: its number in the order of the run.

    index       0 .. 9999 | 10000 .. 19999 | ...           blocks of 10,000 sequences
    a block     A A A A A A B B B C  shuffled               each source has its exact share of every block
    index g     the n-th sequence of A                      n = block * (A's share) + A's sequences before g in the block

So any number of ranks reads the same sequences, and a resumed run continues exactly. Each source has its own epochs, shuffled as if it were
the only source. A source has at least one of the 10,000 sequences of a block; shares are rounded by largest remainders (Hamilton's method).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe.data.order import Held, TrainSet, ValidationSet, permutation
from moe.data.token_shard import Ints, TokenShard

BLOCK = 10_000  # sequences of a block


def shares(weights: Sequence[float], whole: int, *, least: int = 0) -> tuple[int, ...]:
    """Return integers in proportion to the weights, rounded by largest remainders. Their sum is `whole`; each is at least `least`."""
    exact = np.array(weights, dtype=np.float64) / np.sum(weights) * whole
    found = np.maximum(np.floor(exact).astype(np.int64), least)
    while found.sum() > whole:  # minimum shares made the sum too large: take from the largest share
        found[found.argmax()] -= 1
    for i in np.argsort(np.floor(exact) - exact, kind="stable")[: whole - found.sum()]:
        found[i] += 1
    return tuple(int(n) for n in found)


@dataclass(frozen=True)
class MixedTrain:
    """Endless training sequences of several sources, in an order that the seed decides. `parts`, `weights`: one for each source; the
    weights may have any sum."""

    parts: tuple[TrainSet, ...]
    weights: tuple[float, ...]
    seed: int

    def located(self, global_indices: npt.ArrayLike) -> tuple[Ints, Ints]:
        """Return (index of the source [n], index in the source's order [n]) for the sequences with these global indices [n]."""
        counts = shares(self.weights, BLOCK, least=1)
        starts = np.concatenate([[0], np.cumsum(counts)])
        blocks, at = np.divmod(np.array(global_indices, dtype=np.int64).reshape(-1), BLOCK)
        # a shuffle depends on seed and epoch: sources use epochs 0, 1, ..., so blocks use -1, -2, ... to get other shuffles
        for block in np.unique(blocks):
            here = blocks == block
            at[here] = permutation(at[here], size=BLOCK, seed=self.seed, epoch=-1 - int(block))
        source = np.searchsorted(starts, at, side="right") - 1
        return source, blocks * np.array(counts)[source] + at - starts[source]

    def sequences(self, global_indices: npt.ArrayLike, columns: Ints | None = None) -> Ints:
        """Return the sequences with these global indices: [n] -> [n, max_length + 1] int64, or only the given columns."""
        source, places = self.located(global_indices)
        return gathered([part.sequences(places[source == i], columns) for i, part in enumerate(self.parts)], source)

    def batch(self, step: int, shard: TokenShard) -> Ints:
        """Return one rank's part of the batch of step `step`, int64 of shape `shard.shape`. The first step is 0."""
        return self.sequences(shard.places(step), shard.columns)


@dataclass(frozen=True)
class MixedValidation:
    """Held-out sequences of several sources, in proportion to the weights, source after source. `parts`, `weights`: one for each source."""

    parts: tuple[ValidationSet, ...]
    weights: tuple[float, ...]

    def held(self, shard: TokenShard) -> Held:
        """Return one rank's part of `shard.num_sequences` sequences, and the mean number of bytes per token over all of them."""
        counts = shares(self.weights, shard.num_sequences)
        chosen = [np.arange(n, dtype=np.int64) * part.windows.num_windows // max(n, 1) for part, n in zip(self.parts, counts, strict=True)]
        text_bytes, tokens = map(
            sum, zip(*(part.predicted(windows) for part, windows in zip(self.parts, chosen, strict=True)), strict=True)
        )
        mine = slice(shard.sequences.start, shard.sequences.stop)
        source, windows = np.repeat(np.arange(len(self.parts)), counts)[mine], np.concatenate(chosen)[mine]
        found = [part.windows.read(windows[source == i], shard.columns) for i, part in enumerate(self.parts)]
        return Held(gathered(found, source), text_bytes / tokens)


def gathered(found: Sequence[Ints], source: Ints) -> Ints:
    """Return the rows of all sources in the order of `source` [n]: row i is the next unused row of `found[source[i]]`."""
    rows = np.empty((len(source), found[0].shape[1]), dtype=np.int64)
    for i, part in enumerate(found):
        rows[source == i] = part
    return rows
