"""A MoE layer whose tokens are on all ranks of tp equals the layer in one process: output, gradients of input and weights, report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.experts.spread import Copies, Spread
from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.nn.linear import FeedForward
from moe.recipe.sections import Experts, Router
from parallel.errors import BadInput
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World

B, L, D, F, E = 6, 5, 8, 12, 4  # batch, length, d_model, d_ff, number of experts
MEANS = ("balance_loss", "z_loss", "entropy")


def layer(axis: Axis | None) -> MoELayer:
    torch.manual_seed(0)
    router = Router(preset="gshard", group=1, capacity_factor=1.0, min_capacity=1, z_weight=0.1)
    experts, shared = Experts(num_experts=E, kernels="reference"), FeedForward(D, F, "gelu")
    made = MoELayer(experts, router, d_model=D, d_ff=F, ffn="gelu", layer=3, shared=shared)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.copies = None if axis is None else Copies(axis)
    return made


def computed(axis: Axis | None, *, padded: bool) -> dict[str, Tensor]:
    """Return output, gradients and report of one pass by name. A weight's gradient is for the sequences that this rank routed."""
    made, valid_BL = layer(axis), torch.ones(B, L, dtype=torch.bool)
    if padded:
        valid_BL[0, 2:], valid_BL[4, 1:] = False, False
    x_BLD = torch.randn(B, L, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    context = Context.of(torch.zeros(B, L, dtype=torch.long), seed=5, valid_BL=valid_BL if padded else None)
    y_BLD, report = made(x_BLD, context)
    (y_BLD * torch.randn(B, L, D, generator=torch.Generator().manual_seed(2))).sum().backward()
    assert x_BLD.grad is not None
    found = {
        "y": y_BLD.detach(),
        "x": x_BLD.grad,
        **{name: getattr(report, name).detach().double() for name in (*MEANS, "load_E", "kept", "dropped")},
    }
    return found | {f"weight {name}": p.grad for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_over_copies_is_the_layer_in_one_process(ranks: int, padded: bool) -> None:
    def work(rank: int) -> dict[str, Any]:
        return computed(process.connect(Degrees(tp=ranks), World(rank, ranks)).axis("tp"), padded=padded)

    want, got = computed(None, padded=padded), run_on_ranks(work, ranks, timeout_s=60)
    assert want["kept"] > 0 and want["dropped"] > 0
    for name, value in want.items():
        of_ranks = [torch.stack([found[name] for found in got]).sum(0)] if name.startswith("weight") else [found[name] for found in got]
        for found in of_ranks:
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}")  # type: ignore[misc]


def test_sequences_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match="^sequences of a micro-batch: got 6, needed a multiple of tp=4"):
        layer(Axis("tp", (0, 1, 2, 3)))(torch.zeros(B, L, D), Context.of(torch.zeros(B, L, dtype=torch.long)))


def test_without_gradients_every_rank_can_route_all_sequences() -> None:
    """In text generation, sequences that the ranks cannot share equally are routed by every rank, without a collective."""
    x_BLD, context = torch.randn(1, L, D, generator=torch.Generator().manual_seed(3)), Context.of(torch.zeros(1, L, dtype=torch.long))
    with torch.no_grad():
        (want, _), (got, report) = (layer(axis).eval()(x_BLD, context) for axis in (None, Axis("tp", (0, 1, 2, 3))))
    assert torch.equal(got, want) and int(report.load_E.sum()) == 2 * L
