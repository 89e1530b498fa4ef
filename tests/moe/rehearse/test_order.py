"""All ranks of a small world, rehearsed in turn, have the same order of collectives and messages. A rank with another order is named.

The orders that must fail are made by hand: a call that is swapped with the next one, left out, or of another size, on one rank only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.cli.main import main
from moe.rehearse import walk
from moe.verify.cases import Case
from parallel.mesh.collectives import ring_round, sum_over
from parallel.mesh.mesh import Axis, Degrees
from parallel.pipeline.links import Links
from parallel.pipeline.schedules import SCHEDULES
from parallel.process import process
from parallel.process.process import World
from parallel.rehearse.order import Call, difference
from parallel.rehearse.stage import rehearsal
from tests.moe.rehearse.test_rehearse import run_of, staged

THIS = re.escape(__file__.rpartition("/")[2])


def calls(work: Callable[[Axis, int], Any], ranks: int) -> list[list[Call]]:
    """Return the calls of `work` (axis, rank) on each rank of a world with one axis."""
    made = []
    for rank in range(ranks):
        world = World(rank, ranks, place="cuda")
        with rehearsal(world) as pretended:
            work(process.connect(Degrees(dp=ranks), world).axis("dp"), rank)
        made.append(pretended.calls.made)
    return made


def zeros(axis: Axis, size: int) -> torch.Tensor:
    return torch.zeros(size, device=torch.device("cuda", axis.index))


def summed(axis: Axis, *sizes: int) -> None:
    for size in sizes:
        sum_over(zeros(axis, size), axis)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((4, 3), "collective 1 of ranks [0, 1, 2] differs: rank 1 calls allreduce 4 float32"),
        ((3,), "collective 2 of ranks [0, 1, 2] differs: rank 1 makes none"),
        ((3, 5), "collective 2 of ranks [0, 1, 2] differs: rank 1 calls allreduce 5 float32"),
    ],
)
def test_the_rank_that_sums_in_another_order_is_named(sizes: tuple[int, ...], said: str) -> None:
    made = calls(lambda axis, rank: summed(axis, *(sizes if rank == 1 else (3, 4))), 3)
    found = difference(made, "rank {}".format)
    assert found is not None and found.startswith(said) and ", but rank " in found
    assert re.search(r" at parallel/mesh/collectives\.py:\d+ in _reduce", found)
    assert difference([made[0], made[0], made[2]], str) is None


def test_messages_that_start_together_have_no_order_and_others_have() -> None:
    def ring(axis: Axis, rank: int) -> None:
        list(ring_round([zeros(axis, 5)], axis))

    def opposed(axis: Axis, rank: int) -> None:  # both send first: NCCL waits for ever
        both, other = [torch.distributed.send, torch.distributed.recv], axis.ranks[1 - rank]
        for message in both:
            message(zeros(axis, 5), other, group=axis.group)

    assert difference(calls(ring, 2), str) is None and difference(calls(ring, 3), str) is None
    found = difference(calls(opposed, 2), "rank {}".format)
    assert found is not None
    assert re.match(
        rf"message 1 between ranks 0 and 1 differs: rank 0 sends to rank 1: 5 float32 at \S*{THIS}:\d+ in opposed, but rank 1 sends", found
    )


def test_a_rank_that_receives_no_rows_of_an_all_to_all_meets_the_others() -> None:
    def to_the_other(axis: Axis, rank: int) -> None:
        sent, received = ([0, 3], [0, 0]) if rank == 0 else ([0, 0], [3, 0])
        torch.distributed.all_to_all_single(zeros(axis, sum(received)), zeros(axis, sum(sent)), received, sent, group=axis.group)

    assert difference(calls(to_the_other, 2), str) is None


# one schedule for each combination of facts on which its messages depend; ranks run all orders by the same code
UNLIKE = {(kind.placed, kind.chunks, kind.continuous, kind.splits_backward): name for name, kind in SCHEDULES.items()}


@pytest.mark.parametrize("schedule", UNLIKE.values())
def test_all_ranks_of_a_pipeline_send_and_receive_in_the_same_order(schedule: str) -> None:
    """A stage has one layer, and there are as many micro-batches as the most demanding schedule needs."""
    case = staged(schedule, "dense", microbatches=1 if schedule == "pipedream" else 4)
    ordered(replace(case, world=2, layers=2 if SCHEDULES[schedule].chunks == 1 else 4))


LAYOUTS = {
    "pp dp ep": replace(staged("1f1b", "gshard"), layers=2),
    "ep fsdp": Case("gshard", "fsdp", 2, 2, 1, "fp32"),
    "tp ep": Case("gshard", "ddp", 4, 2, 1, "fp32", tp=2, tensor="1d"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_of_a_layout_call_in_the_same_order(name: str) -> None:
    ordered(LAYOUTS[name])


def ordered(case: Case) -> None:
    made = [walk(run_of(case), World(rank, case.world, place="cuda"), steps=1).calls for rank in range(case.world)]
    every = [call for calls in made for call in calls]
    assert all(made) and len({id(call) for call in every}) == len(set(every))  # equal calls of all ranks are kept once
    assert difference(made, "rank {}".format) is None


def test_a_message_sent_too_late_is_named_by_rank_stage_and_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 sends the outputs of two micro-batches, of equal size, in the wrong order: the data would be wrong without any error."""
    send, late = Links.send, list[Any]()

    def swapped(links: Links, message: Any, tensor: torch.Tensor) -> None:
        late.append((message, tensor))
        if links.up.index > 0 or len(late) != 1:
            for each in reversed(late):
                send(links, *each)
            late.clear()

    monkeypatch.setattr(Links, "send", swapped)
    sizes = "--model.num_layers 2 --model.d_model 16 --model.d_ff 16 --model.vocab_size 256 --model.max_length 32"
    layout = "--degrees.pp 2 --pipeline.microbatches 2 --train.global_batch 4"
    assert main(f"rehearse dense_tiny --world 2 --rank all {sizes} {layout}".split()) == 1
    said = capsys.readouterr().out
    assert re.match(
        r"message \d between ranks 0 and 1 differs: rank 0 \(stage 0\) sends to rank 1: .*parallel/pipeline/links\.py:\d+ in send", said
    )
    assert "but rank 1 (stage 1) receives from rank 0: " in said
