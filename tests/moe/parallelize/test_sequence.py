"""Sequence parallelism in parts of a run that `moe verify --kinds sequence` does not compare: checkpoints, text generation, validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe.train.loop.step import validation_loss
from moe.train.parts.executor import logits_of
from moe.verify.cases import BATCH, SLICED, Case
from moe.verify.plain.batches import batch
from parallel.data.deepspeed import load_deepspeed
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Tiny, hand_over, start

STEPS = 2
SLICES = {"ring": ("zigzag", "zero1", 1), "lightseq": ("lightseq", "fsdp", 2)}  # name -> (attention, engine, ep), on two ranks


def sliced(name: str, **more: Any) -> Case:
    attention, kind, ep = SLICES[name]
    return Case("gshard", kind, 2, ep, 1, "fp32", sp=2, attention=attention, length=SLICED, **more)


def losses(tiny: Tiny, first: int) -> list[float]:
    found = []
    for step in range(first, first + STEPS):
        found.append(tiny.accumulate(step).loss)
        tiny.finish()
    return found


@pytest.mark.parametrize("name", SLICES)
def test_a_checkpoint_can_be_resumed_without_sequence_parallelism_and_back(tmp_path: Path, name: str) -> None:
    """A run changes from sequence parallelism to data parallelism and back, with checkpoints. Its losses equal those of one uninterrupted
    process.
    """
    load_deepspeed()
    whole = Case("gshard", "ddp", 2, 1, 1, "fp32", length=SLICED)

    def work(rank: int) -> list[float]:
        one, two = start(sliced(name), rank), start(whole, rank, train={"seed": 8})
        three, found = start(sliced(name), rank, train={"seed": 9}), losses(one, 0)
        hand_over(tmp_path / "a", one, two, step=STEPS)
        found += losses(two, STEPS)
        hand_over(tmp_path / "b", two, three, step=2 * STEPS)
        return found + losses(three, 2 * STEPS)

    unbroken = start(Case("gshard", "ddp", 1, 1, 1, "fp32", length=SLICED), 0)
    expected = [loss for first in range(0, 3 * STEPS, STEPS) for loss in losses(unbroken, first)]
    for found in run_on_ranks(work, 2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_logits_and_validation_are_those_of_one_process() -> None:
    """Every rank has the logits of whole sequences, and the validation loss is the mean over the tokens of both ranks."""

    def seen(rank: int, case: Case) -> tuple[torch.Tensor, float]:
        tiny = start(case, rank)
        tokens_BL = batch(5, length=SLICED)
        loss = validation_loss(tiny.executor, tiny.shard.of_batch(tokens_BL), shard=tiny.shard, at_once=5)
        tiny.model.eval()
        return logits_of(tiny.executor, tiny.shard)(tokens_BL[:2, :-1]).logits_BLV, loss

    logits_BLV, loss = seen(0, Case("gshard", "ddp", 1, 1, 1, "fp32", length=SLICED))
    assert loss > 0 and BATCH % 5
    for attention in ("zigzag", "ulysses"):
        case = Case("gshard", "ddp", 2, 2, 1, "fp32", sp=2, attention=attention, length=SLICED)
        for got_BLV, got in run_on_ranks(seen, 2, case):
            torch.testing.assert_close(got_BLV, logits_BLV, rtol=1e-5, atol=1e-5)
            assert got == pytest.approx(loss, rel=1e-6)
