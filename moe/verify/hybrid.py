"""Layouts in which every kind of parallelism meets every other (`moe verify --kinds hybrid --nproc 8`); no torch here.

    factor      values                                                      ranks
    schedule    none, and every schedule of the catalog                     2 stages
    sequence    none, ring (three orders, and with ulysses inside),
                lightseq, colossal_ring, ulysses                            2, ring with ulysses 4
    tensor      none, 1d, 1d with slices, dtensor, 2d, 2.5d, 3d             2; 2d 4; 2.5d and 3d 8
    dispatch    none, all_to_all (whole, in chunks), padded, all_gather,
                hierarchical                                                those of ep
    data        ddp, fsdp, zero1, zero2, zero3                              the rest
    experts     whole, over ep, over etp, over both                         folded over the others
    model, recompute, precision

`moe/verify/pairwise.py` makes rows of them that have every pair; what may not be is said by the code that checks recipes. A kind
that is not in a row costs no ranks, so the rest go to data parallelism.
"""

from __future__ import annotations

from typing import Any

from moe.checks.together import check_run
from moe.experts.dispatch.catalog import PLAIN, examples, rows_for
from moe.verify.cases import EXPERTS, LAYERS, MODELS, SLICED, Case, attentions
from moe.verify.pairwise import Choice, Covering, Pair, cover, together
from parallel.data.kinds.catalog import ENGINES, planned
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.pipeline.schedules.catalog import SCHEDULES

WORLD, BATCH = 8, 24  # a batch that 8 ranks share out, in groups
TENSOR = {"none": 1, "1d": 2, "sliced": 2, "dtensor": 2, "2d": 4, "2.5d": 8, "3d": 8}  # and the fewest ranks
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
    """A value that changes nothing beside the others."""


def hybrid_cases(nproc: int) -> list[Case]:
    """The rows of `covering`, where there are the ranks for them."""
    return [] if nproc < WORLD else [case_of(row, world=WORLD) for row in covering().rows]


def covering() -> Covering:
    """Every pair of values in a row of eight processes, or refused. Of equally useful precisions fp32, whose twin costs least."""

    def refuse(choice: Choice) -> BadInput | None:
        try:
            case = case_of(choice, world=WORLD)
            check_run(case.run(), case.world)
        except BadInput as refused:
            return refused
        return None

    return cover(FACTORS, complete=completed, refuse=refuse, first_of=("precision",))


def described(found: Covering) -> list[str]:
    """Which pairs the rows have, and which they cannot have, with the reason."""
    lines = [f"pairs of values: {len(found.met)} met by {len(found.rows)} rows, each at least once; {len(found.refused)} cannot be:"]
    by_reason: dict[str, list[Pair]] = {}
    for pair, refused in found.refused.items():
        by_reason.setdefault(f"{refused.what}: needed {refused.needed}", []).append(pair)
    for reason, pairs in by_reason.items():
        lines += [f"  {line}: {reason}" for line in together(pairs)]
    return lines


def as_json(found: Covering) -> dict[str, dict[str, Any]]:
    """Of each pair in how many rows it is, or why in none."""

    def name(pair: Pair) -> str:
        return " x ".join(" ".join(value) for value in pair)

    return {
        "pairs": {name(pair): times for pair, times in found.met.items()},
        "refused_pairs": {name(pair): str(refused) for pair, refused in found.refused.items()},
    }


def completed(chosen: Choice) -> Choice:
    """The simplest row with these values: where experts travel there are some, and they lie on several ranks."""
    row = {factor: values[0] for factor, values in FACTORS.items()} | chosen
    if "experts" not in chosen and row["dispatch"] != "none":
        row["experts"] = next(place for place, (ep, _) in PLACES.items() if row["dispatch"] in rows_for(ep) and ep > 1)
    if "dispatch" not in chosen and PLACES[row["experts"]][0] > 1:
        row["dispatch"] = PLAIN
    if "model" not in chosen and row["experts"] != "whole":
        row["model"] = "switch"
    return row


def case_of(choice: Choice, *, world: int | None) -> Case:
    """A row as a case; world None: of as many processes as it needs, two data-parallel ranks among them.

    Raises BadInput for a row that needs more processes than `world`, and Idle for one with a value that would change nothing.
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
        needed = "none: one rank holds every expert, nothing travels" if ep == 1 else "a way for rows to travel"
        raise Idle("dispatch.kind", got=f"{rows} with experts {places}", needed=needed, fix=Set("degrees.ep", 2) | "leave dispatch out")
    if ep > 1 and rows not in rows_for(ep):
        needed = "degrees.ep 4: of two ranks, one of the two steps goes nowhere"
        raise Idle("dispatch.kind", got=f"{rows} with experts {places}", needed=needed, fix=Set("degrees.ep", 4))


def _rest(choice: Choice, world: int | None, ranks: int, experts: int, *, sharers: int) -> int:
    """The data-parallel ranks beside `ranks` of other axes: with none, sharded states would lie on one rank. `sharers`: ranks of
    other axes that share them too."""
    least = 1 if ENGINES[choice["data"]].stage == 0 or sharers > 1 or ranks == WORLD and choice["tensor"] in ("2.5d", "3d") else 2
    if world is None:
        return max(2, experts)
    if ranks * least > world:
        got = f"{world} for {' x '.join(value for value in choice.values() if value != 'none')}"
        raise BadInput("--nproc", got=got, needed=f"{counted(ranks * least, 'process')} at least", fix=f"--nproc {ranks * least}")
    return world // ranks


def _microbatches(schedule: str, dp: int) -> int:
    """Several where they can be: a batch of 24 in at most 12 parts with one exception, a pipeline of four replicas."""
    if schedule == "none":
        return 3 if dp <= 4 else 1
    kind = SCHEDULES[schedule]
    return kind.update_every or (3 if kind.continuous else 6)
