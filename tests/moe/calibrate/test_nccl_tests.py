"""Outputs in NCCL-tests' format, written by a law of latency and bandwidth, give this law back; wrong outputs are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe.calibrate.nccl_tests import from_folder, main, read, with_times
from moe.plan.machine.cluster import load_cluster
from moe.plan.time.collective_times import Group, all_reduce, all_to_all, gather, send
from parallel.errors import BadInput

SIZES = [2**n for n in range(13, 31)]


def output(nodes: int, here: int, latency: float, gb_s: float) -> str:
    lines = ["# nThread 1 nGpus 1 minBytes 8192 maxBytes 1073741824 step: 2(factor)", "#", "# Using devices"]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid {100 + rank} on node{rank // here} device {rank % here} [0x1a] NVIDIA H100 80GB HBM3"
        for rank in range(nodes * here)
    ]
    lines.append("#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong")
    for size in SIZES:
        us = latency + size / gb_s / 1e3
        half = f"{us:8.2f} {size / us / 1e3:.2f} {size / us / 1e3:.2f} 0"
        lines.append(f"{size:12d} {size // 4:12d} float sum -1 {half} {half}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 100.0"])


def test_a_law_between_nodes_is_recovered(tmp_path: Path) -> None:
    (tmp_path / "all_gather_perf.txt").write_text(output(4, 8, 400.0, 200.0))
    made = from_folder(load_cluster("h100-8x4"), tmp_path)
    for size in SIZES:
        assert gather(made, Group(8, 4), size) == pytest.approx(400e-6 + size / 200e9, rel=0.02)
    assert "all_gather_perf.txt" in made.sources[-1]


def test_laws_of_all_to_all_and_all_reduce_between_nodes_are_recovered(tmp_path: Path) -> None:
    """An exchange's bandwidth and an all-reduce's latency, given the links of an all-gather."""
    given = load_cluster("h100-8x4")
    (tmp_path / "all_gather_perf.txt").write_text(output(4, 8, 400.0, 200.0))
    (tmp_path / "alltoall_perf.txt").write_text(output(4, 8, 100.0, 30.0))
    (tmp_path / "all_reduce_perf.txt").write_text(output(4, 8, 150.0, 80.0))
    made = from_folder(given, tmp_path)
    assert all_to_all(made, Group(8, 4), SIZES[-1]) == pytest.approx(SIZES[-1] / 30e9, rel=0.02)
    assert all_reduce(made, Group(8, 4), 1) == pytest.approx(150e-6, rel=0.02)
    assert gather(made, Group(8, 4), SIZES[0]) == pytest.approx(400e-6 + SIZES[0] / 200e9, rel=0.02)
    assert [source.partition(":")[0] for source in made.sources[-3:]] == [
        "between.share, between.latency_us", "between.exchange_share", "between.tree_us"
    ]  # fmt: skip
    with pytest.raises(BadInput, match="f: got a fitted 58.* GB/s, needed at most 50 GB/s"):
        with_times(given, read(output(2, 1, 30.0, 117.0), kind="all_to_all", what="f"))


def test_times_of_one_node_are_those_that_were_printed() -> None:
    made = with_times(load_cluster("h100-8"), read(output(1, 8, 30.0, 250.0), kind="all_reduce", what="f"))
    for size in SIZES:
        assert all_reduce(made, Group(8, 1), size) == pytest.approx(30e-6 + size / 250e9, rel=0.02)


@pytest.mark.parametrize(
    ("old", "new", "got"),
    [
        ("float sum", "float", "12 columns"),
        (" 0 ", " 3 ", "#wrong 3"),
        ("on node1 device 0", "on node0 device 0", "ranks per host"),
        ("# ", "- ", "no line"),
        ("Rank  3 Group  0", "Rank  3 Group  1", "several groups"),
        ("        8192 ", "       16384 ", "a size twice"),
    ],
)
def test_a_wrong_output_is_one_line(old: str, new: str, got: str) -> None:
    text = output(2, 2, 30.0, 250.0)
    assert old in text
    with pytest.raises(BadInput, match=got):
        read(text.replace(old, new), kind="all_reduce", what="f")
    with pytest.raises(BadInput, match="0 sizes"):
        read(text.split("#       size")[0], kind="all_reduce", what="f")


def test_the_slower_of_gather_and_reduce_scatter_counts(tmp_path: Path) -> None:
    (tmp_path / "all_gather_perf.txt").write_text(output(1, 8, 10.0, 300.0))  # slower below 18 MB
    (tmp_path / "reduce_scatter_perf.txt").write_text(output(1, 8, 5.0, 275.0))
    made = from_folder(load_cluster("h100-8"), tmp_path)
    for size in SIZES:
        us = max(10 + size / 300e3, 5 + size / 275e3)
        assert made.inside.times["all_gather"][8][size] == pytest.approx(us, abs=0.01)
    assert made.sources[-1].endswith("the slower of all_gather_perf.txt and reduce_scatter_perf.txt")


@pytest.mark.parametrize(
    ("nodes", "here", "latency", "gb_s", "got"),
    [
        (2, 8, -0.02, 200.0, "fitted latency of -0.02"),
        (2, 8, 1e7, -200.0, "do not grow"),
        (2, 8, 400.0, 500.0, "468.* GB/s, needed at most 400"),
        (1, 16, 30.0, 200.0, "16 ranks on a node"),
    ],
)
def test_times_that_the_cluster_cannot_have_are_one_line(nodes: int, here: int, latency: float, gb_s: float, got: str) -> None:
    found = read(output(nodes, here, latency, gb_s), kind="all_gather", what="all_gather_perf.txt")
    with pytest.raises(BadInput, match=f"all_gather_perf.txt: got .*{got}.*; fix: "):
        with_times(load_cluster("h100-8"), found)


def test_a_latency_that_the_node_has_alone_leaves_none_between_and_says_it() -> None:
    made = with_times(load_cluster("h100-8x2"), read(output(2, 8, 30.0, 200.0), kind="all_gather", what="f"))
    assert made.between.latency_us == 0
    assert "30 us fitted, 43 us by" in made.sources[-1]


def test_outputs_of_two_numbers_of_nodes_are_one_line(tmp_path: Path) -> None:
    for nodes in (2, 4):
        (tmp_path / f"all_gather_perf_{nodes}.txt").write_text(output(nodes, 8, 400.0, 200.0))
    with pytest.raises(BadInput, match="16 ranks on 2 nodes and 32 ranks on 4 nodes"):
        from_folder(load_cluster("h100-8"), tmp_path)


def test_files_without_a_name_of_a_program_are_named(tmp_path: Path) -> None:
    (tmp_path / "gather.txt").write_text(output(2, 8, 400.0, 200.0))
    with pytest.raises(BadInput, match="gather.txt, needed .* all_gather_perf.txt"):
        from_folder(load_cluster("h100-8"), tmp_path)


def test_messages_of_all_ranks_are_times_of_a_message() -> None:
    made = with_times(load_cluster("h100-8"), read(output(1, 8, 20.0, 100.0), kind="send", what="f"))
    assert send(made, SIZES[-1], stride=1) == pytest.approx(20e-6 + SIZES[-1] / 100e9, rel=0.02)


def test_the_command_writes_a_cluster_that_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf.txt").write_text(output(1, 8, 30.0, 250.0))
    assert main(tmp_path, "h100-8", tmp_path / "mine.yaml") == 0
    assert load_cluster(str(tmp_path / "mine.yaml")).inside.times["all_reduce"][8][8192] == pytest.approx(30.03)
    with pytest.raises(BadInput, match="outputs"):
        main(tmp_path / "none", "h100-8", tmp_path / "mine.yaml")
