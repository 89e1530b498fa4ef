"""Formats a run's predicted memory and time: as lines before the run, and in its summary as a comparison with the measurements.

moe/plan/choose/predicted.py makes the prediction, and finds a change of the recipe with which a run fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe.plan.choose.predicted import Bound, Change, Prediction, change_that_fits, predict
from moe.recipe.sections import Run
from moe.records.summary import size
from parallel.errors import BadInput
from parallel.fixes import Fix, Words

CALIBRATE = "moe plan --calibrate"


def line(found: Prediction) -> str:
    """Return the line that is printed at the start of a run: bytes of tensors on the fullest rank, and seconds per step."""
    of = "" if found.tightest is None else f" of {size(found.tightest.limit)}"
    said = f"predicted: {size(found.rank_bytes)} of tensors on the fullest rank{of}, "
    if found.time is None or found.place.cluster is None:
        return f"{said}time not predicted ({CALIBRATE} measures this machine)"
    return f"{said}{seconds(found.time.step)} a step ({found.place.cluster.name})"


def warning(found: Prediction) -> str | None:
    """Return a warning if tensors alone fit into the device's memory, but not together with the allocator's reserve (blocks that it keeps
    unused) and the CUDA context; else None."""
    limit = found.place.limit_bytes
    if limit is None or found.over_bytes > 0 or found.needed_bytes <= limit:
        return None
    return f"it may not fit: with the allocator's reserve and the CUDA context, a device needs {size(found.needed_bytes)} of {size(limit)}"


def refusal(found: Prediction, run: Run, world: int, *, checked: Callable[[Run, int], Run]) -> BadInput:
    """Return the error for a run that is predicted not to fit, with a fix. run: the recipe, with its "auto" values. checked: function
    of (recipe, world) that replaces "auto" values, and raises BadInput for a recipe that is refused."""
    bound = found.tightest
    assert bound is not None
    change = change_that_fits(
        run, world, fits=lambda changed: predict(changed, found.place).fits, checked=checked, has_gpus=found.place.kind == "cuda"
    )
    return BadInput(
        "memory",
        got=f"a prediction of {size(bound.least)} of tensors {bound.where}, {size(bound.over)} too much",
        needed=f"at most {size(bound.limit)}",
        fix=_fix(change, found, bound) | "--force starts the run anyway",
    )


def _fix(change: Change | None, found: Prediction, bound: Bound) -> Fix:
    if change is not None:
        then = predict(change.run, found.place)
        host = sum(then.fullest.host.values()) if then.place.kind == "cuda" else 0.0
        assert then.tightest is not None
        more = f", and {size(host)} in the memory of its host" if host else ""
        return Words(f"{change.fix}: then {size(then.tightest.least)}{more}", change.fix)
    many = f"with about {bound.least / bound.limit:.1f} times as much" if bound.limit > 2**20 else "with more"
    disk = "put model states on a disk (sharding.offload), or " if found.place.kind == "cpu" else ""
    return Words(f"{disk}use ranks {many} memory together (moe plan chooses a layout)")


def compared(found: Prediction, *, memory_bytes: float, beside_bytes: float, step_seconds: float | None) -> dict[str, Any]:
    """Return prediction, measurements and their ratios (measured / predicted) for the summary. found: the prediction. memory_bytes:
    measured peak. beside_bytes: memory of a CPU process other than tensors; it is part of the measured peak, so for the ratio it is added
    to the prediction. step_seconds: measured, or None."""
    step, cluster = None if found.time is None else found.time.step, found.place.cluster
    return {
        "memory_bytes": found.rank_bytes,
        "step_seconds": step,
        "cluster": None if cluster is None else cluster.name,
        "beside_bytes": beside_bytes,
        "measured_memory_bytes": memory_bytes,
        "measured_step_seconds": step_seconds,
        "memory_ratio": _ratio(memory_bytes, found.rank_bytes + beside_bytes),
        "step_ratio": _ratio(step_seconds, step),
    }


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def seconds(value: float) -> str:
    """Format seconds with three digits and a unit."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
