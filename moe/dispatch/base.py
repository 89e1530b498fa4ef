"""What every dispatcher is, and dropout inside the experts, whose keys travel with the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe.experts import Experts
from moe.router import Routing

# T tokens, D model, R rows, F hidden


@dataclass(frozen=True)
class Dropout:
    """`position_T` int64 [T]: each token's index in the step; `scale(position_R)`: 0 or 1 / (1 - p) for each hidden unit, [R, F]."""

    position_T: Tensor
    scale: Callable[[Tensor], Tensor]


class Dispatcher(Protocol):
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        """Sum of gate * expert(x) over the kept choices of each token, [T, D] in x's dtype; zero where every choice was dropped."""
        ...
