"""The context of one forward pass: positions of its tokens in the step, padding, random seed, scale of auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.nn.routing_record import RoutingRecord
from parallel.errors import BadInput
from parallel.mesh.host import on_device
from parallel.numerics.random import key_of, uniform
from parallel.numerics.recompute import Replay
from parallel.numerics.supposed import supposed_as

Value = TypeVar("Value")
_OF_TOKENS = ("position_T", "valid_T", "tokens_T", "begins_T")


@dataclass(frozen=True)
class Context:
    """Facts about the tokens of one forward pass, usually a micro-batch.

    `position_T` int64 [T]: each token's index in the whole step. Random numbers depend on it, so they are equal on every layout.
    `sequence_B` int64 [B]: the sequences' indices in the step. `place_L` int64 [L]: position of each of the L tokens (columns) in its
    sequence. `length`: tokens of a whole sequence, of which this rank may hold a shard. `begins_T` bool [T]: True where a packed chat
    begins. `document_BS` int64 [B, S]: the number of each token's document in whole sequences; None: attention sees across documents.
    `source_document_BS`: the same of the encoder's tokens, for cross attention. `source`: the encoder reads the first `source` columns on
    this rank, and the decoder the others; 0: no encoder.

    `auxiliary_scale`: factor on auxiliary losses: this pass's share of the global batch's tokens, times the loss scale. `valid_T`
    bool [T]: False for padding. `whole_step(layer, sums)` returns a layer's sums over the tokens of the global batch (for its balance
    loss), given the sums over this pass's tokens; None: this pass is the whole batch. `replay`: stores decisions, such as routing, so that
    a recomputed pass repeats them. `tokens_T`: token ids, for hash routing. Routers write their chosen experts to `record_routing`, and
    take them from `replay_routing`."""

    seed: int
    step: int
    position_T: Tensor
    tokens_T: Tensor
    sequence_B: Tensor
    place_L: Tensor
    length: int
    auxiliary_scale: float | Tensor = 1.0
    valid_T: Tensor | None = None
    whole_step: Callable[[int, Tensor], Tensor] | None = None
    replay: Replay | None = None
    begins_T: Tensor | None = None
    document_BS: Tensor | None = None
    source_document_BS: Tensor | None = None
    source: int = 0
    record_routing: RoutingRecord | None = None
    replay_routing: RoutingRecord | None = None
    _kept: list[tuple[Tensor, tuple[object, ...], Any]] = field(default_factory=list, compare=False, repr=False)

    @staticmethod
    def of(
        tokens_BL: Tensor,
        *,
        seed: int = 0,
        step: int = 0,
        first_sequence: int = 0,
        auxiliary_scale: float = 1.0,
        valid_BL: Tensor | None = None,
        begins_BL: Tensor | None = None,
        positions: Sequence[int] | npt.NDArray[np.int64] | None = None,
        length: int | None = None,
        source: int = 0,
        record_routing: RoutingRecord | None = None,
        replay_routing: RoutingRecord | None = None,
    ) -> Context:
        """Make the context of tokens [B, L]. Row i is sequence `first_sequence` + i of the step. `source`: number of the encoder's tokens.
        `valid_BL` bool: False for padding. `begins_BL` bool: True where a packed chat begins. `positions`: positions of the columns in
        their sequences of `length` tokens; None: all L. The other arguments are fields of Context. Raise BadInput if a routing record has
        other sequences."""
        (batch, columns), device = tokens_BL.shape, tokens_BL.device
        length = length or columns
        assert positions is None or len(positions) == columns
        for record in (record_routing, replay_routing):
            if record is not None:
                last = columns - 1 if positions is None else int(max(positions))
                record.check_positions(range(first_sequence, first_sequence + batch), last, length)
        sequence_B = torch.arange(first_sequence, first_sequence + batch, device=device)
        place_L = torch.arange(columns, device=device) if positions is None else on_device(torch.tensor(positions), device)
        position_T = (sequence_B.unsqueeze(1) * length + place_L).flatten()
        valid_T, begins_T = (None if x is None else x.flatten() for x in (valid_BL, begins_BL))
        found = Context(seed, step, position_T, tokens_BL.flatten(), sequence_B, place_L, length, auxiliary_scale, valid_T)
        return replace(found, begins_T=begins_T, source=source, record_routing=record_routing, replay_routing=replay_routing)

    @staticmethod
    def fresh(tokens_BL: Tensor) -> Context:
        """Make a context with a seed from torch's generator, for a model without a trainer."""
        return Context.of(tokens_BL, seed=int(torch.randint(2**31, ()).item()))

    def remembering(self) -> Context:
        """Return a context that stores decisions, such as routing (`once`), so that recomputed activations repeat them."""
        return replace(self, replay=Replay())

    def of_columns(self, columns: slice) -> Context:
        """Return a context for these columns of every sequence. Only `position_T`, which random numbers need, is cut."""
        return replace(self, position_T=self.position_T.view(len(self.sequence_B), -1)[:, columns].flatten())

    def halves(self) -> tuple[Context, Context]:
        """Return (context of the encoder's tokens, context of the decoder's tokens). The decoder's positions begin at 0 again.
        Raise BadInput unless `source` is from 1 to L - 1."""
        place_L, length = self.place_L, len(self.place_L)
        if not 0 < self.source < length:
            needed = f"1 to {length - 1}: the encoder reads the first `source` of a sequence's {length} tokens, the decoder the others"
            raise BadInput("source", got=self.source, needed=needed, fix="make the context by Context.of(tokens, source=...)")

        def half(columns: slice, first: int) -> Context:
            tokens = self._changed(lambda x_T: x_T.view(-1, length)[:, columns].flatten())
            return replace(self, **tokens, place_L=place_L[columns] - first, source=0, _kept=[])

        return half(slice(0, self.source), 0), half(slice(self.source, length), self._whole_source(length))

    def _whole_source(self, columns: int) -> int:
        """Return the number of tokens that the encoder reads of a whole sequence, of which this rank has `columns` tokens."""
        return self.source * self.length // columns  # a rank holds the same fraction of the encoder's tokens as of all tokens

    def of_tokens(self, mine: Callable[[Tensor], Tensor], *, share: float | Tensor, together: Callable[[int, Tensor], Tensor]) -> Context:
        """Return the context of a rank or replica that computes only some of this pass's tokens. `mine` selects these tokens from a tensor
        [T]. `share`: fraction of the pass's valid tokens that are selected.

        `together(layer, sums)` gets a layer's sums over the selected tokens, and returns the layer's sums over all of this pass's tokens.
        """
        whole, scale = self.whole_step, self.auxiliary_scale * share
        whole_step = None if whole is None else lambda layer, sums: whole(layer, together(layer, sums))
        return replace(self, **self._changed(mine), auxiliary_scale=scale, whole_step=whole_step)

    def to(self, device: torch.device) -> Context:
        of_sequences = ("sequence_B", "place_L", "document_BS", "source_document_BS")
        return replace(self, **self._changed(lambda x: x.to(device), *_OF_TOKENS, *of_sequences))

    def _changed(self, change: Callable[[Tensor], Tensor], *names: str) -> dict[str, Any]:
        """Return field name -> its value with `change` applied, for the fields `names` (default: the fields [T]) that are not None."""
        return {name: change(value) for name in names or _OF_TOKENS if (value := getattr(self, name)) is not None}

    def with_documents(self, separator: int | None, whole: Callable[[Tensor], Tensor]) -> Context:
        """Return a context with `document_BS`, the number of each token's document. A document begins at each token `separator` (None: at
        none), and at each packed chat. `whole(x)` gathers this rank's shards [B, L] of sequences to whole sequences [B, S]."""
        begins_T = torch.zeros_like(self.tokens_T, dtype=torch.bool) if self.begins_T is None else self.begins_T
        begins_T = begins_T if separator is None else begins_T | (self.tokens_T == separator)
        begins_BS = whole(begins_T.view(len(self.sequence_B), -1))
        return replace(self, document_BS=begins_BS.long().cumsum(1))

    def halves_with_documents(self, separator: int, sentinels: int, whole: Callable[[Tensor], Tensor]) -> tuple[Context, Context]:
        """Return `halves` with `document_BS`, the number of each token's document. In the encoder, a document begins at each
        `separator` but the last token, which ends the text. In the decoder, the tokens of a hidden span belong to the document in which the
        encoder reads the span's sentinel (T5: a token in place of the span), or to the last document if it reads none.

        `sentinels`: smallest id of a sentinel. `whole(x)` gathers this rank's shards of sequences to whole sequences: the encoder's tokens,
        then the decoder's.
        """
        tokens_BL = self.tokens_T.view(len(self.sequence_B), -1)
        read_BS, written_BL = whole(tokens_BL).tensor_split([self._whole_source(tokens_BL.shape[1])], dim=1)
        of_read_BS = F.pad(read_BS[:, :-1] == separator, (0, 1)).long().cumsum(1)
        marks_BS, marks_BL = ((half >= sentinels).long() for half in (read_BS, written_BL))
        # at index n, from 1: the document of the encoder's n-th sentinel, or the last document if it has fewer; index 0 is not used
        of_span_BN = of_read_BS[:, -1:].repeat(1, 1 + max(read_BS.shape[1], written_BL.shape[1]))
        of_span_BN = of_span_BN.scatter(1, marks_BS.cumsum(1) * marks_BS, of_read_BS)
        # tokens before the first sentinel get the first sentinel's document
        of_written_BL = of_span_BN.gather(1, marks_BL.cumsum(1).clamp(min=1))
        read, written = self.halves()
        return replace(read, document_BS=of_read_BS), replace(written, document_BS=of_written_BL, source_document_BS=of_read_BS)

    def once(self, name: str, decide: Callable[[], Value]) -> Value:
        """Return decide(), or in a recomputed pass its result from the first pass. `name`: key of the result."""
        return decide() if self.replay is None else self.replay.once(name, decide)

    def for_all_layers(self, compute: Callable[..., Value], place_L: Tensor, *given: Any, dtype: torch.dtype) -> Value:
        """Return compute(place_L, *given, dtype=dtype), computed once in a pass: layers with equal arguments share the result."""
        key = (compute, *given, dtype)
        for places, known, found in self._kept:
            if places is place_L and known == key:
                return found  # type: ignore[no-any-return]
        found = compute(place_L, *given, dtype=dtype)
        self._kept.append((place_L, key, found))
        return found

    def key(self, name: str) -> int:
        """Return the 31-bit key (seed) of the random numbers that are used for `name`."""
        return key_of(self.seed, self.step, name)

    def uniform(self, name: str, width: int, *, first: int = 0) -> Tensor:
        """Return random numbers in [0, 1], fp32 [T, width], for `name`: columns `first` to `first` + width - 1 of each token's numbers. In
        a rehearsal (parallel/rehearse/), in which tensors have no values, all are 0.5."""
        numbers = uniform(self.key(name), self.position_T, width, first=first)
        same: Tensor = supposed_as(numbers, lambda made: torch.full_like(made, 0.5), numbers)
        return same

    def dropout_scale(self, name: str, width: int, p: float, *, first: int = 0) -> Tensor:
        """Return dropout's factors, fp32 [T, width], from channel `first` on: 0 with probability p, else 1 / (1 - p)."""
        return (self.uniform(name, width, first=first) >= p).float() / (1 - p)
