"""The methods of sequence-parallel attention by name. A new method is its file, its facts in this folder, and its row here.

`Named`: the values of `sequence.kind`.
"""

from __future__ import annotations

from typing import Literal

from parallel.sequence.kinds.colossal_ring import COLOSSAL_RING
from parallel.sequence.kinds.kind import SequenceKind
from parallel.sequence.kinds.lightseq import LIGHTSEQ
from parallel.sequence.kinds.ring import RING
from parallel.sequence.kinds.ulysses import ULYSSES

Named = Literal["ring", "lightseq", "colossal_ring", "ulysses"]
SEQUENCES: dict[str, SequenceKind] = {kind.name: kind for kind in (RING, LIGHTSEQ, COLOSSAL_RING, ULYSSES)}
DEFAULT = RING.name


def described() -> str:
    """Return a phrase about each, for the recipe's key."""
    return "; ".join(f"{kind.name}: {kind.about}" for kind in SEQUENCES.values())
