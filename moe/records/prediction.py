"""What a run is told about itself before it starts, and at its end: predicted memory and time, in words and for the summary.

    line(p), warning(p)     at the start: bytes of the fullest rank, seconds of a step
    refusal(p, ...)         the error of a run that cannot fit, with a change that makes it fit (moe/plan/fitting.py)
    record(p), against(...) at the end: what was predicted, what was measured, and measured / predicted

The prediction itself is moe/plan/predicted.py. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe.plan.fitting import Change, change_that_fits
from moe.plan.predicted import Prediction, predict
from moe.recipe.sections import Run
from moe.records.summary import size
from parallel.errors import BadInput

CALIBRATE = "moe plan --calibrate"


def line(found: Prediction) -> str:
    """For the start of a run."""
    limit = found.place.limit_bytes
    of = "" if limit is None else f" of {size(limit)}"
    said = f"predicted: {size(found.rank_bytes)} of tensors on the fullest rank{of}, "
    if found.time is None or found.place.cluster is None:
        return f"{said}time not predicted ({CALIBRATE} measures this machine)"
    return f"{said}{seconds(found.time.step)} a step ({found.place.cluster.name})"


def warning(found: Prediction) -> str | None:
    """Where a run may not fit though it is not refused."""
    limit = found.place.limit_bytes
    if limit is None or found.over_bytes > 0 or found.needed_bytes <= limit:
        return None
    return f"it may not fit: with the allocator's share and the context a device needs {size(found.needed_bytes)} of {size(limit)}"


def refusal(found: Prediction, run: Run, world: int, *, checked: Callable[[Run, int], Run]) -> BadInput:
    """For a prediction with `over_bytes` above 0. `run`: as the user has it; `checked`: the recipe's own checks."""
    limit = found.place.limit_bytes or 1.0

    def fits(changed: Run) -> bool:
        return predict(changed, found.place).needed_bytes <= limit

    change = change_that_fits(run, world, fits=fits, checked=checked, has_gpus=found.place.kind == "cuda")
    each = "on the fullest rank" if found.place.kind == "cuda" else "a rank, all of which share this host's memory"
    return BadInput(
        "memory",
        got=f"a prediction of {size(found.least_bytes)} of tensors {each}, {size(found.over_bytes)} too much",
        needed=f"at most {size(limit)}",
        fix=f"{_fix(change, found, limit)}; --force tries all the same",
    )


def _fix(change: Change | None, found: Prediction, limit: float) -> str:
    if change is not None:
        then = predict(change.run, found.place)
        host = sum(then.fullest.host.values()) if then.place.kind == "cuda" else 0.0
        return f"add {change.words}: then {size(then.least_bytes)}{f', and {size(host)} in the memory of its host' if host else ''}"
    times = found.least_bytes / limit
    return f"take a smaller model.max_length, or ranks with about {times:.1f} times as much memory together (moe plan chooses a layout)"


def record(found: Prediction) -> dict[str, Any]:
    """What the summary keeps, before anything was measured."""
    cluster = found.place.cluster
    step = None if found.time is None else found.time.step
    return {"memory_bytes": found.rank_bytes, "step_seconds": step, "cluster": None if cluster is None else cluster.name}


def against(recorded: dict[str, Any] | None, *, memory_bytes: float, step_seconds: float | None) -> dict[str, Any] | None:
    """The same with what was measured: ratios are measured / predicted."""
    if recorded is None:
        return None
    measured = {"measured_memory_bytes": memory_bytes, "measured_step_seconds": step_seconds}
    ratios = {
        "memory_ratio": _ratio(memory_bytes, recorded["memory_bytes"]),
        "step_ratio": _ratio(step_seconds, recorded["step_seconds"]),
    }
    return recorded | measured | ratios


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def seconds(value: float) -> str:
    """Three digits with their unit."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
