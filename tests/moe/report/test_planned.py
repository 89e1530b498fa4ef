"""A plan's predicted memory as a table and as bars: both show each part of each pipeline rank, and the parts add up to the total."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe.plan.job.network import Network, Plan
from moe.plan.memory.memory import memory
from moe.report.planned import bars, draw, parts_of, table
from moe.report.style import styled

NETWORK = Network(layers=8, width=512, heads=8, hidden=2048, vocab=32000, length=1024)
RANKS = memory(NETWORK, Plan(dp=2, pp=4, microbatches=8, microbatch=4, engine="zero1", offload_optimizer="cpu"))


def test_the_table_has_every_part_and_its_sum() -> None:
    lines = {line[:24].strip(): [float(cell) for cell in line[24:].split()] for line in table(RANKS).splitlines()}
    names = parts_of(RANKS)
    assert set(names) < set(lines) and "on the host" in lines
    for number, rank in enumerate(RANKS):
        assert sum(lines[name][number] for name in names) == pytest.approx(lines["allocated"][number], abs=0.005 * (len(names) + 1))
        assert lines["with allocator, context"][number] == pytest.approx(rank.used / 2**30, abs=0.006)


def test_bars_stack_to_what_a_rank_uses(tmp_path: Path) -> None:
    with styled():
        (ax,) = bars(RANKS, capacity=16 * 2**30).axes
    tops = [0.0] * len(RANKS)
    for patch in ax.patches:
        number = round(patch.get_x() + patch.get_width() / 2)
        tops[number] = max(tops[number], patch.get_y() + patch.get_height())
    assert tops == pytest.approx([rank.used / 2**30 for rank in RANKS])
    for capacity, lines in ((16, 1), (1024, 0)):  # a line far above the bars would shrink them, so the title names that capacity
        with styled():
            (ax,) = bars(RANKS, capacity=capacity * 2**30).axes
        assert len(ax.lines) == lines and ("1024 GiB" in ax.get_title("left")) == (lines == 0)
    assert draw(RANKS, tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")
