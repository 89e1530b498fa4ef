"""Lists the cases of `moe verify` for expert parallelism."""

from __future__ import annotations

from itertools import cycle
from math import gcd

from moe.experts.dispatch import rows_for
from moe.router.methods import METHODS
from moe.verify.cases import BATCH, EXPERTS, MODELS, OPTIONS, ROUTERS, Case
from parallel.mesh.mesh import divisors


def expert_cases() -> list[Case]:
    """Return cases of every router with every dispatcher in rows_for(ep), then a case of each model in OPTIONS (options of published
    models) with only one dispatcher. To save cases, full and selective recompute are each combined with only one number of
    micro-batches: full with 1 and selective with 3 for every second router, the reverse for the others.
    """
    found = [
        Case(model, "ddp", world, ep, microbatches, "fp32", recompute, etp, rows, EXPERTS)
        for world in divisors(gcd(BATCH, EXPERTS))
        for etp in (1, 2)
        for ep in divisors(world)
        if world % (ep * etp) == 0
        for rows in rows_for(ep)
        for number, model in enumerate(model for model in MODELS | ROUTERS if model != "dense")
        for microbatches in (1, 3)
        if BATCH % (world * microbatches) == 0
        for recompute in ("none", "full" if (microbatches == 1) == (number % 2 == 0) else "selective")
    ]
    options = zip(OPTIONS, cycle(rows_for(2)[1:]), strict=False)
    found += [Case(model, "ddp", 2, 2, 1, "fp32", rows=rows, experts=EXPERTS) for model, rows in options]
    found += [Case("gpt_oss", "ddp", 2, 1, 1, "fp32", etp=2, experts=EXPERTS)]  # experts with biases, each sharded over two ranks
    found += [Case("lora", "ddp", 2, 2, 1, "fp32", rows="overlapped", experts=EXPERTS)]  # each chunk of experts has its own adapters
    found += [Case(f"own_balance{whole}", "ddp", 2, 2, 3, "fp32", recompute, experts=EXPERTS, padded=True)
              for whole, recompute in (("", "full"), ("_whole", "none"))]  # fmt: skip
    padded = [name for name, method in METHODS.items() if method.example]  # router methods with an example of their own
    return found + [Case(name, "ddp", 1, 1, 3, "fp32", experts=EXPERTS, padded=True) for name in padded]
