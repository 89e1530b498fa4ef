"""Recorded experts of one forward pass, for replay in another: Rollout Routing Replay (R3, arXiv 2510.11370).

    record = RoutingRecord(sequences=2, length=8)
    model(tokens_BL, Context.of(tokens_BL, record_routing=record))      the old policy, which generated the texts
    record.experts[3]                                                   layer 3: int32 [2, 8, K]; -1: token not routed on this rank
    model(tokens_BL, Context.of(tokens_BL, replay_routing=record))      the new policy: same experts, gates from its own logits

Experts are stored by a token's position in the whole batch, so a record can be replayed with another layout and other micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.errors import BadInput, counted

# B sequences, L length, T tokens of a forward pass, K choices

Experts = Mapping[int, Any]  # layer -> array or tensor of integers [B, L, K]
_ROWS = "K different experts for each token, or K times -1 (the router chooses)"


class RoutingRecord:
    """A record of `sequences` sequences of `length` tokens. `experts`: the experts recorded so far, by layer index."""

    def __init__(self, sequences: int, length: int) -> None:
        self.sequences, self.length = sequences, length
        self._chosen: dict[str, Tensor] = {}  # router's name -> chosen experts, int32 [B * L, K]; -1: not recorded
        self._largest: dict[str, int] = {}  # largest expert index by the router's name, cached because reading it waits for the GPU

    @staticmethod
    def of(*parts: Experts) -> RoutingRecord:
        """Make a record from arrays, and merge several `parts`, for example of ranks that had different sequences.
        Each part maps a layer index to integers [B, L, K], with equal B and L. A row of -1 leaves the token to the router. Raise BadInput
        for arrays that cannot be a record."""
        arrays = [{layer: _checked(layer, given) for layer, given in part.items()} for part in parts]
        shapes = {array.shape[:2] for part in arrays for array in part.values()}
        if len(shapes) != 1:
            got = "no layer" if not shapes else " and ".join(f"[{b}, {n}, ...]" for b, n in sorted(shapes))
            raise _refused(got, "arrays [B, L, K] with equal B and L, one for each layer with experts", "give every layer's array")
        record = RoutingRecord(*shapes.pop())
        for part in arrays:
            for layer, array in part.items():
                record._join(layer, array)
        return record

    @property
    def experts(self) -> dict[int, npt.NDArray[np.int32]]:
        """Return the recorded experts on the host: layer -> int32 [B, L, K]."""
        shape = (self.sequences, self.length, -1)
        by_layer = {int(name.split(".")[1]): chosen for name, chosen in self._chosen.items()}
        return {layer: chosen.cpu().numpy().reshape(shape) for layer, chosen in sorted(by_layer.items())}

    def check_positions(self, sequences: range, last_place: int, length: int) -> None:
        """Raise BadInput if a forward pass has tokens outside the record. sequences: indices of the pass's sequences in the batch.
        last_place: largest position of a token in its sequence. length: tokens of a whole sequence."""
        if length != self.length or last_place >= length or sequences.stop > self.sequences:
            got = f"a record of {counted(self.sequences, 'sequence')} of {counted(self.length, 'token')}"
            needed = f"one with sequence {sequences.stop - 1} and position {last_place}, of sequences of {counted(length, 'token')}"
            raise _refused(got, needed, "give the tokens' positions: Context.of(tokens, first_sequence=..., positions=..., length=...)")

    def add(self, name: str, position_T: Tensor, expert_TK: Tensor) -> None:
        """Record the experts, int64 [T, K], that router `name` chose for the tokens at these positions of the batch."""
        if name not in self._chosen:
            shape = (self.sequences * self.length, expert_TK.shape[1])
            self._chosen[name] = torch.full(shape, -1, dtype=torch.int32, device=expert_TK.device)
        self._chosen[name][position_T] = expert_TK.int()
        self._largest.pop(name, None)

    def take(self, name: str, position_T: Tensor, *, num_choices: int, num_experts: int) -> Tensor:
        """Return the recorded experts of router `name`, int64 [T, K]; -1: the router chooses. Raise BadInput if the record does not fit
        this router."""
        if name not in self._chosen:
            got = f"a record of layers {', '.join(map(str, self.experts)) or '(none)'}"
            needed = f"a record of all layers with experts, also of layer {name.split('.')[1]}"
            raise _refused(got, needed, "record with a model of the same layers")
        chosen = self._chosen[name] = self._chosen[name].to(position_T.device)
        if name not in self._largest:
            self._largest[name] = int(chosen.max())
        if chosen.shape[1] != num_choices or self._largest[name] >= num_experts:
            got = f"{counted(chosen.shape[1], 'choice')} of experts up to {self._largest[name]} in layer {name.split('.')[1]}"
            needed = f"{counted(num_choices, 'choice')} of experts 0 to {num_experts - 1}"
            raise _refused(got, needed, "record it with a model of the same router")
        return chosen[position_T].long()

    def _join(self, layer: int, array: npt.NDArray[np.int32]) -> None:
        name, new = f"layers.{layer}.router", torch.from_numpy(array.reshape(-1, array.shape[-1]))
        old = self._chosen.get(name, torch.full_like(new, -1))
        if old.shape != new.shape or ((old >= 0) & (new >= 0) & (old != new)).any():
            raise _refused(f"different experts for the same token in layer {layer}", "equal experts in all parts", "give each token once")
        self._chosen[name] = torch.maximum(old, new)


def _checked(layer: int, given: Any) -> npt.NDArray[np.int32]:
    array = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
    what, integers = f"{array.dtype} of shape {list(array.shape)} in layer {layer}", np.issubdtype(array.dtype, np.integer)
    if not integers or array.ndim != 3 or 0 in array.shape:
        raise _refused(what, "integers [B, L, K]", "for example: numpy.int32, one row of experts for each token")
    if array.max() >= 2**31 or array.min() < -1:
        raise _refused(
            f"expert {array.min() if array.min() < -1 else array.max()} in layer {layer}",
            "int32 from 0, or -1 (the router chooses)",
            "count experts from 0",
        )
    ordered = array.astype(np.int32)
    ordered.sort(axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    wrong = twice.any(-1) | (ordered[..., 0] < 0) & (ordered[..., -1] >= 0)
    if wrong.any():
        sequence, place = (int(x) for x in np.argwhere(wrong)[0])
        got = f"{array[sequence, place].tolist()} for position {place} of sequence {sequence} in layer {layer}"
        raise _refused(got, _ROWS, "record all choices of each token")
    return array.astype(np.int32)


def _refused(got: str, needed: str, fix: str) -> BadInput:
    return BadInput("replay_routing", got=got, needed=needed, fix=fix)
