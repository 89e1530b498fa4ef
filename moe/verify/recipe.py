"""`moe verify --recipe MINE`: the layouts of a user's recipe at a small size (moe/verify/small.py), run by the trainer's own code."""

from __future__ import annotations

from dataclasses import replace

from moe.checks.together import check_run
from moe.recipe.load import load
from moe.train.start.own import Own
from moe.verify.cases import SLICED, Case
from moe.verify.small import not_compared
from parallel.errors import BadInput
from parallel.mesh.mesh import divisors


def recipe_cases(path: str, nproc: int) -> tuple[list[Case], list[str]]:
    """(the layouts that this recipe supports, a line for each layout that it refuses). Raises BadInput if it supports none."""
    first = Case(path, "ddp", 1, 1, 1, "fp32", recipe=path)
    Own.code(first.run())  # imported once, before ranks are forked
    sparse = bool(first.run().model.layers_with_experts())
    length = replace(first, length=SLICED)
    asked = [first, replace(first, microbatches=3), replace(first, recompute="full"), replace(first, padded=True, microbatches=3)]
    for world in range(2, nproc + 1):
        if first.batch % world:
            continue
        some = replace(first, world=world)
        for ep in divisors(world) if sparse else [1]:
            asked += [replace(some, ep=ep, microbatches=m, kind=kind) for kind in ("ddp", "fsdp", "zero1", "zero3") for m in (1, 2)]
        asked += [replace(some, etp=world, microbatches=2)] if sparse else []
        asked += [replace(some, tp=world, tensor=kind) for kind in ("1d", "sliced")]
        asked += [replace(some, pp=world, microbatches=4, schedule=schedule) for schedule in ("1f1b", "zb_h1")]
        asked += [replace(length, world=world, sp=world, attention=kind) for kind in ("zigzag", "ulysses")]
    cases, refused = [], []
    for case in asked:
        try:
            check_run(case.run(), case.world)
            cases.append(case)
        except BadInput as bad:
            if case is first:
                raise
            refused.append(f"refused: {case.layout} {case.kind}: {bad}")
    return cases, [*not_compared(load(path)[0]), *refused]
