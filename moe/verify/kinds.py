"""The cases of each kind that `moe verify --kinds` names."""

from __future__ import annotations

from collections.abc import Callable

from moe.verify.cases import Case
from moe.verify.hybrid import WORLD, hybrid_cases
from moe.verify.rows.data import all_data_cases
from moe.verify.rows.expert import all_expert_cases
from moe.verify.rows.pipeline import pipeline_cases
from moe.verify.rows.sequence import sequence_cases
from moe.verify.rows.tensor import tensor_cases
from parallel.errors import BadInput, did_you_mean, some

KINDS: dict[str, Callable[[int], list[Case]]] = {
    "data": all_data_cases,
    "expert": all_expert_cases,
    "tensor": tensor_cases,
    "sequence": sequence_cases,
    "pipeline": pipeline_cases,
    "hybrid": hybrid_cases,
}


def cases(nproc: int, *, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Case]:
    """Every case of up to `nproc` processes, of the given kinds. Raises BadInput for an unknown kind, and for a kind without cases."""
    for kind in kinds:
        if kind not in KINDS:
            near = did_you_mean(kind, KINDS) or next(iter(KINDS))
            needed = f"comma-separated kinds: {some(KINDS, rest='moe verify --help')}"
            raise BadInput("--kinds", got=kind, needed=needed, fix=f"--kinds {near}, or leave --kinds out for all")
    if "hybrid" in kinds and kinds != tuple(KINDS) and nproc < WORLD:
        raise BadInput(
            "--nproc", got=f"{nproc} with --kinds hybrid", needed=f"{WORLD}: all its layouts have {WORLD} processes", fix=f"--nproc {WORLD}"
        )
    return [case for kind in KINDS if kind in kinds for case in KINDS[kind](nproc)]
