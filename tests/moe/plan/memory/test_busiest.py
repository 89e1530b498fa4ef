"""The rows of the busiest rank of ep in predicted memory and time: laws, bytes counted by hand, and the default of a recipe."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moe.checks.together import check_run
from moe.experts.dispatch import dispatcher_of
from moe.plan.choose.predicted import Place, predict
from moe.plan.job.network import LARGEST_EP, Experts, Network, Plan
from moe.plan.job.of_recipe import network_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import memory, peak
from moe.plan.memory.stack import OURS
from moe.plan.time.cost import step_time
from moe.recipe.load import load
from moe.recipe.sections import Dispatch, Run

L, D, F, E, K, B, EP = 96, 64, 480, 16, 2, 3, 4
PLAN = Plan(dp=EP, ep=EP, microbatch=B)
H100 = load_cluster("h100-8")
SHARES = (1.0, 1.01, 1.3, 1.7, 2.0, 2.9, 4.0, 9.0)


def sparse(busiest: float = 1.0, **of: object) -> Network:
    experts = Experts(E, K, F, busiest=busiest, **of)  # type: ignore[arg-type]
    return Network(layers=2, width=D, heads=4, hidden=256, vocab=64, length=L, experts=experts, sparse_layers=(0, 1))


def recipe(**values: str) -> Run:
    return load("glam_tiny", {key.replace("_", ".", 1).replace("__", "_"): value for key, value in values.items()})[0]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["all_to_all", "padded", "all_gather"])
def test_memory_and_time_grow_with_the_share_up_to_all_tokens(kind: str, recompute: str) -> None:
    plan, exchange = replace(PLAN, microbatch=500, recompute=recompute), dispatcher_of(Dispatch(kind=kind))  # type: ignore[arg-type]
    networks = [sparse(share, exchange=exchange) for share in SHARES]
    held = [peak(network, plan, OURS).allocated for network in networks]
    took = [step_time(network, plan, H100).step for network in networks]
    assert all(a < b for a, b in pairwise(held[:-1])) and held[-1] == held[-2]  # each rank has 4 of 16 experts: 4 times the mean is all
    assert all(a <= b for a, b in pairwise(took)) and took[0] < took[-2] == took[-1]
    one = replace(plan, ep=1)
    assert len({peak(network, one, OURS).allocated for network in networks}) == 1 == len({step_time(n, one, H100) for n in networks})


def test_the_bytes_of_more_rows_are_those_counted_by_hand() -> None:
    """In bf16, with two products for each expert: a row that arrives keeps D inputs and F pre-activations in each of two layers. While a
    layer works, it has D and F gradients, and D in the buffer. A row that leaves needs as much as before."""
    even, busy = (memory(sparse(share), PLAN, OURS)[0].parts for share in (1.0, 1.75))
    rows = 0.75 * B * L * K
    wanted = {"activations": 2 * 2 * rows * (D + F), "layer at work": 2 * rows * (F + D), "dispatch buffers": 2 * rows * D}
    assert {name: busy[name] - even[name] for name in even if busy[name] != even[name]} == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["all_to_all", "padded"])
def test_capacity_bounds_the_share(kind: str) -> None:
    exchange = dispatcher_of(Dispatch(kind=kind))  # type: ignore[arg-type]
    for rows, slots, most in ((1.0, 1.5, 1.5), (0.8, 0.8, 1.0), (1.0, 8.0, 4.0)):
        limit, beyond = (sparse(share, rows=rows, slots=slots, exchange=exchange) for share in (most, 3 * most))
        assert memory(limit, PLAN, OURS) == memory(beyond, PLAN, OURS) and step_time(limit, PLAN, H100) == step_time(beyond, PLAN, H100)
    even, full = (memory(sparse(share, rows=1.0, slots=1.5, exchange=exchange), PLAN, OURS)[0].parts for share in (1.0, 1.5))
    sent = [part["dispatch buffers"] for part in (even, full)]
    assert sent[0] == sent[1] if kind == "padded" else sent[0] < sent[1]  # padded blocks have all slots at any share
    assert even["activations"] < full["activations"]


def test_the_default_is_of_the_routers_balance() -> None:
    def share(**values: str) -> float:
        experts = network_of(recipe(**values)).experts
        assert experts is not None
        return experts.unlimited(2)

    unbalanced = share(router_balance_weight="0")
    assert 1.0 < share() == share(router_balance_weight="0", router_bias_rate="0.01") < unbalanced
    assert unbalanced == share(router_balance_weight="0", router_bias_rate="0") == share(router_balance_weight="0", router_select="hash")
    assert share(router_balance_weight="0", router_select="expert_choice", router_allow_noncausal="true") == 1.0
    assert share(dispatch_busiest="1.8") == 1.8


def test_the_default_follows_ep_as_measured() -> None:
    rows = json.loads((Path(__file__).resolve().parents[4] / "docs/benchmarks/busiest.json").read_text())["rows"]
    errors = []
    for row in (row for row in rows if row["ep"] <= LARGEST_EP and row["case"] not in ("expert choice", "hash, table")):
        experts = network_of(load(row["recipe"], row["changes"])[0]).experts
        assert experts is not None
        errors.append(abs(experts.unlimited(row["ep"]) / row["later_step_median"] - 1))
    assert network_of(recipe()).experts.unlimited(64) == network_of(recipe()).experts.unlimited(8)  # type: ignore[union-attr]
    assert statistics.mean(errors) < 0.07 and max(errors) < 0.15


def test_a_run_is_refused_for_equal_rows_only_and_a_plan_for_the_busiest_rank() -> None:
    run = check_run(recipe(degrees_ep="8", model_d__model="256", experts_d__ff="4096", dispatch_busiest="1.5"), 8)
    limit = peak(network_of(run), predict(run, Place("cuda")).plan, OURS).used
    even, busy = (predict(run, Place("cuda", size)) for size in (limit + 1, limit - 1))
    assert even.fits and not busy.fits and busy.over_bytes < 0 and busy.least_bytes < busy.rank_bytes
