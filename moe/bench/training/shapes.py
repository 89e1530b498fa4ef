"""The models of `moe bench memory`: two wide layers that see a few tokens, so that their states are nearly all there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe.bench.training.sharded import ShardedKind
from parallel.numerics.precision import DTYPES

LENGTH = 7


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. With `experts`, its second layer has so many experts, each as wide as the first layer's network."""

    layers: int = 2
    width: int = 2048
    hidden: int = 8192
    experts: int = 0

    @property
    def name(self) -> str:
        return "sparse" if self.experts else "dense"

    def recipe(self, kind: ShardedKind, ranks: int, *, ep: int = 1, precision: str = "bf16") -> dict[str, Any]:
        """`ep` ranks share the experts. In bf16, DeepSpeed's stages keep weights in 16 bits; other kinds keep the same as in fp32."""
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
    """Run matrix products of the model's sizes on the same threads, since the library keeps scratch memory that is no model state."""
    dtype = DTYPES[precision]
    for out, into in ((shape.hidden, shape.width), (shape.width, shape.hidden), (shape.width, shape.width)):
        weight = torch.zeros(out, into, dtype=dtype, requires_grad=True)
        x = torch.zeros(LENGTH, into, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
