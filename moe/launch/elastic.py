"""A run with fewer processes than planned, `--elastic MIN`: dp shrinks, and each rank computes more micro-batches of a step.

    4 processes    dp 4  ep 4    1 micro-batch of 2 sequences          lost: 2 ranks
    2 processes    dp 2  ep 2    2 micro-batches of 2 sequences        the same 8 sequences per step, in the same order

A micro-batch never has more sequences than planned, so activations still fit. tp, pp, sp and etp do not change. ep becomes the largest
divisor of the recipe's ep with which the run is possible. The global batch does not change, so losses are equal up to rounding. If routing
or the balance loss depends on which sequences share a micro-batch, micro-batches must keep their size, which excludes some numbers of
processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe.checks.together import check_run
from moe.recipe.sections import Run
from moe.router.checks import group_size
from parallel.errors import BadInput, counted
from parallel.mesh.mesh import divisors

ORIGIN = "--elastic"  # origin of the values that --elastic changes, in the comments after them in a run's recipe.yaml
_TRIES = 8  # number of values of pipeline.microbatches that are tried for each number of processes, smallest first


def whole(run: Run, processes: int | None) -> Run:
    """Return the planned run: the run in which degrees.dp "auto" is replaced by its value on `processes` processes.
    Raises BadInput if degrees.dp is "auto" and `processes` is None."""
    if run.degrees.dp != "auto":
        return run
    if processes is None:
        needed = "a number: dp of the run with all processes, which decides the size of micro-batches"
        raise BadInput("degrees.dp", got="auto with --elastic", needed=needed, fix="--degrees.dp N")
    return _with_degrees(run, dp=max(1, processes // _ranks_each(run)))


def size(run: Run) -> int:
    """Return the number of processes of a planned run; its degrees.dp is a number."""
    assert isinstance(run.degrees.dp, int)
    return run.degrees.dp * _ranks_each(run)


def for_world(run: Run, world: int, *, least: int) -> Run:
    """Return the planned `run`, with dp, ep and micro-batches for `world` processes. `least`: MIN of --elastic.
    Raises BadInput if `world` is below `least`, or if the run cannot be divided among `world` processes."""
    found = None if world < least else run if world == size(run) else _fitted(run, world)
    if found is not None:
        return found
    works = smaller(run, below=max(world, size(run)) + 1, least=1)
    needed = f"{listed(works)}, of which --elastic {least} allows {listed([n for n in works if n >= least])}: {_why(run)}"
    raise BadInput("processes", got=world, needed=needed, fix=_advice(works, world, least))


def _advice(works: list[int], world: int, least: int) -> str:
    fewer = [n for n in works if n <= world]
    if fewer and fewer[0] >= least:
        return f"start {counted(fewer[0], 'process')}"
    return f"--elastic {fewer[0]}" if fewer else f"start {counted(works[-1], 'process')}" if works else "leave --elastic out"


def smaller(run: Run, *, below: int, least: int) -> list[int]:
    """Return the numbers of processes from `least` to `below` - 1 on which the planned `run` can continue; largest first."""
    each = _ranks_each(run)
    worlds = range((below - 1) // each * each, max(least, each) - 1, -each)
    return [world for world in worlds if world == size(run) or _fitted(run, world) is not None]


def check_smaller(run: Run, *, below: int, least: int) -> list[int]:
    """Return the numbers of processes from `least` to `below` - 1 on which the run can continue (`smaller`). If there are none, raise
    BadInput with the numbers that a smaller `least` would allow."""
    found = smaller(run, below=below, least=least)
    if found:
        return found
    works = smaller(run, below=below, least=1)
    needed = f"one of {listed(works)}" if works else "a run that can continue on fewer processes"
    fix = f"--elastic {works[0]}" if works else "leave --elastic out"
    raise BadInput("--elastic", got=f"{least} with {counted(below, 'process')}", needed=f"{needed}: {_why(run)}", fix=fix)


def layout(run: Run) -> str:
    """Format the values of a resolved run that --elastic changes: "dp 2 ep 2, 2 micro-batches of 2 sequences"."""
    d, m = run.degrees, run.pipeline.microbatches
    ep = f" ep {d.ep}" if run.model.layers_with_experts() else ""
    held = run.train.global_batch // (int(d.dp) * m)
    return f"dp {d.dp}{ep}, {counted(m, 'micro-batch')} of {counted(held, 'sequence')}"


def _fitted(run: Run, world: int) -> Run | None:
    """Return the planned `run`, changed for `world` processes; None if that is impossible. It has as few micro-batches as possible, each
    with at most as many sequences as planned."""
    each = _ranks_each(run)
    if world < each or world % each or run.train.global_batch % (world // each):
        return None
    for fitted in _candidates(run, world // each):
        try:
            check_run(fitted, world)
        except BadInput:
            continue
        return fitted
    return None


def _candidates(run: Run, dp: int) -> Iterator[Run]:
    batch, held = run.train.global_batch, _held(run)
    counts = [m for m in divisors(batch // dp) if batch // dp // m == held or (batch // dp // m < held and not _same_size(run))]
    for microbatches in counts[:_TRIES]:
        for ep in _expert_degrees(run, dp):
            pipeline = run.pipeline.model_copy(update={"microbatches": microbatches})
            yield _with_degrees(run, dp=dp, ep=ep).model_copy(update={"pipeline": pipeline})


def _expert_degrees(run: Run, dp: int) -> list[int | str]:
    """Return the possible values of degrees.ep with this dp, largest first: common divisors of the recipe's ep and dp * sp * tp / etp."""
    ep, d = run.degrees.ep, run.degrees
    if ep == "auto":
        return ["auto"]
    return [*reversed(divisors(math.gcd(ep, max(1, dp * d.sp * d.tp // d.etp))))]


def _same_size(run: Run) -> bool:
    """Return whether the number of sequences in a micro-batch must not change, because routing or the balance loss depends on it."""
    spec = run.router
    if not run.model.layers_with_experts():
        return False
    balanced = spec.balance_scope == "micro_batch" and spec.asks_balance
    return balanced or (spec.group == "rank" and group_size(spec) is not None)


def _held(run: Run) -> int:
    """Return the number of sequences in a micro-batch."""
    return max(1, run.train.global_batch // (int(run.degrees.dp) * run.pipeline.microbatches))


def _ranks_each(run: Run) -> int:
    """Return the number of ranks in each dp replica."""
    return max(1, run.degrees.pp * run.degrees.tp * run.degrees.sp)


def _with_degrees(run: Run, **values: int | str) -> Run:
    return run.model_copy(update={"degrees": run.degrees.model_copy(update=values)})


def _why(run: Run) -> str:
    batch, held, each = run.train.global_batch, _held(run), _ranks_each(run)
    cut = f"micro-batches of {held}" if _same_size(run) else f"micro-batches of at most {held}"
    beside = f", pp {run.degrees.pp}, tp {run.degrees.tp} and sp {run.degrees.sp} stay" if each > 1 else ""
    return f"train.global_batch={batch} and train.eval_sequences={run.train.eval_sequences} are divided by dp, in {cut}{beside}"


def listed(worlds: list[int]) -> str:
    """Format numbers of processes, given largest first: the first 16, then how many smaller numbers follow."""
    return " ".join(map(str, worlds[:16])) + (f" and {len(worlds) - 16} smaller" if len(worlds) > 16 else "") if worlds else "none"
