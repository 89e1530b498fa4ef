"""The methods of sequence-parallel attention by name. A new method is its file, its facts in this folder, and its row here."""

from __future__ import annotations

from typing import Literal

from parallel.sequence.kinds.colossal_ring import COLOSSAL_RING
from parallel.sequence.kinds.kind import SequenceKind
from parallel.sequence.kinds.lightseq import LIGHTSEQ
from parallel.sequence.kinds.ring import RING
from parallel.sequence.kinds.ulysses import ULYSSES

Named = Literal["ring", "lightseq", "colossal_ring", "ulysses"]  # values of sequence.kind
SEQUENCES: dict[str, SequenceKind] = {kind.name: kind for kind in (RING, LIGHTSEQ, COLOSSAL_RING, ULYSSES)}
DEFAULT = RING.name


def described() -> str:
    """Return a phrase about each method, for the help text of `sequence.kind`."""
    return "; ".join(f"{kind.name}: {kind.about}" for kind in SEQUENCES.values())
