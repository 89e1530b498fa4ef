"""A MoE layer whose tokens are shared by ranks equals the layer in one process, for any number of sequences and any length. Its messages
have the bytes that the planner states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe.experts.layer import MoELayer
from moe.experts.spread import Columns, Copies, Spread
from moe.nn.context import Context
from moe.nn.linear import FeedForward
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of
from moe.plan.time.layer_messages import grouping, sharing
from moe.recipe.load import build_run
from moe.recipe.sections import Experts, Router
from moe.verify import expected, layouts, twin
from moe.verify.cases import Case
from moe.verify.expected import compare
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.process import World
from parallel.tensor.grid import Exchanged
from tests.support.ranks import run_on_ranks

D, F, E = 6, 10, 4  # d_model, d_ff, number of experts
LOSSES = ("balance_loss", "importance_loss")
COUNTS = ("load_E", "kept", "dropped")
ROUTERS: dict[str, dict[str, Any]] = {
    "group of a sequence": {"preset": "gshard", "group": "sequence", "capacity_factor": 0.75, "importance_weight": 0.2},
    "group of three sequences": {"preset": "gshard", "group": 3, "capacity_factor": 0.75},
    "group of the micro-batch": {"preset": "megatron", "capacity_factor": 0.75, "allow_noncausal": True},
    "loss of the micro-batch": {"preset": "mixtral"},
    "loss of a sequence": {"preset": "qwen3_moe", "num_choices": 2, "balance_scope": "sequence"},
    "experts choose": {"preset": "expert_choice", "allow_noncausal": True},
    "no group": {"preset": "switch", "capacity_factor": None, "balance_weight": 0.0},
}


class Held(NamedTuple):
    """A way in which ranks hold the tokens of `batch` sequences, each of `length`."""

    way: str
    batch: int
    length: int
    padded: bool = False


CASES = [
    *(Held("copies", batch, length, padded) for batch, length, padded in ((1, 7, False), (3, 5, True), (6, 4, False))),
    *(Held("columns", batch, 12, padded) for batch, padded in ((1, False), (3, True))),
    Held("channels", 3, 5),
    *(Held(way, 0, 12) for way in ("copies", "columns")),
]


def layer(router: str, exchange: Copies | Columns | Exchanged | None) -> MoELayer:
    torch.manual_seed(0)
    spec = Router(**{"min_capacity": 1, "z_weight": 0.1} | ROUTERS[router])
    experts, shared = Experts(num_experts=E, kernels="cpu"), FeedForward(D, F, "gelu")
    made = MoELayer(experts, spec, d_model=D, d_ff=F, ffn="gelu", layer=3, shared=shared)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if exchange is not None:
        made.spread = Spread(exchange.axis, exchange, made.router.spec, sp=Axis("sp"), both=replace(exchange.axis, name="groups"))
    return made


def computed(held: Held, router: str, axis: Axis | None) -> dict[str, Tensor]:
    """Return this rank's output, gradients and part of the report of one pass, by name. Without an axis, of all tokens."""
    batch, length = held.batch, held.length
    x_BLD, weight_BLD = (torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    valid_BL = torch.arange(length) < length - torch.arange(batch).unsqueeze(1) if held.padded else None
    context = Context.of(torch.arange(batch * length).view(batch, length), seed=5, valid_BL=valid_BL)
    exchange = None if axis is None else {"copies": Copies, "columns": Columns, "channels": Exchanged}[held.way](axis)
    if axis is not None and held.way != "copies":
        dim = {"columns": 1, "channels": 2}[held.way]
        x_BLD, weight_BLD = (x.chunk(axis.size, dim)[axis.index] for x in (x_BLD, weight_BLD))
    made, x_BLD = layer(router, exchange), x_BLD.clone().requires_grad_()
    y_BLD, report = made(x_BLD, context)
    (y_BLD * weight_BLD).sum().backward()
    assert x_BLD.grad is not None
    found = {"y": y_BLD.detach(), "x": x_BLD.grad}
    # if nothing needs the group, the balance loss is reported over each rank's own tokens
    numbers = ("z_loss", "entropy", *COUNTS, *(() if router == "no group" else LOSSES))
    found |= {name: getattr(report, name).detach().double() * (1 if name in COUNTS else report.share) for name in numbers}
    return found | {f"weight {name}": p.grad for name, p in made.named_parameters() if p.grad is not None}


def expected_bytes(held: Held, router: str, ranks: int) -> dict[tuple[str, str], float]:
    """Return the bytes that the planner states for all ranks' calls, by (axis, collective)."""
    values = {"model": {"d_model": D, "num_heads": 2, "moe_every": 1}, "experts": {"num_experts": E}, "router": ROUTERS[router]}
    network = replace(network_of(build_run(values)), length=held.length)
    tensor = {"copies": "1d", "columns": "sliced", "channels": "1d"}[held.way]
    plan = Plan(tp=ranks, tensor=tensor, microbatch=held.batch, compute_bytes=4)  # type: ignore[arg-type]
    forward, backward = grouping(network, plan, "operations")
    found = {("groups", m.name): ranks * m.handed for m in (*forward, *backward)}
    if held.way == "channels":
        return found | {("tp", "all_to_all"): 4 * held.batch * held.length * D * 4}  # x and y, and their gradients
    return found | {("tp", m.name): ranks * 2 * m.handed for m in sharing(network, plan)}


def test_a_layer_over_ranks_is_the_layer_in_one_process() -> None:
    ranks = 3
    runs = [(held, router) for held in CASES for router in ROUTERS if held.batch % 3 == 0 or router != "group of three sequences"]

    def work(rank: int) -> list[tuple[dict[str, Tensor], dict[tuple[str, str], int]]]:
        axis, found = process.connect(Degrees(tp=ranks), World(rank, ranks)).axis("tp"), []
        for run in runs:
            axis.communicator.reset_counts()
            numbers = computed(*run, axis)
            found.append((numbers, {key: count.bytes for key, count in axis.communicator.counts().items()}))
        return found

    of_ranks, dropped = run_on_ranks(work, ranks), 0
    for number, (held, router) in enumerate(runs):
        got, want = [found[number][0] for found in of_ranks], computed(held, router, None)
        counts = [found[number][1] for found in of_ranks]
        if held.batch and not held.padded and router != "experts choose":  # there a token's number of experts depends on the values
            summed = {key: sum(count[key] for count in counts) for key in counts[0]}
            assert summed == expected_bytes(held, router, ranks), (held, router)
        dropped += int(want["dropped"])
        for name, value in want.items():
            if name not in ("x", "y"):  # sums of the ranks' gradients, or of their parts of the report
                joined = [torch.stack([found[name] for found in got]).sum(0)]
            elif held.way != "copies":
                joined = [torch.cat([found[name] for found in got], {"columns": 1, "channels": 2}[held.way])]
            else:
                joined = [found[name] for found in got]
            for found in joined:
                torch.testing.assert_close(
                    found, value, rtol=1e-5, atol=1e-6, msg=lambda told, where=(held, router, name): f"{where}: {told}"
                )  # type: ignore[misc]
    assert dropped > 0


@pytest.mark.parametrize(
    "case",
    [
        Case("gshard", "ddp", 2, 2, 3, "fp32", tp=2, tensor="1d", batch=3, length=11),  # one sequence of odd length
        Case("deepseek", "ddp", 2, 2, 1, "fp32", tp=2, tensor="sliced", batch=3),
    ],
    ids=lambda case: case.layout,
)
def test_steps_with_few_sequences_equal_the_plain_twin(case: Case, two_steps: None) -> None:
    ((_, ran),) = layouts.run_world([case], 2)
    assert not isinstance(ran, str), ran
    assert max(compare(ran[0], twin.reference(expected.twin_of(case))).values()) < 1e-5
