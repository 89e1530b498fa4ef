"""Lists the cases of `moe verify`, each a model in a layout: for the kinds of parallelism in `--kinds`, or for the recipe in `--recipe`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe.checks.together import check_run
from moe.recipe.load import load, read_recipe, recipe_path
from moe.train.start.own import Own
from moe.verify.cases import SLICED, Case, as_written
from moe.verify.hybrid import WORLD, hybrid_cases
from moe.verify.rows.data import data_cases
from moe.verify.rows.expert import expert_cases
from moe.verify.rows.pipeline import pipeline_cases
from moe.verify.rows.sequence import sequence_cases
from moe.verify.rows.tensor import tensor_cases
from moe.verify.small import not_compared, not_in_the_twin
from parallel.errors import BadInput, did_you_mean, some
from parallel.mesh.mesh import divisors

_TINY = 64  # a recipe whose widths and length are at most this is also compared unchanged, with its own sizes

KINDS: dict[str, Callable[[], list[Case]]] = {
    "data": data_cases,
    "expert": expert_cases,
    "tensor": tensor_cases,
    "sequence": sequence_cases,
    "pipeline": pipeline_cases,
    "hybrid": hybrid_cases,
}


def cases(nproc: int, *, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Case]:
    """Return the cases of these kinds on at most `nproc` processes. The kind `hybrid` needs 8 processes. With fewer, it is left out if all
    kinds are chosen; otherwise it raises BadInput. Also raises BadInput for an unknown kind."""
    for kind in kinds:
        if kind not in KINDS:
            near = did_you_mean(kind, KINDS) or next(iter(KINDS))
            needed = f"comma-separated kinds: {some(KINDS, rest='moe verify --help')}"
            raise BadInput("--kinds", got=kind, needed=needed, fix=f"--kinds {near}, or leave --kinds out for all")
    if "hybrid" in kinds and kinds != tuple(KINDS) and nproc < WORLD:
        needed = f"{WORLD}: all its layouts have {WORLD} processes"
        raise BadInput("--nproc", got=f"{nproc} with --kinds hybrid", needed=needed, fix=f"--nproc {WORLD}")
    chosen = [KINDS[kind] for kind in KINDS if kind in kinds and (kind != "hybrid" or nproc >= WORLD)]
    return [case for listed in chosen for case in listed() if case.world <= nproc]


def recipe_cases(path: str, nproc: int) -> tuple[list[Case], list[str]]:
    """Return (cases of a small version of the recipe, lines of text about layouts that the recipe refuses and settings that are not
    tested). Raises BadInput if the recipe is refused."""
    first = Case(path, "ddp", 1, 1, 1, "fp32", recipe=path)
    Own.code(first.run())  # imports the recipe's plugins before ranks are forked, so that not every rank imports them
    sparse = bool(first.run().model.layers_with_experts())
    first = replace(first, packed=first.run().train.has_own_loss)  # a user's loss may compare the chats of a sequence, as in DPO
    asked = [first, replace(first, microbatches=3), replace(first, recompute="full")]
    if first.run().model.kind == "decoder":  # an encoder would read the padding, so batches of encoder-decoders have none
        asked += [replace(first, padded=True, microbatches=3)]
    for world in (world for world in divisors(first.batch)[1:] if world <= nproc):
        layout = replace(first, world=world)
        for ep in divisors(world) if sparse else [1]:
            asked += [replace(layout, ep=ep, microbatches=m, kind=kind) for kind in ("ddp", "fsdp", "zero1", "zero3") for m in (1, 2)]
        asked += [replace(layout, etp=world, microbatches=2)] if sparse else []
        asked += [replace(layout, tp=world, tensor=kind) for kind in ("1d", "sliced")]
        asked += [replace(layout, pp=world, microbatches=4, schedule=schedule) for schedule in ("1f1b", "zb_h1")]
        asked += [replace(layout, sp=world, attention=kind, length=SLICED) for kind in ("zigzag", "ulysses")]
    cases, refused = [], []
    for case in asked:
        try:
            check_run(case.run(), case.world)
            cases.append(case)
        except BadInput as bad:
            if case is first:
                raise
            refused.append(f"refused: {case.layout} {case.kind}: {bad}")
    own, notes = _as_it_is(path, nproc)
    return [*cases, *own], [*not_compared(load(path)[0]), *refused, *notes]


def _as_it_is(path: str, nproc: int) -> tuple[list[Case], list[str]]:
    """Return (list with the case of the unchanged recipe, or an empty list; lines of text that say why it is not compared). Only recipes
    with tiny sizes and an explicit degrees.dp are compared unchanged; `moe verify --draws` prints such recipes."""
    run = load(path)[0]
    d, widest = run.degrees, max(run.model.d_model, run.model.d_ff, run.model.max_length)
    if d.dp == "auto" or widest > _TINY:
        return [], []
    world, lacking = d.dp * d.pp * d.tp * d.sp, not_in_the_twin(run)
    if world <= nproc and lacking is None:
        return [as_written(read_recipe(recipe_path(path))[0], world, name="as-it-is")], []
    return [], [f"not compared: the recipe as it is; {f'the twin does not have {lacking}' if lacking else f'that needs --nproc {world}'}"]


def rows_with(only: str | None, found: list[Case]) -> list[Case]:
    """Return the cases whose layout, kind or precision contains the text `only` (None: all). Raises BadInput if there is none."""
    chosen = [c for c in found if only is None or only in f"{c.layout} {c.kind} {c.precision}"]
    if not chosen:
        layouts = some(dict.fromkeys(case.layout for case in found))
        raise BadInput("--only", got=only, needed=f"a part of a row's text: {layouts}", fix=f'--only "{found[0].layout}"')
    return chosen
