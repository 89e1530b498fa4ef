"""A change of a recipe with which it fits in memory: the first of a list that works, cheapest in time first.

    1  activations computed again: selective, full          4  2 or 3 and full recompute, with the smallest micro-batches
    2  smaller micro-batches                                5  4 with the loss in chunks
    3  states sharded: ZeRO-1, 2, 3, FSDP                   6  5 with states in the host's memory, if the device has its own memory
    7  4 with the loss in chunks and shorter sequences

Each is tried by the recipe's own checks and by the prediction, so the printed flags work. Source of the order: the decision guide
(moe/plan/choose/guide.py), and ZeRO-Infinity (arXiv 2104.07857), section 3, for step 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moe.recipe.sections import Run
from parallel.data.kinds.catalog import ENGINES, offloading
from parallel.data.kinds.kind import EngineKind
from parallel.errors import BadInput
from parallel.fixes import Fix, typed

Values = dict[str, Any]  # dotted key: value
SHORTEST = 64  # tokens: shorter sequences are not proposed


@dataclass(frozen=True)
class Change:
    """A change of a recipe. `run`: changed and checked."""

    fix: Fix
    run: Run


def change_that_fits(
    run: Run, world: int, *, fits: Callable[[Run], bool], checked: Callable[[Run, int], Run], has_gpus: bool
) -> Change | None:
    """Return the first change with which the run fits on `world` ranks; None if there is none."""
    for values in _changes(run, has_gpus=has_gpus):
        try:
            changed = checked(with_values(run, values), world)
            if fits(changed):
                return Change(typed(values), changed)
        except BadInput:
            continue
    return None


def with_values(run: Run, values: Values) -> Run:
    """The run with some values changed by dotted key; nothing is checked."""
    for key, value in values.items():
        first, *rest = key.split(".")
        run = _with(run, [first, *rest], value)
    return run


def _with(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with(getattr(section, path[0]), path[1:], value)
    return section.model_copy(update={path[0]: inner})


def _named(kind: EngineKind) -> Values:
    return {f"sharding.{key}": value for key, value in kind.sharding.items()}


def _changes(run: Run, *, has_gpus: bool) -> Iterator[Values]:
    again: list[Values] = [{"recompute.kind": "selective"}, {"recompute.kind": "full"}]
    smaller: list[Values] = [{"pipeline.microbatches": run.pipeline.microbatches * 2**n} for n in range(1, 11)]
    engines = sorted(reversed(ENGINES.values()), key=lambda kind: kind.stage)  # of stage 3 ZeRO, then FSDP
    sharded = [_named(kind) for kind in engines if kind.stage]
    chunked: Values = {"recompute.loss_chunks": 8}
    host = _named(offloading("parameters", "cpu")) | {"sharding.offload.optimizer": "cpu", "sharding.offload.parameters": "cpu"}
    yield from again
    yield from smaller
    yield from sharded
    for more in ({}, chunked):
        yield from (again[1] | less | more for less in smaller)
        yield from (again[1] | states | more for states in sharded)
        yield from (again[1] | less | states | more for less in smaller for states in sharded)
    if has_gpus:
        yield from (again[1] | less | chunked | host for less in ({}, *smaller))
    lengths = (run.model.max_length // 2**n for n in range(1, 8) if run.model.max_length // 2**n >= SHORTEST)
    yield from (again[1] | less | chunked | {"model.max_length": length} for length in lengths for less in ({}, *smaller))
