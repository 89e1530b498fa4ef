"""A run with fewer processes than it is meant for, `--elastic MIN`: dp shrinks, and each rank computes more micro-batches of a step.

    4 processes    dp 4  ep 4    1 micro-batch of 2 sequences          lost: 2 ranks
    2 processes    dp 2  ep 2    2 micro-batches of 2 sequences        the same 8 sequences a step, in the same order

A micro-batch never holds more sequences than it is meant to, so activations fit where they fitted before. tp, pp, sp and etp stay; ep is
the recipe's, or its largest divisor that divides what is left. Losses are a function of the global batch, so they stay what they were, to
rounding; with a router whose decisions depend on the micro-batch, only numbers of processes with micro-batches of the same size will do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe.checks.together import check_run
from moe.recipe.sections import Run
from moe.router.groups import needs_group
from parallel.errors import BadInput
from parallel.mesh import divisors

ORIGIN = "--elastic"  # of the values that this changes
_TRIES = 8  # numbers of micro-batches for one number of processes: the fewest come first


def whole(run: Run, processes: int | None) -> Run:
    """The recipe for all its processes: where `degrees.dp` is auto, for these. Raises BadInput where nobody says how many those are."""
    if run.degrees.dp != "auto":
        return run
    if processes is None:
        needed = "the dp of all processes: micro-batches are cut for it, however many processes are left"
        raise BadInput("degrees.dp", got="auto with --elastic", needed=needed, fix="--degrees.dp N")
    return _with_degrees(run, dp=max(1, processes // _ranks_each(run)))


def size(run: Run) -> int:
    """How many processes a run with a number for `degrees.dp` is meant for."""
    assert isinstance(run.degrees.dp, int)
    return run.degrees.dp * _ranks_each(run)


def for_world(run: Run, world: int, *, least: int) -> Run:
    """The run of all processes (`whole`), which must be legal, for `world` of them. Raises BadInput where that does not divide."""
    found = None if world < least else run if world == size(run) else _fitted(run, world)
    if found is not None:
        return found
    works = smaller(run, below=max(world, size(run)) + 1, least=1)
    needed = f"{listed(works)}, of which --elastic {least} allows {listed([n for n in works if n >= least])}: {_why(run)}"
    raise BadInput("processes", got=world, needed=needed, fix=_advice(works, world, least))


def _advice(works: list[int], world: int, least: int) -> str:
    fewer = [n for n in works if n <= world]
    if fewer and fewer[0] >= least:
        return f"start {fewer[0]} of them"
    return f"--elastic {fewer[0]}" if fewer else f"start {works[-1]} of them" if works else "leave --elastic out"


def smaller(run: Run, *, below: int, least: int) -> list[int]:
    """The numbers of processes under `below` on which the run of all processes (`whole`) can go on, at least `least`; largest first."""
    each = _ranks_each(run)
    worlds = range((below - 1) // each * each, max(least, each) - 1, -each)
    return [world for world in worlds if world == size(run) or _fitted(run, world) is not None]


def check_smaller(run: Run, *, below: int, least: int) -> list[int]:
    """`smaller`, of a start on `below` processes. Raises BadInput where there is none, and names those that there are below `least`."""
    found = smaller(run, below=below, least=least)
    if found:
        return found
    works = smaller(run, below=below, least=1)
    needed = f"at most {works[0]}, as {listed(works)} can train it" if works else "a smaller number that can train it, and there is none"
    fix = f"--elastic {works[0]}" if works else "leave --elastic out"
    got = f"{least} of {below} process{'es' if below > 1 else ''}"
    raise BadInput("--elastic", got=got, needed=f"{needed}: {_why(run)}", fix=fix)


def layout(run: Run) -> str:
    """What changes with the number of processes, in a few words, of a resolved run."""
    d, m = run.degrees, run.pipeline.microbatches
    ep = f" ep {d.ep}" if run.model.layers_with_experts() else ""
    held = run.train.global_batch // (int(d.dp) * m)
    return f"dp {d.dp}{ep}, {m} micro-batch{'es' if m > 1 else ''} of {held} sequence{'s' if held > 1 else ''}"


def _fitted(run: Run, world: int) -> Run | None:
    """The legal run on `world` processes with the fewest micro-batches that hold no more than they should; None where there is none."""
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
    """The recipe's, or if it no longer divides the ranks that experts lie over, its divisors that do, largest first."""
    ep, d = run.degrees.ep, run.degrees
    if ep == "auto":
        return ["auto"]
    return [*reversed(divisors(math.gcd(ep, max(1, dp * d.sp * d.tp // d.etp))))]


def _same_size(run: Run) -> bool:
    """Whether the router decides, or asks for balance, over what a rank holds in a micro-batch: then that must stay the same sequences."""
    spec = run.router.spec
    if not run.model.layers_with_experts():
        return False
    balanced = spec.balance_scope == "micro_batch" and spec.asks_balance
    return balanced or (spec.group == "rank" and needs_group(spec) is not None)


def _held(run: Run) -> int:
    """Sequences in a micro-batch of a rank, of the run of all processes."""
    assert isinstance(run.degrees.dp, int)
    return max(1, run.train.global_batch // (run.degrees.dp * run.pipeline.microbatches))


def _ranks_each(run: Run) -> int:
    """Ranks of one place on dp."""
    d = run.degrees
    return max(1, d.pp * d.tp * d.sp)


def _with_degrees(run: Run, **values: int | str) -> Run:
    return run.model_copy(update={"degrees": run.degrees.model_copy(update=values)})


def _why(run: Run) -> str:
    batch, held, each = run.train.global_batch, _held(run), _ranks_each(run)
    cut = f"micro-batches of {held}" if _same_size(run) else f"micro-batches of at most {held}"
    beside = f", pp {run.degrees.pp}, tp {run.degrees.tp} and sp {run.degrees.sp} stay" if each > 1 else ""
    return f"train.global_batch={batch} and train.eval_sequences={run.train.eval_sequences} are divided by dp, in {cut}{beside}"


def listed(worlds: list[int]) -> str:
    """Numbers of processes in words."""
    return " ".join(map(str, worlds[:16])) + (f" and {len(worlds) - 16} fewer" if len(worlds) > 16 else "") if worlds else "none"
