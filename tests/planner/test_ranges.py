"""Ranges of predicted times: the shipped file is that of the tables, and intervals of invented ratios equal results by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.plan.job.network import Plan
from moe.plan.machine.cluster import load_cluster
from moe.plan.time.cost import range_of, ranges
from tests.planner.planner import TABLES
from tests.planner.ranges import GROUPS, NEWER, group, held_out, interval
from tests.planner.read_tables import read_folder
from tests.planner.time import predictions


def test_a_table_of_many_rows_weighs_as_much_as_one_of_few() -> None:
    assert interval([[1.0], [2.0] * 1000], 1.0) == (1.0, 2.0)
    assert interval([[1.0], [2.0] * 1000], 1.25) == (0.8, 2.5)


def test_a_held_out_table_has_no_part_in_its_own_range() -> None:
    tables = [[1.0, 1.1], [1.0, 1.2], [5.0, 1.05]]
    # ranges of the other two tables: 1 to 5, 1 to 5, 1 to 1.2
    assert held_out(tables, 1.0) == pytest.approx((1 + 1 + 0.5) / 3)


def test_the_shipped_ranges_are_those_of_the_tables() -> None:
    assert [(each.runs, each.devices, each.across) for each in ranges()] == list(GROUPS)
    newer = [table for table in read_folder(TABLES) if table.name in ("megatron_core_h100_r080", "megatron_moe_modelzoo", "torchtitan")]
    made = [predictions(table.rows) for table in newer]
    assert [group(made, *each) for each in GROUPS if each[1] == NEWER] == [each for each in ranges() if each.devices == NEWER]
    assert all(each.held_out >= 0.8 and each.tables >= 3 and each.low < 1 < each.high for each in ranges())


def test_the_finest_group_of_a_run_counts() -> None:
    """Replicas are on several nodes if their sums are: with four stages of 8 ranks on 4 nodes, each stage's replicas share a node."""
    h100, a100 = load_cluster("h100-8x4"), load_cluster("a100-80-8x4")
    runs = [
        range_of(h100, Plan(dp=4, tp=8)),
        range_of(h100, Plan(tp=8, pp=4, microbatches=4)),
        range_of(a100, Plan(dp=8, pp=4, microbatches=4)),
    ]
    assert [each and each.runs for each in runs] == [GROUPS[1][0], GROUPS[2][0], GROUPS[0][0]]
    found = runs[2]
    assert found is not None and found.said(10).startswith(f"{10 * found.low:.3g} to {10 * found.high:.3g} s: 8 of 10")
    assert range_of(replace(a100, cores=2), Plan(dp=8)) is None
