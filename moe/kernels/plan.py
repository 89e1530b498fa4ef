"""The plan of a dispatch: the row of every kept choice, where rows are sorted by expert.

token   0   1   2   3        rows   0   1   2          (token 2 was dropped)
expert  1   0   1   1        token  1   0   3
                             counts_E = [1, 2]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# T tokens, K choices, R rows (kept choices), E experts


@dataclass(frozen=True)
class Plan:
    """`choice_R` [R] int64: the flat choice t*K + k of each row. `row_TK` [T, K] int64: the row of each choice, -1 if it is
    dropped. `counts_E` [E] int64: the number of rows of each expert. The rows of one expert stand in token order."""

    choice_R: Tensor
    row_TK: Tensor
    counts_E: Tensor

    @property
    def token_R(self) -> Tensor:
        return self.choice_R // self.row_TK.shape[1]
