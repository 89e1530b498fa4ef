"""Layouts of expert parallelism."""

from __future__ import annotations

from itertools import cycle

from moe.experts.dispatch.catalog import rows_for
from moe.verify.cases import BATCH, EXPERTS, MODELS, OPTIONS, ROUTERS, Case
from parallel.mesh.mesh import divisors


def expert_cases(nproc: int) -> list[Case]:
    """Every router with every dispatcher. With ep 1 no rows are sent, so one dispatcher is tested; hierarchical needs an ep of at least 4.

    Each kind of recompute is combined with one number of micro-batches, and for every second router with the other number. Each dispatcher
    thus meets all four pairs with half the cases.
    """
    sparse = [model for model in MODELS | ROUTERS if model != "dense"]
    return [
        Case(model, "ddp", world, ep, microbatches, "fp32", recompute, etp, rows, EXPERTS)
        for world in range(1, nproc + 1)
        if BATCH % world == 0 and EXPERTS % world == 0
        for etp in (1, 2)
        for ep in divisors(world)
        if world % (ep * etp) == 0
        for rows in rows_for(ep)
        for number, model in enumerate(sparse)
        for microbatches in (1, 3)
        if BATCH % (world * microbatches) == 0
        for recompute in ("none", "full" if (microbatches == 1) == (number % 2 == 0) else "selective")
    ]


def all_expert_cases(nproc: int) -> list[Case]:
    """The cases of `expert_cases`, and options of published models."""
    ways = zip(OPTIONS, cycle(rows_for(2)[1:]), strict=False)
    options = [Case(model, "ddp", 2, 2, 1, "fp32", rows=rows, experts=EXPERTS) for model, rows in ways]
    return expert_cases(nproc) + (options if nproc >= 2 else [])
