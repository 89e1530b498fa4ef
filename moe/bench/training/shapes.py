"""The models of `moe bench memory`: two wide layers and few tokens, so that nearly all memory is model states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe.bench.training.sharded import ShardedKind
from parallel.numerics.precision import DTYPES

LENGTH = 7


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `experts`: number of experts in its second layer, each as wide as the first layer's network; 0: dense."""

    layers: int = 2
    width: int = 2048
    hidden: int = 8192
    experts: int = 0

    @property
    def name(self) -> str:
        return "sparse" if self.experts else "dense"

    def recipe(self, kind: ShardedKind, ranks: int, *, ep: int = 1, precision: str = "bf16") -> dict[str, Any]:
        """Recipe values; `ep` ranks share the experts. In bf16, DeepSpeed's stages keep 16-bit weights; other kinds keep fp32 weights."""
        model = {"num_layers": self.layers, "d_model": self.width, "num_heads": 4, "d_ff": self.hidden, "max_length": LENGTH}
        values: dict[str, Any] = {"precision": {"compute": precision}}
        values |= {"model": model, "sharding": kind.sharding, "degrees": {"dp": ranks, "ep": ep}}
        values |= {"train": {"global_batch": ranks, "eval_sequences": ranks}, "optimizer": {"warmup_steps": 0}}
        if self.experts:
            model |= {"moe_every": 2}
            values |= {"experts": {"num_experts": self.experts}, "router": {"preset": "switch", "capacity_factor": None}}
        return values


DENSE = Shape()
SPARSE = Shape(width=1152, hidden=4608, experts=8)


def warm_up(shape: Shape, precision: str) -> None:
    """Run matrix products of the model's sizes on the same threads. The library then has its scratch memory, which is not a model state."""
    dtype = DTYPES[precision]
    for out, into in ((shape.hidden, shape.width), (shape.width, shape.hidden), (shape.width, shape.width)):
        weight = torch.zeros(out, into, dtype=dtype, requires_grad=True)
        x = torch.zeros(LENGTH, into, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
