"""Layouts that combine every kind of parallelism (`moe verify --kinds hybrid --nproc 8`). Needs no torch.

    factor      values                                                      ranks
    schedule    none, and every schedule of the catalog                     2 stages
    sequence    none, ring (three orders, and with ulysses inside),
                lightseq, colossal_ring, ulysses                            2; ring with ulysses 4
    tensor      none, 1d, 1d with slices, dtensor, 2d, 2.5d, 3d             2; 2d 4; 2.5d and 3d 8
    dispatch    none, all_to_all (whole, in chunks), padded, all_gather,
                hierarchical                                                the ranks of ep
    data        ddp, fsdp, zero1, zero2, zero3                              the remaining ranks
    experts     whole, over ep, over etp, over both                         folded over the other axes
    model, recompute, precision

`moe/verify/pairwise.py` chooses rows that contain every pair of values. The checks of recipes decide which pairs are refused. A factor
with the value none uses no ranks, and the remaining ranks are used for data parallelism.
"""

from __future__ import annotations

from typing import Any

from moe.checks.together import check_run
from moe.experts.dispatch.catalog import PLAIN, examples, rows_for
from moe.verify.cases import EXPERTS, MODELS, SLICED, Case, attentions
from moe.verify.pairwise import Choice, Covering, Pair, cover, together
from moe.verify.rows.pipeline import LAYERS
from parallel.data.kinds.catalog import ENGINES, planned
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.mesh.grids import SMALLEST
from parallel.pipeline.schedules.catalog import SCHEDULES

WORLD, BATCH = 8, 24  # the batch divides evenly over 8 ranks, also in groups
TENSOR = {"none": 1, "1d": 2, "sliced": 2, "dtensor": 2} | SMALLEST  # value -> the fewest ranks
PLACES = {"whole": (1, 1), "ep2": (2, 1), "ep4": (4, 1), "etp2": (1, 2), "ep2 etp2": (2, 2)}  # (ep, etp)
FACTORS: dict[str, tuple[str, ...]] = {  # the first value is the simplest
    "schedule": ("none", *SCHEDULES),
    "sequence": ("none", *attentions()),
    "tensor": tuple(TENSOR),
    "dispatch": ("none", *examples()),
    "data": planned(),
    "experts": tuple(PLACES),
    "model": tuple(MODELS),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "bf16", "fp16"),
}


class Idle(BadInput):
    """A value that has no effect together with the others."""


def hybrid_cases() -> list[Case]:
    """Return the rows of `covering` as cases."""
    return [case_of(row, world=WORLD) for row in covering().rows]


def covering() -> Covering:
    """Rows of eight processes that contain every pair of values that is not refused.

    If several precisions would bring equally many new pairs, fp32 is taken, because its twin costs least.
    """

    def refuse(choice: Choice) -> BadInput | None:
        try:
            case = case_of(choice, world=WORLD)
            check_run(case.run(), case.world)
        except BadInput as refused:
            return refused
        return None

    return cover(FACTORS, complete=completed, refuse=refuse, first_of=("precision",))


def described(found: Covering) -> list[str]:
    """Lines of text: how many pairs the rows contain, and the refused pairs with their reasons."""
    lines = [f"pairs of values: {len(found.met)} tested by {len(found.rows)} rows, each at least once; {len(found.refused)} are refused:"]
    by_reason: dict[str, list[Pair]] = {}
    for pair, refused in found.refused.items():
        by_reason.setdefault(f"{refused.what}: needed {refused.needed}", []).append(pair)
    for reason, pairs in by_reason.items():
        lines += [f"  {line}: {reason}" for line in together(pairs)]
    return lines


def as_json(found: Covering) -> dict[str, dict[str, Any]]:
    """For each pair the number of rows that contain it, or the reason why it is refused."""

    def name(pair: Pair) -> str:
        return " x ".join(" ".join(value) for value in pair)

    return {
        "pairs": {name(pair): times for pair, times in found.met.items()},
        "refused_pairs": {name(pair): str(refused) for pair, refused in found.refused.items()},
    }


