"""The plan of a dispatch: which row each kept choice gets. Rows are sorted by expert.

token   0   1   2   3        row    0   1   2          (token 2 was dropped)
expert  1   0   1   1        token  1   0   3
                             counts_E = [1, 2]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# T tokens, K choices, R rows (kept choices), E experts


@dataclass(frozen=True)
class Plan:
    """Rows sorted by expert, then by token.

    `choice_R` [R] int64: the flat choice t*K + k of each row. `row_TK` [T, K] int64: the row of each choice, -1 if the choice is
    dropped. `counts_E` [E] int64: the number of rows of each expert.
    """

    choice_R: Tensor
    row_TK: Tensor
    counts_E: Tensor

    @property
    def token_R(self) -> Tensor:
        """The token of each row, int64 [R]."""
        return self.choice_R // self.row_TK.shape[1]
