"""What one forward pass knows beside its tokens: where they stand in the run, which are padding, the scale of auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe.nn.routing_record import RoutingRecord
from parallel.errors import BadInput
from parallel.random import key_of, uniform
from parallel.recompute import Replay

Value = TypeVar("Value")


@dataclass(frozen=True)
class Context:
    """`position_T` int64 [T]: each token's index in the whole step, so that noise is the same on every layout.

    `sequence_B` int64 [B]: the sequences' numbers in the step; `place_L` int64 [L]: the columns' places in their sequence, of which this
    rank may hold a slice; None: the sequences are whole, 0 to L - 1. `document_BS` int64: which document of its sequence each token is of,
    of the whole sequences; None: attention sees across documents. `length`: tokens of the whole sequences. `source`: so many of a
    sequence's tokens, the first ones, are what an encoder reads, and the others are the decoder's; 0: there is no encoder.

    `auxiliary_scale` multiplies auxiliary losses as they join the backward pass: this pass's share of the global batch's tokens, times
    the loss scale. `valid_T` bool [T]: False is padding; None: no token is. `whole_step(layer, sums)` gives one layer's sums over the
    global batch for those of this pass; None: this pass is the whole batch. `replay` keeps what must be decided once though the pass may
    be computed twice. `tokens_T`: the tokens' ids, which hash routing goes by. `record_routing`: where routers write whom they chose;
    `replay_routing`: what they take instead of choosing.
    """

    seed: int
    step: int
    position_T: Tensor
    auxiliary_scale: float = 1.0
    valid_T: Tensor | None = None
    whole_step: Callable[[int, Tensor], Tensor] | None = None
    replay: Replay | None = None
    tokens_T: Tensor | None = None
    sequence_B: Tensor | None = None
    place_L: Tensor | None = None
    document_BS: Tensor | None = None
    source: int = 0
    length: int | None = None
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
        places: Sequence[int] | npt.NDArray[np.int64] | None = None,
        length: int | None = None,
        source: int = 0,
        record_routing: RoutingRecord | None = None,
        replay_routing: RoutingRecord | None = None,
    ) -> Context:
        """For tokens [B, L] that are sequences first_sequence, first_sequence + 1, ... of the step; `valid_BL` False: padding.

        `places`: which ones of each sequence's `length` tokens these are; None: all L. Raises BadInput for a record of routing
        that has other sequences.
        """
        batch, columns = tokens_BL.shape
        assert places is None or len(places) == columns
        for record in (record_routing, replay_routing):
            if record is not None:
                last = columns - 1 if places is None else int(max(places))
                record.check_places(range(first_sequence, first_sequence + batch), last, length or columns)
        sequence_B = torch.arange(first_sequence, first_sequence + batch, device=tokens_BL.device)
        device = tokens_BL.device
        place_L = torch.arange(columns, device=device) if places is None else torch.tensor(places, device=device)
        position_T = (sequence_B.unsqueeze(1) * (length or columns) + place_L).flatten()
        valid_T = None if valid_BL is None else valid_BL.flatten()
        return Context(
            seed,
            step,
            position_T,
            auxiliary_scale,
            valid_T,
            tokens_T=tokens_BL.flatten(),
            sequence_B=sequence_B,
            place_L=place_L,
            source=source,
            length=length or columns,
            record_routing=record_routing,
            replay_routing=replay_routing,
        )

    @staticmethod
    def fresh(tokens_BL: Tensor) -> Context:
        """For a model that is used alone: noise seeded from torch's own generator."""
        return Context.of(tokens_BL, seed=int(torch.randint(2**31, ()).item()))

    def with_whole_step(self, whole_step: Callable[[int, Tensor], Tensor] | None) -> Context:
        return replace(self, whole_step=whole_step)

    def remembering(self) -> Context:
        """The same for one pass whose parts may be computed again."""
        return replace(self, replay=Replay())

    def of_columns(self, columns: slice) -> Context:
        """For a slice of every sequence: where its tokens stand, which is what noise is drawn by."""
        assert self.sequence_B is not None
        return replace(self, position_T=self.position_T.view(len(self.sequence_B), -1)[:, columns].flatten())

    def halves(self) -> tuple[Context, Context]:
        """Of an encoder-decoder: for the tokens that the encoder reads, and for those of the decoder, whose places begin at 0 again.

        Raises BadInput where the context does not say which are which.
        """
        assert self.place_L is not None
        length = len(self.place_L)
        if not 0 < self.source < length:
            needed = f"from 1 to {length - 1} of the {length} tokens of a sequence: the encoder reads them, and the decoder the others"
            raise BadInput("source", got=self.source, needed=needed, fix="make the context by Context.of(tokens, source=...)")

        def cut(x: Tensor, columns: slice) -> Tensor:
            return x.view(-1, length)[:, columns].flatten()

        def part(columns: slice, first: int) -> Context:
            assert self.place_L is not None
            return replace(
                self,
                position_T=cut(self.position_T, columns),
                valid_T=None if self.valid_T is None else cut(self.valid_T, columns),
                tokens_T=None if self.tokens_T is None else cut(self.tokens_T, columns),
                place_L=self.place_L[columns] - first,
                source=0,
                _kept=[],
            )

        return part(slice(0, self.source), 0), part(slice(self.source, length), self.source)

    def of_run(self, tokens: slice, *, share: float, together: Callable[[int, Tensor], Tensor]) -> Context:
        """For a run of this pass's tokens, `share` of the valid ones, where somebody else has the other runs.

        `together(layer, sums)`: the sums of all runs for those of this one.
        """
        whole = self.whole_step
        return replace(
            self,
            position_T=self.position_T[tokens],
            valid_T=None if self.valid_T is None else self.valid_T[tokens],
            tokens_T=None if self.tokens_T is None else self.tokens_T[tokens],
            auxiliary_scale=self.auxiliary_scale * share,
            whole_step=None if whole is None else lambda layer, mine: whole(layer, together(layer, mine)),
        )

    def to(self, device: torch.device) -> Context:
        """The same on another device."""
        names = ("position_T", "valid_T", "tokens_T", "sequence_B", "place_L", "document_BS")
        there = {name: value.to(device) for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **there)

    def with_documents(self, separator: int, whole: Callable[[Tensor], Tensor]) -> Context:
        """The same, told where documents begin: with the token `separator`. `whole(x)`: of [B, L, ...] of the tokens here, all places'."""
        assert self.tokens_T is not None and self.sequence_B is not None
        begins_BS = whole((self.tokens_T == separator).view(len(self.sequence_B), -1))
        return replace(self, document_BS=begins_BS.long().cumsum(1))

    def once(self, name: str, decide: Callable[[], Value]) -> Value:
        """decide(), or what it gave when this pass was first computed."""
        return decide() if self.replay is None else self.replay.once(name, decide)

    def places(self, length: int, *, device: torch.device) -> Tensor:
        """`place_L` of sequences of which so many tokens are held here."""
        return torch.arange(length, device=device) if self.place_L is None else self.place_L

    def for_all_layers(self, compute: Callable[..., Value], place_L: Tensor, *given: Any, dtype: torch.dtype) -> Value:
        """compute(place_L, *given, dtype=dtype), once for the whole pass: layers with the same settings share it."""
        asked = (compute, *given, dtype)
        for places, before, found in self._kept:
            if places is place_L and before == asked:
                return found  # type: ignore[no-any-return]
        found = compute(place_L, *given, dtype=dtype)
        self._kept.append((place_L, asked, found))
        return found

    def uniform(self, name: str, width: int, *, first: int = 0) -> Tensor:
        """Float32 [T, width] in [0, 1] for one use in one layer; columns from the `first` on."""
        return uniform(key_of(self.seed, self.step, name), self.position_T, width, first=first)

    def dropout_scale(self, name: str, width: int, p: float, *, first: int = 0) -> Tensor:
        """Float32 [T, width]: 0 with probability p, else 1 / (1 - p)."""
        return (self.uniform(name, width, first=first) >= p).float() / (1 - p)
