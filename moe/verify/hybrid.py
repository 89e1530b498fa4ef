"""Lists layouts that combine all kinds of parallelism (`moe verify --kinds hybrid --nproc 8`). Needs no torch.

A row has one value of each feature in FACTORS, and is tested as one case (a model in a layout). `cover` chooses rows so that
every two values of different features occur together in at least one row, unless the checks of recipes refuse this pair. The degree of dp
is the number of ranks divided by pp * tp * sp; ep and etp use the same ranks as the other axes.

    factors   a: 1 2    b: x y    c: p q r            there are 12 combinations; these 6 rows contain every pair:
              (1, x, p) (2, y, p) (1, y, q) (2, x, q) (1, x, r) (2, y, r)

Most faults that appear only in combinations need just two particular values (Kuhn, Wallace, Gallo 2004). Rows are chosen greedily as in
AETG (Cohen, Dalal, Fredman, Patton 1997): a row begins with a pair that no earlier row has. Then values are added one by one: among the
allowed values of all remaining factors, always the one that adds the most new pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from moe.checks.together import check_run
from moe.experts.dispatch import PLAIN, examples, rows_for
from moe.verify.cases import EXPERTS, HALVES, MODELS, SLICED, Case, attentions
from moe.verify.rows.pipeline import LAYERS
from parallel.data.kinds import ENGINES, planned
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.mesh.grids import GRIDS, SMALLEST
from parallel.pipeline.schedules import SCHEDULES

Factors = Mapping[str, Sequence[str]]  # factor -> its values
Choice = dict[str, str]  # a row, or a part of one: factor -> value
Pair = tuple[tuple[str, str], tuple[str, str]]  # ((factor, value), (later factor, value))


@dataclass(frozen=True)
class Covering:
    """The chosen rows. met: pair -> number of rows that contain it; refused: pair that no row may contain -> reason."""

    rows: tuple[Choice, ...]
    met: dict[Pair, int]
    refused: dict[Pair, BadInput]


def every_pair(factors: Factors) -> Iterator[Pair]:
    """Yield every pair of values of two factors, in the order of the factors."""
    for one, other in combinations(factors, 2):
        yield from (((one, a), (other, b)) for a in factors[one] for b in factors[other])


def pairs_of(row: Choice, factors: Factors) -> list[Pair]:
    """Return all pairs that the row contains."""
    return list(combinations([(factor, row[factor]) for factor in factors if factor in row], 2))


def together(pairs: Sequence[Pair]) -> list[str]:
    """Return the pairs as lines of text. A line such as `schedule zb_h1, zb_h2 x data fsdp, zero2` means four pairs."""
    lines = []
    for factors in dict.fromkeys((one[0], other[0]) for one, other in pairs):
        partners: dict[str, list[str]] = {}
        for one, other in pairs:
            if (one[0], other[0]) == factors:
                partners.setdefault(one[1], []).append(other[1])
        for others in dict.fromkeys(map(tuple, partners.values())):
            ones = [value for value, found in partners.items() if tuple(found) == others]
            lines.append(f"{factors[0]} {', '.join(ones)} x {factors[1]} {', '.join(others)}")
    return lines


def cover(
    factors: Factors, *, complete: Callable[[Choice], Choice], refuse: Callable[[Choice], BadInput | None], first_of: Sequence[str] = ()
) -> Covering:
    """Choose rows that contain every pair that is not refused. complete(values): returns the simplest row with these values. refuse(row):
    returns the error with which the row is refused, or None. A pair is refused if the simplest row with it is refused. If several values
    add equally many new pairs, a row gets the value that the fewest rows have; for a factor in `first_of`, the factor's first such value.
    """
    reason_of: dict[tuple[str, ...], BadInput | None] = {}

    def why_not(chosen: Choice) -> BadInput | None:
        row = complete(chosen)
        key = tuple(row[factor] for factor in factors)
        if key not in reason_of:
            reason_of[key] = refuse(row)
        return reason_of[key]

    reasons = {pair: why_not(dict(pair)) for pair in every_pair(factors)}
    left = dict.fromkeys(pair for pair, reason in reasons.items() if reason is None)
    met: Counter[Pair] = Counter()
    used: Counter[tuple[str, str]] = Counter()

    def brought(row: Choice, option: tuple[str, str]) -> list[Pair]:
        return [pair for pair in pairs_of(row | dict([option]), factors) if option in pair]

    def extended(row: Choice) -> Choice:
        """Return the row with one more value: among all allowed values, the one that adds the most new pairs."""
        options = [(factor, value) for factor in factors if factor not in row for value in factors[factor]]
        gains = {option: sum(pair in left for pair in brought(row, option)) for option in options}
        options.sort(key=lambda option: (-gains[option], 0 if option[0] in first_of else used[option]))
        for option in options:
            if all(reasons[pair] is None for pair in brought(row, option)) and why_not(row | dict([option])) is None:
                return row | dict([option])
        raise AssertionError(f"{row} is allowed, but no further value is allowed with it")

    rows: list[Choice] = []
    while left:
        row = dict(next(iter(left)))
        while len(row) < len(factors):
            row = extended(row)
        rows.append({factor: row[factor] for factor in factors})
        used.update(row.items())
        for pair in pairs_of(row, factors):
            met[pair] += 1
            left.pop(pair, None)
    return Covering(tuple(rows), dict(met), {pair: reason for pair, reason in reasons.items() if reason is not None})


WORLD, BATCH = 8, 24  # number of ranks of every row; sequences of a step, divisible by the degree of every axis
TENSOR = {"none": 1, "1d": 2, "sliced": 2, "dtensor": 2} | SMALLEST  # value of `tensor` -> smallest number of tp ranks
PLACES = {"whole": (1, 1), "ep2": (2, 1), "ep4": (4, 1), "etp2": (1, 2), "ep2 etp2": (2, 2)}  # value of `experts` -> (ep, etp)
FACTORS: dict[str, tuple[str, ...]] = {  # feature -> its values, the simplest first
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
# feature -> its values in the rows of `covering_few`
FEW: dict[str, tuple[str, ...]] = {
    "model": ("gshard", "deepseek", "megatron", "t5", "t5_untied", "muon", "frozen", "olmoe", "latent", "adafactor", "kfac"),
    "schedule": ("none", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "dualpipe", "chimera"),
    "tensor": ("none", "1d", "sliced", "2d"),
    "sequence": ("none", "zigzag", "ulysses"),
    "data": (*planned(), "fsdp+kept"),  # fsdp+kept: FSDP with sharding.reshard false
    "experts": ("ep2", "ep4", "ep2 etp2"),
    "sequences": ("1", "3"),  # in a data-parallel rank's micro-batch; with a grid of tp ranks, in each grid row's shard of it
}


class Idle(BadInput):
    """Raised for a row in which one of the values has no effect, such as a dispatcher without expert parallelism."""


def hybrid_cases() -> list[Case]:
    """Return the cases of `moe verify --kinds hybrid`: one for each row of `covering` and of `covering_few`."""
    return [case_of(row, world=WORLD) for row in covering().rows] + [few_of(row) for row in covering_few().rows]


@cache
def covering() -> Covering:
    """Return rows in which every allowed pair of values of FACTORS occurs, and the refused pairs. Rows use fp32 if possible, because
    reference runs in fp32 are the fastest."""
    return cover(FACTORS, complete=completed, refuse=_refusal(lambda row: case_of(row, world=WORLD)), first_of=("precision",))


@cache
def covering_few() -> Covering:
    """Like `covering`, for FEW: further models, in fp32, with few sequences in a micro-batch."""
    simplest = {factor: values[0] for factor, values in FEW.items()}
    return cover(FEW, complete=lambda chosen: simplest | chosen, refuse=_refusal(few_of))


def _refusal(made: Callable[[Choice], Case]) -> Callable[[Choice], BadInput | None]:
    """Return a function: row -> the error with which the checks of recipes refuse the row's case, or None. made: makes the case of a
    row."""

    def refuse(choice: Choice) -> BadInput | None:
        try:
            case = made(choice)
            check_run(case.run(), case.world)
        except BadInput as refused:
            return refused
        return None

    return refuse


def described(found: Covering) -> list[str]:
    """Return lines of text: the numbers of tested pairs, rows and refused pairs, then the refused pairs with the reasons."""
    lines = [f"pairs of values: {len(found.met)} tested by {len(found.rows)} rows, each at least once; {len(found.refused)} are refused:"]
    by_reason: dict[str, list[Pair]] = {}
    for pair, refused in found.refused.items():
        by_reason.setdefault(f"{refused.what}: needed {refused.needed}", []).append(pair)
    for reason, pairs in by_reason.items():
        lines += [f"  {line}: {reason}" for line in together(pairs)]
    return lines


def as_json(*coverings: Covering) -> dict[str, dict[str, Any]]:
    """Return {"pairs": pair -> number of rows with it, "refused_pairs": pair -> reason}. Pairs are text "FEATURE VALUE x FEATURE VALUE"."""
    pairs, refused = Counter[str](), dict[str, Any]()
    for found in coverings:
        pairs.update({_named(pair): times for pair, times in found.met.items()})
        refused |= {_named(pair): str(reason) for pair, reason in found.refused.items()}
    return {"pairs": dict(pairs), "refused_pairs": refused}


def _named(pair: Pair) -> str:
    return " x ".join(" ".join(value) for value in pair)


def completed(chosen: Choice) -> Choice:
    """Return a value for each feature: the chosen ones, and for all others the simplest with which the chosen dispatcher or split of
    experts can run."""
    row = {factor: values[0] for factor, values in FACTORS.items()} | chosen
    if "experts" not in chosen and row["dispatch"] != "none":
        row["experts"] = next(place for place, (ep, _) in PLACES.items() if row["dispatch"] in rows_for(ep) and ep > 1)
    if "dispatch" not in chosen and PLACES[row["experts"]][0] > 1:
        row["dispatch"] = PLAIN
    if "model" not in chosen and row["experts"] != "whole":
        row["model"] = "switch"
    return row


def case_of(choice: Choice, *, world: int | None) -> Case:
    """Return a row's case on `world` ranks. choice: the row, feature -> value. world: number of ranks; None: as many as the row
    needs with dp = max(2, ep * etp). Raises BadInput if `world` is too small, and Idle if a value of the row has no effect."""
    (ep, etp), rows, schedule = PLACES[choice["experts"]], choice["dispatch"], choice["schedule"]
    _check_idle(choice, ep)
    pp, tp = (1 if schedule == "none" else 2), TENSOR[choice["tensor"]]
    sp = {"none": 1, "heads2": 4}.get(choice["sequence"], 2)
    dp = _dp_of(choice, world, pp * tp * sp, ep * etp, sp=sp)
    # without a pipeline: 3 micro-batches if dp * 3 is at most 12, the largest number of micro-batches in reference runs (CUTS); otherwise 1
    kind = None if pp == 1 else SCHEDULES[schedule]
    microbatches = (3 if dp <= 4 else 1) if kind is None else kind.update_every or (3 if kind.continuous else 6)
    batch = BATCH if world is not None else dp * microbatches * max(1, tp // 2)  # tp // 2: at least as many sequences as a tp grid has rows
    layers = LAYERS[2][int(kind is not None and kind.chunks != 1)]
    case = Case(choice["model"], choice["data"], dp * pp * tp * sp, ep, microbatches, choice["precision"], choice["recompute"], etp)
    case = replace(case, experts=EXPERTS, layers=layers, length=SLICED, batch=batch)
    case = replace(case, rows=rows) if ep > 1 else case
    case = replace(case, pp=pp, schedule=schedule) if pp > 1 else case
    case = replace(case, tp=tp, tensor=choice["tensor"]) if tp > 1 else case
    return replace(case, sp=sp, attention=choice["sequence"]) if sp > 1 else case


def few_of(choice: Choice) -> Case:
    """Return the case on WORLD ranks for one combination of values in FEW. Raises BadInput if it needs more ranks."""
    (ep, etp), schedule, model = PLACES[choice["experts"]], choice["schedule"], choice["model"]
    pp, tp, sp = (1 if schedule == "none" else 2), TENSOR[choice["tensor"]], (1 if choice["sequence"] == "none" else 2)
    dp = _dp_of(choice, WORLD, pp * tp * sp, ep * etp, sp=sp)
    microbatches, sequences = (2 if pp == 1 else 4), int(choice["sequences"]) * (2 if choice["tensor"] in GRIDS else 1)
    layers = 4 if model in HALVES else LAYERS[2][int(pp > 1 and SCHEDULES[schedule].chunks != 1)]
    length = 24 if model == "latent" else 32  # with 32, a token of `latent` is nearly tied between two experts in step 3
    case = Case(model, choice["data"], WORLD, ep, microbatches, "fp32", etp=etp, experts=EXPERTS, layers=layers, length=length)
    case = replace(case, batch=dp * microbatches * sequences, tp=tp, tensor=choice["tensor"] if tp > 1 else case.tensor)
    case = replace(case, pp=pp, schedule=schedule) if pp > 1 else case
    return replace(case, sp=sp, attention=choice["sequence"]) if sp > 1 else case


def _check_idle(choice: Choice, ep: int) -> None:
    """Raise Idle for a dispatcher without expert parallelism, for expert parallelism without a dispatcher, and for a dispatcher that needs
    more than `ep` ranks. ep: degree of expert parallelism of the row `choice`."""
    rows, places = choice["dispatch"], choice["experts"]
    if (rows == "none") != (ep == 1):
        needed = "none: one rank holds every expert" if ep == 1 else "a dispatcher"
        raise Idle("dispatch.kind", got=f"{rows} with experts {places}", needed=needed, fix=Set("degrees.ep", 2) | "leave dispatch out")
    if ep > 1 and rows not in rows_for(ep):
        needed = "degrees.ep 4: with two ranks, one of the two steps of this dispatcher sends nothing"
        raise Idle("dispatch.kind", got=f"{rows} with experts {places}", needed=needed, fix=Set("degrees.ep", 4))


def _dp_of(choice: Choice, world: int | None, ranks: int, experts: int, *, sp: int) -> int:
    """Return the degree of dp for a row. ranks: pp * tp * sp. experts: ep * etp. Raises BadInput if `world` is too small."""
    # smallest dp: 2 for an engine that shards states, unless it can shard over sp, or over a 2.5D or 3D grid of all ranks
    least = (
        1 if ENGINES[choice["data"].partition("+")[0]].stage == 0 or sp > 1 or ranks == WORLD and choice["tensor"] in ("2.5d", "3d") else 2
    )
    if world is None:
        return max(2, experts)
    if ranks * least > world:
        got = f"{world} for {' x '.join(value for value in choice.values() if value != 'none')}"
        raise BadInput("--nproc", got=got, needed=f"at least {counted(ranks * least, 'process')}", fix=f"--nproc {ranks * least}")
    return world // ranks
