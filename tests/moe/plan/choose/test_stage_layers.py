"""`layer_lists`: no other cut of the layers has a faster slowest stage than the first list, or a smaller largest stage than both."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

from moe.plan.choose.candidates import Space, candidates
from moe.plan.job import counts
from moe.plan.job.cut import layer_lists, operations
from moe.plan.job.network import Experts, Network, Plan


def every_list(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Return all lists of numbers of layers per stage. Only the first and the last stage may have none."""
    found = []
    for first, last in ((0, 0), (0, 1), (1, 0), (1, 1)):
        inner = stages - first - last
        if layers >= inner > 0:
            for places in combinations(range(1, layers), inner - 1):
                ends = (0, *places, layers)
                found.append((*(0,) * first, *(b - a for a, b in zip(ends, ends[1:], strict=False)), *(0,) * last))
    return found


def slowest(network: Network, sizes: tuple[int, ...]) -> float:
    """Return the number of multiplications of the slowest stage. The last stage also has the head."""
    at, found = 0, []
    for size in sizes:
        found.append(sum(operations(network, index) for index in range(at, at + size)))
        at += size
    head = network.vocab * network.width
    found[-1] += head + network.ahead * (operations(replace(network, experts=None), 0) + 2 * network.width**2 + head)
    return max(found)


def fullest(network: Network, plan: Plan, sizes: tuple[int, ...]) -> float:
    """Return the number of parameters of the largest stage, with embedding, head, last norm and multi-token prediction."""
    at, found = 0, []
    for size in sizes:
        found.append(sum(counts.layer(network, plan, index).total for index in range(at, at + size)))
        at += size
    found[0] += counts.embedding(network, plan)
    joins = network.ahead * (2 * network.width**2 + 3 * network.width + counts.layer(replace(network, experts=None), plan, 0).total)
    found[-1] += counts.embedding(network, plan) * (2 if network.ahead and not network.tied else 1) + network.width + joins
    return max(found)


def test_no_list_is_faster_by_work_or_emptier_by_elements() -> None:
    draw, own, more = random.Random(5), 0, 0
    for _ in range(60):
        layers, stages = draw.randint(3, 9), draw.randint(2, 5)
        experts = Experts(count=8, choices=2, hidden=draw.choice([64, 256])) if draw.random() < 0.5 else None
        sparse = tuple(sorted(draw.sample(range(layers), draw.randint(1, layers)))) if experts else ()
        vocab = draw.choice([100, 3000, 9000])
        network = Network(layers, 64, 4, 256, vocab, 32, experts=experts, sparse_layers=sparse, ahead=draw.choice([0, 0, 1, 2]))
        network = replace(network, tied=draw.random() < 0.5)
        plan = Plan(tp=draw.choice([1, 2]), ep=draw.choice([1, 4]) if experts else 1, dp=4)
        lists = layer_lists(network, plan, stages)
        if stages > layers:
            assert lists == ()
            continue
        every = every_list(layers, stages)
        assert set(lists) <= set(every) and len(set(lists)) == len(lists) <= 2
        assert slowest(network, lists[0]) <= min(slowest(network, one) for one in every) * (1 + 1e-9)
        least = min(fullest(network, plan, one) for one in every)
        assert min(fullest(network, plan, one) for one in lists) * 0.95 <= least * (1 + 1e-9)
        own, more = own + (lists[0][-1] == 0), more + (len(lists) == 2)
    assert own > 5 and more > 5


def test_a_large_vocabulary_gets_a_stage_of_its_own_among_the_candidates() -> None:
    network = Network(layers=8, width=64, heads=4, hidden=256, vocab=9000, length=32, tied=False)
    space = Space(engines=("ddp",), tensors=("1d",), schedules=(("1f1b", 1),), largest_sp=1, largest_microbatch=1)
    lists = {p.stage_layers for p in candidates(network, world=4, global_batch=8, base=Plan(), space=space) if p.pp == 4}
    assert (3, 3, 2, 0) in lists or (2, 3, 3, 0) in lists
    small = {
        p.stage_layers for p in candidates(Network(8, 64, 4, 256, 100, 32), world=4, global_batch=8, base=Plan(), space=space) if p.pp == 4
    }
    assert small == {(2, 2, 2, 2)}
