"""Cluster files, and predicted times of collectives and kernels, which are compared with counted bytes and operations."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe.plan.machine.cluster import FOLDER, Cluster, cluster_names, cluster_of, larger_clusters, load_cluster, mapping_of
from moe.plan.machine.device import alignment
from moe.plan.time.collective_times import Group, all_reduce, all_to_all, gather, group_of, network, send
from parallel.errors import BadInput


def plain(nodes: int = 4) -> Cluster:
    """Return a cluster without measured times and latencies, on which the time of a collective depends only on bytes."""
    cluster = load_cluster("h100-8").of(nodes)
    quick = replace(cluster.inside, times={}, latency_us=0, hop_us=0, bus_gb_s={2: 300, 8: 300}, sum_bus_gb_s=None)
    return replace(cluster, inside=quick, between=replace(cluster.between, latency_us=0, tree_us=0))


@pytest.mark.parametrize("name", cluster_names())
def test_each_constant_of_a_shipped_file_names_its_source_or_why_it_is_assumed(name: str) -> None:
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    sources = content.pop("sources")
    constants = {key for key, value in content.items() if not isinstance(value, dict)} - {"devices_per_node"}
    constants |= {f"{section}.{key}" for section, values in content.items() if isinstance(values, dict) for key in values} - {"device.name"}
    # each text has parts "KEY, KEY: source" between semicolons; text after a semicolon without keys belongs to the part before
    named = [key for text in sources for keys in re.findall(r"(?:^|; )([\w., ]+):", text) for key in keys.split(", ")]
    assert sorted(key for key in named if key in constants) == sorted(constants)


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_file_says_where_its_numbers_come_from_and_is_read_back(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.sources and cluster.device.rate() > 0
    again = cluster_of(mapping_of(cluster), name=name)
    assert again == cluster and mapping_of(again) == mapping_of(cluster)


def test_a_number_after_the_name_is_the_number_of_nodes() -> None:
    assert load_cluster("a100-80-8x6").world == 48
    assert load_cluster("h100-8").holding(17).nodes == 3


def test_a_smaller_number_after_the_device_is_a_part_of_one_node() -> None:
    parts = (("h100-2", "h100-8", 2), ("v100-4", "v100-8", 4), ("a100-40-1", "a100-40-8", 1), ("gb200-36", "gb200-72", 36))
    for name, whole, devices in parts:
        assert load_cluster(name) == replace(load_cluster(whole), name=name, devices_per_node=devices)


def test_larger_clusters_have_the_names_that_load_them() -> None:
    for name, first in (("h100-2", "h100-8"), ("h100-8", "h100-8x2"), ("a100-80-8x3", "a100-80-8x6")):
        found = list(itertools.islice(larger_clusters(load_cluster(name)), 3))
        assert found[0][0] == f"take --cluster {first}"
        assert all(load_cluster(words.split()[-1]) == larger for words, larger in found)
    for name in ("mine", "h100-4"):
        mine = replace(load_cluster("h100-8"), name=name, devices_per_node=4, host_gb_s=1.0)
        assert next(larger_clusters(mine)) == (f"write nodes: 2 in {name}.yaml", mine.of(2))


WRONG = ["h1000-8", "h100-0", "h100-8x0", "xh100-8x2", "h100-8x2x3", "h100x8", "8xh100", "h100-16", "H100", "gb200x144"]


@pytest.mark.parametrize("wrong", WRONG)
def test_an_unknown_cluster_is_one_line_whose_fix_is_one(wrong: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_cluster(wrong)
    assert all(name in str(refused.value) for name in cluster_names()[:5]) and "\n" not in str(refused.value)
    assert re.fullmatch(r"did you mean (\S+)\?", str(refused.value.fix))
    meant = load_cluster(str(refused.value.fix).split()[-1].rstrip("?"))
    if counted := {"h100x8": 8, "8xh100": 8, "h100-16": 16, "gb200x144": 144}.get(wrong):
        assert meant.world == counted


def test_an_unknown_cluster_that_is_like_none_gets_an_example() -> None:
    with pytest.raises(BadInput, match="fix: take one of them, as a100-40-8x4"):
        load_cluster("nothing")


def test_a_malformed_file_is_one_line(tmp_path: Path) -> None:
    for text in ("a: [", "- 1", "device: {}", "device: 3"):
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(BadInput, match="mine.yaml") as refused:
            load_cluster(str(tmp_path / "mine.yaml"))
        assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="none.yaml"):
        load_cluster(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("device.memory_gb_s", 0, "memory_gb_s: 0, needed a number from 1e-15"),
        ("device.units", "many", "units: 'many', needed a valid integer"),
        ("device.attention", [0.4], "attention.1: nothing, needed this key"),
        ("device.peak_tflops", {}, "peak_tflops: {}, needed a rate for one of bf16"),
        ("device.peak_tflops", {"int8": 5}, "peak_tflops: {'int8': 5}, needed a rate for one of bf16, fp16, tf32, fp32"),
        ("device.rates", {"bf16": {}}, "rates.bf16: {}, needed at least 1 item"),
        ("inside.bus_gb_s", {2: 1e300}, r"bus_gb_s.2: 1e\+300, needed a number"),
        ("inside.latency_us", None, "latency_us: None, needed a valid number"),
        ("inside.times", {"all_reduce": {8: {}}}, "times.all_reduce.8: {}, needed at least 1 item"),
        ("inside.times", {"all_reduce": {8: {1024: float("nan")}}}, "times.all_reduce.8.1024: nan"),
        ("between.share", [], r"share: \[\], needed a valid number"),
        ("between.node_gbs", 5, r"between.node_gbs, which no cluster has, .* did you mean node_gb_s\?"),
        ("cores", True, "cores: True, needed a number"),
        ("program", {"step": 1}, "program.step: 'step', needed one of name, attention"),
        ("devices_per_node", 2.5, "devices_per_node: 2.5, needed a valid integer"),
    ],
)
def test_a_number_that_no_formula_can_use_is_one_line_with_its_name(path: str, value: Any, said: str, tmp_path: Path) -> None:
    told = mapping_of(load_cluster("a100-80-8"))
    *section, key = path.split(".")
    (told[section[0]] if section else told)[key] = value
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(told))
    with pytest.raises(BadInput, match=said) as refused:
        load_cluster(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (16, 1), (4, 2), (4, 8), (6, 4), (32, 1), (3, 16)])
def test_a_group_lies_on_the_nodes_that_its_ranks_are_on(size: int, stride: int) -> None:
    group = group_of(size, stride, 8, 64)
    on = [rank * stride // 8 for rank in range(size)]
    inside = max(on.count(node) for node in on)
    assert (group.inside, group.nodes) == (inside, -(-size // inside))


def test_rings_send_what_no_algorithm_undercuts_and_an_all_reduce_is_two_gathers() -> None:
    cluster, size = plain(), 3e9
    for ranks in (2, 4, 8):
        group = Group(ranks, 1)
        assert gather(cluster, group, size) == pytest.approx((ranks - 1) / ranks * size / 300e9)
        assert all_reduce(cluster, group, size) == pytest.approx(2 * gather(cluster, group, size))


def test_measured_times_are_returned_where_they_were_measured() -> None:
    cluster = load_cluster("a100-80-8")
    assert all_reduce(cluster, Group(8, 1), 64 * 2**20) == pytest.approx(580e-6)  # vTrain measured 579.9
    assert all_reduce(cluster, Group(2, 1), 2**20) == pytest.approx(44e-6)  # vTrain measured 44.2
    between = all_reduce(cluster, Group(8, 1), 48 * 2**20)
    assert 358e-6 < between < 580e-6  # measured times of 32 and 64 MiB


def test_groups_that_share_a_network_get_their_part_of_it() -> None:
    cluster = plain()
    alone, shared = Group(1, 4, 1), Group(1, 4, 8)
    narrow = replace(cluster, between=replace(cluster.between, device_gb_s=cluster.between.node_gb_s))
    assert network(narrow, alone) == pytest.approx(8 * network(narrow, shared))
    assert all_reduce(narrow, shared, 1e9) == pytest.approx(8 * all_reduce(narrow, alone, 1e9))
    assert network(cluster, alone) == network(cluster, shared)  # each device has its own adapter


def test_an_all_to_all_takes_as_long_as_its_slower_links_need() -> None:
    cluster, size, group = plain(2), 4e9, Group(8, 2, 1)
    to_each = size / group.size
    within = 7 * to_each / 300e9
    rate = cluster.between.device_gb_s * 1e9 * cluster.between.share * cluster.between.exchange_share
    assert all_to_all(cluster, group, size) == pytest.approx(max(within, 8 * to_each / rate))
    assert all_to_all(cluster, Group(8, 1), size) == pytest.approx(7 / 8 * size / 300e9)
    assert all_to_all(cluster, Group(1, 1), size) == 0


def test_a_message_crosses_the_network_only_between_nodes() -> None:
    cluster = plain()
    near, far = send(cluster, 1e9, stride=4), send(cluster, 1e9, stride=8)
    assert near == pytest.approx(1e9 / (cluster.inside.pair_gb_s * 1e9))
    assert far == pytest.approx(1e9 / (cluster.between.device_gb_s * 1e9 * cluster.between.share))


def test_no_product_is_faster_than_its_operations_its_bytes_or_a_launch() -> None:
    device = load_cluster("a100-80-8").device
    for m, n, k in itertools.product((1, 100, 2048), (64, 1000, 9216), (128, 3072)):
        seconds = device.product(m, n, k)
        assert seconds >= 2 * m * n * k / device.rate()
        assert seconds >= 2 * (m * k + k * n + m * n) / device.bandwidth
        assert seconds >= device.launch_us * 1e-6


def test_one_tile_more_than_the_processors_hold_is_a_wave_more() -> None:
    device = replace(load_cluster("a100-80-8").device, units=4, launch_us=0.0, memory_gb_s=1e9)
    full, over = device.product(512, 256, 4096), device.product(512 + 1, 256, 4096)
    assert over > 1.4 * full  # 512 x 256 is four tiles of 256 x 128 on four processors


def test_sizes_that_loads_do_not_fit_are_slower() -> None:
    assert [alignment(size) for size in (256, 128, 64, 32, 16, 4, 2)] == sorted(alignment(s) for s in (256, 128, 64, 32, 16, 4, 2))[::-1]
    device = load_cluster("a100-80-8").device
    assert device.product(4096, 4095, 4096) > 2 * device.product(4096, 4096, 4096)