def completed(chosen: Choice) -> Choice:
    """The simplest row with these values. If a dispatcher is chosen, the model has experts, split over several ranks."""
    row = {factor: values[0] for factor, values in FACTORS.items()} | chosen
    if "experts" not in chosen and row["dispatch"] != "none":
        row["experts"] = next(place for place, (ep, _) in PLACES.items() if row["dispatch"] in rows_for(ep) and ep > 1)
    if "dispatch" not in chosen and PLACES[row["experts"]][0] > 1:
        row["dispatch"] = PLAIN
    if "model" not in chosen and row["experts"] != "whole":
        row["model"] = "switch"
    return row


def case_of(choice: Choice, *, world: int | None) -> Case:
    """A row as a case. With `world` None it has as many processes as it needs, two data-parallel ranks among them.

    Raises BadInput for a row that needs more than `world` processes, and Idle for one with a value that has no effect.
    """
    (ep, etp), rows, schedule = PLACES[choice["experts"]], choice["dispatch"], choice["schedule"]
    _check_idle(choice, ep)
    pp, tp = (1 if schedule == "none" else 2), TENSOR[choice["tensor"]]
    sp = {"none": 1, "heads2": 4}.get(choice["sequence"], 2)
    dp = _rest(choice, world, pp * tp * sp, ep * etp, sharers=sp)
    microbatches = _microbatches(schedule, dp)
    return Case(
        choice["model"],
        choice["data"],
        dp * pp * tp * sp,
        ep,
        microbatches,
        choice["precision"],
        choice["recompute"],
        etp,
        rows if ep > 1 else PLAIN,
        EXPERTS,
        pp=pp,
        schedule="1f1b" if pp == 1 else schedule,
        layers=LAYERS[2][int(pp > 1 and SCHEDULES[schedule].chunks != 1)],
        tp=tp,
        tensor="copied" if tp == 1 else choice["tensor"],
        sp=sp,
        attention="zigzag" if sp == 1 else choice["sequence"],
        length=SLICED,
        batch=BATCH if world is not None else dp * microbatches * tp,
    )


def _check_idle(choice: Choice, ep: int) -> None:
    rows, places = choice["dispatch"], choice["experts"]
    if (rows == "none") != (ep == 1):
        needed = "none: one rank holds every expert" if ep == 1 else "a dispatcher"
        raise Idle("dispatch.kind", got=f"{rows} with experts {places}", needed=needed, fix=Set("degrees.ep", 2) | "leave dispatch out")
    if ep > 1 and rows not in rows_for(ep):
        needed = "degrees.ep 4: with two ranks, one of the two steps sends nothing"
        raise Idle("dispatch.kind", got=f"{rows} with experts {places}", needed=needed, fix=Set("degrees.ep", 4))


def _rest(choice: Choice, world: int | None, ranks: int, experts: int, *, sharers: int) -> int:
    """The number of data-parallel ranks in addition to `ranks` of other axes.

    With one, shards of optimizer states would not be split. `sharers`: ranks of other axes over which such shards are split too.
    """
    least = 1 if ENGINES[choice["data"]].stage == 0 or sharers > 1 or ranks == WORLD and choice["tensor"] in ("2.5d", "3d") else 2
    if world is None:
        return max(2, experts)
    if ranks * least > world:
        got = f"{world} for {' x '.join(value for value in choice.values() if value != 'none')}"
        raise BadInput("--nproc", got=got, needed=f"at least {counted(ranks * least, 'process')}", fix=f"--nproc {ranks * least}")
    return world // ranks


def _microbatches(schedule: str, dp: int) -> int:
    """The number of micro-batches: several if possible. The batch of 24 is cut into at most 12 parts, except in a pipeline of four
    replicas.
    """
    if schedule == "none":
        return 3 if dp <= 4 else 1
    kind = SCHEDULES[schedule]
    return kind.update_every or (3 if kind.continuous else 6)
