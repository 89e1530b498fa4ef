"""Megatron-LM's sequence parallelism sends as many bytes as 1D."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe.nn.context import Context
from moe.verify.cases import BATCH, LENGTH, Case
from parallel.mesh.mesh import Degrees, Mesh
from parallel.mesh.traffic import Count
from parallel.tensor.sliced import SlicedNorm, own_columns
from tests.support.ranks import run_on_ranks
from tests.support.tiny import start

B, L, D = 4, 6, 3
LAYERS, WIDTH = 3, 24


def test_noise_of_a_slice_is_that_of_its_places() -> None:
    context = Context.of(torch.zeros(B, L, dtype=torch.long), seed=3, first_sequence=8)
    whole = context.uniform("dropout", D).view(B, L, D)
    for rank in range(3):
        places = own_columns(L, axis=Mesh.of(Degrees(tp=3), rank).axis("tp"))
        assert torch.equal(context.of_columns(places).uniform("dropout", D).view(B, -1, D), whole[:, places])


def test_a_norms_gradient_is_summed_over_tp() -> None:
    assert SlicedNorm().layout("layers.0.ffn_norm.weight", (D,)).summed_over() == ("dp", "sp", "tp")


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gathers_and_reduce_scatters_send_what_sums_would(microbatches: int) -> None:
    """In a dense model, one gather and one reduce-scatter replace each all-reduce of 1D, with equal bytes."""

    def sent(tensor: str) -> dict[str, Count]:
        def work(rank: int) -> list[list[object]]:
            tiny = start(Case("dense", "ddp", 2, 1, microbatches, "fp32", layers=LAYERS, tp=2, tensor=tensor), rank)
            tiny.mesh.communicator.reset_counts()
            engine: Any = tiny.executor.engine  # leaves out the sums of norms' gradients, in the backward pass and after it
            engine.apart, engine.reduce = [], lambda: None
            tiny.accumulate(0)
            counts = tiny.mesh.communicator.counts()
            return [[name, c.calls, c.bytes, c.sent] for (axis, name), c in counts.items() if axis == "tp"]

        return {name: Count(*numbers) for name, *numbers in run_on_ranks(work, 2)[0]}

    sums, slices = sent("1d"), sent("sliced")
    tokens, pairs = (
        BATCH // microbatches * LENGTH,
        microbatches * (2 * LAYERS + 1),
    )  # pairs: a gather and a reduce-scatter each, in forward and in backward
    assert (slices["all_gather"].calls, slices["reduce_scatter"].calls) == (2 * pairs, 2 * pairs)
    assert slices["reduce_scatter"].bytes == 2 * pairs * tokens * WIDTH * 4 and slices["all_gather"].bytes == pairs * tokens * WIDTH * 4
    assert slices["all_gather"].sent + slices["reduce_scatter"].sent + slices["all_reduce"].sent == sums["all_reduce"].sent
